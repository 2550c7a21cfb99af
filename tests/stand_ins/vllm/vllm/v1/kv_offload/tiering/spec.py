"""Signatures of vllm.v1.kv_offload.tiering.spec, vllm 0.32.0; written by tools/make_stand_ins.py."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar, NewType


class TieringOffloadingSpec:
    pass
