"""A segment of a memory: rows that do not change, in Lance, searched exactly or by Lance's index. Next: merge.

The only file that knows pylance, which is imported when a memory has segments or makes one. A segment is written,
indexed if it is large, made durable file by file, and only then says by `segment.json` that it is whole. Of its rows
the ids, checks and what is needed to score them are held in memory, 37 bytes a row; vectors only up to a limit.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvtide.errors import Corrupt, FormatError, IoError, KvtideError, UnsupportedError
from kvtide.recall.contract import Keep
from kvtide.recall.manifest import Entry, segment_path, write_entry
from kvtide.recall.ops import MemoryIo
from kvtide.recall.place import sync_folder
from kvtide.recall.records import Ids, Vectors, row_check, seed_of
from kvtide.recall.scores import Hits, Metric, factors, join, score, top

CHUNK_ROWS = 4096
HELD_BYTES_MAX = 64 << 20  # of a segment's vectors: it is then searched in memory
PARTITION_ROWS = 4096
BITS = 3  # of a dimension, in codes that rank candidates; 2 rank less well for queries far from all rows
REFINE_FACTOR = (
    4  # candidates for each row asked of the index, 20 for ten wanted: their vectors are read, and rank them
)
FILE_ROWS = 1 << 30  # of one file at most: Lance takes larger numbers for 0, and then makes a file of each batch
EXACT_ROWS_MAX = 1024  # of so few rows all are compared
MISSING = "segments need pylance; type: pip install 'kvtide[recall]'"


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows on their way into a segment. Payloads lie one after another; `ends` says where each one ends."""

    ids: Ids
    checks: npt.NDArray[np.uint64]
    vectors: Vectors
    payloads: npt.NDArray[np.uint8]
    ends: Ids


def is_installed() -> bool:
    """Return whether segments can be read and written here."""
    try:
        import lance  # noqa: F401
    except ImportError:
        return False
    return True


