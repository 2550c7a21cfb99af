"""kvtide's own memory as a measured engine."""

from __future__ import annotations

from collections import deque

import numpy as np

from kvtide.recall import Memory
from kvtide.recall.commits import Ticket
from kvtide.stores.engines.contract import EngineOptions, Ids, Vectors

IDS_MAX = 1 << 24  # looked for after a crash


class Kvtide:
    """Group commit: `insert` returns when the rows are durable, or without waiting unless rows must be."""

    def __init__(self, options: EngineOptions) -> None:
        self._folder, self._dim = options.folder / "memory", options.dim
        self._memory = Memory.open(self._folder, self._dim)
        self._waits = options.is_durable
        self._waiting: deque[tuple[int, Ticket]] = deque()
        self._num_durable = 0

    def insert(self, ids: Ids, vectors: Vectors) -> None:
        self._waiting.append((len(ids), self._memory.add(ids, vectors, wait=self._waits)))

    def num_durable(self) -> int:
        while self._waiting and self._waiting[0][1].is_done and self._waiting[0][1].error is None:
            self._num_durable += self._waiting.popleft()[0]
        return self._num_durable

    def finish(self) -> None:
        self._memory.close()  # what only the ring has goes to the log, and counts
        self._memory = Memory.open(self._folder, self._dim)

    def search(self, queries: Vectors, k: int) -> Ids:
        return self._memory.search(queries, k)[0]

    def ids(self) -> Ids:
        num = len(self._memory)
        found: list[int] = []
        first, step = 0, 4096
        while len(found) < num and first < IDS_MAX:
            asked = np.arange(first, first + step)
            held = self._memory.get(asked)
            found += [int(one) for one, payload in zip(asked, held, strict=True) if payload is not None]
            first += step
        return np.array(found, np.int64)

    def close(self) -> None:
        self._memory.close()
