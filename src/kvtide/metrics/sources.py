"""What a cache and a store of chunks have to tell, as samples of the metrics in `names`. Next: endpoint.

Everything is read when it is asked for, from counters that are there anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvtide import __version__
from kvtide.cache import TieredCache
from kvtide.chunks import ChunkStore
from kvtide.metrics.events import EventSums, Histogram
from kvtide.tiers.contract import TierStats
from kvtide.trace.record import Recorder

Labels = TypeVar("Labels", bound=tuple[str, ...])


@dataclass(frozen=True, slots=True)
class Sample:
    """One figure of one metric; `value` is a histogram where the metric is one. Labels in the metric's order."""

    name: str
    labels: tuple[str, ...]
    value: float | Histogram


class Source(Protocol):
    """Something that is told of.

    Threads: `samples` is called on the endpoint's.
    """

    store: str

    def samples(self) -> Iterable[Sample]:
        """Return every figure as it is now."""


class CacheSource:
    """A tiered cache. `store` is how its figures are told from others'; `recorder` is the cache's own, if any."""

    def __init__(
        self, cache: TieredCache, *, store: str, model: str, integration: str, recorder: Recorder | None = None
    ) -> None:
        self.store = store
        self._cache, self._about = cache, (integration, model, __version__)
        self._sums = None if recorder is None else EventSums(recorder)

    def samples(self) -> Iterator[Sample]:
        """Return every figure as it is now."""
        cache, asked = self._cache, self._cache.asked
        yield Sample("kvtide_store_info", self._about, 1)
        yield Sample("kvtide_requests_total", (), asked.num_requests)
        yield Sample("kvtide_asked_total", ("tokens",), asked.num_tokens)
        yield Sample("kvtide_hit_total", ("tokens",), asked.used_tokens)
        yield Sample("kvtide_kept_tokens_total", (), asked.kept_tokens)
        yield from _counted("kvtide_hit_bytes_total", {(tier,): num for tier, num in asked.hit_bytes.copy().items()})
        yield from _counted("kvtide_decisions_total", asked.choices.copy())
        yield Sample("kvtide_compute_token_seconds", (), cache.pace.token_ns / 1e9)
        yield Sample("kvtide_load_byte_seconds", (), cache.pace.byte_ns / 1e9)
        yield Sample("kvtide_wait_seconds_total", (), cache.wait_ns / 1e9)
        for tier, stats in cache.usage().items():
            yield from _tier(tier, stats, has_io=tier not in {"device", "dram"})
        yield Sample("kvtide_evicted_fragments_total", ("dram",), cache.ledger.num_evicted)
        yield Sample("kvtide_refused_total", ("file",), cache.num_refused)
        if self._sums is not None:
            yield from _events(self._sums)


class ChunkSource:
    """A store of an engine's chunks; `recorder` is the one it was opened with, if any."""

    def __init__(self, store: ChunkStore, *, integration: str, recorder: Recorder | None = None) -> None:
        self.store = store.path.name[:16]
        self._chunks, self._about = store, (integration, store.model, __version__)
        self._sums = None if recorder is None else EventSums(recorder)

    def samples(self) -> Iterator[Sample]:
        """Return every figure as it is now."""
        chunks, counts = self._chunks, self._chunks.counts
        yield Sample("kvtide_store_info", self._about, 1)
        num_computed = counts.stored + counts.refused  # look-ups are not counted: engines ask many times for one chunk
        yield Sample("kvtide_asked_total", ("chunks",), counts.loaded + counts.missed + num_computed)
        yield Sample("kvtide_hit_total", ("chunks",), counts.loaded)
        yield Sample("kvtide_hit_bytes_total", ("file",), counts.loaded * chunks.chunk_bytes)
        yield Sample("kvtide_pending", (), chunks.num_pending)
        yield Sample("kvtide_refused_total", ("file",), counts.refused)
        yield from _tier("file", chunks.stats(), has_io=True)
        if self._sums is not None:
            yield from _events(self._sums)


def _counted(name: str, counts: Mapping[Labels, int]) -> Iterator[Sample]:
    for labels, num in counts.items():
        yield Sample(name, labels, num)


def _tier(tier: str, stats: TierStats, *, has_io: bool) -> Iterator[Sample]:
    yield Sample("kvtide_capacity_bytes", (tier,), stats.capacity_bytes)
    yield Sample("kvtide_used_bytes", (tier,), stats.used_bytes)
    yield Sample("kvtide_groups", (tier,), stats.num_groups)
    if not has_io:
        return
    for direction, num_bytes, num in (
        ("read", stats.read_bytes, stats.num_reads),
        ("write", stats.written_bytes, stats.num_writes),
    ):
        yield Sample("kvtide_tier_bytes_total", (tier, direction), num_bytes)
        yield Sample("kvtide_tier_operations_total", (tier, direction), num)
    yield Sample("kvtide_gap_bytes_total", (tier,), stats.gap_bytes)
    yield Sample("kvtide_corrupt_total", (tier,), stats.num_corrupt)
    yield Sample("kvtide_failed_total", (tier,), stats.num_failed)
    yield Sample("kvtide_full_total", (tier,), stats.num_full)
    yield from _counted("kvtide_dropped_total", {(tier, why): num for why, num in stats.dropped.copy().items()})


def _events(sums: EventSums) -> Iterator[Sample]:
    sums.update()
    yield from _counted("kvtide_moved_bytes_total", sums.moved.copy())
    for name, found in (("kvtide_operation_seconds", sums.seconds), ("kvtide_operation_bytes", sums.sizes)):
        for place, histogram in found.copy().items():
            yield Sample(name, place, histogram)
    for direction, histogram in sums.depths.copy().items():
        yield Sample("kvtide_operation_depth", (direction,), histogram)
    yield from _counted("kvtide_operation_errors_total", {(one,): num for one, num in sums.errors.copy().items()})
    yield from _counted("kvtide_lost_events_total", {(one,): num for one, num in sums.lost.copy().items()})
