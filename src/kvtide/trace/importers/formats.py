"""The formats kvtide imports: how each is called, told apart and read. Next: records.

Decides which format a file has, by trying all of them on its first lines: the one that finds most events there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvtide.errors import ConfigError, FormatError
from kvtide.trace.file import About, TraceWriter
from kvtide.trace.importers import blktrace, refused
from kvtide.trace.importers.blkparse import Blkparse
from kvtide.trace.importers.cheops import Cheops
from kvtide.trace.importers.commas import Alibaba, Msr
from kvtide.trace.importers.fiolog import FioLog, kind_of
from kvtide.trace.importers.iolog import Iolog
from kvtide.trace.importers.mlperf import MlPerf
from kvtide.trace.importers.samples import Iostat, IostatMeans, NvidiaSmi
from kvtide.trace.importers.sink import Sink
from kvtide.trace.importers.source import OnProgress, Source, line_frame
from kvtide.trace.importers.strace import Strace
from kvtide.trace.importers.tables import BIOSNOOP, BIOSNOOP_BT, IOSNOOP, Table
from kvtide.trace.importers.tracepoints import Tracepoints

if TYPE_CHECKING:
    import polars as pl

AUTO = "auto"


class Reader(Protocol):
    """Turns lines into rows, piece by piece."""

    def feed(self, lines: pl.DataFrame, sink: Sink) -> None:
        """Take a piece: judge each of its lines, and add the rows that are done."""

    def close(self, sink: Sink) -> None:
        """Add what still waits, and say what the log cannot tell."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format. `make` is None for binary traces; `why_not` says why a known one is refused."""

    name: str
    title: str
    expected: str  # what a line looks like
    make: Callable[[], Reader] | None
    why_not: str = ""


SINGLE = "it has no single events, so no trace can be made of it; "
FORMATS = (
    Format("cheops", "bpftrace lines of block_rq_issue", "nsecs, rwbs, bytes, sector, nr_sector", Cheops),
    Format("biosnoop", "bcc biosnoop", "TIME(s) COMM PID DISK T SECTOR BYTES ... LAT(ms)", lambda: Table(BIOSNOOP)),
    Format("biosnoop.bt", "bpftrace biosnoop.bt", "TIME(ms) DISK ID COMM PID LAT(ms)", lambda: Table(BIOSNOOP_BT)),
    Format("iosnoop", "perf-tools iosnoop", "COMM PID TYPE DEV BLOCK BYTES LATms", lambda: Table(IOSNOOP)),
    Format("blkparse", "blkparse text", "8,0 1 1 0.000000000 697 Q R 223490 + 8 [comm]", Blkparse),
    Format("blktrace", "binary blktrace", "records that begin with the magic number 0x65617407", None),
    Format(
        "perf", "perf script or ftrace text", "comm pid [cpu] time: block:block_rq_issue: 8,0 R 4096 ()", Tracepoints
    ),
    Format("strace", "strace -f -T -ttt -y", '12 1700000000.000001 pread64(3</f>, "", 4096, 0) = 4096 <0.01>', Strace),
    *(
        Format(
            f"fio-{kind}", f"fio {kind} log", "time_ms, value, direction, size[, offset][, ...]", partial(FioLog, kind)
        )
        for kind in ("lat", "clat", "slat", "bw", "iops")
    ),
    Format("fio-iolog", "fio iolog, version 2 or 3", "fio version 3 iolog", Iolog),
    Format("msr", "MSR Cambridge (SNIA) CSV", "128166372003061629,host,1,Read,8192,4096,1331", Msr),
    Format("alibaba", "Alibaba block CSV", "419,W,8792731648,16384,1577808144360767", Alibaba),
    Format("mlperf", "MLPerf --io-trace-log CSV", "Timestamp,Operation,Object_Size_Bytes,Tier,Key,Phase", MlPerf),
    Format("iostat", "iostat -x", "Device r/s rkB/s ...", Iostat),
    Format("iostat-means", "CSV of iostat means", "model,...,r_s,rMB_s,r_await,...", IostatMeans),
    Format("nvidia-smi", "nvidia-smi CSV", "timestamp, utilization.gpu [%]", NvidiaSmi),
    Format(
        "histogram",
        "a histogram, as biolatency prints",
        "a -> b : n |***|",
        lambda: refused.Refused(refused.HISTOGRAM),
        SINGLE + "trace with biosnoop in place of biolatency",
    ),
    Format(
        "biopattern",
        "biopattern",
        "TIME DISK %RND %SEQ COUNT KBYTES",
        lambda: refused.Refused(refused.BIOPATTERN),
        SINGLE + "trace with biosnoop",
    ),
    Format(
        "btt", "btt", "Q2C min avg max n", lambda: refused.Refused(refused.BTT), SINGLE + "import the text of blkparse"
    ),
)
ALIASES = {"ftrace": "perf"}
NAMES = tuple(form.name for form in FORMATS if not form.why_not)


