"""The bytes of a memory's log: groups of rows, encoded, and decoded without trusting them. Next: log.

Pure: knows no file, no thread and no clock.

Theory. A log is a header page, then groups. A group is what one commit made durable:

    group header 48 | row 24 x rows | vector 4D x puts | payload bytes, row after row | zeros to a multiple of 8

    group header   magic 8 | checksum u64 | log u64 | sequence u64 | rows u32 | puts u32 | payload bytes u64
    row            id i64 | check u64 | payload bytes u32 | kind u32 (0 put, 1 delete)

The checksum covers everything behind itself, seeded with a secret of the store, so neither a torn group nor one that
somebody hid in a payload is believed. `log` is the number of the log: groups of an earlier life of a recycled file
differ in it. Sequences count up by one. A row's check covers its id, vector and payload, and follows it into segments.
A group begins where the one before ended, or on the next page, whichever writes fewer pages.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

GROUP_MAGIC = b"KVTGROUP"
GROUP = np.dtype(
    [
        ("magic", "V8"),
        ("checksum", "<u8"),
        ("log", "<u8"),
        ("sequence", "<u8"),
        ("num_rows", "<u4"),
        ("num_puts", "<u4"),
        ("payload_bytes", "<u8"),
    ]
)
ROW = np.dtype([("id", "<i8"), ("check", "<u8"), ("payload_bytes", "<u4"), ("kind", "<u4")])
PUT, DELETE = 0, 1
ALIGN_BYTES = 8  # of groups, hence of vectors
_CHECKED_FROM = 16

PLACED = np.dtype(
    [
        ("id", "<i8"),
        ("check", "<u8"),
        ("vector_at", "<i8"),  # offset in the file, -1 for a delete
        ("payload_at", "<i8"),
        ("payload_bytes", "<i8"),
        ("kind", "<u4"),
    ]
)
"""Where a row of a log lies."""

Ids = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]
Placed = npt.NDArray[np.void]


def seed_of(salt: bytes, row_id: int = 0) -> int:
    """Return the seed of the checksums of a store, or of the check of one of its rows."""
    return (int.from_bytes(salt[:8], "little") ^ row_id) & 0xFFFFFFFFFFFFFFFF


def row_check(salt: bytes, row_id: int, vector: bytes, payload: bytes) -> int:
    """Return the check of one row."""
    state = xxhash.xxh3_64(vector, seed=seed_of(salt, row_id))
    state.update(payload)
    return int(state.intdigest())


def group_bytes(num_rows: int, num_puts: int, dim: int, payload_bytes: int) -> int:
    """Bytes of a group, its padding to 8 included."""
    size = GROUP.itemsize + num_rows * ROW.itemsize + num_puts * 4 * dim + payload_bytes
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def encode(
    rows: npt.NDArray[np.void], vectors: Vectors, payloads: Sequence[bytes], *, log: int, sequence: int, salt: bytes
) -> bytes:
    """Return one group. Shapes: rows [n] ROW; vectors [puts, D]; payloads [n]."""
    header = np.zeros(1, GROUP)
    header["magic"], header["log"], header["sequence"] = np.frombuffer(GROUP_MAGIC, "V8")[0], log, sequence
    header["num_rows"], header["num_puts"] = len(rows), len(vectors)
    header["payload_bytes"] = rows["payload_bytes"].astype(np.int64).sum()
    raw = b"".join([header.tobytes(), rows.tobytes(), vectors.tobytes(), *payloads])
    raw += bytes(-len(raw) % ALIGN_BYTES)
    check = xxhash.xxh3_64_intdigest(memoryview(raw)[_CHECKED_FROM:], seed=seed_of(salt))
    return raw[:8] + check.to_bytes(8, "little") + raw[_CHECKED_FROM:]


def place(rows: npt.NDArray[np.void], num_puts: int, dim: int, at: int) -> Placed:
    """Return where the rows of a group that begins at `at` lie."""
    placed = np.zeros(len(rows), PLACED)
    for name in ("id", "check", "payload_bytes", "kind"):
        placed[name] = rows[name]
    vectors_at = at + GROUP.itemsize + len(rows) * ROW.itemsize
    is_put = rows["kind"] == PUT
    placed["vector_at"] = np.where(is_put, vectors_at + (np.cumsum(is_put) - 1) * 4 * dim, -1)
    ends = np.cumsum(placed["payload_bytes"])
    placed["payload_at"] = vectors_at + num_puts * 4 * dim + ends - placed["payload_bytes"]
    return placed


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a log holds. `end` is where its last good group ends; `num_bad` groups before that could not be read."""

    placed: Placed
    vectors: Vectors
    end: int
    sequence: int  # of the next group
    num_bad: int


