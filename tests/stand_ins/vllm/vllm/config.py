"""Signatures of vllm.config, vllm 0.32.0; written by tools/make_stand_ins.py."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar, NewType


def get_current_vllm_config_or_none() -> VllmConfig | None:
    return None