class Segment:
    """The rows of one segment.

    Threads: any may search; liveness changes under the memory's lock.
    """

    def __init__(self, path: Path, entry: Entry, metric: Metric, dim: int, salt: bytes) -> None:
        """Open a segment.

        Raises: UnsupportedError without pylance; FormatError if it is not what its entry says; IoError.
        """
        self.entry, self.metric, self.dim = entry, metric, dim
        self.folder = segment_path(path, entry.number)
        self.num_readers = 0
        with _told(self.folder):
            self._lance = _lance().dataset(str(self.folder / "rows.lance"))
            found = self._lance.to_table(columns=["id", "check", "factor"])
            self.ids = _array(found["id"], np.int64)
            self.checks = _array(found["check"], np.uint64)
            self._factors = _array(found["factor"], np.float32)
        self.deleted = np.frombuffer(_read_file(self.folder / "deleted.ids"), "<i8").astype(np.int64)
        counts = (len(self.ids), len(self.deleted))
        if counts != (entry.num_rows, entry.num_deleted) or entry.rows_check != _check(
            salt, self.ids, self.checks, self.deleted
        ):
            wanted = f"{entry.num_rows} rows and {entry.num_deleted} deleted ids with check {entry.rows_check}"
            raise FormatError(f"{self.folder}: expected {wanted}, found {counts[0]} and {counts[1]}, or another check")
        self.live = np.ones(len(self.ids), np.bool_)
        self._order = np.argsort(self.ids, kind="stable")
        self._sorted = self.ids[self._order]
        self._held: Vectors | None = None

    @property
    def part(self) -> Segment:
        """What is searched: itself."""
        return self

    @property
    def num_rows(self) -> int:
        return len(self.ids)

    @property
    def num_live(self) -> int:
        return int(self.live.sum())

    def find(self, ids: Ids) -> Ids:
        """Return the place of each id that is live here, -1 of others."""
        if not len(self._sorted):
            return np.full(len(ids), -1, np.int64)
        at = np.minimum(np.searchsorted(self._sorted, ids), len(self._sorted) - 1)
        rows = self._order[at]
        return np.where((self._sorted[at] == ids) & self.live[rows], rows, -1)

    def kill(self, ids: Ids) -> None:
        """Let the rows with these ids, if any are here, be no longer live."""
        rows = self.find(ids)
        self.live[rows[rows >= 0]] = False

    # Searching

    def search(self, queries: Vectors, k: int, keep: Keep | None) -> Hits:
        """Return the best rows, by the index where there is one and many rows may be found; else exactly."""
        wanted = self.live.copy()
        if keep is not None:
            wanted &= keep(self.ids)
        num = int(wanted.sum())
        if not num:
            return _none(len(queries))
        share = num / self.num_rows
        if self.entry.is_indexed and num > max(EXACT_ROWS_MAX, 4 * k) and share > 0.1:
            return self._by_index(queries, k, wanted, share)
        return self._exact(queries, k, wanted)

    def _exact(self, queries: Vectors, k: int, wanted: npt.NDArray[np.bool_]) -> Hits:
        best = _none(len(queries))
        for rows, vectors in self._blocks(wanted):
            scores = score(self.metric, queries, vectors, self._factors[rows])
            scores[:, ~wanted[rows]] = -np.inf
            best = join([best, top(np.broadcast_to(self.ids[rows], scores.shape), scores, k)], k)
        return best

    def _blocks(self, wanted: npt.NDArray[np.bool_]) -> Iterator[tuple[Ids, Vectors]]:
        """Yield rows and their vectors, a chunk at a time: only those wanted where they are few."""
        if self._held is None and self.num_rows * self.dim * 4 <= HELD_BYTES_MAX and not self.entry.is_indexed:
            self._held = self.vectors(np.arange(self.num_rows))
        held = self._held
        few = np.flatnonzero(wanted)
        if held is not None or 4 * len(few) < self.num_rows:
            for first in range(0, len(few), CHUNK_ROWS):
                rows = few[first : first + CHUNK_ROWS]
                yield rows, held[rows] if held is not None else self.vectors(rows)
            return
        first = 0
        with _told(self.folder):
            for batch in self._lance.scanner(
                columns=["vector"], batch_size=CHUNK_ROWS, scan_in_order=True
            ).to_batches():
                yield np.arange(first, first + len(batch)), self._unpacked(batch["vector"])
                first += len(batch)

    def _by_index(self, queries: Vectors, k: int, wanted: npt.NDArray[np.bool_], share: float) -> Hits:
        """Ask the index for more rows than wanted, as many of them may be dead, and score those again, exactly."""
        found = [self._nearest(query, min(self.num_rows, int(1.2 * k / share) + 8), wanted) for query in queries]
        short = np.array([len(rows) < k for rows in found])
        best = Hits(np.full((len(queries), k), -1, np.int64), np.full((len(queries), k), -np.inf, np.float32))
        for at in np.flatnonzero(~short):
            rows = found[at]
            scores = score(self.metric, queries[at : at + 1], self.vectors(rows), self._factors[rows])
            hits = top(self.ids[rows][None], scores, k)
            best.ids[at], best.scores[at] = hits.ids[0], hits.scores[0]
        if short.any():
            hits = self._exact(queries[short], k, wanted)
            best.ids[short], best.scores[short] = hits.ids, hits.scores
        return best

    def _nearest(self, query: Vectors, k: int, wanted: npt.NDArray[np.bool_]) -> Ids:
        probes = max(32, 3 * _partitions(self.num_rows) // 4)  # of fewer all: half of them would cost 10 % of recall
        asked = {"column": "vector", "q": query, "k": REFINE_FACTOR * k, "nprobes": probes}
        with _told(self.folder):
            found = self._lance.scanner(columns=["row", "_distance"], nearest=asked).to_table()
            rows = _array(found["row"], np.int64)
        return rows[wanted[rows]]

    # Reading

    def vectors(self, rows: Ids) -> Vectors:
        """Return the vectors of some rows. Shapes: [n] to [n, D]."""
        with _told(self.folder):
            parts = [self._unpacked(chunk) for chunk in self._take(rows, "vector").chunks]
        return np.concatenate(parts) if parts else np.zeros((0, self.dim), np.float32)

    def payloads(self, io: MemoryIo, rows: Ids, salt: bytes) -> list[bytes]:  # noqa: ARG002  Lance reads by itself
        """Return the payloads of some rows, each checked.

        Raises: Corrupt if a row is not as it was added; IoError.
        """
        if not len(rows):
            return []
        with _told(self.folder):
            found: list[bytes] = self._take(rows, "payload").to_pylist()
        vectors = self.vectors(rows)
        for at, row in enumerate(rows.tolist()):
            row_id = int(self.ids[row])
            if row_check(salt, row_id, vectors[at].tobytes(), found[at]) != int(self.checks[row]):
                where = f"{self.folder.name}, row {row}"
                raise Corrupt(errno.EIO, f"{where}: row {row_id} is not as it was added; add it again, or delete it")
        return found

    def rows(self, rows: Ids) -> Rows:
        """Return some rows with all that belongs to them, as they lie: a merge carries their checks along."""
        with _told(self.folder):
            texts = [one or b"" for one in self._take(rows, "payload").to_pylist()]
        ends = np.cumsum([len(one) for one in texts], dtype=np.int64)
        payloads = np.frombuffer(b"".join(texts), np.uint8)
        return Rows(self.ids[rows], self.checks[rows], self.vectors(rows), payloads, ends)

    def _take(self, rows: Ids, column: str) -> Any:
        return self._lance.take(rows.tolist(), columns=[column])[column]

    def _unpacked(self, vectors: Any) -> Vectors:
        flat = vectors.flatten().to_numpy(zero_copy_only=True)
        return np.asarray(flat, np.float32).reshape(len(vectors), self.dim)

    def close(self) -> None:
        """Let go of the files. Idempotent."""
        self._lance = self._held = None


# Writing


def write_segment(
    path: Path, parts: Iterable[Rows], deleted: Ids, entry: Entry, metric: Metric, dim: int, salt: bytes
) -> Entry:
    """Write a segment and make it durable; return its entry with the counts and check of what was written.

    Raises: UnsupportedError without pylance; IoError, with ENOSPC where the file system is full.
    """
    folder = segment_path(path, entry.number)
    seen: list[tuple[Ids, npt.NDArray[np.uint64]]] = []
    with _told(folder):
        folder.mkdir(mode=0o700)
        (folder / "deleted.ids").write_bytes(deleted.astype("<i8").tobytes())
        made = _lance().write_dataset(
            _batches(parts, metric, dim, seen), str(folder / "rows.lance"), mode="create", max_rows_per_file=FILE_ROWS
        )
        if entry.is_indexed:
            kind = {"index_type": "IVF_RQ", "num_bits": BITS}
            if dim % 8:  # RQ takes multiples of 8 only
                kind = {"index_type": "IVF_SQ"}
            made.create_index("vector", metric=metric, num_partitions=_partitions(made.count_rows()), **kind)
        sync_tree(folder)
    ids = np.concatenate([one for one, _ in seen]) if seen else np.zeros(0, np.int64)
    checks = np.concatenate([one for _, one in seen]) if seen else np.zeros(0, np.uint64)
    check = _check(salt, ids, checks, deleted)
    whole = Entry(
        entry.number, len(ids), len(deleted), check, entry.replaces, entry.logs_to, is_indexed=entry.is_indexed
    )
    write_entry(path, whole)
    return whole


def _partitions(num_rows: int) -> int:
    return -(-num_rows // PARTITION_ROWS)


def _batches(parts: Iterable[Rows], metric: Metric, dim: int, seen: list[tuple[Ids, npt.NDArray[np.uint64]]]) -> Any:
    import pyarrow as pa

    vector = pa.list_(pa.float32(), dim)
    schema = pa.schema(
        [
            pa.field("row", pa.int64(), nullable=False),
            pa.field("id", pa.int64(), nullable=False),
            pa.field("check", pa.uint64(), nullable=False),
            pa.field("factor", pa.float32(), nullable=False),
            pa.field("vector", vector, nullable=False),
            pa.field("payload", pa.large_binary(), nullable=False),
        ]
    )

    def made() -> Iterator[Any]:
        first = 0
        for part in parts:
            num = len(part.ids)
            offsets = np.concatenate([[0], part.ends]).astype(np.int64)
            payload = pa.LargeBinaryArray.from_buffers(
                pa.large_binary(), num, [None, pa.py_buffer(offsets), pa.py_buffer(part.payloads)]
            )
            columns = [
                pa.array(np.arange(first, first + num)),
                pa.array(part.ids),
                pa.array(part.checks),
                pa.array(factors(metric, part.vectors)),
                pa.FixedSizeListArray.from_arrays(pa.array(np.ravel(part.vectors)), dim),
                payload,
            ]
            seen.append((part.ids, part.checks))
            first += num
            yield pa.record_batch(columns, schema=schema)

    return pa.RecordBatchReader.from_batches(schema, made())


def sync_tree(folder: Path) -> None:
    """Make every file below a folder durable, then the names, innermost first.

    Raises: IoError.
    """
    for inner, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync_file(Path(inner, name))
        sync_folder(Path(inner))


def sync_file(path: Path) -> None:
    """Make what was written to a file durable.

    Raises: OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _lance() -> Any:
    try:
        import lance
    except ImportError as error:
        raise UnsupportedError(MISSING) from error
    return lance


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Say of which segment an error of Lance is."""
    try:
        yield
    except KvtideError:
        raise
    except OSError as error:
        number = error.errno or (errno.ENOSPC if "space" in str(error) else errno.EIO)
        raise IoError(number, f"{folder}: {str(error).splitlines()[0]:.300}") from error
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Rust
            raise
        raise FormatError(f"{folder}: expected a segment in Lance, found: {str(error).splitlines()[0]:.300}") from error


def _array(column: Any, dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.asarray(column.to_numpy(), dtype)


def _none(num: int) -> Hits:
    return Hits(np.full((num, 0), -1, np.int64), np.zeros((num, 0), np.float32))


def _check(salt: bytes, ids: Ids, checks: npt.NDArray[np.uint64], deleted: Ids) -> str:
    state = xxhash.xxh3_64(seed=seed_of(salt))
    for one in (ids.astype("<i8"), checks.astype("<u8"), deleted.astype("<i8")):
        state.update(one.tobytes())
    return str(state.hexdigest())


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path}: expected the deleted ids of a segment, found: {error.strerror}") from error
