"""Signatures of vllm.v1.kv_offload.cpu.shared_offload_region, vllm 0.32.0; written by tools/make_stand_ins.py."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar, NewType


class SharedOffloadRegion:
    BLOCK_SIZE_ALIGNMENT: int = ...
    def __init__(self, engine_id: str, num_chunks: int, rank: int | None, kv_bytes_per_chunk: int, cpu_page_size: int, barrier: Callable[[], None] | None=None, *, creator_memory_check: Callable[[int], None] | None=None, populate_only_on_creator: bool=False) -> None:
        raise NotImplementedError
    def create_next_worker_view(self, tensor_page_size: int) -> torch.Tensor:
        raise NotImplementedError
    def cleanup(self) -> None:
        raise NotImplementedError
