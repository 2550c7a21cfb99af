"""Making room: store units below, drop what nobody needs, take frames. Next: traffic.

All of it runs on the mover's thread, which alone calls the tier below; bookkeeping happens under the cache's lock. What
is stored far alone is sent, and noted when it has arrived: nobody waits for it who does not need its room.
"""

from __future__ import annotations

import functools
import threading

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KeyArray
from kvtide.cache.ledger import Ids, Ledger
from kvtide.tiers.contract import FAILED, FULL, OK, Cause, GroupRecords, Reason, Remembers, Statuses, Tier
from kvtide.tiers.stacked import StackedTier

STORE_UNITS_MAX = 4  # units stored by one job, so that a reader waits for few


class Room:
    """Decides in which order room is made; `filling` are units that are being read, which stay."""

    def __init__(self, ledger: Ledger, tier: Tier | None, lock: threading.Condition) -> None:
        self._ledger, self._tier, self._lock = ledger, tier, lock
        self.filling = np.zeros(0, np.int64)
        self.num_refused = 0

    # Down

    def flush_some(self) -> int:
        """Do what `store_some` does while nobody waits for KV: all of it is sent to a remote, however slow."""
        tier = self._tier
        if not isinstance(tier, StackedTier):
            return self.store_some("demote")
        was_patient, tier.is_patient = tier.is_patient, True
        try:
            return self.store_some("demote")
        finally:
            tier.is_patient = was_patient

    def drain(self) -> None:
        """Return when nothing is on its way to a remote any more."""
        if isinstance(self._tier, StackedTier):
            self._tier.drain()

    def store_some(self, cause: Cause) -> int:
        """Try the least recently used units that the tier below lacks, a few; return how many were tried.

        Where there are none but some are on their way to a remote, wait for those.
        """
        if self._tier is None:
            return 0
        with self._lock:
            units = self._ledger.recency.victims(STORE_UNITS_MAX, self._ledger.storable())
            num_sent = int(self._ledger.is_sent.sum())
        if not len(units) and num_sent and isinstance(self._tier, StackedTier):
            self._tier.drain()
            return num_sent
        return self.store(units, cause)

    def send(self, units: Ids, cause: Cause) -> int:
        """Do what `store` does for units that may wait: without a near tier, do not wait for the remote.

        What the outbox has no room for stays as it is, to be stored when its room is wanted.
        """
        tier = self._tier
        if not isinstance(tier, StackedTier) or tier.near is not None:
            return self.store(units, cause)
        with self._lock:
            ledger = self._ledger
            units = units[ledger.storable(units)]
            frames, records, uids = ledger.frames[units], ledger.records(units), ledger.uid[units].copy()
            ledger.is_sent[units] = True
            ledger.pin(frames.ravel(), 1)
        start = 0
        try:
            addresses = ledger.frame_pool.addresses(frames)
            while start < len(units):
                rest = slice(start, None)
                arrived = functools.partial(self._arrived, units[rest], uids[rest], records.take(rest))
                num = tier.begin(records.take(rest), addresses[rest], arrived, cause=cause)
                start += num
                if not num or not tier.is_patient:
                    break
        finally:
            with self._lock:
                ledger.is_sent[units[start:]] = False
                ledger.pin(frames.ravel(), -1)
        return start

    def _arrived(self, units: Ids, uids: Ids, records: GroupRecords, statuses: Statuses) -> None:
        """Note what became of the first of some units that were sent. Runs on the outbox's thread."""
        rows = slice(len(statuses))
        with self._lock:
            self._ledger.note_sent(units[rows], uids[rows], records.take(rows), statuses == OK)
            self.num_refused += int((statuses != OK).sum())

    def store(self, units: Ids, cause: Cause) -> int:
        """Write `units` to the tier below where they still need it; return how many those were.

        What it does not take is marked, and not tried again before something makes room.
        """
        with self._lock:
            ledger = self._ledger
            units = units[ledger.storable(units)]
            if self._tier is None or not len(units):
                return 0
            num, known = len(units), ledger.is_known(units) & (~ledger.is_far[units] | ledger.stores_far)
            gone, units = ledger.note_stored(units[known]), units[~known]
        self.drop(gone, "replaced")
        with self._lock:
            units = units[ledger.storable(units)]
            frames, records, is_own = ledger.frames[units], ledger.records(units), ledger.is_own[units]
            ledger.is_busy[units] = True
            ledger.pin(frames.ravel(), 1)
        statuses = np.full(len(units), FAILED, np.uint8)
        try:
            addresses = ledger.frame_pool.addresses(frames)
            statuses = self._write(records, addresses, is_own, cause)
            full = np.flatnonzero(statuses == FULL)
            if len(full) and self._evict_stored(len(full)):
                statuses[full] = self._write(records.take(full), addresses[full], is_own[full], cause)
        finally:
            with self._lock:  # in one piece: as soon as a unit is not busy, its sequence may change it
                gone = ledger.note_stored(units[statuses == OK])
                ledger.was_refused[units[statuses != OK]] = True
                self.num_refused += int((statuses != OK).sum())
                ledger.pin(frames.ravel(), -1)
                ledger.is_busy[units] = False
                self._lock.notify_all()
        self.drop(gone, "replaced")
        if (statuses != OK).any():
            self._note_refused(records, statuses)
        return num

    def _write(
        self,
        records: GroupRecords,
        addresses: npt.NDArray[np.uint64],
        is_own: npt.NDArray[np.bool_],
        cause: Cause,
    ) -> Statuses:
        assert self._tier is not None, "there is nothing to write to"
        if isinstance(self._tier, StackedTier):
            return self._tier.write(records, addresses, cause=cause, is_own=is_own)
        return self._tier.write(records, addresses, cause=cause)

    def _evict_stored(self, num: int) -> bool:
        """Drop least recently used units that nobody needs until the tier below has `num` slots more, if it can be."""
        gone: list[KeyArray] = []
        with self._lock:
            ledger = self._ledger
            while (missing := num - sum(map(len, gone))) > 0:
                candidates = self.disposable() & (ledger.stored_tokens > 0) & ~ledger.is_far  # those take no slot
                units = ledger.recency.victims(missing, candidates)
                if not len(units):
                    break
                gone.append(ledger.dispose(units))
        for keys in gone:
            self.drop(keys, "evicted")
        return bool(gone)

    def _note_refused(self, records: GroupRecords, statuses: Statuses) -> None:
        """Have the tier below remember what it did not take."""
        if isinstance(self._tier, Remembers):
            self._tier.note(records.take(statuses == FULL), "full")
            self._tier.note(records.take((statuses != FULL) & (statuses != OK)), "failed")

    def drop(self, keys: KeyArray, reason: Reason) -> None:
        """Drop from the tier below what it holds for nobody."""
        if self._tier is not None and len(keys):
            self._tier.drop(keys, reason=reason)

    # Frames

    def take(self, num_frames: int) -> Ids:
        """Return up to `num_frames` frames, storing or dropping units until there are some."""
        with self._lock:
            frames = self._ledger.take_frames(num_frames)
        try:
            while len(frames) < num_frames and self.relieve():
                with self._lock:
                    frames = np.concatenate([frames, self._ledger.take_frames(num_frames - len(frames))])
        except BaseException:
            with self._lock:
                self._ledger.frame_pool.give(frames)
            raise
        return frames

    def relieve(self) -> bool:
        """Make some DRAM evictable: store units, or, where nothing takes them, drop idle ones. False: nothing left."""
        if self.store_some("demote"):
            return True
        with self._lock:
            ledger = self._ledger
            num_free = ledger.pool.num_free
            keys = self.drop_idle(STORE_UNITS_MAX, self.disposable() & ~ledger.is_clean())
            was_useful = ledger.pool.num_free > num_free
        self.drop(keys, "evicted")
        return was_useful

    def disposable(self) -> npt.NDArray[np.bool_]:
        """Say which units may end. Callers hold the lock."""
        candidates = self._ledger.disposable()
        candidates[self.filling] = False
        return candidates

    def drop_idle(self, num: int, candidates: npt.NDArray[np.bool_]) -> KeyArray:
        """End the least recently used of `candidates`; return what the tier below may drop. Callers hold the lock."""
        return self._ledger.dispose(self._ledger.recency.victims(num, candidates))
