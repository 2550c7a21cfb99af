"""`Memory`: vectors with ids and payloads on one machine's disk, durable when `add` returns. Next: kvtide.cli_memory.

Puts the pieces together: a directory and its owner (place), commits that write logs (commits, log), the rows of each
log (parts, shelf), what becomes of old logs (merge, segments). `docs/recall.md` says what is promised.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError
from kvtide.io.opening import open_engine
from kvtide.io.ops import Engine
from kvtide.recall.commits import Commits, Ticket
from kvtide.recall.contract import (
    GROUP_BYTES_MAX,
    Filter,
    MemoryOptions,
    Scores,
    checked_dim,
    checked_ids,
    checked_k,
    checked_payloads,
    checked_vectors,
    keeper,
)
from kvtide.recall.merge import Merger
from kvtide.recall.ops import MemoryIo
from kvtide.recall.place import Place
from kvtide.recall.records import DELETE, GROUP, PUT, ROW, Ids, Vectors, row_check
from kvtide.recall.scores import Hits, join
from kvtide.recall.shelf import Shelf
from kvtide.trace.record import Recorder

DEPTH = 32  # of reads and writes in flight


class Memory:
    """A `VectorMemory` in a directory.

    Threads: any may call anything at any time; searches run beside commits.
    """

    def __init__(self, path: Path, dim: int, options: MemoryOptions, recorder: Recorder | None = None) -> None:
        """Open or make; see `open`."""
        self.options, self.dim = options, checked_dim(dim)
        self._is_closed = False
        self._place = Place(path, self.dim, options.metric, options.of)
        self._engines: list[Engine] = []
        self._shelf: Shelf | None = None
        try:
            for _ in range(2):
                self._engines.append(open_engine(options.engine, depth_max=DEPTH))
            self.write_io, self.read_io = (MemoryIo(engine, recorder) for engine in self._engines)
            self._shelf = Shelf(self._place, self.write_io, self.read_io, options)
            self.merger = Merger(self._shelf, self._place, options, recorder)
            self._shelf.load(after=self.merger.load())
        except BaseException:
            self._release()
            raise
        self._commits = Commits(
            self._commit, self._written_bytes, delay_ms=options.commit_ms, pending_bytes_max=options.pending_bytes_max
        )
        self.merger.wake()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        dim: int,
        *,
        options: MemoryOptions | None = None,
        recorder: Recorder | None = None,
        **changed: object,
    ) -> Self:
        """Open the memory in directory `path`, made where there is none, for vectors of `dim` dimensions.

        Options may be given one by one, as in `Memory.open("mem", 256, commit_ms=5, metric="l2")`; see `MemoryOptions`.

        Raises: ConfigError for an option that is none, a directory that holds something else, or a memory of other
        vectors; FormatError for files that are not what they claim; IoError, with EBUSY while another process owns it.
        """
        return cls(Path(path), dim, made_options(options, changed), recorder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        shelf = self._open_shelf()
        with shelf.lock:
            return sum(one.part.num_live for one in shelf.all())

    @property
    def num_bad(self) -> int:
        """Groups of the logs that were damaged since they were written, as found when opening."""
        return self._open_shelf().num_bad

    # Writing

    def add(
        self,
        ids: npt.ArrayLike,
        vectors: npt.ArrayLike,
        payloads: Sequence[bytes] | None = None,
        *,
        wait: bool = True,
    ) -> Ticket:
        """Keep rows; a row with an id that is there already replaces it. Return when they are durable.

        With `wait=False` the call returns at once, the rows are durable, and found, within `commit_ms` and the time of
        a sync: `wait()` of the ticket says when.

        Shapes: ids [n], whole numbers of 0 to 2**63 - 1; vectors [n, D]; payloads [n].
        Raises: ConfigError for what is no such row; IoError, with ENOSPC where the file system is full.
        """
        known = checked_ids(ids)
        rows = checked_vectors(vectors, self.dim, len(known))
        texts = checked_payloads(payloads, len(known), self.options.payload_bytes_max)
        ticket = self._ticket(np.zeros(0, ROW), rows[:0], [])
        for first, end in _groups(texts, 4 * self.dim):
            part = rows[first:end]
            ticket = self._ticket(self._rows(known[first:end], part, texts[first:end]), part, texts[first:end])
            self._commits.put(ticket, wait=wait and end == len(known))
        return ticket

    def delete(self, ids: npt.ArrayLike, *, wait: bool = True) -> Ticket:
        """Forget rows, those that are not there too. Return when that is durable.

        Shapes: ids [n]. Raises: as `add`.
        """
        known = checked_ids(ids)
        rows = np.zeros(len(known), ROW)
        rows["id"], rows["kind"] = known, DELETE
        ticket = self._ticket(rows, np.zeros((0, self.dim), np.float32), [b""] * len(known))
        if len(known):
            self._commits.put(ticket, wait=wait)
        return ticket

    def flush(self) -> None:
        """Return when everything added so far is durable."""
        self._commits.flush()

    def _rows(self, ids: Ids, vectors: Vectors, payloads: list[bytes]) -> npt.NDArray[np.void]:
        rows = np.zeros(len(ids), ROW)
        rows["id"], rows["kind"] = ids, PUT
        rows["payload_bytes"] = list(map(len, payloads))
        salt, raw, width = self._place.description.salt, vectors.tobytes(), 4 * self.dim
        rows["check"] = [
            row_check(salt, one, raw[width * at : width * (at + 1)], payload)
            for at, (one, payload) in enumerate(zip(ids.tolist(), payloads, strict=True))
        ]
        return rows

    def _ticket(self, rows: npt.NDArray[np.void], vectors: Vectors, payloads: list[bytes]) -> Ticket:
        size = rows.nbytes + vectors.nbytes + sum(map(len, payloads))
        commits = self._commits
        return Ticket(rows, vectors, payloads, size, commits, is_done=not len(rows))

    def _written_bytes(self, group: list[Ticket]) -> int:
        log = self._open_shelf().volumes[-1].log
        return log.pages_for(GROUP.itemsize + sum(ticket.num_bytes for ticket in group))

    def _commit(self, group: list[Ticket]) -> None:
        """Make a group durable and let searches find it."""
        rows = np.concatenate([ticket.rows for ticket in group])
        vectors = np.concatenate([ticket.vectors for ticket in group])
        payloads = [payload for ticket in group for payload in ticket.payloads]
        if self._open_shelf().commit(rows, vectors, payloads):
            self.merger.wake()

    # Reading

    def search(self, queries: npt.ArrayLike, k: int, filter: Filter = None) -> tuple[Ids, Scores]:  # noqa: A002
        """Return the ids and scores of the `k` rows most like each query, best first: the more alike, the higher.

        Scores are the cosine, the dot product, or with metric l2 the squared distance, negative. Where fewer rows are
        there, ids are -1 and scores minus infinity. `filter` is ids to search among, or a function that says of an
        array of ids which may be returned.

        Shapes: queries [q, D], or [D] for one; returns [q, k] each.
        Raises: ConfigError for what is no such query.
        """
        asked = np.asarray(queries)
        asked = checked_vectors(asked[None] if asked.ndim == 1 else asked, self.dim, None, "queries")
        k, keep = checked_k(k), keeper(filter)
        empty = Hits(np.full((len(asked), k), -1, np.int64), np.full((len(asked), k), -np.inf, np.float32))
        if not len(asked):
            return empty.ids, empty.scores
        with self._open_shelf().reading() as volumes:
            found = [volume.part.search(asked, k, keep) for volume in volumes]
        best = join([*found, empty], k)
        return best.ids, best.scores

    def get(self, ids: npt.ArrayLike) -> list[bytes | None]:
        """Return the payload of each id, None where there is no such row. Every row is checked as it is read.

        Shapes: ids [n]. Raises: ConfigError for what are no ids; Corrupt if a row is not as it was added; IoError.
        """
        known = checked_ids(ids)
        payloads = self._open_shelf().payloads(known)
        return [payloads.get(at) for at in range(len(known))]

    # Opening and closing

    def close(self) -> None:
        """Make everything durable and let another process open it. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._commits.close()
        self.merger.close()
        self._open_shelf().settle()
        self._release()

    def _release(self) -> None:
        for engine in self._engines:
            engine.close()
        if self._shelf is not None:
            self._shelf.close()
            self._shelf = None
        self._place.close()

    def _open_shelf(self) -> Shelf:
        if self._shelf is None:
            raise ConfigError("this memory is closed; open it again with Memory.open")
        return self._shelf


def made_options(options: MemoryOptions | None, changed: Mapping[str, object]) -> MemoryOptions:
    """Return options with some of them changed.

    Raises: ConfigError for a name that is none.
    """
    known = [one.name for one in fields(MemoryOptions)]
    unknown = sorted(set(changed) - set(known))
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}; choose from {', '.join(known)}")
    return replace(options or MemoryOptions(), **changed)  # type: ignore[arg-type]


def _groups(payloads: list[bytes], vector_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield runs of rows of up to a group's worth of bytes each."""
    first = size = 0
    for at, payload in enumerate(payloads):
        row_bytes = ROW.itemsize + vector_bytes + len(payload)
        if at > first and size + row_bytes > GROUP_BYTES_MAX:
            yield first, at
            first, size = at, 0
        size += row_bytes
    if payloads:
        yield first, len(payloads)
