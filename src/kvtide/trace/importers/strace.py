"""Text of `strace -f -T -ttt -y`. Next: fiolog.

Decides how calls that strace prints in two parts become one, and where offset and length stand among the arguments.
Every call is a row; for those that are not reads and writes of the family below, offset and length are unknown.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from kvtide.trace.events import UNKNOWN
from kvtide.trace.file import TracedFile
from kvtide.trace.importers.fields import SECONDS, integer, small, time_ns
from kvtide.trace.importers.pairs import Stitches

if TYPE_CHECKING:
    import polars as pl

    from kvtide.trace.importers.sink import Sink

LINE = r"^(?:\[pid\s+(?P<pid>\d+)\]\s+|(?P<pid_o>\d+)\s+)?(?P<time>\d+\.\d{3,9})\s+(?P<rest>\S.*)$"
STARTED = r"^\w+\(.*<unfinished \.\.\.>\s*$"
RESUMED = r"^<\.\.\. (?P<name>\w+) resumed>"
CALL = (
    r"^(?P<name>\w+)\((?P<args>.*)\)\s+= (?P<result>-?\d+|0x[0-9a-f]+|\?)"
    r"(?P<fd_path><[^>]*>)?(?: (?P<errno>E[A-Z0-9]+))?"
    r"(?: \(.*\)| [^<(].*)?(?:\s*<(?P<took>\d+\.\d+)>)?\s*$"
)
BEGUN = r"^(?P<name>\w+)\((?P<args>.*)$"  # of a call whose second part never came
REMARKS = r"^(?:---|\+\+\+|strace: )|^\S*\s*\d*\.?\d*\s*(?:---|\+\+\+) "
READS = ("read", "pread64", "readv", "preadv", "preadv2")
WRITES = ("write", "pwrite64", "writev", "pwritev", "pwritev2")
FILES_MAX = 1000  # that are named in the trace


class Strace:
    """Reads calls, whole or in two parts."""

    def __init__(self) -> None:
        self._parts = Stitches()
        self._files: set[tuple[int, str]] = set()
        self._has_durations = False

    def feed(self, lines: pl.DataFrame, sink: Sink) -> None:
        """Take a piece."""
        from kvtide.tables import pl

        told = lines.with_columns(pl.col("text").str.extract_groups(LINE).alias("found")).unnest("found")
        rest = pl.col("rest")
        told = told.with_columns(
            time_ns(pl.col("time"), SECONDS).alias("time_ns"),
            small(pl.coalesce("pid", "pid_o")).alias("pid"),
            rest.str.contains(STARTED).alias("is_start"),
            rest.str.contains(RESUMED).alias("is_end"),
        )
        is_line = pl.col("time_ns").is_not_null() & (pl.col("pid").is_not_null() | pl.col("pid_o").is_null())
        parts = told.filter(is_line & (pl.col("is_start") | pl.col("is_end")))
        wholes = told.filter(is_line & ~pl.col("is_start") & ~pl.col("is_end"))
        sink.clock(told["time_ns"])
        done, given_up, lone = self._parts.add(_keyed(parts))
        self._judge(told, wholes, done, lone, sink)
        self._add_begun(given_up, sink)

    def close(self, sink: Sink) -> None:
        """Give up calls whose second part never came."""
        waiting = self._parts.close()
        if waiting is not None:
            self._add_begun(waiting, sink)
        if not self._has_durations:
            sink.note("The log has no durations: latency cannot be told. Type strace -f -T -ttt -y.")
        sink.note("Threads are named by their own id; a file number is that of the process that used it.")

    def _judge(
        self, told: pl.DataFrame, wholes: pl.DataFrame, done: pl.DataFrame, lone: pl.DataFrame, sink: Sink
    ) -> None:
        """Add whole calls and stitched ones, and judge each line: a call that cannot be read is malformed."""
        from kvtide.tables import pl

        tail = pl.col("end_rest").str.replace(RESUMED, "")
        stitched = done.select(
            pl.col("end_line").alias("line"),
            "time_ns",
            pl.col("end_time_ns").alias("seen_ns"),
            "pid",
            (pl.col("rest").str.replace(r"\s*<unfinished \.\.\.>\s*$", "") + tail).alias("call"),
        )
        alone = lone.select(  # the first part was before the log
            "line",
            pl.lit(UNKNOWN, pl.Int64).alias("time_ns"),
            pl.col("time_ns").alias("seen_ns"),
            "pid",
            (pl.col("rest").str.extract(RESUMED) + "(" + pl.col("rest").str.replace(RESUMED, "")).alias("call"),
        )
        plain = wholes.select(
            "line", "time_ns", pl.lit(UNKNOWN, pl.Int64).alias("seen_ns"), "pid", pl.col("rest").alias("call")
        )
        calls = pl.concat([plain, stitched, alone])
        calls = calls.with_columns(pl.col("call").str.extract_groups(CALL).alias("found")).unnest("found")
        is_whole = pl.col("name").is_not_null() & (
            integer(pl.col("result")).is_not_null() | pl.col("result").str.contains(r"^(?:\?|0x)")
        )
        calls = calls.filter(is_whole)
        self._add_calls(calls, sink)
        good = pl.col("line").is_in(calls["line"].implode()) | pl.col("is_start")
        text = pl.col("text")
        is_remark = text.str.contains(REMARKS) | ~text.str.contains(r"^\[pid|^\d")
        sink.judge(told, is_event=good & pl.col("time_ns").is_not_null(), is_foreign=is_remark)

    def _add_calls(self, calls: pl.DataFrame, sink: Sink) -> None:
        from kvtide.tables import pl

        took = time_ns(pl.col("took"), SECONDS)
        self._has_durations |= bool(calls.select(took.is_not_null().any()).item())
        calls = calls.with_columns(
            pl.when(pl.col("time_ns") != UNKNOWN)
            .then(pl.coalesce(pl.col("time_ns") + took, "seen_ns"))
            .otherwise("seen_ns")
            .alias("complete_ns"),
            _arguments(),
            _result(),
        ).unnest("arguments")
        self._name_files(calls, sink)
        sink.add("call", calls.select(*_columns(), "complete_ns", "offset", "length", "result"))

    def _add_begun(self, starts: pl.DataFrame, sink: Sink) -> None:
        from kvtide.tables import pl

        begun = starts.with_columns(pl.col("rest").str.extract_groups(BEGUN).alias("found")).unnest("found")
        begun = begun.with_columns(_arguments()).unnest("arguments")
        sink.add("call", begun.select(*_columns(), pl.lit(0, pl.Int64).alias("result")))

    def _name_files(self, calls: pl.DataFrame, sink: Sink) -> None:
        """Keep which paths file numbers stood for."""
        from kvtide.tables import pl

        named = calls.filter(pl.col("path").str.starts_with("/") & pl.col("fd").is_not_null())
        for fd, path in named.select("fd", "path").unique(maintain_order=True).iter_rows():
            if (fd, path) not in self._files and len(self._files) < FILES_MAX:
                self._files.add((fd, path))
                sink.about.files.append(TracedFile(path=path, fd=fd, device=0))


def _keyed(parts: pl.DataFrame) -> pl.DataFrame:
    """Return first and second parts as `Stitches` wants them: a thread is in one call at a time."""
    from kvtide.tables import pl

    return parts.select(
        pl.col("pid").fill_null(0).cast(pl.Int64).cast(pl.UInt64, strict=False).fill_null(0).alias("key"),
        "time_ns",
        "is_end",
        "line",
        "pid",
        "rest",
    )


def _arguments() -> pl.Expr:
    """Return a struct of fd, path, offset and length as the arguments tell them."""
    from kvtide.tables import pl

    name, args = pl.col("name"), pl.col("args")
    places = args.str.extract_groups(r"^(\d+)(?:<([^>]*)>)?")
    sizes = args.str.extract_all(r"iov_len=\d+").list.eval(pl.element().str.slice(8).cast(pl.Int64, strict=False))
    last, last_two = args.str.extract(r", (\d+)$"), args.str.extract_groups(r", (\d+), (\d+)$")
    vector, flagged = args.str.extract(r"\], \d+, (\d+)$"), args.str.extract(r"\], \d+, (\d+), [^,]*$")
    is_cut = args.str.contains(r"\.\.\.\], \d+")  # strace shortens long vectors
    length = (
        pl.when(name.is_in(["read", "write"]))
        .then(integer(last))
        .when(name.is_in(["pread64", "pwrite64"]))
        .then(integer(last_two.struct.field("1")))
        .when(name.is_in([*READS, *WRITES]) & ~is_cut & (sizes.list.len() > 0))
        .then(sizes.list.sum())
    )
    offset = (
        pl.when(name.is_in(["pread64", "pwrite64"]))
        .then(integer(last_two.struct.field("2")))
        .when(name.is_in(["preadv", "pwritev"]))
        .then(integer(vector))
        .when(name.is_in(["preadv2", "pwritev2"]))
        .then(integer(flagged))
    )
    return pl.struct(
        small(places.struct.field("1")).alias("fd"),
        places.struct.field("2").alias("path"),
        offset.alias("offset"),
        length.alias("length"),
    ).alias("arguments")


def _result() -> pl.Expr:
    """Return what a call returned: negative for errors, 0 for addresses and for what strace did not see."""
    from kvtide.tables import pl

    numbers = {name: -number for number, name in errno.errorcode.items()}
    failed = pl.col("errno").replace_strict(numbers, default=-errno.EIO, return_dtype=pl.Int64)
    failed = pl.when(pl.col("errno").is_not_null()).then(failed)
    return pl.coalesce(failed, integer(pl.col("result")), pl.lit(0, pl.Int64)).alias("result")


def _columns() -> list[pl.Expr]:
    from kvtide.tables import pl

    return [
        pl.col("time_ns"),
        pl.col("name"),
        pl.col("pid"),
        pl.col("name").is_in(WRITES).alias("is_write"),
        pl.col("fd"),
    ]
