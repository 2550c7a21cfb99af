"""Signatures of vllm.v1.kv_offload.tiering.base, vllm 0.32.0; written by tools/make_stand_ins.py."""

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
class TransferJob:
    job_id: JobId
    keys: Collection[OffloadKey]
    chunk_ids: np.ndarray
    is_promotion: bool
    req_context: ReqContext
    submit_time: float = field(default_factory=time.monotonic)


@dataclass
class JobResult:
    job_id: JobId
    success: bool
    successful_keys: Collection[OffloadKey] | None = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager(ABC):
    medium: ClassVar[Medium | None] = None
    cache_hit_source: ClassVar[CacheHitSource] = ...
    def __init__(self, offloading_spec: 'OffloadingSpec', primary_kv_view: memoryview, tier_type: str, backpressure_detector: BackpressureDetector | None=None) -> None:
        self._offloading_spec, self.tier_type = offloading_spec, tier_type
        self._primary_kv_view, self._bp_detector = primary_kv_view, backpressure_detector
        self._block_size_bytes = primary_kv_view.strides[0]
    @property
    def block_size_bytes(self) -> int:
        return self._block_size_bytes
    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        raise NotImplementedError
    @abstractmethod
    def submit_store(self, job_metadata: TransferJob) -> None:
        raise NotImplementedError
    @abstractmethod
    def submit_load(self, job_metadata: TransferJob) -> None:
        raise NotImplementedError
    @abstractmethod
    def get_finished_jobs(self) -> Iterable[JobResult]:
        raise NotImplementedError
    def take_events(self) -> Iterable[OffloadingEvent]:
        raise NotImplementedError
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext):
        raise NotImplementedError
    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        raise NotImplementedError
    @abstractmethod
    def drain_jobs(self) -> None:
        raise NotImplementedError
    def shutdown(self) -> None:
        raise NotImplementedError
    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        raise NotImplementedError
    def get_stats(self) -> 'OffloadingConnectorStats | None':
        raise NotImplementedError
