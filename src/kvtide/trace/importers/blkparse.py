"""The default text of blkparse, with or without -t. Next: blktrace.

Decides which of its actions make rows: Q queues, D issues, C completes, R gives back. The others (G, I, M, F, P, U, A,
X, ...) are events without a row of their own. Titles and the summary at the end are foreign.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtide.trace.events import flags_of
from kvtide.trace.importers.fields import SECONDS, device, integer, sector, sectors_bytes, small, time_ns
from kvtide.trace.importers.pairs import CANCEL, COMPLETE, ISSUE, QUEUE, BlockPairs

if TYPE_CHECKING:
    import polars as pl

    from kvtide.trace.importers.sink import Sink

# "%3d,%-3d %2d %8d %5d.%09lu %5u %2s %3s ", and what the action adds. Source: blkparse_fmt.c, blktrace.
LINE = (
    r"^\s*(?P<major>\d+),(?P<minor>\d+)\s+\d+\s+\d+\s+(?P<time>\d+\.\d{9})\s+(?P<pid>\d+)\s+(?P<action>[A-Za-z]{1,2})"
    r"\s+(?P<rwbs>[A-Za-z]{1,8})(?:\s+(?P<rest>.*))?$"
)
# `sector + n [comm]`, `sector + n (elapsed) [error]`; without data `[comm]` and `sector [error]`.
COMMAND = r"^(?:(?P<sector>\d+)(?: \+ (?P<num>\d+))?\s*)?(?:\(\s*\d+\)\s*)?\[(?P<who>.*)\]\s*$"
PASSTHROUGH = r"^(?:\d+ )?\((?:[0-9a-f]{2} ?)+(?:\.\. ?)?\)"  # bytes of a SCSI command: it has no place on the medium
LIKE = r"^\s*\d+,\d+\s+\d+\s"
LOST = r"^Skips: \d+ forward \(\s*([0-9,]+)|You have (\d+) dropped events|dropped (\d+) events"
KINDS = {"Q": QUEUE, "D": ISSUE, "C": COMPLETE, "R": CANCEL}


class Blkparse:
    """Reads lines, and pairs their events."""

    def __init__(self) -> None:
        self._pairs: BlockPairs | None = None

    def feed(self, lines: pl.DataFrame, sink: Sink) -> None:
        """Take a piece."""
        from kvtide.tables import pl

        self._pairs = self._pairs or BlockPairs(sink)
        told = lines.with_columns(pl.col("text").str.extract_groups(LINE).alias("found")).unnest("found")
        told = told.with_columns(
            device(pl.col("major"), pl.col("minor")).alias("device"),
            time_ns(pl.col("time"), SECONDS).alias("time_ns"),
            small(pl.col("pid")),
            pl.col("action").replace_strict(KINDS, default=None, return_dtype=pl.UInt8).alias("kind"),
            pl.col("rest").str.contains(PASSTHROUGH).fill_null(value=False).alias("is_passthrough"),
        )
        told = told.with_columns(
            pl.when(pl.col("kind").is_not_null()).then("rest").str.extract_groups(COMMAND).alias("command")
        ).unnest("command")
        told = told.with_columns(sector(pl.col("sector").fill_null("0")), sectors_bytes(pl.col("num").fill_null("0")))
        is_line = pl.all_horizontal(pl.col(name).is_not_null() for name in ("device", "time_ns", "pid", "action"))
        is_command = pl.col("kind").is_not_null() & pl.col("who").is_not_null()
        is_command &= pl.col("sector").is_not_null() & pl.col("num").is_not_null()
        is_other = pl.col("kind").is_null() | pl.col("is_passthrough")
        sink.judge(told, is_event=is_line & (is_command | is_other), is_foreign=~pl.col("text").str.contains(LIKE))
        lost = pl.col("text").str.extract_groups(LOST)
        words = lines.select(pl.coalesce(lost.struct.field("1", "2", "3")))
        sink.lose(words.to_series().str.replace_all(",", "", literal=True).cast(pl.Int64, strict=False))
        self._pairs.add(_events(told.filter(is_line & is_command)))

    def close(self, _sink: Sink) -> None:
        """Give up what is still in flight."""
        if self._pairs:
            self._pairs.close()


def _events(told: pl.DataFrame) -> pl.DataFrame:
    """Return events as `BlockPairs` wants them."""
    from kvtide.tables import pl

    is_end = pl.col("kind") == COMPLETE
    return told.select(
        "kind",
        "time_ns",
        "device",
        "sector",
        pl.col("num").alias("length"),
        flags_of(pl.col("rwbs")).alias("flags"),
        pl.when(is_end)
        .then(integer(pl.col("who"), most=1 << 31))
        .fill_null(0)
        .cast(pl.Int32, strict=False)
        .alias("error"),
        "pid",
        pl.when(~is_end).then("who").fill_null("").alias("comm"),
    )
