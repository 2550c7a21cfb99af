"""Signatures of vllm.distributed.kv_transfer.kv_connector.v1.metrics, vllm 0.32.0; written by tools/make_stand_ins.py."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar, NewType


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)