def scan(
    raw: npt.NDArray[np.uint8],
    *,
    start: int,
    log: int,
    dim: int,
    salt: bytes,
    page_bytes: int,
    late: Container[int] = (),
) -> Scanned:
    """Read the groups of a log that begins at byte `start` of `raw`.

    The first group that is not whole ends the log, unless a good one with a later sequence follows: groups are written
    one after another, so the bad one was whole once, and has been damaged since. Not so if it is among `late`: these
    sequences are elsewhere, because their write to the log had not ended.
    """
    view, at, end, num_bad, sequence = raw.data, start, start, 0, 1
    placed: list[Placed] = []
    vectors: list[Vectors] = []
    while True:
        found = _find(view, at, log=log, dim=dim, salt=salt, page_bytes=page_bytes, sequence=sequence)
        if found is None or (int(found[1]["sequence"]) > sequence and sequence in late):
            break
        at, header, rows = found
        num_puts = int(header["num_puts"])
        first = at + GROUP.itemsize + rows.nbytes
        placed.append(place(rows, num_puts, dim, at))
        vectors.append(np.frombuffer(view, np.float32, num_puts * dim, first).reshape(num_puts, dim))
        num_bad += int(header["sequence"]) - sequence
        sequence = int(header["sequence"]) + 1
        at = end = at + group_bytes(len(rows), num_puts, dim, int(header["payload_bytes"]))
    rows = np.concatenate(placed) if placed else np.zeros(0, PLACED)
    return Scanned(rows, np.concatenate(vectors) if vectors else np.zeros((0, dim), np.float32), end, sequence, num_bad)


def groups_of(view: memoryview, *, log: int, dim: int, salt: bytes) -> dict[int, bytes]:
    """Return every good group of a log in some bytes, by its sequence, wherever it lies."""
    hay, found = bytes(view), {}
    at = hay.find(GROUP_MAGIC)
    while at >= 0:
        if group := _decode(view, at, log=log, dim=dim, salt=salt, sequence=1):
            header, rows = group
            size = group_bytes(len(rows), int(header["num_puts"]), dim, int(header["payload_bytes"]))
            found[int(header["sequence"])] = hay[at : at + size]
        at = hay.find(GROUP_MAGIC, at + ALIGN_BYTES)
    return found


def group_at(view: memoryview, *, log: int, dim: int, salt: bytes) -> int:
    """Return the sequence of the group of a log that begins some bytes, 0 if none does."""
    group = _decode(view, 0, log=log, dim=dim, salt=salt, sequence=1)
    return int(group[0]["sequence"]) if group else 0


def _find(
    view: memoryview, at: int, *, log: int, dim: int, salt: bytes, page_bytes: int, sequence: int
) -> tuple[int, np.void, npt.NDArray[np.void]] | None:
    """Return the next good group at or behind `at`: where, its header and its rows; None at the end of the log."""
    here = (at, -(-at // page_bytes) * page_bytes)  # at once behind the last one, or on the next page
    for candidate in here:
        if group := _decode(view, candidate, log=log, dim=dim, salt=salt, sequence=sequence):
            return candidate, *group
    hay = bytes(view[at:])
    where = hay.find(GROUP_MAGIC)
    while where >= 0:
        if group := _decode(view, at + where, log=log, dim=dim, salt=salt, sequence=sequence):
            return at + where, *group
        where = hay.find(GROUP_MAGIC, where + 1)
    return None


def _decode(
    view: memoryview, at: int, *, log: int, dim: int, salt: bytes, sequence: int
) -> tuple[np.void, npt.NDArray[np.void]] | None:
    """Return header and rows of the group at `at`, None unless all of it is as it was written."""
    if at % ALIGN_BYTES or at + GROUP.itemsize > len(view) or view[at : at + 8] != GROUP_MAGIC:
        return None
    header = np.frombuffer(view, GROUP, 1, at)[0]
    num_rows, num_puts = int(header["num_rows"]), int(header["num_puts"])
    payload_bytes = int(header["payload_bytes"])
    size = group_bytes(num_rows, num_puts, dim, payload_bytes)
    if int(header["log"]) != log or int(header["sequence"]) < sequence or at + size > len(view):
        return None
    check = xxhash.xxh3_64_intdigest(view[at + _CHECKED_FROM : at + size], seed=seed_of(salt))
    if check != int(header["checksum"]):
        return None
    rows = np.frombuffer(view, ROW, num_rows, at + GROUP.itemsize)
    is_sound = int((rows["kind"] == PUT).sum()) == num_puts and (rows["kind"] <= DELETE).all()
    if not is_sound or int(rows["payload_bytes"].astype(np.int64).sum()) != payload_bytes:
        return None
    return header, rows
