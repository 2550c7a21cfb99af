"""Payloads of rows in a log, read in pages, many at once, and checked. Next: shelf."""

from __future__ import annotations

import errno
import itertools

import numpy as np
import numpy.typing as npt

from kvtide.errors import Corrupt
from kvtide.io.ops import OP, PAGE_BYTES, READ, address_of, aligned_buffer
from kvtide.recall.log import Log, MemoryIo
from kvtide.recall.parts import LogPart
from kvtide.recall.records import Ids, row_check

READ_BYTES = 16 << 20  # of pages read at once


def read_payloads(io: MemoryIo, log: Log, part: LogPart, rows: Ids, salt: bytes) -> list[bytes]:
    """Return the payloads of some rows of a log.

    Raises: Corrupt if a row is not as it was added; IoError.
    """
    placed = part.placed[rows]
    starts = placed["payload_at"] // PAGE_BYTES * PAGE_BYTES
    ends = -(-(placed["payload_at"] + placed["payload_bytes"]) // PAGE_BYTES) * PAGE_BYTES
    lengths = np.where(placed["payload_bytes"] > 0, ends - starts, 0)
    portion = np.cumsum(lengths) // READ_BYTES
    found: list[bytes] = []
    for first, end in _runs(portion):
        found += _read(io, log, placed[first:end], starts[first:end], lengths[first:end])
    vectors = part.vectors(rows)
    for at, payload in enumerate(found):
        row_id = int(placed["id"][at])
        if row_check(salt, row_id, vectors[at].tobytes(), payload) != int(placed["check"][at]):
            where = f"{log.name}, byte {int(placed['payload_at'][at])}"
            raise Corrupt(errno.EIO, f"{where}: row {row_id} is not as it was added; add it again, or delete it")
    return found


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
