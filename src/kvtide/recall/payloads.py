"""Payloads of rows in a log, read in pages, many at once, and checked; of rows it does not have yet, from memory.

Next: shelf.
"""

from __future__ import annotations

import bisect
import errno
import itertools

import numpy as np
import numpy.typing as npt

from kvtide.errors import Corrupt
from kvtide.io.ops import OP, PAGE_BYTES, READ, address_of, aligned_buffer
from kvtide.recall.log import Log
from kvtide.recall.ops import MemoryIo
from kvtide.recall.parts import LogPart
from kvtide.recall.records import Ids, row_check

READ_BYTES = 16 << 20  # of pages read at once


def read_payloads(io: MemoryIo, log: Log, part: LogPart, rows: Ids, salt: bytes) -> list[bytes]:
    """Return the payloads of some rows of a log.

    Raises: Corrupt if a row is not as it was added; IoError.
    """
    held = log.held  # looked at first: what leaves it is in the file by then
    placed = part.placed[rows]
    is_held = placed["payload_at"] >= (held[0][0] if held else np.iinfo(np.int64).max)
    starts = placed["payload_at"] // PAGE_BYTES * PAGE_BYTES
    ends = -(-(placed["payload_at"] + placed["payload_bytes"]) // PAGE_BYTES) * PAGE_BYTES
    lengths = np.where((placed["payload_bytes"] > 0) & ~is_held, ends - starts, 0)
    portion = np.cumsum(lengths) // READ_BYTES
    found: list[bytes] = []
    for first, end in _runs(portion):
        found += _read(io, log, placed[first:end], starts[first:end], lengths[first:end])
    for at in np.flatnonzero(is_held).tolist():
        found[at] = _held(held, int(placed["payload_at"][at]), int(placed["payload_bytes"][at]))
    vectors = part.vectors(rows)
    for at, payload in enumerate(found):
        row_id = int(placed["id"][at])
        if row_check(salt, row_id, vectors[at].tobytes(), payload) != int(placed["check"][at]):
            where = f"{log.name}, byte {int(placed['payload_at'][at])}"
            raise Corrupt(errno.EIO, f"{where}: row {row_id} is not as it was added; add it again, or delete it")
    return found


def _held(held: list[tuple[int, bytes]], at: int, num_bytes: int) -> bytes:
    begins, raw = held[bisect.bisect_right(held, at, key=lambda one: one[0]) - 1]
    return raw[at - begins : at - begins + num_bytes]


def _read(io: MemoryIo, log: Log, placed: npt.NDArray[np.void], starts: Ids, lengths: Ids) -> list[bytes]:
    at = np.cumsum(lengths) - lengths
    buffer = aligned_buffer(int(lengths.sum()))
    wanted = np.flatnonzero(lengths)
    if len(wanted):
        batch = np.zeros(len(wanted), OP)
        batch["fd"], batch["kind"], batch["tag"] = log.fd, READ, np.arange(len(wanted))
        batch["offset"], batch["length"] = starts[wanted], lengths[wanted]
        batch["address"] = address_of(buffer) + at[wanted]
        io.run(batch, cause="memory-read", what=log.name)
    begins = at + placed["payload_at"] - starts
    ends = begins + placed["payload_bytes"]
    raw = buffer.data
    return [bytes(raw[begin:end]) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]


def _runs(portion: Ids) -> list[tuple[int, int]]:
    """Return where runs of equal numbers begin and end."""
    if not len(portion):
        return []
    edges = [0, *(np.flatnonzero(np.diff(portion)) + 1).tolist(), len(portion)]
    return list(itertools.pairwise(edges))
