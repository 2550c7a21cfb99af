"""Tables whose columns a title line names: biosnoop of bcc and bpftrace, and iosnoop of perf-tools. Next: blkparse.

Decides where a table begins and ends in a text: after a title line until a blank one, lines must be events or known
remarks; elsewhere prose is foreign. Each line is one completed command.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtide.trace.events import flags_of
from kvtide.trace.importers.fields import (
    MILLISECONDS,
    SECONDS,
    device,
    integer,
    sector,
    sector_offset,
    small,
    time_ns,
)

if TYPE_CHECKING:
    import polars as pl

    from kvtide.trace.importers.sink import Sink

# Each title's column, as a pattern of its text. A comm may hold spaces and slashes.
PATTERNS = {
    "TIME(s)": r"(?P<end_s>\d+\.\d+)",
    "TIME(ms)": r"(?P<end_ms>\d+)",
    "STARTs": r"(?P<start_s>\d+\.\d+)",
    "ENDs": r"(?P<end_s>\d+\.\d+)",
    "COMM": r"(?P<comm>\S.*?)",
    "PID": r"(?P<pid>\d+)",
    "DISK": r"(?P<disk>\S+)",
    "DISK ID": r"(?P<major>\d+)\s+(?P<minor>\d+)",
    "DEV": r"(?P<major>\d+),(?P<minor>\d+)",
    "T": r"(?P<rwbs>[A-Z]+)",
    "TYPE": r"(?P<rwbs>[A-Z]+)",
    "SECTOR": r"(?P<sector>-?\d+)",
    "BLOCK": r"(?P<sector>\d+)",
    "BYTES": r"(?P<bytes>\d+)",
    "P": r"\S+",  # pattern, sequential or random: told by the sectors
    "QUE(ms)": r"(?P<queue_ms>\d+(?:\.\d+)?)",
    "LAT(ms)": r"(?P<latency_ms>\d+(?:\.\d+)?)",
    "LATms": r"(?P<latency_ms>\d+(?:\.\d+)?)",
}
NEVER = r"(?P<pid>[^\s\S])"  # matches nothing
FIELDS = (
    *("start_s", "end_s", "end_ms", "comm", "pid", "disk", "major", "minor", "rwbs", "sector", "bytes"),
    *("queue_ms", "latency_ms"),
)
REMARKS = (
    r"^\s*(?:\[\.\.\.\]|\.\.\.|\^C.*|MAJOR\s+MINOR|"
    r"Tracing .*|Ending tracing.*|Attach(?:ing|ed) \d+ probes.*|.*\bLost \d+ .*)\s*$"
)
LATENCY_NS_MAX = 86_400_000_000_000  # a day: longer ones are damage
LOST = r"\b[Ll]ost (\d+) (?:samples|events)"  # of bcc and bpftrace


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that prints such a table: the pattern of its title line."""

    titles: str


BIOSNOOP = Tool(r"^\s*TIME\(s\)\s+COMM\s+PID\s+DISK\s+T\s+SECTOR\s+BYTES(\s+P)?(\s+QUE\(ms\))?\s+LAT\(ms\)\s*$")
BIOSNOOP_BT = Tool(r"^\s*TIME\(ms\)(\s+DISK(\s+ID)?)?\s+COMM\s+PID\s+LAT\(ms\)\s*$")
IOSNOOP = Tool(r"^\s*(STARTs\s+)?(ENDs\s+)?COMM\s+PID\s+TYPE\s+DEV\s+BLOCK\s+BYTES\s+LATms\s*$")


