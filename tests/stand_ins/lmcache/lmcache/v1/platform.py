"""Signatures of lmcache.v1.platform, lmcache 0.5.6; written by tools/make_stand_ins.py."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar, NewType


class EventNotifier(ABC):
    def fileno(self) -> int:
        return self._fd
    def notify(self) -> None:
        os.eventfd_write(self._fd, 1)
    def consume(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
    def __init__(self):
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def create_event_notifier() -> EventNotifier:
    return EventNotifier()
