"""Logs of fio: latencies, bandwidth and IOPS. Next: iolog.

Decides from the file's name what its values are, for the lines do not say; and from the figures, by Little's law, in
which unit fio wrote latencies. Latencies of single operations become `op` rows, all else becomes samples.
Source: "Log File Formats" in fio's HOWTO, flush_samples in its iolog.c.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvtide.trace.events import UNKNOWN
from kvtide.trace.importers.fields import MICROSECONDS, MILLISECONDS, NANOSECONDS, integer, number, time_ns

if TYPE_CHECKING:
    import polars as pl

    from kvtide.trace.importers.sink import Sink

KINDS = ("lat", "clat", "slat", "bw", "iops")
NAME = re.compile(r"_(lat|clat|slat|bw|iops)(?:\.\d+)?\.log(?:\.gz|\.zst)?$")
LINE = r"^\s*\d+\s*,\s*-?\d+\s*,\s*\d+\s*,\s*\d+"
FIELDS_MIN, FIELDS_MAX = 4, 8
DIRECTIONS = ("read", "write", "trim")
FIGURES = {  # name of the sample, and what its value is multiplied with
    "lat": ("lat_ns", 1),
    "clat": ("clat_ns", 1),
    "slat": ("slat_ns", 1),
    "bw": ("bw_bytes_per_s", 1024),
    "iops": ("ops_per_s", 1),
}
DEPTH_MIN = 0.1  # fio keeps at least one operation in flight, unless it is told to pause


def kind_of(name: str) -> str | None:
    """Return which log a file name such as `job_clat.1.log` means; None if it does not say."""
    match = NAME.search(name)
    return match[1] if match else None


class FioLog:
    """Reads a log whose values are of `kind`."""

    def __init__(self, kind: str) -> None:
        assert kind in KINDS
        self._kind = kind
        self._layout: dict[str, int] | None = None  # column: its field
        self._unit = NANOSECONDS
        self._has_ops = False

    def feed(self, lines: pl.DataFrame, sink: Sink) -> None:
        """Take a piece."""
        from kvtide.tables import pl

        text = pl.col("text")
        parts = text.str.splitn(",", FIELDS_MAX)
        fields = [parts.struct.field(f"field_{at}").str.strip_chars().alias(f"f{at}") for at in range(FIELDS_MAX)]
        told = lines.with_columns(*fields, (text.str.count_matches(",") + 1).alias("num_fields"))
        told = told.with_columns(text.str.contains(LINE).alias("is_like"))
        if self._layout is None:
            sample = told.filter("is_like")
            if len(sample):
                self._layout = _layout(sample)
                self._choose_unit(sample, sink)
        if self._layout is None:
            sink.judge(told, is_event=pl.lit(value=False), is_foreign=pl.lit(value=False))
            return
        told = _columns(told, self._layout, self._unit if "lat" in self._kind else None)
        needed = ("time_ns", "value", "direction", "length")
        is_event = pl.col("is_like") & pl.all_horizontal(pl.col(name).is_not_null() for name in needed)
        is_event &= pl.col("num_fields") == len(self._layout) if self._layout else True
        sink.judge(told, is_event=is_event, is_foreign=pl.lit(value=False))
        self._add(told.filter(is_event), sink)

    def close(self, sink: Sink) -> None:
        """Say what such a log cannot tell."""
        sink.about.health.has_completions = self._has_ops
        if self._has_ops:
            sink.note("fio logs completions in whole ms; the start of an operation is its completion less its latency.")

    def _add(self, rows: pl.DataFrame, sink: Sink) -> None:
        from kvtide.tables import pl

        sink.clock(rows["time_ns"])
        is_op = (pl.col("length") > 0) & (pl.col("direction") < 2) & pl.lit(self._kind in {"lat", "clat"})
        ops, samples = rows.filter(is_op), rows.filter(~is_op)
        self._has_ops |= len(ops) > 0
        value = pl.col("value").cast(pl.Int64)
        begun = pl.when(pl.col("issued_ns") > 0).then("issued_ns").otherwise(pl.col("time_ns") - value)
        begun = pl.when(begun >= 0).then(begun).otherwise(0)  # a time of whole ms may be too early by one
        sink.add(
            "op",
            ops.select(
                begun.alias("time_ns"),
                (begun + value).alias("complete_ns"),
                (pl.col("direction") == 1).alias("is_write"),
                "offset",
                "length",
            ),
        )
        name, scale = FIGURES[self._kind]
        sink.add(
            "sample",
            samples.select(
                "time_ns",
                pl.lit("fio").alias("source"),
                pl.col("direction")
                .replace_strict(dict(enumerate(DIRECTIONS)), return_dtype=pl.String)
                .alias("subject"),
                pl.lit(name).alias("name"),
                (pl.col("value") * scale).alias("value"),
            ),
        )

    def _choose_unit(self, sample: pl.DataFrame, sink: Sink) -> None:
        """Tell ns from us: before version 3 fio wrote us, and the lines look the same.

        Theory. The latencies of a time add up to that time, times the operations in flight. In the wrong unit this
        depth comes out a thousand times too small.
        """
        from kvtide.tables import pl

        assert self._layout is not None
        if "lat" not in self._kind or "priority" in self._layout:
            return
        told = sample.select(
            number(pl.col(f"f{self._layout['value']}")).alias("value"),
            time_ns(pl.col(f"f{self._layout['time']}"), MILLISECONDS).alias("time_ns"),
            integer(pl.col(f"f{self._layout['length']}")).alias("length"),
        ).drop_nulls()
        single = told.filter(pl.col("length") > 0)
        span_ns = single.select(pl.col("time_ns").max() - pl.col("time_ns").min()).item() or 0
        depth = float(single["value"].sum()) / span_ns if span_ns else 0.0
        self._unit = NANOSECONDS if depth >= DEPTH_MIN else MICROSECONDS
        words = "ns, as fio 3 writes" if self._unit == NANOSECONDS else "us, as fio 2 writes"
        sink.note(f"The log does not say its unit; latencies were taken for {words}: else too few would be in flight.")


def _layout(sample: pl.DataFrame) -> dict[str, int]:
    """Return which field each column is, from the number of fields and from what they hold."""
    from kvtide.tables import pl

    num = int(sample["num_fields"].mode().max() or 0)  # type: ignore[call-overload]
    sample = sample.filter(pl.col("num_fields") == num)
    has_two_values = bool(sample.select((integer(pl.col("f2")) > 2).any()).item())
    names = ["time", "value", *(["value_max"] if has_two_values else []), "direction", "length"]
    more = num - len(names)
    if more == 1:
        last = pl.col(f"f{len(names)}")
        is_priority = sample.select((last.is_in(["0", "1"]) | last.str.starts_with("0x")).all()).item()
        names.append("priority" if is_priority else "offset")
    elif more > 1:
        names += ["offset", "priority", "issued"][:more]
    return {name: at for at, name in enumerate(names)}


def _columns(told: pl.DataFrame, layout: dict[str, int], unit: int | None) -> pl.DataFrame:
    """Return `told` with the columns of a log as numbers. `unit`: of latencies; None: plain figures."""
    from kvtide.tables import pl

    field = {name: pl.col(f"f{at}") for name, at in layout.items()}
    nothing = pl.lit(None, pl.Int64)
    value = number(field["value"]) if unit is None else time_ns(field["value"], unit).cast(pl.Float64)
    direction = integer(field["direction"])
    issued = time_ns(field["issued"], NANOSECONDS) if "issued" in field else nothing
    return told.with_columns(
        time_ns(field["time"], MILLISECONDS).alias("time_ns"),
        value.alias("value"),
        pl.when(direction.is_between(0, 2)).then(direction).alias("direction"),
        integer(field["length"]).alias("length"),
        (integer(field["offset"]) if "offset" in field else pl.lit(UNKNOWN, pl.Int64)).alias("offset"),
        issued.alias("issued_ns"),
    )
