"""fio's own traces, `write_iolog`, versions 2 and 3: what was asked for, not what it took. Next: commas.

Decides how relative waits become times. Source: "Trace file format" in fio's HOWTO.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtide.trace.file import TracedFile
from kvtide.trace.importers.fields import BYTES_MAX, MICROSECONDS, MILLISECONDS, integer, time_ns

if TYPE_CHECKING:
    import polars as pl

    from kvtide.trace.importers.sink import Sink

TITLE = r"^fio version (\d+) iolog\s*$"
FILE = r"^(?:(?P<time>\d+) )?(?P<file>\S.*) (?P<action>add|open|close)\s*$"
IO = (
    r"^(?:(?P<time>\d+) )?(?P<file>\S.*) (?P<action>read|write|trim|sync|datasync|wait)"
    r" (?P<offset>\d+)(?: (?P<length>\d+))?\s*$"
)
WAIT_US_MIN = 100  # fio itself takes no notice of shorter ones
FILES_MAX = 1000  # that are named in the trace


class Iolog:
    """Reads lines under a title that tells the version."""

    def __init__(self) -> None:
        self._version = 0
        self._clock_ns = 0
        self._number_of_file: dict[str, int] = {}

    def feed(self, lines: pl.DataFrame, sink: Sink) -> None:
        """Take a piece."""
        from kvtide.tables import pl

        text = pl.col("text")
        found = lines.select(text.str.extract(TITLE).drop_nulls()).to_series()
        if not self._version and len(found):
            self._version = int(found[0]) if found[0] in {"2", "3"} else 0
        if not self._version:
            sink.judge(lines, is_event=pl.lit(value=False), is_foreign=text.str.contains(TITLE))
            return
        is_timed = self._version == 3
        told = lines.with_columns(
            text.str.extract_groups(
                IO if is_timed else IO.replace(r"(?:(?P<time>\d+) )?", "(?P<time>[^\\s\\S])?")
            ).alias("io"),
            text.str.contains(FILE if is_timed else FILE.replace(r"(?:(?P<time>\d+) )?", "")).alias("is_file"),
        ).unnest("io")
        told = told.with_columns(
            time_ns(pl.col("time"), MILLISECONDS).alias("time_ns"),
            integer(pl.col("offset"), most=BYTES_MAX // 2),
            integer(pl.col("length"), most=BYTES_MAX // 2),
        )
        is_wait = pl.col("action") == "wait"
        if not is_timed:
            told = self._with_waits(told)
        is_io = pl.col("action").is_not_null() & pl.col("offset").is_not_null() & pl.col("time_ns").is_not_null()
        is_io &= pl.when(is_wait).then(not is_timed).otherwise(pl.col("length").is_not_null())
        sink.judge(told, is_event=is_io | pl.col("is_file"), is_foreign=text.str.contains(TITLE))
        self._add(told.filter(is_io & pl.col("action").is_in(["read", "write"])), sink)

    def close(self, sink: Sink) -> None:
        """Say what such a log cannot tell."""
        sink.about.health.has_completions = False
        sink.note("An iolog has no completions: latency, depth and errors cannot be told.")
        if self._version == 2 and not self._clock_ns:
            sink.note("The log has no waits: all operations carry the same time.")

    def _with_waits(self, told: pl.DataFrame) -> pl.DataFrame:
        """Return `told` with times: the waits up to each line, added up."""
        from kvtide.tables import pl

        told = told.with_columns(
            pl.when(pl.col("action") == "wait")
            .then(time_ns(pl.col("offset").cast(pl.String), MICROSECONDS))
            .alias("wait_ns")
        )
        waits = pl.when(pl.col("wait_ns") >= WAIT_US_MIN * 1000).then("wait_ns").fill_null(0)
        times = (waits.cast(pl.Float64).cum_sum() + self._clock_ns).clip(0, BYTES_MAX - 1)
        told = told.with_columns(times.cast(pl.Int64).alias("time_ns"))
        self._clock_ns = told["time_ns"][-1] if len(told) else self._clock_ns
        return told

    def _add(self, rows: pl.DataFrame, sink: Sink) -> None:
        from kvtide.tables import pl

        for name in rows["file"].unique(maintain_order=True).to_list():
            if name not in self._number_of_file:
                self._number_of_file[name] = len(self._number_of_file)
                if len(sink.about.files) < FILES_MAX:
                    sink.about.files.append(TracedFile(path=name, fd=self._number_of_file[name], device=0))
        sink.clock(rows["time_ns"])
        sink.add(
            "op",
            rows.select(
                "time_ns",
                (pl.col("action") == "write").alias("is_write"),
                pl.col("file").replace_strict(self._number_of_file, default=None, return_dtype=pl.Int32).alias("fd"),
                "offset",
                "length",
            ),
        )
