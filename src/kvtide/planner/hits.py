"""What a tier of blocks would hit under any evictor, and two tiers, DRAM over disk. Pure: arrays in, counts out.

A request looks its blocks up in the tiers as they are before, and hits the longest prefix of them that is all there.
Then they all come in or are used, the last of the prompt first, so that the first counts as the most recent; later
blocks are of no use without earlier ones. While that is done none of them goes; if they do not all fit, the first stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError
from kvtide.evict import NEVER, Facts, Ids, LookAhead, make_evictor
from kvtide.evict.admission import Admission
from kvtide.planner.curve import first_places

LOOK_AHEAD = 32  # requests that wait: what a serving engine's queue holds under load, by our assumption


@dataclass(frozen=True, slots=True)
class TierHits:
    """What one tier did for a row of requests, in blocks.

    Shapes: hits [R], the blocks of each request read from it.
    """

    hits: Ids
    num_written: int  # copies that came in
    num_evicted: int
    num_reread: int  # copies that were read at least once before they went, or by the end
    num_peak: int  # most copies at one time


@dataclass(frozen=True, slots=True)
class TwoTierHits:
    """What DRAM and disk did. The hits of a request are those of both; each block counts in the faster that has it."""

    dram: TierHits  # its copies that came in include those promoted from disk
    disk: TierHits


def simulate(
    block_start: Ids,
    block_ids: Ids,
    capacity: int,
    *,
    policy: str = "lru",
    admission: Admission | None = None,
    times_ns: Ids | None = None,
    block_bytes: int = 1,
    costs: npt.NDArray[np.float64] | None = None,
    look_ahead: int = LOOK_AHEAD,
) -> TierHits:
    """Return what a tier of `capacity` blocks would do for these requests, one after the other.

    `admission` is asked for what the tier lacks, at `times_ns` (0 if not given). The evictor called look-ahead knows
    the next `look_ahead` requests, belady all.

    Shapes: block_start [R + 1], block_ids, costs [N]: request r asks for block_ids[block_start[r]:block_start[r + 1]];
    times_ns [R].
    Units: capacity in blocks; costs in ns to compute a block again.
    Raises: ConfigError for an unknown policy or a negative capacity.
    """
    row = _Row(block_start, block_ids, times_ns, costs, wants_next_use=policy == "belady")
    tier = _Tier(row, capacity, policy, admission, block_bytes, look_ahead)
    for request in range(row.num_requests):
        blocks = row.blocks(request)
        slots = tier.slots_of(blocks)
        tier.read(request, slots[: _prefix(slots >= 0)])
        tier.serve(request)
    return tier.done()


def simulate_two(
    block_start: Ids,
    block_ids: Ids,
    *,
    dram_blocks: int,
    disk_blocks: int,
    dram_policy: str = "lru",
    disk_policy: str = "lru",
    admission: Admission | None = None,
    times_ns: Ids | None = None,
    block_bytes: int = 1,
    costs: npt.NDArray[np.float64] | None = None,
    look_ahead: int = LOOK_AHEAD,
) -> TwoTierHits:
    """Return what DRAM over disk would do for these requests, one after the other.

    All blocks of a request come into DRAM, promoted or computed. What of them the disk lacks is written there at once,
    unless `admission` refuses; a use counts in both tiers. A hit may mix blocks of both.

    Shapes, Units, Raises: as `simulate`.
    """
    wants_next_use = "belady" in {dram_policy, disk_policy}
    row = _Row(block_start, block_ids, times_ns, costs, wants_next_use=wants_next_use)
    dram = _Tier(row, dram_blocks, dram_policy, None, block_bytes, look_ahead)
    disk = _Tier(row, disk_blocks, disk_policy, admission, block_bytes, look_ahead)
    for request in range(row.num_requests):
        blocks = row.blocks(request)
        fast, slow = dram.slots_of(blocks), disk.slots_of(blocks)
        num = _prefix((fast >= 0) | (slow >= 0))
        is_fast = fast[:num] >= 0
        dram.read(request, fast[:num][is_fast])
        disk.read(request, slow[:num][~is_fast])
        dram.serve(request)
        disk.serve(request)
    return TwoTierHits(dram.done(), disk.done())


def _prefix(is_there: npt.NDArray[np.bool_]) -> int:
    return len(is_there) if is_there.all() else int(is_there.argmin())


class _Row:
    """The requests, with what the evictors may know of each block."""

    def __init__(
        self,
        block_start: Ids,
        block_ids: Ids,
        times_ns: Ids | None,
        costs: npt.NDArray[np.float64] | None,
        *,
        wants_next_use: bool,
    ) -> None:
        unique, dense = np.unique(block_ids, return_inverse=True)
        self.num_unique, self.num_requests = len(unique), len(block_start) - 1
        request = np.repeat(np.arange(self.num_requests), np.diff(block_start))
        order = np.argsort(dense, kind="stable")
        is_first = first_places(request, dense, order)
        places = np.flatnonzero(is_first)
        self._all, self._all_start = dense, block_start.tolist()
        self._times_ns = [0] * self.num_requests if times_ns is None else times_ns.tolist()
        self._once, self._once_start = dense[places], np.searchsorted(places, block_start).tolist()
        next_use = _next_use(dense, order[is_first[order]])[places] if wants_next_use else None
        keys = np.asarray(block_ids).astype(np.uint64)[places]
        self._facts = Facts(keys=keys, costs=None if costs is None else costs[places], next_use=next_use)

    def blocks(self, request: int, num_requests: int = 1) -> Ids:
        """Return the blocks that this request and those after it ask for, `num_requests` in all."""
        end = min(request + num_requests, self.num_requests)
        return self._all[self._all_start[min(request, end)] : self._all_start[end]]

    def once(self, request: int, num_max: int) -> tuple[Ids, Facts]:
        """Return the first `num_max` of the blocks of this request, each once, and what is known of them."""
        begin, end = self._once_start[request], self._once_start[request + 1]
        own = slice(begin, min(end, begin + num_max))
        return self._once[own], self._facts.take(own)

    def time_ns(self, request: int) -> int:
        """Return when this request came."""
        return self._times_ns[request]


def _next_use(blocks: Ids, order: npt.NDArray[np.intp]) -> Ids:
    """Return for each place when a later request uses its block: where in `blocks` that is; NEVER if none does.

    Shapes: blocks [N]; order [n], first places only, sorted by block; returns [N], unset in other places.
    """
    next_use = np.full(len(blocks), NEVER, np.int64)
    is_same = blocks[order[1:]] == blocks[order[:-1]]
    next_use[order[:-1][is_same]] = order[1:][is_same]
    return next_use


class _Tier:
    """Slots, who is in them, and an evictor over them."""

    def __init__(
        self,
        row: _Row,
        capacity: int,
        policy: str,
        admission: Admission | None,
        block_bytes: int,
        look_ahead: int,
    ) -> None:
        if capacity < 0:
            raise ConfigError(f"a tier of {capacity} blocks: 0 or more are needed")
        self._row, self._capacity = row, min(capacity, row.num_unique)
        self._evictor = make_evictor(policy, self._capacity)
        self._admission, self._block_bytes, self._look_ahead = admission, block_bytes, look_ahead
        self._slot_of = np.full(row.num_unique, -1, np.int64)
        self._block_in = np.full(self._capacity, -1, np.int64)
        self._free = np.arange(self._capacity)[::-1].copy()
        self._num_free = self._capacity
        self._evictable = np.ones(self._capacity, np.bool_)
        self._was_read = np.zeros(self._capacity, np.bool_)
        self._hits = np.zeros(row.num_requests, np.int64)
        self._num_written = self._num_evicted = self._num_reread = self._num_peak = 0

    def slots_of(self, blocks: Ids) -> Ids:
        """Return where `blocks` are; -1: nowhere."""
        return self._slot_of[blocks]

    def read(self, request: int, slots: Ids) -> None:
        """Count `slots` as hits of `request`."""
        self._hits[request] = len(slots)
        self._was_read[slots] = True

    def serve(self, request: int) -> None:
        """Let the blocks of `request` in, and count a use of those that are in."""
        if isinstance(self._evictor, LookAhead):
            waiting = self._slot_of[self._row.blocks(request + 1, self._look_ahead)]
            self._evictor.expect(waiting[waiting >= 0])
        blocks, facts = self._row.once(request, self._capacity)
        slots = self._slot_of[blocks]
        was_in = slots >= 0
        if not was_in.all():
            self._let_in(request, blocks, slots, was_in, facts)
        kept = (slots >= 0).nonzero()[0][::-1]
        if not len(kept):
            return
        is_used = was_in[kept]
        edges = (is_used[1:] != is_used[:-1]).nonzero()[0] + 1
        for begin, end in pairwise([0, *edges.tolist(), len(kept)]):
            run = kept[begin:end]
            note = self._evictor.touch if was_in[kept[begin]] else self._evictor.admit
            note(slots[run], facts.take(run))

    def _let_in(self, request: int, blocks: Ids, slots: Ids, was_in: npt.NDArray[np.bool_], facts: Facts) -> None:
        """Give slots to those of `blocks` that are not in and admitted; write these to `slots`."""
        absent = (~was_in).nonzero()[0]
        if self._admission is not None and facts.keys is not None:
            time_ns = self._row.time_ns(request)
            absent = absent[self._admission.admits(facts.keys[absent], num_bytes=self._block_bytes, now_ns=time_ns)]
        missing = len(absent) - self._num_free
        if missing > 0:
            pinned = slots[was_in]
            self._evictable[pinned] = False
            self._drop(self._evictor.victims(missing, self._evictable))
            self._evictable[pinned] = True
        assert len(absent) <= self._num_free, "blocks that can go did not"
        taken = self._free[self._num_free - len(absent) : self._num_free][::-1].copy()
        self._num_free -= len(absent)
        slots[absent], self._slot_of[blocks[absent]], self._block_in[taken] = taken, taken, blocks[absent]
        self._num_written += len(absent)
        self._num_peak = max(self._num_peak, self._capacity - self._num_free)

    def _drop(self, slots: Ids) -> None:
        self._evictor.forget(slots)
        self._slot_of[self._block_in[slots]] = -1
        self._block_in[slots] = -1
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)
        self._num_evicted += len(slots)
        self._num_reread += int(np.count_nonzero(self._was_read[slots]))
        self._was_read[slots] = False

    def done(self) -> TierHits:
        """Return the counts."""
        self._num_reread += int(np.count_nonzero(self._was_read))
        return TierHits(self._hits, self._num_written, self._num_evicted, self._num_reread, self._num_peak)
