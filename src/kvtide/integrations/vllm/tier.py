"""The secondary tier that vLLM's tiering manager cascades chunks to and promotes them from. Next: known.

vLLM calls everything here from its scheduler, so nothing waits: a look-up asks a set, transfers run on the store's
worker straight from and to the primary tier's memory, and results are collected when vLLM asks.
"""

from __future__ import annotations

import collections
import itertools
import logging
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvtide.chunks import LOAD, STORE, ChunkOptions, ChunkStore, Transfer, fold
from kvtide.chunks.transfer import Kind
from kvtide.errors import ConfigError
from kvtide.integrations.options import CAPACITY, master_in
from kvtide.integrations.vllm.facts import facts_of, revision_of
from kvtide.integrations.vllm.known import KnownChunks
from kvtide.integrations.weights import digest_of_weights, folder_of_model
from kvtide.io.ops import address_of
from kvtide.metrics import recorder_for, serve_chunks
from kvtide.tiers.contract import OK
from kvtide.units import parse_bytes

_COUNTERS = {
    "stored": "Chunks written to kvtide's tier.",
    "loaded": "Chunks read from kvtide's tier, their checksums right.",
    "evicted": "Chunks given up for newer ones.",
    "missed": "Chunks that were to be read and were not there, or not whole.",
    "failed": "Chunks the disk could not write or read.",
}
_HIT, _MISS = LookupResult.HIT, LookupResult.MISS  # looked up once: the class of an enumeration is slow to ask
_USED = "vllm:kvtide_used_bytes"
_OWNER = "kvtide"
_log = logging.getLogger("kvtide.vllm")


class KvtideTier(SecondaryTierManager):
    """Chunks of the primary tier in one bounded file under `directory`.

    `capacity` bounds the file, as bytes or `64GiB`. `salt` parts tenants that share a directory.
    `model_facts` is any text that names what vLLM was told of the model and does not show here, such as --hf-overrides
    and --revision; `KvtideConnector` needs none.
    `metrics_port` is where kvtide's own metrics are served, as a port or `HOST:PORT`; None: nowhere. `key_file` has the
    key that chunks are encrypted with on disk; None: they are not.
    `enable_kv_events` has vLLM publish what is stored here and what is given up, where it publishes KV events at all;
    `locality`, LOCAL or REMOTE, is what they say of where `directory` lies, and what requests may choose tiers by.

    Raises: ConfigError, FormatError, IoError of `ChunkStore`: vLLM then does not start, and shows the message.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        directory: str = "~/.cache/kvtide/vllm",
        capacity: str | int = CAPACITY,
        salt: str = "",
        metrics_port: str | int | None = None,
        model_facts: str = "",
        key_file: str | None = None,
        backpressure_detector: Any = None,
        locality: str | None = None,
        enable_kv_events: bool = False,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = _locality(locality)
        config = offloading_spec.config
        self._known = KnownChunks(
            [group.group_id for group in config.groups], has_events=_has_events(offloading_spec, asked=enable_kv_events)
        )
        self._names = self._known.names
        revision = revision_of(offloading_spec)
        folder = folder_of_model(config.model.name, revision)
        recorder = recorder_for(metrics_port)
        self._store = ChunkStore(
            ChunkOptions(
                Path(directory).expanduser(),
                parse_bytes(str(capacity)),
                self.block_size_bytes,
                config.model.name[:256],
                facts_of(offloading_spec, folder, salt, model_facts),
                digest_of_weights(config.model.name, revision, folder),
                master=master_in(key_file),
            ),
            self._known.gone,
            recorder=recorder,
        )
        self._known.start(self._store.held)
        rank = getattr(config.parallel, "data_parallel_index", 0)
        self._endpoint = serve_chunks(self._store, metrics_port, integration="vllm", recorder=recorder, rank=rank)
        self._address = address_of(np.frombuffer(primary_kv_view, np.uint8))
        self._jobs: dict[Transfer, TransferJob] = {}
        self._done: collections.deque[Transfer] = collections.deque()
        self._told = dict.fromkeys(_COUNTERS, 0)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if key in self._names:  # asked for every chunk of every request
            return _HIT
        return _HIT if self._known.find(key) else _MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(STORE, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(LOAD, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        while self._done:
            transfer = self._done.popleft()
            results.append(self._result(self._jobs.pop(transfer), transfer))
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        for names, is_removed in self._known.take_events():
            yield OffloadingEvent(
                keys=[OffloadKey(name) for name in names],
                medium=self.medium,
                removed=is_removed,
                locality=self.locality,
                ownership=_OWNER,
                removal_expected=not is_removed,
            )

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._store.touch(fold(list(keys)))

    def drain_jobs(self) -> None:
        self._store.drain()

    def shutdown(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
        self._store.close()
        self._primary_kv_view = memoryview(b"")  # whoever owns the memory can give it back

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        del extra_config
        counters = {_metric(name): OffloadingCounterMetadata(told) for name, told in _COUNTERS.items()}
        return counters | {_USED: OffloadingGaugeMetadata("Bytes of the file that hold chunks.")}

    def get_stats(self) -> OffloadingConnectorStats:
        stats, counts = OffloadingConnectorStats(), self._store.counts
        for name, before in self._told.items():
            now = getattr(counts, name)
            if now > before:
                stats.increase_counter(_metric(name), now - before)
                self._told[name] = now
        stats.set_gauge(_USED, self._store.used_bytes)
        return stats

    def _submit(self, kind: Kind, job: TransferJob) -> None:
        rows = np.asarray(job.chunk_ids, np.int64)
        addresses: npt.NDArray[np.uint64] = (rows * self.block_size_bytes + self._address).view(np.uint64)
        transfer = Transfer(kind, fold(list(job.keys)), addresses, self._ended)
        self._jobs[transfer] = job  # before it can end
        self._store.submit(transfer)

    def _ended(self, transfer: Transfer) -> None:
        """Note what came or went, on the store's worker."""
        try:
            if transfer.kind == STORE:
                there = self._store.has(transfer.keys)
                names = list(itertools.compress(self._jobs[transfer].keys, there.tolist()))
                self._known.stored(transfer.keys[there], names)
            elif not transfer.is_good:
                self._known.gone(transfer.keys[~self._store.has(transfer.keys)])
        finally:
            self._done.append(transfer)

    def _result(self, job: TransferJob, transfer: Transfer) -> JobResult:
        kept = None
        if transfer.kind == LOAD and not transfer.is_good and transfer.num_good:
            kept = tuple(itertools.compress(job.keys, (transfer.statuses == OK).tolist()))
        return JobResult(
            job_id=job.job_id,
            success=transfer.is_good,
            successful_keys=kept,
            transfer_time=(transfer.ended_ns - transfer.began_ns) / 1e9,
            transfer_bytes=transfer.num_good * self.block_size_bytes,
        )


def _locality(told: str | None) -> Locality | None:
    if told is None:
        return None
    try:
        return Locality(told)
    except ValueError:
        raise ConfigError(
            f'"locality" of the tier is {told!r}; type one of {", ".join(one.value for one in Locality)}'
        ) from None


def _has_events(spec: Any, *, asked: bool) -> bool:
    """Say whether vLLM will take events: those it does not take would pile up."""
    config = getattr(spec, "kv_events_config", None)
    taken = bool(config is not None and config.enable_kv_cache_events)
    if asked and not taken:
        _log.warning(
            'kvtide: "enable_kv_events" is set, but vLLM publishes none: set "enable_kv_cache_events" in its '
            "--kv-events-config"
        )
    return asked and taken


def _metric(name: str) -> str:
    return f"vllm:kvtide_{name}_chunks"
