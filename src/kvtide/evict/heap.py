"""Ids in a heap by their values: the order of the evictors that no few queues can hold. Next: values.

A new value is a new entry; the old one is dead from then on and thrown away when it comes up, or when the dead are
more than the living. So putting an id in and taking the lowest out are O(log n), amortised.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from kvtide.evict.contract import Ids, Mask

SPARE = 64  # dead entries not worth a clean-up
FRUITLESS_MAX = 64  # entries that may not go after which a pass over the mask costs less


class Heap:
    """Ids 0 to capacity - 1 by value, lowest first; of equals the one put in earliest.

    `num_scanned` counts the entries looked at so far.
    """

    def __init__(self, capacity: int, dtype: npt.DTypeLike) -> None:
        self.values = np.zeros(capacity, dtype)
        self.num_scanned = 0
        self._stamps = np.full(capacity, -1, np.int64)  # -1: not in
        self._entries: list[tuple[float, int, int]] = []  # value, stamp, id
        self._num = self._now = 0

    def is_in(self, ids: Ids) -> Mask:
        """Say which of `ids` are in."""
        return self._stamps[ids] >= 0

    def put(self, ids: Ids, values: npt.NDArray[np.float64] | Ids) -> None:
        """Give `ids` these values; of equals, later ids are later. Shapes: ids, values [n]."""
        is_new = ~self.is_in(ids)
        self._num += len(np.unique(ids[is_new])) if is_new.any() else 0
        stamps = np.arange(self._now, self._now + len(ids))
        self._now += len(ids)
        self.values[ids], self._stamps[ids] = values, stamps
        for entry in zip(values.tolist(), stamps.tolist(), ids.tolist(), strict=True):
            heapq.heappush(self._entries, entry)
        if len(self._entries) > 2 * self._num + SPARE:
            self._clean()

    def remove(self, ids: Ids) -> None:
        """Take `ids` out."""
        ids = ids[self.is_in(ids)]
        places = np.arange(len(ids))
        self._stamps[ids] = places
        self._num -= int(np.count_nonzero(self._stamps[ids] == places))  # each once
        self._stamps[ids] = -1

    def lowest(self, num: int, evictable: Mask) -> Ids:
        """Return up to `num` of the ids that are in and `evictable`, lowest value first."""
        found: list[int] = []
        met: list[tuple[float, int, int]] = []
        while self._entries and len(found) < num and len(met) - len(found) < FRUITLESS_MAX:
            entry = heapq.heappop(self._entries)
            self.num_scanned += 1
            if self._stamps[entry[2]] == entry[1]:
                met.append(entry)
                if evictable[entry[2]]:
                    found.append(entry[2])
        has_more = bool(self._entries)
        for entry in met:
            heapq.heappush(self._entries, entry)
        ids = np.array(found, np.int64)
        if len(ids) < num and has_more:
            rest = evictable.copy()
            rest[ids] = False
            ids = np.concatenate([ids, self._among(num - len(ids), np.flatnonzero(rest & (self._stamps >= 0)))])
        return ids

    def _among(self, num: int, ids: Ids) -> Ids:
        """Return the `num` lowest of `ids`; only as many as that are sorted, and their equals."""
        if num < len(ids):
            values = self.values[ids]
            ids = ids[values <= np.partition(values, num - 1)[num - 1]]
        return ids[np.lexsort((self._stamps[ids], self.values[ids]))][:num]

    def _clean(self) -> None:
        ids = np.flatnonzero(self._stamps >= 0)
        self.num_scanned += len(self._entries)
        stamps = self._stamps[ids].tolist()
        self._entries = list(zip(self.values[ids].tolist(), stamps, ids.tolist(), strict=True))
        heapq.heapify(self._entries)
