"""Published block traces as comma-separated text: MSR Cambridge (SNIA) and Alibaba. Next: mlperf.

Decides what their times count from. Each line is one command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtide.trace.events import READ, WRITE
from kvtide.trace.importers.fields import MICROSECONDS, integer, time_ns

if TYPE_CHECKING:
    import polars as pl

    from kvtide.trace.importers.sink import Sink

TICK_NS = 100  # of Windows' FILETIME
UNIX_EPOCH_TICKS = 116_444_736_000_000_000  # 1970 in ticks since 1601. Source: FILETIME, Microsoft's Win32 reference
RESPONSE_TICKS_MAX = 864_000_000_000  # a day: longer ones are damage
TITLES = r"(?i)^(?:Timestamp,Hostname,|device_id,opcode,)"


class Msr:
    """Reads `Timestamp,Hostname,DiskNumber,Type,Offset,Size,ResponseTime`, times in 100 ns.

    Source: README of the MSR Cambridge traces, SNIA IOTTA 388.
    """

    def __init__(self) -> None:
        self._epoch_ticks: int | None = None

    def feed(self, lines: pl.DataFrame, sink: Sink) -> None:
        """Take a piece."""
        from kvtide.tables import pl

        field = _fields(7)
        kind = field[3].str.to_lowercase()
        told = lines.with_columns(
            integer(field[0]).alias("ticks"),
            (field[1] + "." + field[2]).alias("disk"),
            pl.when(kind.is_in(["read", "write"])).then(kind == "write").alias("is_write"),
            integer(field[4]).alias("offset"),
            integer(field[5]).alias("length"),
            integer(field[6], most=RESPONSE_TICKS_MAX).alias("response_ticks"),
        )
        if self._epoch_ticks is None and told["ticks"].drop_nulls().len():
            first = told["ticks"].drop_nulls()[0]
            self._epoch_ticks = UNIX_EPOCH_TICKS if first >= UNIX_EPOCH_TICKS else 0
        ticks = pl.col("ticks") - (self._epoch_ticks or 0)
        told = told.with_columns(
            pl.when(ticks.is_between(0, (1 << 62) // TICK_NS)).then(ticks * TICK_NS).alias("time_ns")
        )
        needed = ("time_ns", "is_write", "offset", "length", "response_ticks")
        is_event = pl.all_horizontal(pl.col(name).is_not_null() for name in needed) & field[2].str.contains(r"^\d+$")
        is_event &= (pl.col("offset") >= 0) & (pl.col("length") >= 0) & (pl.col("response_ticks") >= 0)
        sink.judge(told, is_event=is_event, is_foreign=pl.col("text").str.contains(TITLES))
        rows = told.filter(is_event)
        complete = pl.col("time_ns") + pl.col("response_ticks") * TICK_NS
        _add(rows.with_columns(complete.alias("complete_ns")), sink)

    def close(self, sink: Sink) -> None:
        """Say which clock it was."""
        if self._epoch_ticks and sink.num_events:
            sink.note("Times are the clock of the day.")


class Alibaba:
    """Reads `device_id,opcode,offset,length,timestamp`, times in us. Source: README of alibaba/block-traces."""

    def feed(self, lines: pl.DataFrame, sink: Sink) -> None:
        """Take a piece."""
        from kvtide.tables import pl

        field = _fields(5)
        told = lines.with_columns(
            pl.when(field[0].str.contains(r"^\d+$")).then(field[0]).alias("disk"),
            pl.when(field[1].is_in(["R", "W"])).then(field[1] == "W").alias("is_write"),
            integer(field[2]).alias("offset"),
            integer(field[3]).alias("length"),
            time_ns(field[4], MICROSECONDS).alias("time_ns"),
        )
        needed = ("time_ns", "disk", "is_write", "offset", "length")
        is_event = pl.all_horizontal(pl.col(name).is_not_null() for name in needed)
        is_event &= (pl.col("offset") >= 0) & (pl.col("length") >= 0)
        sink.judge(told, is_event=is_event, is_foreign=pl.col("text").str.contains(TITLES))
        _add(told.filter(is_event), sink)

    def close(self, sink: Sink) -> None:
        """Say what such a trace cannot tell."""
        sink.about.health.has_completions = False
        sink.note("The trace has no completions: latency, depth and errors cannot be told.")


def _fields(num: int) -> list[pl.Expr]:
    from kvtide.tables import pl

    parts = pl.col("text").str.splitn(",", num)
    return [parts.struct.field(f"field_{at}").str.strip_chars() for at in range(num)]


def _add(rows: pl.DataFrame, sink: Sink) -> None:
    from kvtide.tables import pl

    rows = rows.with_columns(
        sink.device_numbers(rows["disk"]).alias("device"),
        pl.when("is_write").then(WRITE).otherwise(READ).cast(pl.Int32).alias("flags"),
    )
    sink.clock(rows["time_ns"])
    names = ("time_ns", "complete_ns", "device", "offset", "length", "flags")
    sink.add("block", rows.select(name for name in names if name in rows.columns))
