"""Rows of block commands, ops and calls as plain arrays of one kind, so that one meter counts all three. Next: slices.

Decides which rows move data, and which way. Knows the columns of each level and nothing of files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtide.trace.events import CAUSES, DISCARD, FLUSH, META, READ, READAHEAD, UNKNOWN, UNKNOWN_CAUSE, WRITE

if TYPE_CHECKING:
    import polars as pl

READS, WRITES, NEITHER = 0, 1, 2  # directions
ALL_CAUSES = (*CAUSES, UNKNOWN_CAUSE)
COLUMNS_USED = {
    "block": ("time_ns", "complete_ns", "queue_ns", "device", "offset", "length", "flags", "error", "cause"),
    "op": ("time_ns", "complete_ns", "is_write", "fd", "offset", "length", "error", "cause"),
    "call": ("time_ns", "complete_ns", "name", "is_write", "fd", "offset", "length", "result"),
}
# Calls that move bytes, and calls that only touch names and attributes or wait for a disk. Others, such as waiting in
# poll or io_uring_enter, are neither. Names as in the tables of system calls, and opcodes of io_uring.
DATA_CALLS = r"^(p?(read|write)(v2?|64|v64v2)?|io_uring:(READ|WRITE)(V|_FIXED|_MULTISHOT)?)$"
META_CALLS = (
    r"^(open|openat|openat2|creat|close|stat|fstat|lstat|newfstatat|statx|statfs|fstatfs|access|faccessat2?|getdents"
    r"|getdents64|mkdir|mkdirat|rmdir|unlink|unlinkat|rename|renameat2?|link|linkat|symlink|symlinkat|readlink"
    r"|readlinkat|truncate|ftruncate|fallocate|chmod|fchmod|fchmodat|chown|fchown|fchownat|utimensat|fsync|fdatasync"
    r"|sync|syncfs|sync_file_range"
    r"|io_uring:(OPENAT2?|CLOSE|STATX|UNLINKAT|RENAMEAT|MKDIRAT|FSYNC|SYNC_FILE_RANGE|FALLOCATE|FTRUNCATE))$"
)

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Rows:
    """Events of one level, ascending by `at_ns`: the issue, or the completion where no issue was seen. Shapes: [n]."""

    at_ns: Ints
    time_ns: Ints
    complete_ns: Ints
    queue_ns: Ints | None
    device: Ints
    offset: Ints
    length: Ints
    direction: Ints
    cause: Ints  # index in ALL_CAUSES
    is_readahead: Bools | None
    is_meta: Bools | None
    num_flushes: int
    num_errors: int


@dataclass(slots=True)
class Calls:
    """Calls that move no data, in figures. Times in ns."""

    num_data: int = 0
    num_meta: int = 0
    data_ns: int = 0
    meta_ns: int = 0

    def add(self, other: Calls) -> None:
        """Add the figures of another piece."""
        self.num_data += other.num_data
        self.num_meta += other.num_meta
        self.data_ns += other.data_ns
        self.meta_ns += other.meta_ns


def data_rows(level: str, frame: pl.DataFrame) -> Rows:
    """Return the rows of `frame` that move data; calls must have been split by `split_calls` before."""
    column = {name: frame[name].to_numpy() for name in COLUMNS_USED[level] if name not in {"name", "cause"}}
    time_ns, complete_ns = column["time_ns"], column["complete_ns"]
    num = len(time_ns)
    is_readahead = is_meta = None
    num_flushes = 0
    if level == "block":
        flags, length = column["flags"], column["length"]
        writes = np.where(flags & WRITE, WRITES, NEITHER)
        direction = np.where(flags & DISCARD, NEITHER, np.where(flags & READ, READS, writes))
        is_readahead, is_meta = (flags & READAHEAD) != 0, (flags & META) != 0
        num_flushes, num_errors = int(np.count_nonzero(flags & FLUSH)), int(np.count_nonzero(column["error"]))
        device = column["device"]
    else:
        direction = column["is_write"].astype(np.int64)
        moved = column["result"] if level == "call" else column["length"]
        length, device = np.maximum(moved, 0), column["fd"].astype(np.int64)
        failed = column["result"] < 0 if level == "call" else column["error"] != 0
        num_errors = int(np.count_nonzero(failed))
    cause = frame["cause"].to_physical().to_numpy().astype(np.int64) if level != "call" else _no_cause(num)
    rows = Rows(
        at_ns=np.where(time_ns == UNKNOWN, complete_ns, time_ns),
        time_ns=time_ns,
        complete_ns=complete_ns,
        queue_ns=column.get("queue_ns"),
        device=device,
        offset=column["offset"],
        length=length,
        direction=direction.astype(np.int64),
        cause=cause,
        is_readahead=is_readahead,
        is_meta=is_meta,
        num_flushes=num_flushes,
        num_errors=num_errors,
    )
    return rows if np.all(rows.at_ns[1:] >= rows.at_ns[:-1]) else _ordered(rows)


def split_calls(frame: pl.DataFrame) -> tuple[pl.DataFrame, Calls]:
    """Return the calls that move data, and what all calls come to."""
    from kvtide.tables import pl

    name, took = pl.col("name"), pl.col("complete_ns") - pl.col("time_ns")
    is_timed = (pl.col("complete_ns") != UNKNOWN) & (pl.col("time_ns") != UNKNOWN)
    is_data, is_meta = name.str.contains(DATA_CALLS), name.str.contains(META_CALLS)
    told = frame.select(
        is_data.sum().alias("num_data"),
        is_meta.sum().alias("num_meta"),
        took.filter(is_data & is_timed).sum().alias("data_ns"),
        took.filter(is_meta & is_timed).sum().alias("meta_ns"),
    )
    return frame.filter(is_data), Calls(**{key: int(value or 0) for key, value in told.row(0, named=True).items()})


def _no_cause(num: int) -> Ints:
    return np.full(num, ALL_CAUSES.index(UNKNOWN_CAUSE), np.int64)


def _ordered(rows: Rows) -> Rows:
    order = np.argsort(rows.at_ns, kind="stable")
    for name in ("at_ns", "time_ns", "complete_ns", "device", "offset", "length", "direction", "cause"):
        setattr(rows, name, getattr(rows, name)[order])
    for name in ("queue_ns", "is_readahead", "is_meta"):
        if getattr(rows, name) is not None:
            setattr(rows, name, getattr(rows, name)[order])
    return rows
