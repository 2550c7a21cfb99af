"""The jobs that bring KV up: fill a window, bring fragments, make ready for a step. Next: tiered (the cache's face).

Every method here runs on the mover's thread, the only one that calls the tier below. Bookkeeping happens under the
cache's lock; bytes move outside it, with the frames concerned pinned.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtide.blocks import KeyArray
from kvtide.cache.choice import Pace
from kvtide.cache.ledger import Ids, Ledger
from kvtide.cache.options import spare_frames
from kvtide.cache.parts import fill_rows
from kvtide.cache.room import Room
from kvtide.cache.windows import Window, Windows
from kvtide.errors import Corrupt, IoError
from kvtide.tiers.contract import OK, READ_REQUEST, Cause, Statuses, Tier
from kvtide.tiers.stacked import StackedTier

STAGING_BYTES_MAX = 64 << 20  # of fragments read in one go: enough to keep any drive busy


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

    def __init__(
        self,
        ledger: Ledger,
        windows: Windows,
        tier: Tier | None,
        lock: threading.Condition,
        pace: Pace,
        now_ns: Callable[[], int],
    ) -> None:
        self._pace, self._now_ns = pace, now_ns
        self._ledger, self._windows, self._tier, self._lock = ledger, windows, tier, lock
        self._layout = ledger.layout
        self.padded_bytes = np.array(ledger.layout.fragment_padded_bytes, np.int64)
        self._rows = ledger.frame_pool.rows
        staged = min(STAGING_BYTES_MAX // ledger.frame_pool.frame_bytes, len(self._rows) // 2)
        self._staging = max(1, staged // self._layout.parts_per_layer)  # units read in one go
        self.room = Room(ledger, tier, lock)
        self.reserve = spare_frames(self._layout) if tier is not None else 0

    # DRAM and file to device

    def fill(
        self, window: Window, layer: int, units: list[Ids], uids: list[Ids], num_tokens: list[int], *, cause: Cause
    ) -> FillCounts:
        """Make `window` hold the first `num_tokens[r]` tokens of `layer` of the sequence with `units[r]`, each row.

        A row is cut before the first unit that lives no more, which `uids` tells: sequences may end before their fill.
        Raises: LostKv if some of it cannot be read; IoError(ENOSPC) if DRAM has no frame to read into.
        """
        counts, group, started = FillCounts(), self._layout.tokens_per_group, self._now_ns()
        for row, (row_units, row_uids, tokens) in enumerate(zip(units, uids, num_tokens, strict=True)):
            with self._lock:
                is_dead = self._ledger.uid[row_units] != row_uids
                wanted = min(tokens, int(np.argmax(is_dead)) * group) if is_dead.any() else tokens
                common = min(window.common_tokens(row, row_uids, group), wanted)
                self._remember(window, row, row_uids, common)
                first, last = common // group, -(-wanted // group)
                self.room.filling = row_units[:last]
            try:
                while first < last:
                    first += self._fill_run(window, layer, row, first, row_units[first:last], wanted, counts, cause)
            finally:
                self.room.filling = row_units[:0]
            with self._lock:
                self._remember(window, row, row_uids, wanted)
        self._pace.note_load(counts.file_bytes, self._now_ns() - started)
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
        """Copy the fragments of as many of `units` as DRAM has room for; return how many."""
        layout, units = self._layout, units[: self._staging]
        num_parts, parts = layout.parts_per_layer, layout.layer_fragments(layer)
        with self._lock:
            frames = self._ledger.frames[units, parts.start : parts.stop].reshape(-1)  # one row a unit, laid end to end
            absent = np.flatnonzero(frames < 0)
            self._ledger.pin(frames, 1)
        taken = self._take(len(absent), frames)
        if len(taken) < len(absent):
            keep = int(absent[len(taken)]) // num_parts  # units of which every part has a frame
            absent = absent[absent < keep * num_parts]
            with self._lock:
                rest = frames[keep * num_parts :]
                self._ledger.pin(rest, -1)
                self._ledger.frame_pool.give(taken[len(absent) :])
            if not keep and len(units) > 1:  # what is read later may be in the way
                return self._fill_run(window, layer, row, first, units[:1], num_tokens, counts, cause)
            if not keep:
                raise IoError(errno.ENOSPC, "DRAM has no frame to read into; type a larger --dram")
            units, frames, taken = units[:keep], frames[: keep * num_parts], taken[: len(absent)]
        frames[absent] = taken
        wanted, fragments = units[absent // num_parts], parts.start + absent % num_parts
        statuses: Statuses | None = None
        try:
            statuses = self._read(wanted, fragments, taken, cause)
            by_unit = frames.reshape(-1, num_parts)
            fill_rows(self._windows, window, row, first, layout, self._rows, by_unit, num_tokens)
        finally:
            with self._lock:
                frames[absent] = -1
                self._ledger.pin(frames, -1)
                self._ledger.frame_evictor.touch(frames[frames >= 0])
                lost, keys = self._settle(wanted, fragments, taken, statuses)
        if len(lost):
            self.room.drop(keys, "unreadable")  # what was corrupt is dropped, and noted, already
            raise LostKv(lost)
        num_read = int(self.padded_bytes[fragments].sum())
        counts.file_bytes += num_read
        counts.dram_bytes += len(units) * layout.layer_padded_bytes(layer) - num_read
        return len(units)

    def bring(self, units: Ids, uids: Ids, fragments: Ids, *, cause: Cause) -> tuple[Ids, Ids]:
        """Bring the fragments (unit, fragment) into DRAM; return their frames, pinned once each, and which were read.

        Shapes: units, uids, fragments [n], no pair twice; returns [n], [places of those read].
        Raises: LostKv if some cannot be read, or units no longer have the `uids` they had: nobody waits for those then;
        IoError(ENOSPC) if DRAM has no room. Nothing stays pinned then.
        """
        started = self._now_ns()
        with self._lock:
            if (self._ledger.uid[units] != uids).any():
                raise LostKv(units[:0])
            frames = self._ledger.frames[units, fragments]
            absent = np.flatnonzero(frames < 0)
            self._ledger.pin(frames, 1)
        taken = self._take(len(absent), frames)
        statuses: Statuses | None = None
        has_room = len(taken) == len(absent)
        lost, keys = units[:0], self._ledger.stored_key[:0]
        try:
            if has_room:
                statuses = self._read(units[absent], fragments[absent], taken, cause)
        finally:
            with self._lock:
                lost, keys = self._settle(units[absent], fragments[absent], taken, statuses)
                if statuses is not None:
                    frames[absent] = np.where(statuses == OK, taken, -1)
                    self._ledger.pin(frames[absent], 1)
                if statuses is None or not (statuses == OK).all():
                    self._ledger.pin(frames, -1)
        if not has_room:
            raise IoError(errno.ENOSPC, f"DRAM has no room for {len(absent)} more fragments; type a larger --dram")
        if len(lost):
            self.room.drop(keys, "unreadable")  # what was corrupt is dropped, and noted, already
            raise LostKv(lost)
        self._pace.note_load(int(self.padded_bytes[fragments[absent]].sum()), self._now_ns() - started)
        return frames, absent

    def _take(self, num: int, pinned: Ids) -> Ids:
        """Return up to `num` frames; where making room fails, unpin what was `pinned`."""
        try:
            return self.room.take(num)
        except BaseException:
            with self._lock:
                self._ledger.pin(pinned, -1)
            raise

    def _settle(self, units: Ids, fragments: Ids, taken: Ids, statuses: Statuses | None) -> tuple[Ids, KeyArray]:
        """Keep what was read as a DRAM copy, give up what could not be read; return the units of that, and their keys.

        No statuses: nothing was read, and nothing is known of it; only the frames go back.
        Shapes: units, fragments, statuses [n]; taken [n] or, with no statuses, any number.
        """
        ledger = self._ledger
        if statuses is None:
            ledger.frame_pool.give(taken)
            return units[:0], ledger.stored_key[:0]
        keep = (statuses == OK) & (ledger.frames[units, fragments] < 0)
        ledger.bind(taken[keep], units[keep], fragments[keep])
        ledger.frame_pool.give(taken[~keep])
        lost = np.unique(units[statuses != OK])
        return lost, ledger.lose(lost)

    def _read(self, units: Ids, fragments: Ids, frames: Ids, cause: Cause) -> Statuses:
        """Read the fragments (unit, fragment) into `frames`. Shapes: units, fragments, frames [n]."""
        if not len(units):
            return np.zeros(0, np.uint8)
        assert self._tier is not None, "a fragment is in no tier"
        requests = np.zeros(len(units), READ_REQUEST)
        requests["row"], requests["fragment"] = np.arange(len(units)), fragments
        requests["address"] = self._ledger.frame_pool.addresses(frames)
        statuses = self._tier.read(self._ledger.stored_key[units], requests, cause=cause)
        if isinstance(self._tier, StackedTier) and (strays := self._tier.take_strays()):
            with self._lock:
                self._ledger.note_far(strays)
        return statuses

    # Room

    def prepare(self, tail: int, num_frames: int, num_units: int) -> Ids | None:
        """Make ready for a step: bring `tail` (-1: none) into DRAM and pin it there, and return `num_frames` frames.

        None, and no pin, if there is no room for them, or for `num_units` units.
        Raises: LostKv if the tail cannot be read; IoError(ENOSPC) if there is no room for it.
        """
        if tail >= 0:
            self._load(tail)
        try:
            frames = self._take_for_step(tail, num_frames, num_units)
        except BaseException:
            self._unpin_tail(tail)
            raise
        if frames is None:
            self._unpin_tail(tail)
        return frames

    def _unpin_tail(self, tail: int) -> None:
        if tail >= 0:
            with self._lock:
                self._ledger.pin(self._ledger.frames[tail], -1)

    def _take_for_step(self, tail: int, num_frames: int, num_units: int) -> Ids | None:
        """Return `num_frames` frames once there is room for them, and for `num_units` units; None if there is none."""
        while True:
            with self._lock:
                ledger = self._ledger
                missing = num_units - ledger.pool.num_free
                keys = self.room.drop_idle(missing, self.room.disposable()) if missing > 0 else None
                has_units = ledger.pool.num_free >= num_units
            if keys is not None:
                self.room.drop(keys, "evicted")
            with self._lock:  # what came meanwhile is no more than a seal's blocks: it takes no frames
                if has_units and ledger.fits(num_frames, tail, reserve=self.reserve):
                    frames = ledger.take_frames(num_frames, keep_unit=tail)
                    assert len(frames) == num_frames, "frames that can go did not"
                    return frames
            if not self.room.relieve():
                return None

    def _load(self, unit: int) -> None:
        """Bring every fragment of `unit` into DRAM and pin it there, so that it can be appended to."""
        ledger = self._ledger
        with self._lock:
            absent = np.flatnonzero(ledger.frames[unit] < 0)
            present = ledger.frames[unit][ledger.frames[unit] >= 0]
            self._ledger.pin(present, 1)
        taken = self._take(len(absent), present)
        is_enough, good, keys = len(taken) == len(absent), False, ledger.stored_key[:0]
        statuses: Statuses | None = None
        try:
            if is_enough:
                statuses = self._read(np.full(len(absent), unit), absent, taken, "restore")
        finally:
            good = statuses is not None and bool((statuses == OK).all())
            with self._lock:
                if good:
                    ledger.bind(taken, np.full(len(taken), unit), absent)
                    ledger.pin(taken, 1)
                else:
                    ledger.frame_pool.give(taken)
                    ledger.pin(present, -1)
                    keys = ledger.lose(np.array([unit])) if statuses is not None else keys
        self.room.drop(keys, "unreadable")
        if not is_enough:
            raise IoError(errno.ENOSPC, "DRAM has no room to bring a group back; type a larger --dram")
        if not good:
            raise LostKv(np.array([unit]))

    def let_go(self, frames: Ids) -> None:
        """Unpin frames once, and count that as a use of them. Any thread may."""
        with self._lock:
            self._ledger.pin(frames, -1)
            self._ledger.frame_evictor.touch(frames)
