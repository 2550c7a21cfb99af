"""Figures over time: iostat -x, tables of iostat means, and nvidia-smi as comma-separated text. Next: refused.

Decides where the time of a figure comes from. Figures are found by the title of their column, never by its place, and
keep the name and the unit that the tool gives them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvtide.trace.importers.fields import number

if TYPE_CHECKING:
    import polars as pl

    from kvtide.trace.importers.sink import Sink

SECOND_NS = 1_000_000_000
DATES = ("%m/%d/%Y %I:%M:%S %p", "%m/%d/%y %H:%M:%S", "%m/%d/%Y %H:%M:%S", "%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%dT%H:%M:%S")
TITLES_MAX = 64  # different title lines of one log


class Iostat:
    """Reads reports of `iostat -x`, each with a title line for devices and one for the CPU."""

    def __init__(self) -> None:
        self._title = ""
        self._paragraph = -1
        self._report = -1  # number of the report, by titles of devices
        self._time_ns = -1  # of the date line above
        self._titles: set[str] = set()

    def feed(self, lines: pl.DataFrame, sink: Sink) -> None:
        """Take a piece."""
        from kvtide.tables import pl

        text = pl.col("text")
        told = lines.with_columns(
            text.str.contains(r"^\s*Device:?\s+\S").alias("is_disks"),
            text.str.contains(r"^\s*avg-cpu:\s+%").alias("is_cpu"),
            _dates(text).alias("date_ns"),
        )
        is_title = pl.col("is_disks") | pl.col("is_cpu")
        told = told.with_columns(
            pl.when(is_title).then(text.str.strip_chars().str.replace_all(r"\s+", " ")).alias("title"),
            pl.when(is_title).then("paragraph").alias("table"),
            (pl.col("is_disks").cast(pl.Int64).cum_sum() + self._report).alias("report"),
            is_title.alias("is_title"),
        )
        told = told.with_columns(
            pl.col("title").forward_fill().fill_null(self._title),
            pl.col("table").forward_fill().fill_null(self._paragraph),
            pl.col("date_ns").forward_fill().fill_null(self._time_ns).alias("dated_ns"),
        )
        if len(told):
            self._title, self._paragraph = told["title"][-1], told["table"][-1]
            self._report, self._time_ns = told["report"][-1], told["dated_ns"][-1]
        counted = pl.max_horizontal(pl.col("report") + pl.col("is_cpu").cast(pl.Int64), 0) * SECOND_NS
        told = told.with_columns(pl.when(pl.col("dated_ns") >= 0).then("dated_ns").otherwise(counted).alias("time_ns"))
        for part in told.partition_by("title", maintain_order=True):
            self._read(part, part["title"][0], sink)

    def close(self, sink: Sink) -> None:
        """Say how times came about."""
        sink.about.health.has_completions = False
        if self._time_ns < 0:
            sink.note("The log has no dates: reports were taken to be 1 s apart. Type iostat -xt for dates.")
        sink.note("The first report of iostat is the mean since the machine started, unless -y was given.")

    def _read(self, lines: pl.DataFrame, title: str, sink: Sink) -> None:
        """Judge lines under one title, and add their figures."""
        from kvtide.tables import pl

        names = title.replace("avg-cpu:", "avg-cpu").split() if len(self._titles | {title}) <= TITLES_MAX else []
        self._titles |= {title} if names else set()
        is_cpu = title.startswith("avg-cpu")
        words = pl.col("text").str.strip_chars().str.extract_all(r"\S+")
        words = pl.concat_list(pl.lit("cpu"), words) if is_cpu else words
        told = lines.with_columns(words.alias("words"))
        figures = [
            number(pl.col("words").list.get(at, null_on_oob=True)).alias(f"f{at}") for at in range(1, len(names))
        ]
        told = told.with_columns(figures)
        is_row = (pl.col("words").list.len() == len(names)) & ~pl.col("is_title") & pl.lit(len(names) > 1)
        is_row &= pl.all_horizontal(
            pl.lit(value=True), *(pl.col(f"f{at}").is_not_null() for at in range(1, len(names)))
        )
        is_row &= pl.col("date_ns").is_null()
        is_prose = pl.col("is_title") | (pl.col("paragraph") != pl.col("table")) | pl.col("date_ns").is_not_null()
        is_prose |= pl.col("text").str.contains(r"^\s*(?:\[\.\.\.\]|Linux .*|\^C.*)$")
        sink.judge(told, is_event=is_row, is_foreign=is_prose)
        rows = told.filter(is_row).with_columns(pl.col("words").list.get(0).str.strip_suffix(":").alias("subject"))
        sink.clock(rows["time_ns"])
        for at, name in enumerate(names[1:], start=1):
            _add(rows, sink, source="iostat", name=name, value=f"f{at}")


class IostatMeans:
    """Reads a table whose rows are means of iostat runs, as MLPerf's KV cache benchmark publishes them."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._num_rows = 0

    def feed(self, lines: pl.DataFrame, sink: Sink) -> None:
        """Take a piece."""
        from kvtide.tables import pl

        text = pl.col("text")
        is_title = text.str.contains(r"^(?:[\w%/-]+,)*r_s,(?:[\w%/-]+,)*[\w%/-]+\s*$")
        if not self._names:
            titles = lines.filter(is_title)["text"]
            if not len(titles):
                sink.judge(lines, is_event=pl.lit(value=False), is_foreign=pl.lit(value=False))
                return
            self._names = titles[0].strip().split(",")
        parts = text.str.splitn(",", len(self._names) + 1)
        fields = [parts.struct.field(f"field_{at}").str.strip_chars() for at in range(len(self._names))]
        told = lines.with_columns(field.alias(f"w{at}") for at, field in enumerate(fields))
        first = self._names.index("r_s")
        told = told.with_columns(number(pl.col(f"w{at}")).alias(f"f{at}") for at in range(len(fields)))
        has_all = pl.all_horizontal(pl.col(f"f{at}").is_not_null() for at in range(first, len(fields)))
        is_row = (text.str.count_matches(",") == len(fields) - 1) & has_all
        sink.judge(told, is_event=is_row, is_foreign=is_title)
        rows = told.filter(is_row)
        described = pl.concat_str(
            [pl.col(f"w{at}") for at in range(first)] or [pl.lit("disk")], separator=" ", ignore_nulls=True
        )
        rows = rows.with_row_index("row").with_columns(
            ((pl.col("row").cast(pl.Int64) + self._num_rows) * SECOND_NS).alias("time_ns"), described.alias("subject")
        )
        self._num_rows += len(rows)
        for at in range(first, len(fields)):
            _add(rows, sink, source="iostat", name=self._names[at], value=f"f{at}")

    def close(self, sink: Sink) -> None:
        """Say what the times are."""
        sink.about.health.has_completions = False
        sink.note("Each row is the mean of a whole run; rows were put 1 s apart, which says nothing.")