class Table:
    """Reads the tables of one tool, wherever they lie in a text."""

    def __init__(self, tool: Tool) -> None:
        self._tool = tool
        self._title = ""  # that the next line stands under
        self._paragraph = -1  # the title's
        self._origin_ns: int | None = None  # added to all times, so that none is negative
        self._clock_ns = 0  # of logs without times
        self._num_early = 0

    def feed(self, lines: pl.DataFrame, sink: Sink) -> None:
        """Take a piece."""
        import polars as pl

        text = pl.col("text")
        is_title = text.str.contains(self._tool.titles)
        lines = lines.with_columns(is_title.alias("is_title")).with_columns(
            pl.when("is_title").then(text.str.strip_chars().str.replace_all(r"\s+", " ")).alias("title"),
            pl.when("is_title").then("paragraph").alias("table"),
        )
        lines = lines.with_columns(
            pl.col("title").forward_fill().fill_null(self._title),
            pl.col("table").forward_fill().fill_null(self._paragraph),
        )
        if len(lines):
            self._title, self._paragraph = lines["title"][-1], lines["table"][-1]
        sink.lose(lines["text"].str.extract(LOST).cast(pl.Int64, strict=False))
        for part in lines.partition_by("title", maintain_order=True):
            self._read(part, part["title"][0], sink)

    def close(self, sink: Sink) -> None:
        """Say what is made up."""
        if self._num_early:
            sink.note(f"{self._num_early:,} commands began before the clock of the log did; their start is unknown.")

    def _read(self, lines: pl.DataFrame, title: str, sink: Sink) -> None:
        """Judge lines under one title, and add their rows."""
        import polars as pl

        pattern = _pattern(title)
        told = lines.with_columns(pl.col("text").str.extract_groups(pattern).alias("found")).unnest("found")
        told = told.with_columns(pl.lit(None, pl.String).alias(name) for name in FIELDS if name not in told.columns)
        told = told.with_columns(_columns())
        has = {name: f"(?P<{name}>" in pattern for name in FIELDS}
        needed = ["pid", "latency_ns"]
        needed += ["device"] if has["major"] else []
        needed += ["sector", "length"] if has["bytes"] else []
        needed += [name for name in ("end_ns", "start_ns") if has[name.replace("_ns", "_s")]]
        needed += ["end_ns"] if has["end_ms"] else []
        is_event = pl.all_horizontal(pl.col(name).is_not_null() for name in needed) & ~pl.col("is_title")
        is_prose = pl.col("is_title") | (pl.col("paragraph") != pl.col("table")) | pl.col("text").str.contains(REMARKS)
        sink.judge(told, is_event=is_event, is_foreign=is_prose)
        rows = told.filter(is_event)
        if len(rows):
            self._add(rows, has, sink)

    def _add(self, rows: pl.DataFrame, has: dict[str, bool], sink: Sink) -> None:
        import polars as pl

        if has["disk"]:
            rows = rows.with_columns(sink.device_numbers(rows["disk"]).alias("device"))
        elif has["major"]:
            sink.name_devices(rows["device"])
        if not has["bytes"]:
            sink.note(
                "The log has no sizes, no offsets and no directions, and times in whole ms: latency is all it tells."
            )
        rows = self._timed(rows, has, sink)
        sink.clock(rows["end_ns"])
        sink.add(
            "block",
            rows.select(
                pl.col("start_ns").alias("time_ns"),
                pl.col("end_ns").alias("complete_ns"),
                "queue_ns",
                "device",
                sector_offset(pl.col("sector")).alias("offset"),
                "length",
                "flags",
                "pid",
                "comm",
            ),
        )

    def _timed(self, rows: pl.DataFrame, has: dict[str, bool], sink: Sink) -> pl.DataFrame:
        """Return `rows` with start_ns, end_ns and queue_ns: a line is printed at the completion."""
        import polars as pl

        if has["start_s"] and not has["end_s"]:
            return rows.with_columns((pl.col("start_ns") + pl.col("latency_ns")).alias("end_ns"))
        if has["start_s"]:
            return rows
        if not has["end_s"] and not has["end_ms"]:
            sink.note(
                "The log has no times: commands are laid one after the other. Sizes and latencies are as logged; "
                "rates, gaps and depth are made up. Trace with -ts for times."
            )
            rows = rows.with_columns((pl.col("latency_ns").cum_sum() + self._clock_ns).alias("end_ns"))
            self._clock_ns = int(rows["end_ns"][-1])
        start = pl.col("end_ns") - pl.col("latency_ns")
        queue = start - pl.col("queue_ns")
        rows = rows.with_columns(start.alias("start_ns"), queue.alias("queue_ns"))
        if self._origin_ns is None:
            earliest = rows.select(pl.min_horizontal("start_ns", "queue_ns").min()).item()
            self._origin_ns = max(0, -earliest)
        times = [(pl.col(name) + self._origin_ns).alias(name) for name in ("start_ns", "end_ns", "queue_ns")]
        rows = rows.with_columns(times)
        self._num_early += int((rows["start_ns"] < 0).sum())
        return rows.with_columns(
            pl.when(pl.col(name) >= 0).then(pl.col(name)).alias(name) for name in ("start_ns", "queue_ns")
        )


def _pattern(title: str) -> str:
    """Return the pattern of the lines under a title line with single spaces; of none, if there is no title."""
    titles = title.replace("DISK ID", "DISK_ID").split()
    return r"^\s*" + r"\s+".join(PATTERNS[name.replace("_", " ")] for name in titles) + r"\s*$" if titles else NEVER


def _columns() -> list[pl.Expr]:
    """Return the columns of FIELDS as numbers."""
    import polars as pl

    end = pl.coalesce(time_ns(pl.col("end_s"), SECONDS), time_ns(pl.col("end_ms"), MILLISECONDS))
    length, latency = integer(pl.col("bytes")), time_ns(pl.col("latency_ms"), MILLISECONDS)
    return [
        time_ns(pl.col("start_s"), SECONDS).alias("start_ns"),
        end.alias("end_ns"),
        time_ns(pl.col("queue_ms"), MILLISECONDS).alias("queue_ns"),
        pl.when(latency <= LATENCY_NS_MAX).then(latency).alias("latency_ns"),
        small(pl.col("pid")),
        device(pl.col("major"), pl.col("minor")).alias("device"),
        sector(pl.col("sector")),
        length.alias("length"),
        flags_of(pl.col("rwbs")).fill_null(0).alias("flags"),
    ]
