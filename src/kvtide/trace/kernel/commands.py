"""Block commands from records of their start, issue and completion. Next: calls.

Pure: arrays in, frames out. What is still in flight is carried from one piece of a trace to the next.

Theory. `block_io_start` is seen in the context of whoever submitted, `block_rq_issue` in that of whoever ran the
queue, which may be a kernel thread. So process and name come from the first where the kernel has it. Events of one
command are found by device and first sector; see kvtide.trace.pairing for reused keys. A driver whose queue is full
hands a command back, and it is issued again: the last issue counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtide.trace.events import UNKNOWN, flags_of
from kvtide.trace.pairing import pair

if TYPE_CHECKING:
    import polars as pl

SECTOR_BYTES = 512
START, ISSUE, COMPLETE = 0, 1, 2
CARRY_NS = 60_000_000_000  # an event without partner is given up after this long
NO_SECTOR = np.uint64(2**64 - 1)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: spreads device numbers over the key

EVENT = np.dtype(
    [
        ("time_ns", "<i8"),
        ("kind", "u1"),
        ("dev", "<u4"),
        ("sector", "<u8"),
        ("length", "<i8"),
        ("error", "<i4"),
        ("pid", "<i4"),
        ("rwbs", "S10"),
        ("comm", "S16"),
    ]
)
Events = npt.NDArray[np.void]


def block_events(rows: npt.NDArray[np.void], time_ns: npt.NDArray[np.int64], kind: int) -> Events:
    """Return records of one tracepoint as EVENT rows. Shapes: all [n]."""
    events = np.zeros(len(rows), EVENT)
    names = set(rows.dtype.names or ())
    events["time_ns"], events["kind"] = time_ns, kind
    events["dev"], events["rwbs"] = rows["dev"], rows["rwbs"]
    events["sector"] = np.where(rows["sector"] == NO_SECTOR, 0, rows["sector"])  # a flush: told as 0 when issued
    sectors = rows["nr_sector"].astype(np.int64) * SECTOR_BYTES
    events["length"] = rows["bytes"] if "bytes" in names else sectors
    events["error"] = rows["error"] if "error" in names else 0
    events["pid"] = rows["common_pid"]
    events["comm"] = rows["comm"] if "comm" in names else b""
    return events


class Commands:
    """Pairs events into block commands, piece by piece.

    Pieces must come in the order of time.
    """

    def __init__(self) -> None:
        self._open = np.zeros(0, EVENT)

    def add(self, events: Events, *, is_last: bool = False) -> pl.DataFrame:
        """Return the commands that ended in this piece, and those that never will. Shapes: events [n] EVENT."""
        events = _issued_last(np.concatenate([self._open, events]))
        keys = _keys(events)
        kind, time_ns = events["kind"], events["time_ns"]
        done = _partners(keys, time_ns, kind, of=ISSUE, to=COMPLETE)
        begun = _partners(keys, time_ns, kind, of=START, to=ISSUE)
        horizon = int(time_ns.max(initial=0)) - CARRY_NS
        is_waiting = (((kind == ISSUE) & (done == UNKNOWN)) | ((kind == START) & (begun == UNKNOWN))) & (
            time_ns > horizon
        )
        if is_last:
            is_waiting[:] = False
        carried = is_waiting.copy()
        starts = begun[is_waiting & (kind == ISSUE)]
        carried[starts[starts != UNKNOWN]] = True  # an issue that waits keeps its start
        self._open = events[carried]
        issue = np.flatnonzero((kind == ISSUE) & ~is_waiting)
        lone = np.flatnonzero((kind == COMPLETE) & (done == UNKNOWN))
        return _frame(events, issue, done[issue], begun[issue], lone)


def _keys(events: Events) -> npt.NDArray[np.uint64]:
    return events["dev"].astype(np.uint64) * _SPREAD ^ events["sector"]


def _issued_last(events: Events) -> Events:
    """Return `events` without issues that are followed by another issue of the same command."""
    issue = np.flatnonzero(events["kind"] != START)
    order = issue[np.lexsort((events["time_ns"][issue], _keys(events[issue])))]
    keys, is_issue = _keys(events[order]), events["kind"][order] == ISSUE
    is_again = np.zeros(len(events), np.bool_)
    is_again[order[:-1][(keys[:-1] == keys[1:]) & is_issue[:-1] & is_issue[1:]]] = True
    return events[~is_again]


def _partners(
    keys: npt.NDArray[np.uint64], time_ns: npt.NDArray[np.int64], kind: npt.NDArray[np.uint8], *, of: int, to: int
) -> npt.NDArray[np.int64]:
    """Return for each event of the kinds `of` and `to` the index of its partner, UNKNOWN for all others."""
    chosen = np.flatnonzero((kind == of) | (kind == to))
    partner = pair(keys[chosen], time_ns[chosen], kind[chosen] == to)
    result = np.full(len(keys), UNKNOWN, np.int64)
    result[chosen] = np.where(partner == UNKNOWN, UNKNOWN, chosen[partner])
    return result


def _frame(
    events: Events,
    issue: npt.NDArray[np.intp],
    done: npt.NDArray[np.int64],
    begun: npt.NDArray[np.int64],
    lone: npt.NDArray[np.intp],
) -> pl.DataFrame:
    from kvtide.tables import pl

    rows = np.concatenate([issue, lone])
    is_lone = np.arange(len(rows)) >= len(issue)
    done, begun = np.concatenate([done, lone]), np.concatenate([begun, np.full(len(lone), UNKNOWN)])
    whose = np.where(begun == UNKNOWN, rows, begun)  # the submitter's event where there is one
    event = events[rows]
    rwbs = texts(event["rwbs"])
    return pl.DataFrame(
        {
            "time_ns": np.where(is_lone, UNKNOWN, event["time_ns"]),
            "complete_ns": np.where(done == UNKNOWN, UNKNOWN, events["time_ns"][done]),
            "queue_ns": np.where(begun == UNKNOWN, UNKNOWN, events["time_ns"][begun]),
            "device": event["dev"].astype(np.int64),
            "offset": event["sector"].astype(np.int64) * SECTOR_BYTES,
            "length": event["length"],
            "error": np.where(done == UNKNOWN, 0, events["error"][done]),
            "pid": np.where(is_lone, UNKNOWN, events["pid"][whose]),
            "comm": texts(events["comm"][whose]),
            "rwbs": rwbs,
        }
    ).with_columns(flags_of(pl.col("rwbs")).alias("flags"))


def texts(raw: npt.NDArray[np.bytes_]) -> pl.Series:
    """Return NUL-ended byte fields as texts; what follows the NUL is garbage. Shapes: [n]."""
    from kvtide.tables import pl

    width = -(-raw.dtype.itemsize // 8)
    words = np.zeros((len(raw), width * 8), np.uint8)
    words[:, : raw.dtype.itemsize] = np.ascontiguousarray(raw).view(np.uint8).reshape(len(raw), raw.dtype.itemsize)
    halves = words.view("<u8")
    key = np.zeros(len(raw), np.uint64)
    for column in range(width):
        key = (key ^ halves[:, column]) * _SPREAD
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    names = [bytes(words[index]).split(b"\0")[0].decode(errors="replace") for index in first.tolist()]
    return pl.Series(names, dtype=pl.String).gather(inverse)
