"""The trace file: one Parquet table for all levels, written and read in pieces. Next: record, indicators.

Decides how a trace lies on disk (docs/formats.md). Memory is bounded by ROWS_MAX rows of a level, however long the
trace. Knows no source of events.

Theory. Rows of one level lie together, about in the order of time; `about.rows` says how many of each there are, in
the order of LEVELS, so that a level is a slice of the file. While a trace is being written, its pieces lie in a
directory beside it; `finish` puts them into one file that appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvtide.errors import ConfigError, FormatError, IoError
from kvtide.trace.events import LEVELS, schema, shaped

if TYPE_CHECKING:
    import polars as pl

FORMAT = "kvtide trace"
VERSION = 2
ROWS_MAX = 1 << 20  # of a piece: about 100 MB of block commands
REJECTS_MAX = 20  # lines of a log that are kept as examples


@dataclass(slots=True)
class Extent:
    """A run of a file on its device. Sizes in bytes; `physical` counts from the start of the whole device."""

    logical: int
    physical: int
    length: int


@dataclass(slots=True)
class TracedFile:
    """A file that ops went to."""

    path: str
    fd: int
    device: int  # major << 20 | minor of the whole device, as block commands name it
    extents: list[Extent] = field(default_factory=list)


@dataclass(slots=True)
class Device:
    """What is known of a device; 0 or empty for what is not."""

    name: str = ""
    read_ahead_bytes: int = 0
    max_sectors_bytes: int = 0  # largest command
    capacity_bytes: int = 0
    scheduler: str = ""
    is_rotational: bool = False


@dataclass(slots=True)
class Health:
    """What a trace lacks. A verdict needs to know."""

    num_lost: int = 0  # events the recorder had no room for
    num_malformed: int = 0  # lines that could not be read
    malformed: list[tuple[int, str]] = field(default_factory=list)  # number and text of the first of them
    num_foreign: int = 0  # lines of other kinds, such as titles and summaries
    has_completions: bool = True  # false: no latency and no depth can be told


@dataclass(slots=True)
class About:
    """Where a trace comes from."""

    source: str = ""  # kvtide, kernel, or the format it was imported from
    command: str = ""
    pid: int = 0
    host: str = ""
    start_ns: int = 0  # of the same clock as the events
    end_ns: int = 0
    epoch_ns: int = 0  # what the clock of the day said at start_ns; 0 unknown
    devices: dict[str, Device] = field(default_factory=dict)  # by number, as text
    files: list[TracedFile] = field(default_factory=list)
    health: Health = field(default_factory=Health)
    notes: list[str] = field(default_factory=list)  # sentences for the reader
    rows: dict[str, int] = field(default_factory=dict)  # by level


class TraceWriter:
    """Collects frames of any level and writes them as one file.

        with TraceWriter(path) as writer:
            writer.add("block", frame)
            writer.finish(about)

    Without `finish`, and after an error, nothing is left behind.
    Raises: ConfigError if `path` cannot be a file; IoError where the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = dict.fromkeys(LEVELS, 0)
        self._pending: dict[str, list[pl.DataFrame]] = {level: [] for level in LEVELS}
        self._parts: dict[str, list[Path]] = {level: [] for level in LEVELS}
        parent = path.absolute().parent
        if not parent.is_dir():
            raise ConfigError(f"{parent} is no directory; make it, or type another file")
        if path.exists() and not path.is_file():  # a device would be replaced by a file
            raise ConfigError(f"{path} is no regular file; type another one")
        try:
            self._folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=parent))
        except OSError as error:
            raise IoError(error.errno or errno.EIO, f"cannot write {path}: {error.strerror}") from None

    def add(self, level: str, frame: pl.DataFrame) -> None:
        """Add rows of `level`; columns as in `events.COLUMNS`, those that are missing are unknown."""
        if not len(frame):
            return
        pending = self._pending[level]
        pending.append(shaped(level, frame))
        self.rows[level] += len(frame)
        if sum(map(len, pending)) >= ROWS_MAX:
            self._spill(level)

    def finish(self, about: About) -> int:
        """Write the file; return the number of its rows. `about.rows` and unset times are filled in."""
        from kvtide.tables import pl

        for level in LEVELS:
            self._spill(level)
        about.rows = dict(self.rows)
        parts = [(level, part) for level in LEVELS for part in self._parts[level]]
        metadata = {"kvtide": json.dumps({"format": FORMAT, "version": VERSION, **asdict(about)})}
        frames = [pl.scan_parquet(part) for _, part in parts] or [pl.LazyFrame(schema={"level": pl.String})]
        whole, done = pl.concat(frames, how="diagonal_relaxed"), self._folder / "whole"
        with self._told():
            whole.sink_parquet(done, metadata=metadata, row_group_size=ROWS_MAX // 4)
            done.replace(self.path)
        self.close()
        return sum(self.rows.values())

    def close(self) -> None:
        """Drop what was not finished. Idempotent."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _spill(self, level: str) -> None:
        from kvtide.tables import pl

        frames = self._pending[level]
        if not frames:
            return
        self._pending[level] = []
        part = self._folder / f"{level}-{len(self._parts[level]):06d}"
        frame = pl.concat(frames).sort("time_ns", maintain_order=True)
        names = [pl.col(name).cast(pl.String) if name == "cause" else pl.col(name) for name in frame.columns]
        nulled = [
            pl.when(pl.col(name) == -1).then(None).otherwise(pl.col(name)).alias(name) for name in _optional(frame)
        ]
        with self._told():
            frame.with_columns(names).with_columns(nulled).with_columns(pl.lit(level).alias("level")).write_parquet(
                part, compression="lz4"
            )
        self._parts[level].append(part)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        from kvtide.tables import pl

        try:
            yield
        except (OSError, pl.exceptions.PolarsError) as error:
            number = error.errno if isinstance(error, OSError) else None
            raise IoError(number or errno.EIO, f"cannot write {self.path}: {error}") from None


def _optional(frame: pl.DataFrame) -> list[str]:
    """Return the integer columns in which -1 means unknown."""
    return [name for name, dtype in frame.schema.items() if dtype.is_integer() and name not in {"error", "result"}]


class TraceFile:
    """A trace on disk.

    Raises: FormatError if it is none, of another version, or does not hold what it says; ConfigError if missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.about = _read_about(path)

    def frames(
        self, level: str, columns: Sequence[str] | None = None, *, rows: int = ROWS_MAX
    ) -> Iterator[pl.DataFrame]:
        """Yield the rows of `level`, at most `rows` at a time, about in the order of time.

        Without nulls, see `events`. Columns: all, or those named.
        """
        from kvtide.tables import pl

        start = sum(self.about.rows.get(name, 0) for name in LEVELS[: LEVELS.index(level)])
        num = self.about.rows.get(level, 0)
        wanted = list(columns or schema(level))
        for at in range(start, start + num, rows):
            try:
                scan = pl.scan_parquet(self.path).slice(at, min(rows, start + num - at))
                frame = scan.select("level", *wanted).collect()
                is_right = len(frame) == min(rows, start + num - at) and bool((frame["level"] == level).all())
                if is_right:
                    frame = shaped(level, frame.drop("level")).select(wanted)
            except (OSError, pl.exceptions.PolarsError) as error:
                raise FormatError(f"{self.path}: rows of {level} from {at} on cannot be read: {error}") from None
            if not is_right:
                raise FormatError(f"{self.path}: rows {at} to {at + rows} are not {level} rows, as its header says")
            yield frame

    def frame(self, level: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Return all rows of `level` at once: for levels known to be small."""
        from kvtide.tables import pl

        frames = list(self.frames(level, columns))
        wanted = list(columns or schema(level))
        return pl.concat(frames) if frames else pl.DataFrame(schema=schema(level)).select(wanted)


def _read_about(path: Path) -> About:
    from pydantic import TypeAdapter, ValidationError

    from kvtide.tables import pl

    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; type the path of a trace file") from None
    if magic != b"PAR1":
        raise FormatError(f"{path} is no kvtide trace: expected Parquet, found {magic!r}; try kvtide import {path}")
    try:
        about = json.loads(pl.read_parquet_metadata(path).get("kvtide", "null"))
    except (OSError, ValueError, RecursionError, pl.exceptions.PolarsError) as error:
        raise FormatError(f"{path} is a damaged Parquet file: {error}") from None
    if not isinstance(about, dict) or about.pop("format", None) != FORMAT:
        raise FormatError(f"{path} is Parquet, but not written by kvtide: expected a `kvtide` entry in its metadata")
    version = about.pop("version", None)
    if version != VERSION:
        raise FormatError(f"{path} has trace version {version!r}, this kvtide reads {VERSION}: trace again")
    try:
        described = TypeAdapter(About).validate_python(about, strict=False, extra="forbid")
    except ValidationError as error:
        raise FormatError(f"{path}: its description is not what version {VERSION} has: {error}") from None
    if set(described.rows) != set(LEVELS) or min(described.rows.values()) < 0:
        raise FormatError(f"{path}: its numbers of rows are {described.rows}, expected one for each of {LEVELS}")
    return described
