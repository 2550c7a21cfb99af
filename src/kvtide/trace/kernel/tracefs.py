"""An own instance of the kernel's tracing, made and taken away whole. Next: pages.

Decides how events are switched on, filtered, read as raw pages and counted; knows not what the events mean.

Theory. An instance has its own ring buffers, one for each CPU, and its own switches, so that nobody else's tracing is
disturbed. `trace_pipe_raw` gives the pages of a buffer as they are. The buffers do not overwrite: what finds no room is
dropped and counted.
Source: Documentation/trace/ftrace.rst of the kernel.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from kvtide.errors import FormatError, IoError, UnsupportedError

TRACEFS = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))
PREFIX = "kvtide-"
_FIELD = re.compile(
    r"field:(?P<type>.+?) (?P<name>\w+)(?:\[(?P<num>\d*)\])?;"
    r"\s*offset:(?P<at>\d+);\s*size:(?P<size>\d+);\s*signed:(?P<sign>\d);"
)


@dataclass(frozen=True, slots=True)
class EventFormat:
    """Number of an event and the layout of its record."""

    name: str
    number: int
    dtype: np.dtype[np.void]


def find_tracefs() -> Path:
    """Return where tracefs is mounted and can be written to.

    Raises: UnsupportedError that says what is missing.
    """
    for root in TRACEFS:
        if (root / "instances").is_dir():
            if os.access(root / "instances", os.W_OK):
                return root
            raise UnsupportedError(f"tracing the kernel needs root: {root} may not be written to; run with sudo")
    if not TRACEFS[0].is_dir():
        raise UnsupportedError("this kernel has no tracefs: /sys/kernel/tracing is missing")
    if os.geteuid() != 0:
        raise UnsupportedError("tracing the kernel needs root; run with sudo")
    raise UnsupportedError("tracefs is not mounted; type mount -t tracefs tracefs /sys/kernel/tracing")


class Instance:
    """Tracing of some events, from `start` to `close`.

    Threads: one. A process that is killed leaves its instance behind; the next one of kvtide removes it.
    Raises: UnsupportedError if the kernel lacks something; IoError if it refuses.
    """

    def __init__(self, *, buffer_bytes: int, root: Path | None = None) -> None:
        self.root = root or find_tracefs()
        _remove_orphans(self.root)
        self.path = self.root / "instances" / f"{PREFIX}{os.getpid()}-{secrets.token_hex(3)}"
        self._pipes: list[int] = []
        try:
            self.path.mkdir()
        except OSError as error:
            raise IoError(error.errno or errno.EIO, f"the kernel makes no tracing instance: {error}") from None
        try:
            self._write("tracing_on", "0")
            self._write("trace_clock", "mono")
            self._write("options/overwrite", "0")
            self._write("buffer_size_kb", str(max(64, buffer_bytes >> 10)))
        except BaseException:
            self.close()
            raise

    def has(self, event: str) -> bool:
        """Say whether the kernel has `event`, given as `system/name`."""
        return (self.path / "events" / event).is_dir()

    def enable(self, event: str, condition: str = "") -> EventFormat:
        """Switch `event` on, for records that meet `condition`, and return its layout."""
        if not self.has(event):
            raise UnsupportedError(f"this kernel has no event {event}")
        folder = f"events/{event}"
        if condition:
            self._write(f"{folder}/filter", condition)
        self._write(f"{folder}/enable", "1")
        return parse_format((self.path / folder / "format").read_text())

    def follow(self, pids: list[int]) -> None:
        """Record only what these processes and their children do."""
        self._write("options/event-fork", "1")
        self._write("set_event_pid", " ".join(map(str, pids)))

    def start(self) -> None:
        """Begin to record, and open the pages of every CPU."""
        names = sorted((self.path / "per_cpu").iterdir(), key=lambda each: int(each.name[3:]))
        self._pipes = [os.open(each / "trace_pipe_raw", os.O_RDONLY | os.O_NONBLOCK) for each in names]
        self._write("tracing_on", "1")

    def stop(self) -> None:
        """End recording; what is in the buffers can still be read."""
        self._write("tracing_on", "0")

    @property
    def num_cpus(self) -> int:
        """Buffers to read."""
        return len(self._pipes)

    def read(self, cpu: int, page_bytes: int) -> bytes:
        """Return the next page of a CPU's buffer, as far as it is filled; empty where there is none."""
        try:
            return os.read(self._pipes[cpu], page_bytes)
        except BlockingIOError:
            return b""

    def num_lost(self) -> int:
        """Return how many events found no room so far."""
        total = 0
        for folder in (self.path / "per_cpu").iterdir():
            text = (folder / "stats").read_text()
            for name in ("overrun", "commit overrun", "dropped events"):
                found = re.search(rf"^{name}: (\d+)$", text, re.MULTILINE)
                total += int(found[1]) if found else 0
        return total

    def close(self) -> None:
        """Stop, and take the instance away. Idempotent."""
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes = []
        with contextlib.suppress(OSError):
            self._write("tracing_on", "0")
            self._write("events/enable", "0")
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, name: str, text: str) -> None:
        try:
            (self.path / name).write_text(text)
        except OSError as error:
            where = f"{self.path.name}/{name}"
            raise IoError(error.errno or errno.EIO, f"tracefs refuses {text!r} for {where}: {error.strerror}") from None


def parse_format(text: str) -> EventFormat:
    """Return the layout that an event's `format` file tells.

    A text whose length varies appears as its u4 locator: length << 16 | offset in the record.
    Raises: FormatError if it cannot be understood.
    """
    name, number = re.search(r"^name: (\w+)", text, re.MULTILINE), re.search(r"^ID: (\d+)", text, re.MULTILINE)
    found = list(_FIELD.finditer(text))
    if name is None or number is None or not found:
        raise FormatError(f"an event's format file is not understood: {text[:200]!r}")
    names, kinds, offsets = [], [], []
    for each in found:
        size, num = int(each["size"]), int(each["num"]) if each["num"] else 1
        if each["type"].startswith("__data_loc"):
            kind = "<u4"
        elif each["num"] and each["type"].endswith("char"):
            kind = f"S{size}"
        elif size in {1, 2, 4, 8}:
            kind = f"<{'i' if each['sign'] == '1' else 'u'}{size}"
        else:  # an array, of arguments for instance
            kind = f"({num},)<u{size // num}" if num and size % num == 0 and size // num in {1, 2, 4, 8} else f"V{size}"
        names.append(each["name"])
        kinds.append(kind)
        offsets.append(int(each["at"]))
    end = max(offset + np.dtype(kind).itemsize for offset, kind in zip(offsets, kinds, strict=True))
    dtype = np.dtype({"names": names, "formats": kinds, "offsets": offsets, "itemsize": -(-end // 4) * 4})
    return EventFormat(name[1], int(number[1]), dtype)


def _remove_orphans(root: Path) -> None:
    """Take away instances of processes that no longer live."""
    for path in (root / "instances").glob(f"{PREFIX}*"):
        pid = path.name[len(PREFIX) :].split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):
                path.rmdir()
