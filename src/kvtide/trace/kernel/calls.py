"""What programs asked for: read and write system calls, and io_uring requests. Next: spool.

Pure: arrays in, frames out. Calls in progress are carried from one piece of a trace to the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtide.trace.events import UNKNOWN
from kvtide.trace.kernel.commands import CARRY_NS
from kvtide.trace.pairing import pair

if TYPE_CHECKING:
    import polars as pl

READS = ("read", "pread64", "readv", "preadv", "preadv2")
WRITES = ("write", "pwrite64", "writev", "pwritev", "pwritev2")
SYNCS = ("fsync", "fdatasync", "sync_file_range")
SYSCALLS = READS + WRITES + SYNCS
# Opcodes of io_uring that move or flush file data. Source: include/uapi/linux/io_uring.h.
URING = {
    1: "READV",
    2: "WRITEV",
    3: "FSYNC",
    4: "READ_FIXED",
    5: "WRITE_FIXED",
    22: "READ",
    23: "WRITE",
    46: "URING_CMD",
}
URING_NAMES = {f"io_uring:{name}": "WRITE" in name for name in URING.values()}
NAMES = (*SYSCALLS, *URING_NAMES)
_IS_WRITE = np.array([*(name in WRITES for name in SYSCALLS), *URING_NAMES.values()])
_SPREAD = np.uint64(0x9E3779B97F4A7C15)

EVENT = np.dtype(
    [
        ("time_ns", "<i8"),
        ("is_end", "?"),
        ("key", "<u8"),
        ("name", "i2"),  # index of NAMES; UNKNOWN for an end
        ("pid", "<i4"),
        ("fd", "<i4"),
        ("offset", "<i8"),
        ("length", "<i8"),
        ("result", "<i8"),
    ]
)
Events = npt.NDArray[np.void]


def enter_events(rows: npt.NDArray[np.void], time_ns: npt.NDArray[np.int64], name: str) -> Events:
    """Return records of `sys_enter_NAME` as EVENT rows. Of vectored calls the length shows in the result only."""
    events, fields = _base(rows, time_ns), set(rows.dtype.names or ())
    events["name"] = NAMES.index(name)
    events["key"] = _call_key(rows)
    events["fd"] = rows["fd"].astype(np.int64).astype(np.int32) if "fd" in fields else UNKNOWN
    if "pos" in fields:
        events["offset"] = rows["pos"].astype(np.int64)
    elif "pos_l" in fields:  # the high half is 0 on machines of 64 bits
        events["offset"] = rows["pos_l"].astype(np.int64)
    if "count" in fields:
        events["length"] = rows["count"].astype(np.int64)
    return events


def exit_events(rows: npt.NDArray[np.void], time_ns: npt.NDArray[np.int64]) -> Events:
    """Return records of `sys_exit_NAME` as EVENT rows."""
    events = _base(rows, time_ns)
    events["is_end"], events["key"], events["result"] = True, _call_key(rows), rows["ret"]
    return events


def submit_events(rows: npt.NDArray[np.void], time_ns: npt.NDArray[np.int64]) -> Events:
    """Return records of `io_uring_submit_req` as EVENT rows: those that move or flush file data."""
    name = np.full(256, UNKNOWN, np.int16)
    for code, text in URING.items():
        name[code] = NAMES.index(f"io_uring:{text}")
    kept = name[rows["opcode"]] != UNKNOWN
    rows, time_ns = rows[kept], time_ns[kept]
    events = _base(rows, time_ns)
    events["name"], events["key"] = name[rows["opcode"]], _ring_key(rows)
    return events


def complete_events(rows: npt.NDArray[np.void], time_ns: npt.NDArray[np.int64]) -> Events:
    """Return records of `io_uring_complete` as EVENT rows."""
    events = _base(rows, time_ns)
    events["is_end"], events["key"], events["result"] = True, _ring_key(rows), rows["res"]
    return events


class Calls:
    """Pairs events into calls, piece by piece. Pieces must come in the order of time."""

    def __init__(self) -> None:
        self._open = np.zeros(0, EVENT)

    def add(self, events: Events, *, is_last: bool = False) -> pl.DataFrame:
        """Return the calls that ended in this piece, and those that never will. Shapes: events [n] EVENT.

        An end whose start was not seen says too little to be kept: a poll ends like a read.
        """
        from kvtide.tables import pl

        events = np.concatenate([self._open, events])
        partner = pair(events["key"], events["time_ns"], events["is_end"])
        horizon = int(events["time_ns"].max(initial=0)) - CARRY_NS
        is_waiting = ~events["is_end"] & (partner == UNKNOWN) & (events["time_ns"] > horizon) & (not is_last)
        self._open = events[is_waiting]
        chosen = np.flatnonzero(~events["is_end"] & ~is_waiting)
        starts, ends = events[chosen], events[partner[chosen]]
        is_done = partner[chosen] != UNKNOWN
        result = np.where(is_done, ends["result"], 0)
        return pl.DataFrame(
            {
                "time_ns": starts["time_ns"],
                "complete_ns": np.where(is_done, ends["time_ns"], UNKNOWN),
                "name": pl.Series(NAMES).gather(starts["name"].astype(np.int64)),
                "pid": starts["pid"],
                "is_write": _IS_WRITE[starts["name"]],
                "fd": starts["fd"],
                "offset": starts["offset"],
                "length": np.where(starts["length"] == UNKNOWN, np.maximum(result, UNKNOWN), starts["length"]),
                "result": result,
            }
        )


def _base(rows: npt.NDArray[np.void], time_ns: npt.NDArray[np.int64]) -> Events:
    events = np.zeros(len(rows), EVENT)
    events["time_ns"], events["pid"] = time_ns, rows["common_pid"]
    for name in ("name", "fd", "offset", "length"):
        events[name] = UNKNOWN
    return events


def _call_key(rows: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    return rows["common_pid"].astype(np.uint64) * _SPREAD ^ rows["__syscall_nr"].astype(np.uint64)


def _ring_key(rows: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    return rows["ctx"].astype(np.uint64) * _SPREAD ^ rows["user_data"]