@dataclass(frozen=True, slots=True)
class Imported:
    """What came of an import."""

    format: str
    num_lines: int  # of text, or records of a binary trace
    num_events: int  # lines that are events, with or without a row of their own
    about: About


def import_file(
    path: Path,
    output: Path,
    *,
    format: str = AUTO,  # noqa: A002 - as on the command line
    on_progress: OnProgress | None = None,
) -> Imported:
    """Write the log at `path` as a trace at `output`.

    Raises: ConfigError for an unknown format or a path that cannot be used; FormatError if the file is none of the
    formats, not the one asked for, or known to hold no events; IoError where the disk refuses.
    """
    wanted = ALIASES.get(format, format)
    if wanted not in {AUTO, *(form.name for form in FORMATS)}:
        raise ConfigError(f"unknown format {format!r}; type one of {AUTO}, {', '.join(NAMES)}")
    if output.exists() and path.exists() and output.samefile(path):
        raise ConfigError(f"{output} is the log itself; type another file after -o")
    source = Source(path, on_progress=on_progress)
    try:
        form = recognise(source) if wanted == AUTO else next(form for form in FORMATS if form.name == wanted)
        if form.why_not:
            raise FormatError(f"{path} is {form.title} output: {form.why_not}")
        with TraceWriter(output) as writer:
            sink = Sink(writer, About(source=form.name))
            _read(form, source, sink)
            _check(form, path, sink, writer)
            sink.end()
            for note in source.notes:
                sink.note(note)
            writer.finish(sink.about)
    finally:
        source.close()
    health = sink.about.health
    return Imported(form.name, sink.num_events + health.num_malformed + health.num_foreign, sink.num_events, sink.about)


def recognise(source: Source) -> Format:
    """Return the format of a file, from its first lines. Raises: FormatError if it is none that is known."""
    head = source.head
    if blktrace.order_of(head):
        return next(form for form in FORMATS if form.make is None)
    lines = line_frame(head)
    found = [(score(form, lines), form) for form in FORMATS if form.make and not form.name.startswith("fio-")]
    best, form = max(found, key=lambda one: one[0])
    iolog = next(one for one in FORMATS if one.name == "fio-iolog")
    if score(iolog, lines) > best:
        return iolog
    log = next(one for one in FORMATS if one.name == f"fio-{kind_of(source.path.name) or 'bw'}")
    if score(log, lines) > best:
        if kind_of(source.path.name) is None:
            raise FormatError(
                f"{source.path} looks like a log of fio, but neither its lines nor its name tell which: "
                f"type --format with one of fio-lat, fio-clat, fio-slat, fio-bw, fio-iops"
            )
        return log
    if not best:
        raise FormatError(
            f"{source.path} is no known log; its first line is {_first(lines)!r}. Known: {', '.join(NAMES)}; "
            f"type --format to choose one"
        )
    return form


def score(form: Format, lines: pl.DataFrame) -> int:
    """Return how many of `lines` are events of `form`; 0 if more of them are damaged."""
    assert form.make is not None
    sink, reader = Sink(None, About()), form.make()
    screened = sink.screen(lines)
    num_bad = sink.about.health.num_malformed
    reader.feed(screened, sink)
    reader.close(sink)
    return sink.num_events if sink.num_events >= sink.about.health.num_malformed - num_bad else 0


def _read(form: Format, source: Source, sink: Sink) -> None:
    if form.make is None:
        blktrace.read(source, sink)
        return
    reader = form.make()
    for lines in source.lines():
        reader.feed(sink.screen(lines), sink)
    reader.close(sink)


def _check(form: Format, path: Path, sink: Sink, writer: TraceWriter) -> None:
    """Raise FormatError if nothing of a file could be used."""
    if not sink.num_events:
        where, what = sink.first_odd or (1, "")
        unit = "byte" if form.make is None else "line"
        raise FormatError(
            f"{path} is not {form.title}: expected {form.expected!r}, found {what!r} at {unit} {where}; "
            f"type --format {AUTO} to have it recognised"
        )
    if not sum(writer.rows.values()):
        raise FormatError(
            f"{path} is {form.title} and has {sink.num_events:,} events, but none that starts or ends an operation; "
            f"expected {form.expected!r}"
        )


def _first(lines: pl.DataFrame) -> str:
    text = lines["text"]
    shown = text.filter(text.str.strip_chars() != "").str.slice(0, 80)
    return str(shown[0]) if len(shown) else ""
