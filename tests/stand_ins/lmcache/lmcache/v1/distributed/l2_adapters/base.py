"""Signatures of lmcache.v1.distributed.l2_adapters.base, lmcache 0.5.6; written by tools/make_stand_ins.py."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar, NewType


@dataclass(frozen=True)
class AdapterUsage:
    total_bytes_used: int
    total_capacity_bytes: int
    bytes_by_cache_salt: Mapping[str, int] = field(default_factory=dict)
    @property
    def usage_fraction(self) -> float:
        full = self.total_capacity_bytes
        return self.total_bytes_used / full if full > 0 else -1.0


class L2AdapterInterface(ABC):
    def __init__(self, max_capacity_bytes: int=0) -> None:
        self._max_capacity_bytes, self._listeners = max_capacity_bytes, []
        self._backend_name, self._bytes, self._counting = '', {}, threading.Lock()
    @abstractmethod
    def get_store_event_fd(self) -> int:
        raise NotImplementedError
    @abstractmethod
    def get_lookup_and_lock_event_fd(self) -> int:
        raise NotImplementedError
    @abstractmethod
    def get_load_event_fd(self) -> int:
        raise NotImplementedError
    @abstractmethod
    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        raise NotImplementedError
    @abstractmethod
    def pop_completed_store_tasks(self) -> dict[L2TaskId, L2StoreResult]:
        raise NotImplementedError
    @abstractmethod
    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]) -> L2TaskId:
        raise NotImplementedError
    @abstractmethod
    def query_lookup_and_lock_result(self, task_id: L2TaskId) -> Bitmap | None:
        raise NotImplementedError
    @abstractmethod
    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        raise NotImplementedError
    @abstractmethod
    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        raise NotImplementedError
    @abstractmethod
    def query_load_result(self, task_id: L2TaskId) -> Bitmap | None:
        raise NotImplementedError
    def register_listener(self, listener: L2AdapterListener) -> None:
        self._listeners.append(listener)
    def set_backend_identity(self, name: str, shared: bool=False) -> None:
        self._backend_name = name
    def _notify_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self._count(keys, sizes, 1)
        for one in self._listeners:
            one.on_l2_keys_stored(keys, sizes)
    def _notify_keys_accessed(self, keys: list[ObjectKey]) -> None:
        for one in self._listeners:
            one.on_l2_keys_accessed(keys)
    def _notify_keys_deleted(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self._count(keys, sizes, -1)
        for one in self._listeners:
            one.on_l2_keys_deleted(keys)
    @property
    def supports_global_eviction(self) -> bool:
        raise NotImplementedError
    def delete(self, keys: list[ObjectKey]) -> None:
        raise NotImplementedError
    def list_l2_keys(self, model_name: str | None=None, page_size: int=500, cursor: str | None=None) -> KeyListPage:
        raise NotImplementedError
    def get_usage(self) -> AdapterUsage:
        with self._counting:
            kept = {salt: num for salt, num in self._bytes.items() if num}
        return AdapterUsage(sum(kept.values()), self._max_capacity_bytes, kept)
    @abstractmethod
    def close(self) -> None:
        raise NotImplementedError
    def report_status(self) -> dict:
        raise NotImplementedError
    def _count(self, keys, sizes, sign):
        with self._counting:
            for key, size in zip(keys, sizes, strict=True):
                self._bytes[key.cache_salt] = self._bytes.get(key.cache_salt, 0) + sign * size
