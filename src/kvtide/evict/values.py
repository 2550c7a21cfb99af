"""Evictors that give each id a value, the lowest goes first: lfu, gdsf, belady. Next: names.

lfu counts in few steps, so a queue for each count makes it O(1) an id, amortised. gdsf and belady order by any number:
a heap makes them O(log n) an id.
"""

from __future__ import annotations

import numpy as np

from kvtide.evict.contract import NEVER, NO_FACTS, Facts, Ids, Mask
from kvtide.evict.heap import Heap
from kvtide.evict.queues import Queues


class Lfu:
    """Least often used goes first, of equals the least recently used. Counts are halved now and then: old fame fades.

    A sweep at the halving sorts everything; that is once in ten times the capacity of uses.
    Source: counts to 15 and a halving after ten uses an entry, TinyLFU (arXiv:1512.00727).
    """

    COUNT_MAX = 15
    USES_PER_ID = 10

    def __init__(self, capacity: int) -> None:
        self._queues = Queues(self.COUNT_MAX + 1, capacity)  # the queue of an id is its count
        self._period = self._uses_left = max(1, self.USES_PER_ID * capacity)

    def admit(self, ids: Ids, facts: Facts = NO_FACTS) -> None:
        """Count `ids` as used once."""
        del facts
        self._queues.remove(ids)
        self._count(ids)

    def touch(self, ids: Ids, facts: Facts = NO_FACTS) -> None:
        """Count a use of those of `ids` that are in."""
        del facts
        self._count(self._queues.inside(ids))

    def forget(self, ids: Ids) -> None:
        """Take `ids` out."""
        self._queues.remove(ids)

    def victims(self, num: int, evictable: Mask) -> Ids:
        """Return the lowest counts, of equals the least recently used."""
        found = [np.zeros(0, np.int64)]
        for count in range(self.COUNT_MAX + 1):
            if num > 0 and self._queues.num(count):
                found.append(self._queues.first(count, num, evictable))
                num -= len(found[-1])
        return np.concatenate(found)

    def _count(self, ids: Ids) -> None:
        if len(set(ids.tolist())) < len(ids):  # an id was named twice
            ids = ids[np.sort(len(ids) - 1 - np.unique(ids[::-1], return_index=True)[1])]
        while len(ids):
            now, ids = ids[: self._uses_left], ids[self._uses_left :]
            counts = np.maximum(self._queues.queue_of[now].astype(np.int64), 0) + 1
            self._queues.push(now, np.minimum(counts, self.COUNT_MAX))
            self._uses_left -= len(now)
            if not self._uses_left:
                self._queues.merge(np.arange(self.COUNT_MAX + 1) // 2)
                self._uses_left = self._period


class Gdsf:
    """Least worth a byte goes first: how often it was used, times the time to compute it again, over its size.

    What is dropped sets a floor that later values start from, so what was worth much once goes in the end. Where costs
    or sizes are not known they count as 1; then this is lfu with dynamic aging.
    Source: Cherkasova, "Improving WWW proxies performance with greedy-dual-size-frequency caching", HP Labs 1998.
    """

    def __init__(self, capacity: int) -> None:
        self._heap = Heap(capacity, np.float64)
        self._uses = np.zeros(capacity, np.int64)
        self._worth = np.ones(capacity)  # cost over size
        self._was_offered = np.zeros(capacity, np.bool_)
        self._floor = 0.0

    def admit(self, ids: Ids, facts: Facts = NO_FACTS) -> None:
        """Count `ids` as used once, at what they cost and weigh."""
        self._uses[ids] = 0
        self._worth[ids] = 1.0
        self._count(ids, facts)

    def touch(self, ids: Ids, facts: Facts = NO_FACTS) -> None:
        """Count a use of those of `ids` that are in, at their new cost and size if these are given."""
        inside = self._heap.is_in(ids)
        self._count(ids[inside], facts.take(inside))

    def forget(self, ids: Ids) -> None:
        """Take `ids` out; of those that were offered as victims, the highest value is the new floor."""
        dropped = ids[self._was_offered[ids] & self._heap.is_in(ids)]
        if len(dropped):
            self._floor = max(self._floor, float(self._heap.values[dropped].max()))
        self._was_offered[ids] = False
        self._heap.remove(ids)

    def victims(self, num: int, evictable: Mask) -> Ids:
        """Return the lowest values, of equals the least recently used."""
        ids = self._heap.lowest(num, evictable)
        self._was_offered[ids] = True
        return ids

    def _count(self, ids: Ids, facts: Facts) -> None:
        if facts.costs is not None or facts.sizes is not None:
            costs = np.ones(len(ids)) if facts.costs is None else facts.costs
            self._worth[ids] = costs if facts.sizes is None else costs / np.maximum(facts.sizes, 1)
        self._uses[ids] += 1
        self._was_offered[ids] = False
        self._heap.put(ids, self._floor + self._uses[ids] * self._worth[ids])


class Belady:
    """What is needed last goes first: the bound no evictor passes, where each request is for one block.

    It needs the times of the next uses. An id without one counts as never used again, and of those the least recently
    used goes first.
    Source: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 1966.
    """

    def __init__(self, capacity: int) -> None:
        self._heap = Heap(capacity, np.int64)

    def admit(self, ids: Ids, facts: Facts = NO_FACTS) -> None:
        """Note when `ids` will be used next."""
        self._heap.put(ids, np.full(len(ids), -NEVER) if facts.next_use is None else -facts.next_use)

    def touch(self, ids: Ids, facts: Facts = NO_FACTS) -> None:
        """Note when those of `ids` that are in will be used next."""
        inside = self._heap.is_in(ids)
        self.admit(ids[inside], facts.take(inside))

    def forget(self, ids: Ids) -> None:
        """Take `ids` out."""
        self._heap.remove(ids)

    def victims(self, num: int, evictable: Mask) -> Ids:
        """Return those needed last, of equals the least recently used."""
        return self._heap.lowest(num, evictable)
