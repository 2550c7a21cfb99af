"""Signatures of lmcache.lmcache_native, lmcache 0.5.6; written by tools/make_stand_ins.py."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar, NewType


class Bitmap:
    def __init__(self, size: int) -> None:
        self._bits = [False] * size
    def batched_set(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._bits[index] = True
    def test(self, index: int) -> bool:
        return self._bits[index]
    def popcount(self) -> int:
        return sum(self._bits)
    def get_indices_list(self) -> list[int]:
        return [index for index, bit in enumerate(self._bits) if bit]
