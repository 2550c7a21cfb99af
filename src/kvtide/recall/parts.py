"""The rows of one log, fresh or sealed, searched where they lie. Next: commits.

A part knows where each of its rows is and which are live: a row dies when a later one has its id, or deletes it. Fresh,
its vectors are an array in memory; sealed, they are read in the mapped log itself, which so is the first segment.
"""

from __future__ import annotations

import mmap
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtide.recall.contract import Keep
from kvtide.recall.records import ALIGN_BYTES, PLACED, PUT, Ids, Placed, Vectors
from kvtide.recall.scores import Hits, Metric, factors, join, score, top

CHUNK_ROWS = 4096  # gathered at once from a mapped log: 4 MiB of 256 dimensions, about what stays in a core's cache


class Part(Protocol):
    """Some of a memory's rows."""

    def search(self, queries: Vectors, k: int, keep: Keep | None) -> Hits: ...

    def find(self, ids: Ids) -> Ids:
        """Return the place of each id that is live here, -1 of others."""

    def kill(self, ids: Ids) -> None:
        """Let the rows with these ids, if any are here, be no longer live."""


class LogPart:
    """The rows of one log.

    Threads: one writes, any search at the same time: a search sees the rows there were when it began.
    """

    def __init__(self, dim: int, metric: Metric) -> None:
        self.dim, self.metric = dim, metric
        self.num_rows = self.num_readers = 0  # the readers are counted under the memory's lock
        self.placed = np.zeros(256, PLACED)
        self.live = np.zeros(256, np.bool_)
        self._factors = np.zeros(256, np.float32)
        self._vectors: Vectors | None = np.zeros((256, dim), np.float32)
        self._mapped: npt.NDArray[np.uint8] | None = None
        self._row_of: dict[int, int] | None = {}
        self._sorted: tuple[Ids, Ids] | None = None

    @property
    def num_live(self) -> int:
        return int(self.live[: self.num_rows].sum())

    def add(self, placed: Placed, vectors: Vectors) -> None:
        """Take the rows of a group, in order; of several with one id the last counts. Shapes: [n], [puts, D]."""
        assert self._vectors is not None, "a sealed log takes no rows"
        assert self._row_of is not None, "a sealed log takes no rows"
        puts = placed[placed["kind"] == PUT]
        first, end = self.num_rows, self.num_rows + len(puts)
        if end > len(self.placed):
            self._grow(end)
        self.placed[first:end], self._vectors[first:end] = puts, vectors
        self._factors[first:end] = factors(self.metric, vectors)
        self.kill(placed["id"])
        last = dict(zip(placed["id"].tolist(), range(len(placed)), strict=True))
        final = np.zeros(len(placed), np.bool_)
        final[list(last.values())] = True
        is_live = final[placed["kind"] == PUT]
        self.live[first:end] = is_live
        rows = np.flatnonzero(is_live)
        self._row_of.update(zip(puts["id"][rows].tolist(), (first + rows).tolist(), strict=True))
        self.num_rows = end

    def _grow(self, end: int) -> None:
        size = max(end, 2 * len(self.placed))
        for name in ("placed", "live", "_factors", "_vectors"):
            old = getattr(self, name)
            grown = np.zeros((size, *old.shape[1:]), old.dtype)
            grown[: self.num_rows] = old[: self.num_rows]
            setattr(self, name, grown)  # a search under way keeps the old one

    def seal(self, fd: int, size_bytes: int) -> None:
        """Give the vectors in memory up and search the log `fd` in place; no row is added any more."""
        mapped = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
        self._mapped = np.frombuffer(mapped, np.uint8)
        ids = self.placed["id"][: self.num_rows]
        order = np.argsort(ids, kind="stable")
        self._sorted = (ids[order], order)
        self.placed, self.live = self.placed[: self.num_rows].copy(), self.live[: self.num_rows].copy()
        self._factors = self._factors[: self.num_rows].copy()
        self._vectors = self._row_of = None

    def find(self, ids: Ids) -> Ids:
        if self._row_of is not None:
            get = self._row_of.get
            return np.fromiter((get(one, -1) for one in ids.tolist()), np.int64, len(ids))
        assert self._sorted is not None, "sealed"
        known, order = self._sorted
        if not len(known):
            return np.full(len(ids), -1, np.int64)
        after = np.searchsorted(known, ids, side="right") - 1  # the last of several with one id
        there = (after >= 0) & (known[after] == ids)
        rows = order[after]
        return np.where(there & self.live[rows], rows, -1)

    def kill(self, ids: Ids) -> None:
        rows = self.find(ids)
        self.live[rows[rows >= 0]] = False
        if self._row_of is not None:
            for one in ids[rows >= 0].tolist():
                self._row_of.pop(one, None)

    def vectors(self, rows: Ids) -> Vectors:
        """Return the vectors of some rows. Shapes: [n] to [n, D]."""
        vectors = self._vectors
        if vectors is not None:
            return vectors[rows]
        return self._view()[self.placed["vector_at"][rows] // ALIGN_BYTES]

    def payloads(self, rows: Ids) -> tuple[npt.NDArray[np.uint8], Ids]:
        """Return the payloads of some rows of a sealed log, one after another, and where each ends; unchecked."""
        assert self._mapped is not None, "sealed"
        starts, lengths = self.placed["payload_at"][rows], self.placed["payload_bytes"][rows]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        return self._mapped[np.repeat(starts - ends + lengths, lengths) + np.arange(total)], ends

    @property
    def is_sealed(self) -> bool:
        return self._vectors is None

    def _view(self) -> Vectors:
        """Return the mapped log as overlapping vectors, one beginning at every 8th byte: taking some gathers them."""
        assert self._mapped is not None, "sealed"
        size = len(self._mapped) // 4 * 4
        num = max(0, (size - 4 * self.dim) // ALIGN_BYTES + 1)
        flat = self._mapped[:size].view(np.float32)
        return np.lib.stride_tricks.as_strided(flat, (num, self.dim), (ALIGN_BYTES, 4), writeable=False)

    def search(self, queries: Vectors, k: int, keep: Keep | None) -> Hits:
        num, live, vectors = self.num_rows, self.live, self._vectors
        ids, scale = self.placed["id"][:num], self._factors
        wanted = live[:num].copy()
        if keep is not None:
            wanted &= keep(ids)
        step = num if vectors is not None else CHUNK_ROWS
        best = Hits(np.full((len(queries), 0), -1, np.int64), np.zeros((len(queries), 0), np.float32))
        for first in range(0, num, max(1, step)):
            end = min(first + step, num)
            if not wanted[first:end].any():
                continue
            block = vectors[first:end] if vectors is not None else self.vectors(np.arange(first, end))
            scores = score(self.metric, queries, block, scale[first:end])
            scores[:, ~wanted[first:end]] = -np.inf
            found = top(np.broadcast_to(ids[first:end], scores.shape), scores, k)
            best = found if not best.ids.shape[1] else join([best, found], k)
        return best