class NvidiaSmi:
    """Reads `nvidia-smi --query-gpu=timestamp,... --format=csv`."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def feed(self, lines: pl.DataFrame, sink: Sink) -> None:
        """Take a piece."""
        from kvtide.tables import pl

        text = pl.col("text")
        is_title = text.str.contains(r"^\s*timestamp\s*,\s*\S")
        if not self._names:
            titles = lines.filter(is_title)["text"]
            if not len(titles):
                sink.judge(lines, is_event=pl.lit(value=False), is_foreign=pl.lit(value=False))
                return
            self._names = [name.strip() for name in titles[0].split(",")]
        parts = text.str.splitn(",", len(self._names))
        told = lines.with_columns(
            parts.struct.field(f"field_{at}").str.strip_chars().alias(f"w{at}") for at in range(len(self._names))
        )
        day = pl.col("w0").str.to_datetime("%Y/%m/%d %H:%M:%S%.f", strict=False, time_unit="ns")
        told = told.with_columns(day.cast(pl.Int64).alias("time_ns"))
        figures = [at for at, name in enumerate(self._names) if at and name.partition(" ")[0] not in NOT_FIGURES]
        told = told.with_columns(
            number(pl.col(f"w{at}").str.extract(r"^(-?\d+(?:\.\d+)?)(?:\s*\S+)?$")).alias(f"f{at}") for at in figures
        )
        is_absent = [
            pl.col(f"w{at}").str.contains(r"(?i)^\[?(?:N/A|Not Supported|Unknown Error)\]?$") for at in figures
        ]
        is_row = (pl.col("time_ns") >= 0) & pl.all_horizontal(
            pl.col(f"f{at}").is_not_null() | absent for at, absent in zip(figures, is_absent, strict=True)
        )
        sink.judge(told, is_event=is_row, is_foreign=is_title)
        whose = [at for at, name in enumerate(self._names) if name in {"index", "uuid", "gpu_uuid", "pci.bus_id"}]
        subject = pl.lit("gpu ") + pl.col(f"w{whose[0]}") if whose else pl.lit("gpu")
        rows = told.filter(is_row).with_columns(subject.alias("subject"))
        sink.clock(rows["time_ns"])
        for at in figures:
            _add(
                rows.filter(pl.col(f"f{at}").is_not_null()),
                sink,
                source="gpu",
                name=gpu_figure(self._names[at]),
                value=f"f{at}",
            )

    def close(self, sink: Sink) -> None:
        """Say which clock it was."""
        sink.about.health.has_completions = False
        sink.note("Times are the clock of the day without a time zone, taken for UTC.")


NOT_FIGURES = {"timestamp", "index", "name", "uuid", "gpu_uuid", "pci.bus_id", "gpu_name", "pstate", "driver_version"}
UNITS = {"%": "percent", "MiB": "mib", "W": "watts", "MHz": "mhz"}


def gpu_figure(title: str) -> str:
    """Return the name of a figure from a title such as `utilization.gpu [%]`: `utilization_gpu_percent`."""
    name, _, unit = title.partition("[")
    words = [*re.findall(r"\w+", name), UNITS.get(unit.strip(" ]"), "")]
    return "_".join(filter(None, words)).lower()


def _dates(text: pl.Expr) -> pl.Expr:
    """Return the ns since 1970 that a line of nothing but a date means; null for all others. Without a zone: UTC."""
    from kvtide.tables import pl

    words = pl.when(text.str.contains(r"^\d{2,4}[-/]\d{2}[-/]\d{2,4}[ T]\d{2}:\d{2}:\d{2}")).then(
        text.str.strip_chars()
    )
    found = [words.str.to_datetime(form, strict=False, time_unit="ns") for form in DATES]
    times = [one.dt.replace_time_zone(None) if "%z" in form else one for one, form in zip(found, DATES, strict=True)]
    return pl.coalesce(times).cast(pl.Int64)


def _add(rows: pl.DataFrame, sink: Sink, *, source: str, name: str, value: str) -> None:
    from kvtide.tables import pl

    sink.add(
        "sample",
        rows.select(
            "time_ns",
            pl.lit(source).alias("source"),
            "subject",
            pl.lit(name).alias("name"),
            pl.col(value).alias("value"),
        ),
    )
