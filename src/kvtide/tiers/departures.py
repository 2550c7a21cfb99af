"""Which groups left a namespace, or were not let in, when and why: a small ring of records in one file. Next: file.

Theory. `departures.kvt` is up to 65,536 records of 64 bytes, each with a checksum of its own, so that a torn one is
passed over. Record i of turn t is number t * 65,536 + i: where the newest lies follows from the records themselves.
A record has the number in the order of writing of the group that left, so that one stored again later is told from it.
A drop leaves the group's header in the file; an owner that must scan the headers finds it again. So whoever scans
leaves a mark: departures before the mark say nothing of groups whose header is still there.
Records are collected in memory and written in batches, by whoever drops or writes groups, never by a read. What is
written survives the process; after a loss of power the newest may be missing. Where it cannot be written, the store
goes on without: it only explains.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from kvtide.blocks import KEY
from kvtide.io.process import Opener
from kvtide.tiers.contract import REASONS, GroupRecords, Reason
from kvtide.tiers.guard import open_file

DEPARTURES = "departures.kvt"
NUM_MAX = 1 << 16  # a million tokens in blocks of 16, for 4 MiB
RECORD = np.dtype(
    [
        ("key", KEY),  # of the block
        ("time_ns", "<i8"),  # since 1970
        ("sequence", "<u8"),  # of the group; 0: it was not let in
        ("turn", "<u4"),
        ("who", "<u4"),  # pid of the owner << 8 | place of the reason in REASONS
        ("checksum", "<u8"),  # of all before it
    ]
)
_CHECKED_BYTES = RECORD.itemsize - 8
_SCANNED = 255  # instead of a reason
_SEED = 0x4B5654_44455041  # a page of anything else, zeros too, is no record


class Departures:
    """The journal of an owned namespace, at `path`.

    Threads: one at a time, the tier's.
    """

    def __init__(self, path: Path, *, clock: Callable[[], int] = time.time_ns, num_max: int = NUM_MAX) -> None:
        self._path, self._clock, self._num_max = path, clock, num_max
        self._pending: list[npt.NDArray[np.void]] = []
        self._fd = -1
        self._next = 0
        self._opener = Opener()
        self.num_lost = 0  # records that could not be written

    def note(self, records: GroupRecords, reason: Reason, sequences: npt.NDArray[np.uint64] | None = None) -> None:
        """Keep in mind that groups left, or were not let in (no `sequences`), and why. Writes nothing.

        Of a group that is replaced only the last block leaves; the others are in the new one.
        """
        if not len(records):
            return
        is_last = reason == "replaced"
        keys = records.keys if is_last else records.valid_block_keys()
        rows = self._rows(len(keys), REASONS.index(reason))
        rows["key"] = keys
        if sequences is not None:
            rows["sequence"] = sequences if is_last else np.repeat(sequences, records.num_blocks)
        self._pending.append(rows)

    def note_scan(self) -> None:
        """Note that whoever opened the namespace took every whole header for a group; writes it."""
        if os.path.lexists(self._path):
            self._pending.append(self._rows(1, _SCANNED))
            self.flush()

    def _rows(self, num: int, code: int) -> npt.NDArray[np.void]:
        rows = np.zeros(num, RECORD)
        rows["time_ns"], rows["who"] = self._clock(), (os.getpid() << 8 | code) % (1 << 32)
        return rows

    def flush(self) -> None:
        """Write what was noted.

        Raises: IoError in a process forked from the one that made this.
        """
        if not self._pending:
            return
        self._opener.check(f"the store {self._path.parent}")
        rows = np.concatenate(self._pending)[-self._num_max :]
        self._pending.clear()
        try:
            if self._fd < 0:
                self._open()
            self._write(rows)
        except OSError:
            self.num_lost += len(rows)

    def close(self) -> None:
        """Write what was noted and give up the file. Idempotent."""
        self.flush()
        self.abandon()

    def abandon(self) -> None:
        """Give up the file and what was not written. Idempotent."""
        self._pending.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        fd = open_file(self._path, os.O_RDWR | os.O_CREAT)
        try:
            numbers = _read(fd, self._num_max)[0]
        except BaseException:
            os.close(fd)
            raise
        self._fd, self._next = fd, int(numbers[-1]) + 1 if len(numbers) else 0

    def _write(self, rows: npt.NDArray[np.void]) -> None:
        numbers = self._next + np.arange(len(rows))
        rows["turn"] = numbers // self._num_max % (1 << 32)
        raw = rows.view(np.uint8).reshape(len(rows), RECORD.itemsize)
        rows["checksum"] = _checksums(raw)
        at = self._next % self._num_max
        head = min(len(rows), self._num_max - at)
        for part, first in ((rows[:head], at), (rows[head:], 0)):
            if len(part) and os.pwrite(self._fd, part.tobytes(), first * RECORD.itemsize) != part.nbytes:
                self.num_lost += len(part)  # a torn one is passed over
        self._next += len(rows)


@dataclass(frozen=True, slots=True)
class Departure:
    """Why a block is not there: the newest that is known of it. `time_ns` is since 1970, `pid` the owner's then.

    `sequence` is the number of the group it left with, 0 for one that was not let in.
    """

    reason: Reason
    time_ns: int
    pid: int
    sequence: int
    is_before_scan: bool  # its group is back if its header was still there

    def ends(self, sequence: int) -> bool:
        """Say whether the group whose header has `sequence` is gone, though the header is there."""
        return self.sequence >= sequence and not self.is_before_scan


def read_departures(path: Path, num_max: int = NUM_MAX) -> dict[bytes, Departure]:
    """Return the newest departure of each block that the journal at `path` has; nothing where it cannot be read.

    Its owner may write while this reads: a record is seen whole or not at all.
    """
    with contextlib.suppress(OSError):
        fd = open_file(path, os.O_RDONLY)
        try:
            rows = _read(fd, num_max)[1]
        finally:
            os.close(fd)
        scans = np.flatnonzero(rows["who"] % 256 == _SCANNED)
        num_before = int(scans[-1]) if len(scans) else 0
        columns = (rows[name].tolist() for name in ("key", "who", "time_ns", "sequence"))
        return {
            key: Departure(REASONS[who % 256], time_ns, who >> 8, sequence, place < num_before)
            for place, (key, who, time_ns, sequence) in enumerate(zip(*columns, strict=True))
            if who % 256 != _SCANNED
        }
    return {}


def _read(fd: int, num_max: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.void]]:
    """Return the numbers of the records that are whole, and those, oldest first."""
    content = bytearray(min(num_max * RECORD.itemsize, os.fstat(fd).st_size))
    num_bytes = os.preadv(fd, [content], 0)
    rows = np.frombuffer(content, RECORD, num_bytes // RECORD.itemsize)
    raw = rows.view(np.uint8).reshape(len(rows), RECORD.itemsize)
    codes = rows["who"] % 256
    whole = (rows["checksum"] == _checksums(raw)) & ((codes < len(REASONS)) | (codes == _SCANNED))
    numbers = rows["turn"].astype(np.int64) * num_max + np.arange(len(rows))
    numbers, rows = numbers[whole], rows[whole]
    order = np.argsort(numbers)
    return numbers[order], rows[order]


def _checksums(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    texts = np.ascontiguousarray(raw[:, :_CHECKED_BYTES]).view(f"V{_CHECKED_BYTES}").ravel().tolist()
    return np.array([xxhash.xxh3_64_intdigest(text, _SEED) for text in texts], np.uint64)
