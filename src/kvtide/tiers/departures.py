"""Which groups left a namespace, or were not let in, when and why: a small ring of records in one file. Next: file.

Theory. `departures.kvt` is up to 65,536 records of 64 bytes, each with a checksum of its own, so that a torn one is
passed over. Record i of turn t is number t * 65,536 + i: where the newest lies follows from the records themselves.
Records are collected in memory and written in batches, by whoever drops or writes groups, never by a read. What is
written survives the process; after a loss of power the newest may be missing. Where it cannot be written, the store
goes on without: it only explains.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from kvtide.blocks import KEY, KeyArray
from kvtide.tiers.contract import REASONS, Reason

DEPARTURES = "departures.kvt"
NUM_MAX = 1 << 16  # a million tokens in blocks of 16, for 4 MiB
RECORD = np.dtype(
    [
        ("key", KEY),  # of the block
        ("time_ns", "<i8"),  # since 1970
        ("turn", "<u4"),
        ("pid", "<u4"),  # of the owner
        ("reason", "u1"),  # place in REASONS
        ("zero", "V7"),
        ("checksum", "<u8"),  # of all before it
    ]
)
_CHECKED_BYTES = RECORD.itemsize - 8
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
        self.num_lost = 0  # records that could not be written

    def note(self, keys: KeyArray, reason: Reason) -> None:
        """Keep in mind that blocks with `keys` left, or were not let in, and why. Writes nothing."""
        if not len(keys):
            return
        rows = np.zeros(len(keys), RECORD)
        rows["key"], rows["time_ns"], rows["pid"] = keys, self._clock(), os.getpid()
        rows["reason"] = REASONS.index(reason)
        self._pending.append(rows)

    def flush(self) -> None:
        """Write what was noted."""
        if not self._pending:
            return
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
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(self._path, flags, 0o600)
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
    """Why a block is not there: the newest that is known of it. `time_ns` is since 1970, `pid` the owner's then."""

    reason: Reason
    time_ns: int
    pid: int


def read_departures(path: Path, num_max: int = NUM_MAX) -> dict[bytes, Departure]:
    """Return the newest departure of each block that the journal at `path` has; nothing where it cannot be read.

    Its owner may write while this reads: a record is seen whole or not at all.
    """
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            rows = _read(fd, num_max)[1]
        finally:
            os.close(fd)
        columns = (rows[name].tolist() for name in ("key", "reason", "time_ns", "pid"))
        return {key: Departure(REASONS[why], time_ns, pid) for key, why, time_ns, pid in zip(*columns, strict=True)}
    return {}


def _read(fd: int, num_max: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.void]]:
    """Return the numbers of the records that are whole, and those, oldest first."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    content = bytearray(num_max * RECORD.itemsize)
    num_bytes = os.preadv(fd, [content], 0)
    rows = np.frombuffer(content, RECORD, num_bytes // RECORD.itemsize)
    raw = rows.view(np.uint8).reshape(len(rows), RECORD.itemsize)
    whole = (rows["checksum"] == _checksums(raw)) & (rows["reason"] < len(REASONS))
    numbers = rows["turn"].astype(np.int64) * num_max + np.arange(len(rows))
    numbers, rows = numbers[whole], rows[whole]
    order = np.argsort(numbers)
    return numbers[order], rows[order]


def _checksums(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    texts = np.ascontiguousarray(raw[:, :_CHECKED_BYTES]).view(f"V{_CHECKED_BYTES}").ravel().tolist()
    return np.array([xxhash.xxh3_64_intdigest(text, _SEED) for text in texts], np.uint64)
