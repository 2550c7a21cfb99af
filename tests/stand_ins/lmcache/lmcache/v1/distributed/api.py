"""Signatures of lmcache.v1.distributed.api, lmcache 0.5.6; written by tools/make_stand_ins.py."""

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
class EncodedObjectKey:
    chunk_hash_hex: str
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ''


@dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ''
    def to_encoded_object_key(self) -> 'EncodedObjectKey':
        content = self.chunk_hash.hex()
        return EncodedObjectKey(content, self.model_name, self.kv_rank, self.object_group_id, self.cache_salt)


@dataclass(frozen=True)
class KeyEntry:
    key: EncodedObjectKey
    size_bytes: int


@dataclass(frozen=True)
class KeyListPage:
    entries: tuple[KeyEntry, ...]
    next_page_token: str | None
