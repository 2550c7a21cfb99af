"""The jobs that move KV between the tiers: fill a window, store units, make room. Next: tiered (the cache's face).

Every method here runs on the mover's thread, the only one that calls the tier below. Bookkeeping happens under the
cache's lock; bytes move outside it, with the frames concerned pinned.
"""

from __future__ import annotations

import errno
import threading
from dataclasses import dataclass

import numpy as np

from kvtide.cache.ledger import Ids, Ledger
from kvtide.cache.windows import Window, Windows
from kvtide.errors import Corrupt
from kvtide.tiers.contract import FULL, OK, READ_REQUEST, Cause, Statuses, Tier

STAGING_BYTES_MAX = 64 << 20  # fragments read in one go: enough to keep any drive busy
STORE_UNITS_MAX = 4  # units stored by one job, so that a reader waits for few


class LostKv(Corrupt):
    """The only copy of some KV could not be read. `units` says which; the cache has dropped them already."""

    def __init__(self, units: Ids) -> None:
        super().__init__(errno.EIO, f"{len(units)} groups of KV could not be read back and must be computed again")
        self.units = units


@dataclass(slots=True)
class FillCounts:
    """Where the bytes of a fill came from."""

    dram_bytes: int = 0
    file_bytes: int = 0


class Traffic:
    """Moves fragments. Holds no policy but the order in which room is made."""

    def __init__(self, ledger: Ledger, windows: Windows, tier: Tier | None, lock: threading.Condition) -> None:
        self._ledger, self._windows, self._tier, self._lock = ledger, windows, tier, lock
        self._layout = ledger.layout
        self._rows = ledger.frame_pool.rows
        self._staging = max(1, min(STAGING_BYTES_MAX // ledger.frame_pool.frame_bytes, len(self._rows) // 2))
        self.num_refused = 0

    # DRAM and file to device

    def fill(self, window: Window, layer: int, units: list[Ids], num_tokens: list[int], *, cause: Cause) -> FillCounts:
        """Make `window` hold the first `num_tokens[r]` tokens of `layer` of the sequence with `units[r]`, each row.

        Raises: LostKv if some of it cannot be read.
        """
        counts, group = FillCounts(), self._layout.tokens_per_group
        for row, (row_units, tokens) in enumerate(zip(units, num_tokens, strict=True)):
            with self._lock:
                uids = self._ledger.uid[row_units]
                common = window.common_tokens(row, uids, group)
                self._remember(window, row, uids, min(common, tokens))
            first, last = min(common, tokens) // group, -(-tokens // group)
            while first < last:
                first += self._fill_run(window, layer, row, first, row_units[first:last], tokens, counts, cause)
            with self._lock:
                self._remember(window, row, uids, tokens)
        return counts

    @staticmethod
    def _remember(window: Window, row: int, uids: Ids, num_tokens: int) -> None:
        while len(window.uids) <= row:
            window.uids.append(uids[:0])
            window.num_tokens.append(0)
        window.uids[row], window.num_tokens[row] = uids, num_tokens

    def _fill_run(
        self,
        window: Window,
        layer: int,
        row: int,
        first: int,
        units: Ids,
        num_tokens: int,
        counts: FillCounts,
        cause: Cause,
    ) -> int:
        """Copy the fragments of as many of `units` as staging allows; return how many."""
        units = units[: self._staging]
        with self._lock:
            frames = self._ledger.frames[units, layer]
            absent = np.flatnonzero(frames < 0)
            self._pin(frames[frames >= 0], 1)
        taken = self._room(len(absent))
        if len(taken) < len(absent):
            keep = int(absent[len(taken)])
            with self._lock:
                self._pin(frames[keep:][frames[keep:] >= 0], -1)
            assert keep, "no DRAM frame could be freed to read into"
            units, frames, absent = units[:keep], frames[:keep], absent[: len(taken)]
        frames[absent] = taken
        with self._lock:
            self._pin(taken, 1)
        try:
            statuses = self._read(units[absent], layer, taken, cause)
            self._copy(window, layer, row, first, frames, num_tokens)
        finally:
            with self._lock:
                self._pin(frames, -1)
        self._settle(units, absent, taken, layer, statuses)
        size = self._layout.fragment_padded_bytes[layer]
        counts.file_bytes += len(taken) * size
        counts.dram_bytes += (len(units) - len(taken)) * size
        return len(units)

    def _settle(self, units: Ids, absent: Ids, taken: Ids, layer: int, statuses: Statuses) -> None:
        """Keep what was read as a DRAM copy; drop what could not be read, and say so."""
        good = statuses == OK
        with self._lock:
            ledger = self._ledger
            known = ledger.frames[units[absent], layer] < 0
            keep = good & known
            ledger.bind(taken[keep], units[absent][keep], np.full(int(keep.sum()), layer))
            ledger.frame_pool.give(taken[~keep])
            resident = units[np.setdiff1d(np.arange(len(units)), absent)]
            ledger.frame_evictor.touch(ledger.frames[resident, layer])
            lost = units[absent][~good]
            ledger.lose(lost)
        if len(lost):
            if self._tier is not None:
                self._tier.drop(self._ledger.stored_key[lost])
            raise LostKv(lost)

    def _read(self, units: Ids, layer: int, frames: Ids, cause: Cause) -> Statuses:
        if not len(units):
            return np.zeros(0, np.uint8)
        assert self._tier is not None, "a fragment is in no tier"
        requests = np.zeros(len(units), READ_REQUEST)
        requests["row"], requests["layer"] = np.arange(len(units)), layer
        requests["address"] = self._ledger.frame_pool.addresses(frames)
        return self._tier.read(self._ledger.stored_key[units], requests, cause=cause)

    def _copy(self, window: Window, layer: int, row: int, first: int, frames: Ids, num_tokens: int) -> None:
        """Copy K and V parts of frames into the window's rows, the last one only as far as it is filled."""
        layout, windows = self._layout, self._windows
        shape, group = layout.shape.layers[layer], layout.tokens_per_group
        num_full = min(len(frames), num_tokens // group - first)
        k_part, v_part = layout.k_bytes[layer], group * shape.v_bytes
        for start, part, offset in (
            (0, k_part, windows.k_offset(window, row, first * group)),
            (k_part, v_part, windows.v_offset(window, row, first * group)),
        ):
            for index in range(num_full):
                windows.arena.write(offset + index * part, self._rows[frames[index], start : start + part])
            if num_full < len(frames):
                length = (num_tokens - (first + num_full) * group) * part // group
                windows.arena.write(offset + num_full * part, self._rows[frames[num_full], start : start + length])

    # DRAM to file

    def store_some(self, cause: Cause = "prefill-write") -> int:
        """Store the least recently used units that the tier below lacks, a few; return how many were stored."""
        with self._lock:
            units = self._ledger.recency.victims(STORE_UNITS_MAX, self._ledger.storable())
        return self.store(units, cause)

    def store(self, units: Ids, cause: Cause) -> int:
        """Write `units` to the tier below where they still need it; return how many it took."""
        with self._lock:
            ledger = self._ledger
            units = units[ledger.storable()[units]]
            if self._tier is None or not len(units):
                return 0
            frames = ledger.frames[units]
            ledger.is_busy[units] = True
            self._pin(frames.ravel(), 1)
            records = ledger.records(units)
        try:
            addresses = ledger.frame_pool.addresses(frames)
            statuses = self._tier.write(records, addresses, cause=cause)
            full = np.flatnonzero(statuses == FULL)
            if len(full) and self._evict_stored(len(full), units):
                statuses[full] = self._tier.write(records.take(full), addresses[full], cause=cause)
        finally:
            with self._lock:
                self._pin(frames.ravel(), -1)
                ledger.is_busy[units] = False
                self._lock.notify_all()
        with self._lock:
            good = units[statuses == OK]
            replaced = (ledger.stored_tokens[good] > 0) & (ledger.stored_key[good] != ledger.key[good])
            old_keys = ledger.stored_key[good][replaced]
            ledger.stored_key[good], ledger.stored_tokens[good] = ledger.key[good], ledger.num_tokens[good]
            ledger.was_refused[units[statuses != OK]] = True
            self.num_refused += int((statuses != OK).sum())
        self._tier.drop(old_keys)
        return len(good)

    def _evict_stored(self, num: int, keep: Ids) -> bool:
        """Drop `num` least recently used units that the tier below holds and nobody needs."""
        assert self._tier is not None
        with self._lock:
            ledger = self._ledger
            candidates = ledger.disposable() & (ledger.stored_tokens > 0)
            candidates[keep] = False
            units = ledger.recency.victims(num, candidates)
            keys = ledger.stored_key[units]
            ledger.dispose(units)
        self._tier.drop(keys)
        return len(units) > 0

    # Room

    def _room(self, num_frames: int) -> Ids:
        """Return up to `num_frames` frames, storing or dropping units until there are some."""
        with self._lock:
            frames = self._ledger.take_frames(num_frames)
        while len(frames) < num_frames and self._relieve():
            with self._lock:
                frames = np.concatenate([frames, self._ledger.take_frames(num_frames - len(frames))])
        return frames

    def make_room(self, num_frames: int, num_units: int) -> None:
        """Free frames and units until that many are free, or nothing more can go."""
        while True:
            with self._lock:
                ledger = self._ledger
                taken = ledger.take_frames(num_frames)
                ledger.frame_pool.give(taken)
                is_enough = len(taken) == num_frames and ledger.pool.num_free >= num_units
                if not is_enough and ledger.pool.num_free < num_units:
                    self._drop_idle(num_units - ledger.pool.num_free, only_unstored=False)
                    is_enough = len(taken) == num_frames and ledger.pool.num_free >= num_units
            if is_enough or not self._relieve():
                return

    def _relieve(self) -> bool:
        """Make some DRAM evictable: store units, or, where nothing takes them, drop idle ones. False: nothing left."""
        if self.store_some("demote"):
            return True
        with self._lock:
            return self._drop_idle(STORE_UNITS_MAX, only_unstored=True)

    def _drop_idle(self, num: int, *, only_unstored: bool) -> bool:
        ledger = self._ledger
        candidates = ledger.disposable()
        if only_unstored:
            candidates &= ~ledger.is_clean()
        units = ledger.recency.victims(num, candidates)
        keys = ledger.stored_key[units[ledger.stored_tokens[units] > 0]]
        ledger.dispose(units)
        if self._tier is not None:
            self._tier.drop(keys)
        return len(units) > 0

    def load(self, unit: int, cause: Cause) -> None:
        """Bring every fragment of `unit` into DRAM, so that it can be appended to.

        Raises: LostKv if it cannot be read.
        """
        with self._lock:
            absent = np.flatnonzero(self._ledger.frames[unit] < 0)
            present = self._ledger.frames[unit][self._ledger.frames[unit] >= 0]
            self._pin(present, 1)
        frames = self._room(len(absent))
        with self._lock:
            self._pin(present, -1)
        assert len(frames) == len(absent), "DRAM is too small for one group of every layer"
        requests = np.zeros(len(absent), READ_REQUEST)
        requests["layer"], requests["address"] = absent, self._ledger.frame_pool.addresses(frames)
        assert self._tier is not None or not len(absent), "a fragment is in no tier"
        statuses = (
            self._tier.read(self._ledger.stored_key[[unit]], requests, cause=cause)
            if self._tier is not None and len(absent)
            else np.zeros(0, np.uint8)
        )
        with self._lock:
            if (statuses == OK).all():
                self._ledger.bind(frames, np.full(len(frames), unit), absent)
                return
            self._ledger.frame_pool.give(frames)
            self._ledger.lose(np.array([unit]))
            key = self._ledger.stored_key[[unit]]
        if self._tier is not None:
            self._tier.drop(key)
        raise LostKv(np.array([unit]))

    def _pin(self, frames: Ids, step: int) -> None:
        np.add.at(self._ledger.pins, frames, step)
        assert (self._ledger.pins[frames] >= 0).all(), "a frame was unpinned more often than pinned"
