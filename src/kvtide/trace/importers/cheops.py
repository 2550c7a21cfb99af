"""Lines `nsecs, rwbs, bytes, sector, nr_sector` of a bpftrace script on block_rq_issue. Next: tables.

Decides nothing about completions: the script sees issues only. Source: CHEOPS'25 study of KV offloading to storage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtide.trace.events import flags_of
from kvtide.trace.importers.fields import NANOSECONDS, integer, sector, sector_offset, sectors_bytes, time_ns

if TYPE_CHECKING:
    import polars as pl

    from kvtide.trace.importers.sink import Sink

LIKE = r"^\s*\d+\s*,"  # a line that begins like this is an event, or broken
LOST = r"^Lost (\d+) events"  # of bpftrace, on stderr


class Cheops:
    """Reads one row a line."""

    def feed(self, lines: pl.DataFrame, sink: Sink) -> None:
        """Take a piece."""
        from kvtide.tables import pl

        parts = pl.col("text").str.splitn(",", 5)
        field = [parts.struct.field(f"field_{index}").str.strip_chars() for index in range(5)]
        told = lines.with_columns(
            time_ns(field[0], NANOSECONDS).alias("time_ns"),
            pl.when(field[1].str.contains("^[A-Z]{1,8}$")).then(field[1]).alias("rwbs"),
            pl.when(integer(field[2]) >= 0).then(integer(field[2])).alias("bytes"),
            sector(field[3]).alias("sector"),
            sectors_bytes(field[4]).alias("sectors_bytes"),
        )
        is_whole = pl.all_horizontal(
            pl.col(name).is_not_null() for name in ("time_ns", "rwbs", "bytes", "sector", "sectors_bytes")
        )
        # The size is told twice; other logs of five columns differ there. Passthrough commands have no sectors.
        is_event = is_whole & (
            (pl.col("bytes") == pl.col("sectors_bytes")) | (pl.col("bytes") * pl.col("sectors_bytes") == 0)
        )
        sink.judge(told, is_event=is_event, is_foreign=~pl.col("text").str.contains(LIKE))
        sink.lose(told["text"].str.extract(LOST).cast(pl.Int64, strict=False))
        rows = told.filter(is_event).select(
            "time_ns",
            sector_offset(pl.col("sector")).alias("offset"),
            pl.when(pl.col("bytes") > 0).then("bytes").otherwise("sectors_bytes").alias("length"),
            flags_of(pl.col("rwbs")).alias("flags"),
        )
        sink.clock(rows["time_ns"])
        sink.add("block", rows)

    def close(self, sink: Sink) -> None:
        """Say what such a log cannot tell."""
        sink.about.health.has_completions = False
        sink.note("The log has issues only: latency, depth and errors cannot be told, nor which device it was.")
