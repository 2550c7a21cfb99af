"""Signatures of lmcache.v1.distributed.internal_api, lmcache 0.5.6; written by tools/make_stand_ins.py."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar, NewType


class L2StoreResult(int):
    def __new__(cls, success: bool, bytes_transferred: int) -> 'L2StoreResult':
        return super().__new__(cls, bytes_transferred if success else -1)
    def is_successful(self) -> bool:
        return self != -1
    def bytes_transferred(self) -> int:
        return max(0, int(self))
