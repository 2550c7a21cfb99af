"""The trace of MLPerf Storage's KV cache benchmark, `--io-trace-log`. Next: samples.

Decides which of our causes its phases are, and that its tiers are device, DRAM and file. Every line is an `object`
row; a line of the lowest tier is an `op` row too. A trace describes what would be moved: no I/O took place, so there
are no completions. Source: the benchmark's trace logger (Timestamp, Operation, Object_Size_Bytes, Tier, Key, Phase).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtide.trace.events import UNKNOWN_CAUSE
from kvtide.trace.importers.fields import SECONDS, integer, small, time_ns

if TYPE_CHECKING:
    import polars as pl

    from kvtide.trace.importers.sink import Sink

TITLE = r"^Timestamp,Operation,Object_Size_Bytes,Tier,Key,Phase\s*$"
LINE = (
    r"^(?P<time>\d+(?:\.\d+)?),(?P<operation>[A-Za-z]+),(?P<size>\d+),"
    r"(?P<tier>[^,]+),(?P<key>.*),(?P<phase>[A-Za-z]*)\s*$"
)
DEVICE, DRAM, FILE = 0, 1, 2
TIERS = {"tier-0": DEVICE, "gpu": DEVICE, "tier-1": DRAM, "cpu": DRAM, "tier-2": FILE, "nvme": FILE}
CAUSES = {  # phase, is it a write
    ("prefill", True): "prefill-write",
    ("prefill", False): "restore",  # KV of a prefix that was stored before
    ("decode", False): "decode-read",
    ("decode", True): "demote",
    ("evict", True): "demote",
    ("evict", False): "demote",
}


class MlPerf:
    """Reads lines."""

    def feed(self, lines: pl.DataFrame, sink: Sink) -> None:
        """Take a piece."""
        from kvtide.tables import pl

        told = lines.with_columns(pl.col("text").str.extract_groups(LINE).alias("found")).unnest("found")
        operation, phase = pl.col("operation").str.to_lowercase(), pl.col("phase").str.to_lowercase()
        told = told.with_columns(
            time_ns(pl.col("time"), SECONDS).alias("time_ns"),
            pl.when(operation.is_in(["read", "write"])).then(operation == "write").alias("is_write"),
            integer(pl.col("size")).alias("size"),
            pl.col("tier").str.to_lowercase().replace_strict(TIERS, default=None, return_dtype=pl.Int8).alias("tier"),
            small(pl.col("key").str.extract(r"\blayer_?(\d+)")).alias("layer"),
            _cause(phase, operation == "write").alias("cause"),
        )
        is_event = pl.all_horizontal(pl.col(name).is_not_null() for name in ("time_ns", "is_write", "size", "tier"))
        sink.judge(told, is_event=is_event, is_foreign=pl.col("text").str.contains(TITLE))
        rows = told.filter(is_event)
        sink.clock(rows["time_ns"])
        size, is_wanted = pl.col("size"), ~pl.col("is_write") & (pl.col("cause") != "demote")
        sink.add(
            "object",
            rows.select(
                "time_ns",
                "cause",
                "layer",
                *(
                    pl.when(is_wanted & is_right).then(size).otherwise(0).alias(name)
                    for name, is_right in (
                        ("wanted_bytes", pl.lit(value=True)),
                        ("dram_bytes", pl.col("tier") == DRAM),
                        ("file_bytes", pl.col("tier") == FILE),
                    )
                ),
            ),
        )
        ops = rows.filter(pl.col("tier") == FILE)
        sink.add("op", ops.select("time_ns", "cause", "layer", "is_write", size.alias("length")))

    def close(self, sink: Sink) -> None:
        """Say what such a trace cannot tell."""
        sink.about.health.has_completions = False
        sink.note("The benchmark's trace says what would be moved: no I/O took place, so nothing took time.")


def _cause(phase: pl.Expr, is_write: pl.Expr) -> pl.Expr:
    from kvtide.tables import pl

    cause: pl.Expr = pl.lit(UNKNOWN_CAUSE)
    for (name, writes), ours in CAUSES.items():
        cause = pl.when((phase == name) & (is_write == writes)).then(pl.lit(ours)).otherwise(cause)
    return cause
