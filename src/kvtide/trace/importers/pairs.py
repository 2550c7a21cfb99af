"""Rows from events that tell the start and the end of something apart. Next: the formats.

Decides which events make up one block command or one call, across pieces of a log. Frames in, frames out.

Theory. A start that found no end waits for the next piece, but not for ever: its end may be lost. So it is given up
CARRY_NS after it, and of those that wait only the latest CARRY_ROWS are kept. What is given up is a row too, without
its completion.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtide.trace.events import UNKNOWN
from kvtide.trace.importers.fields import sector_offset
from kvtide.trace.pairing import NONE, pair

if TYPE_CHECKING:
    import polars as pl

    from kvtide.trace.importers.sink import Sink

QUEUE, ISSUE, COMPLETE, CANCEL = (
    0,
    1,
    2,
    3,
)  # kinds of block events; CANCEL: given back by the driver, to be issued anew
CARRY_NS = 60_000_000_000  # twice the time after which Linux gives up an NVMe command. Source: nvme_core.io_timeout
CARRY_ROWS = 1 << 20
SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: spreads one half of a key over the other

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class BlockPairs:
    """Makes rows of block commands from events of them, piece by piece.

    Events have the columns kind (UInt8), time_ns, device (Int64), sector (UInt64), length, flags, error, pid, comm.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._open: pl.DataFrame | None = None
        self._has_completions = False

    def add(self, events: pl.DataFrame) -> None:
        """Add a piece."""
        self._sink.clock(events["time_ns"])
        self._sink.name_devices(events["device"])
        self._match(events, is_last=False)

    def close(self) -> None:
        """Give up all that waits."""
        if self._open is not None:
            self._match(self._open.clear(), is_last=True)
            self._sink.about.health.has_completions = self._has_completions

    def _match(self, events: pl.DataFrame, *, is_last: bool) -> None:
        from kvtide.tables import pl

        events = events if self._open is None else pl.concat([self._open, events])
        kind, times = events["kind"].to_numpy(), events["time_ns"].to_numpy()
        keys = events["device"].to_numpy().astype(np.uint64) * SPREAD ^ events["sector"].to_numpy()
        ended = _partners(keys, times, chosen=kind != QUEUE, is_end=kind >= COMPLETE)
        queued = _partners(keys, times, chosen=kind <= ISSUE, is_end=kind == ISSUE)
        self._has_completions |= bool(np.any(kind == COMPLETE))
        waits = ((kind == ISSUE) & (ended == NONE)) | ((kind == QUEUE) & (queued == NONE))
        waits &= _is_recent(times, waits) & (not is_last)
        kept = waits.copy()
        begun = queued[waits & (kind == ISSUE)]
        kept[begun[begun != NONE]] = True  # an issue that waits keeps its start
        issues = np.flatnonzero((kind == ISSUE) & ~waits)
        is_cancelled = (ended[issues] != NONE) & (kind[ended[issues]] == CANCEL)
        self._emit(events, issues[~is_cancelled], ended, queued)
        self._emit(events, np.flatnonzero((kind == COMPLETE) & (ended == NONE)), ended, queued, is_lone=True)
        self._open = events.filter(pl.Series(kept))

    def _emit(self, events: pl.DataFrame, rows: Ints, ended: Ints, queued: Ints, *, is_lone: bool = False) -> None:
        """Add the rows that events at `rows` stand for: issues, or with `is_lone` completions without one."""
        from kvtide.tables import pl

        ends = rows if is_lone else ended[rows]
        starts = np.full(len(rows), NONE) if is_lone else queued[rows]
        times, errors = events["time_ns"].to_numpy(), events["error"].to_numpy()
        frame = events[rows].select(
            pl.lit(UNKNOWN, pl.Int64).alias("time_ns") if is_lone else pl.col("time_ns"),
            pl.Series("complete_ns", np.where(ends == NONE, UNKNOWN, times[ends])),
            pl.Series("queue_ns", np.where(starts == NONE, UNKNOWN, times[starts])),
            "device",
            sector_offset(pl.col("sector")).alias("offset"),
            "length",
            "flags",
            pl.Series("error", np.where(ends == NONE, 0, errors[ends])),
            pl.lit(UNKNOWN, pl.Int32).alias("pid") if is_lone else pl.col("pid"),  # of who ran at the completion
            pl.lit("").alias("comm") if is_lone else pl.col("comm"),
        )
        self._sink.add("block", frame)


class Stitches:
    """Pairs starts and ends of any kind, piece by piece; both have the columns key, time_ns, is_end and others."""

    def __init__(self) -> None:
        self._open: pl.DataFrame | None = None

    def add(self, events: pl.DataFrame, *, is_last: bool = False) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
        """Return starts with their ends beside them (columns `end_...`), starts given up, and ends without a start."""
        from kvtide.tables import pl

        events = events if self._open is None else pl.concat([self._open, events])
        times, is_end = events["time_ns"].to_numpy(), events["is_end"].to_numpy()
        partner = pair(events["key"].to_numpy(), times, is_end)
        is_lone = partner == NONE
        waits = is_lone & ~is_end
        waits &= _is_recent(times, waits) & (not is_last)
        starts = np.flatnonzero(~is_end & ~is_lone)
        both = pl.concat([events[starts], events[partner[starts]].rename(lambda name: f"end_{name}")], how="horizontal")
        self._open = events.filter(pl.Series(waits))
        given_up = events.filter(pl.Series(is_lone & ~is_end & ~waits))
        return both, given_up, events.filter(pl.Series(is_lone & is_end))

    def close(self) -> pl.DataFrame | None:
        """Return the starts that still wait."""
        return self._open


def _partners(keys: npt.NDArray[np.uint64], times: Ints, *, chosen: Bools, is_end: Bools) -> Ints:
    """Return for each chosen event the index of its partner; NONE for all others."""
    index = np.flatnonzero(chosen)
    partner = pair(keys[index], times[index], is_end[index])
    result = np.full(len(keys), NONE, np.int64)
    result[index] = np.where(partner == NONE, NONE, index[partner])
    return result


def _is_recent(times: Ints, waits: Bools) -> Bools:
    """Return which events may still find their end: young enough, and among the latest CARRY_ROWS that wait."""
    is_recent = times > int(times.max(initial=0)) - CARRY_NS
    index = np.flatnonzero(waits & is_recent)
    is_recent[index[:-CARRY_ROWS]] = False
    return is_recent
