"""Evictors that go by when an id came or was used last: lru, fifo, lip, slru, look-ahead. Next: scanproof.

All work is O(1) an id, amortised.
"""

from __future__ import annotations

import numpy as np

from kvtide.evict.contract import NO_FACTS, Facts, Ids, Mask
from kvtide.evict.queues import Queues


class _Queued:
    """What these evictors share: all they know is where each id stands, and facts about it change nothing."""

    def __init__(self, capacity: int, *, num_queues: int) -> None:
        self._queues = Queues(num_queues, capacity)

    def admit(self, ids: Ids, facts: Facts = NO_FACTS) -> None:
        """Let `ids` stand where new ids do."""
        del facts
        self._enter(ids)

    def touch(self, ids: Ids, facts: Facts = NO_FACTS) -> None:
        """Let those of `ids` that are in stand where used ids do."""
        del facts
        self._use(self._queues.inside(ids))

    def forget(self, ids: Ids) -> None:
        """Take `ids` out."""
        self._queues.remove(ids)

    def victims(self, num: int, evictable: Mask) -> Ids:
        """Return the first of the only queue."""
        return self._queues.first(0, num, evictable)

    def _enter(self, ids: Ids) -> None:
        self._queues.push(ids, 0)

    def _use(self, ids: Ids) -> None:
        self._queues.push(ids, 0)


class Lru(_Queued):
    """Least recently used goes first."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, num_queues=1)


class Fifo(_Queued):
    """First in goes first, used or not."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, num_queues=1)

    def _use(self, ids: Ids) -> None:
        """Use changes nothing."""


class Lip(_Queued):
    """New ids go first, the newest before all, until they are used again; then least recently used.

    Decoding reads every layer in a circle. Where the circle does not fit, least-recently-used drops each entry just
    before its next use; this keeps what fits and lets the rest pass through.
    Source: LRU insertion policy, Qureshi et al., ISCA 2007.
    """

    _NEW, _USED = 0, 1

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, num_queues=2)

    def victims(self, num: int, evictable: Mask) -> Ids:
        """Return the newest that were never used, then the least recently used."""
        new = self._queues.last(self._NEW, num, evictable)
        return np.concatenate([new, self._queues.first(self._USED, num - len(new), evictable)])

    def _enter(self, ids: Ids) -> None:
        self._queues.push(ids, self._NEW)

    def _use(self, ids: Ids) -> None:
        self._queues.push(ids, self._USED)


class Slru(_Queued):
    """Segmented: ids used again are protected, as many as fit in a share of the tier; the others go first, by LRU.

    Where more are protected than fit, the least recently used of them count as just used on the other side.
    Source: Karedla, Love and Wherry, "Caching strategies to improve disk system performance", IEEE Computer 1994; the
    share is that of the main region of W-TinyLFU (arXiv:1512.00727).
    """

    _NEW, _PROTECTED = 0, 1

    def __init__(self, capacity: int, *, protected_share: float = 0.8) -> None:
        super().__init__(capacity, num_queues=2)
        self._num_protected_max = int(protected_share * capacity)
        self._all = np.ones(capacity, np.bool_)

    def victims(self, num: int, evictable: Mask) -> Ids:
        """Return the least recently used of the unprotected, then of the protected."""
        new = self._queues.first(self._NEW, num, evictable)
        return np.concatenate([new, self._queues.first(self._PROTECTED, num - len(new), evictable)])

    def _use(self, ids: Ids) -> None:
        self._queues.push(ids, self._PROTECTED)
        surplus = self._queues.num(self._PROTECTED) - self._num_protected_max
        self._queues.push(self._queues.first(self._PROTECTED, surplus, self._all), self._NEW)


class LookAhead(_Queued):
    """What the waiting queue will need stays; the others go by LRU. Of what is needed, the last needed goes first.

    An id no longer expected, and not used either, counts as used when that was said.
    Source: scheduler-aware eviction, CachedAttention (arXiv:2403.19708).
    """

    _OTHERS, _EXPECTED = 0, 1

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, num_queues=2)
        self._expected = np.zeros(0, np.int64)

    def expect(self, ids: Ids) -> None:
        """Keep `ids`, soonest needed first, in place of those expected before; those not in are passed over."""
        queues, old = self._queues, self._expected
        queues.push(old[queues.queue_of[old] == self._EXPECTED][::-1], self._OTHERS)
        self._expected = queues.inside(ids)
        queues.push(self._expected[::-1], self._EXPECTED)

    def victims(self, num: int, evictable: Mask) -> Ids:
        """Return the least recently used of those not expected, then the last needed of the others."""
        others = self._queues.first(self._OTHERS, num, evictable)
        return np.concatenate([others, self._queues.first(self._EXPECTED, num - len(others), evictable)])

    def _use(self, ids: Ids) -> None:
        self._queues.push(ids[self._queues.queue_of[ids] == self._OTHERS], self._OTHERS)  # the rest stand by need
