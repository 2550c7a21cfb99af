"""One engine measured from its first row to its last query, on a file system of its own. Next: crash, report.recall.

Decides what is measured in which order. Each figure that could not be had is None, and `notes` says why.

Theory. An engine is given a fresh file system. Rows go in; the device's counts are read when the last one is
acknowledged and everything dirty is written, again after a pause (what the file system and the engine still owed), and
again after `finish`. Then the file system is mounted anew, so that nothing of it is in memory, and queries are
searched: the first alone, then the others, each for the first time (cold), then all again (warm).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvtide.errors import ConfigError, KvtideError
from kvtide.stores import corpus
from kvtide.stores.device import LoopDisk, Place, Shared, sync_file_system, why_not
from kvtide.stores.engines.contract import About
from kvtide.stores.host import Worker
from kvtide.stores.traced import reads_of, recording, small_share

Progress = Callable[[str], None]
TOP = 10
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What is measured. `rate` is rows a second, 0 without limit; `settle_s` the pause; the last three are crashes."""

    rows: int = 5000
    dim: int = 256
    batch: int = 1
    is_durable: bool = False
    rate: float = 0.0
    queries: int = 50
    seed: int = 1
    settle_s: float = 0.0
    disk_bytes: int = 4 << 30
    kills: int = 1
    cuts_s: tuple[float, ...] = (0.0,)
    crash_rows: int = 1000

    def check(self) -> None:
        """Raise ConfigError for what cannot be measured."""
        for name, value, least, most in (
            ("--rows", self.rows, TOP, 1 << 30),
            ("--dim", self.dim, 2, 1 << 16),
            ("--batch", self.batch, 1, 1 << 20),
            ("--queries", self.queries, 2, 1 << 16),
        ):
            if not least <= value <= most:
                raise ConfigError(f"{name} is {value}; type a whole number from {least} to {most}")

    @property
    def user_bytes(self) -> int:
        """Bytes of vectors that the user gives: what amplification is over."""
        return self.rows * self.dim * 4


@dataclass(slots=True)
class Measured:
    """Figures of one engine. Times in ns, sizes in bytes, amplification over user bytes. None: not known."""

    engine: str
    batch: int
    acknowledged: str
    source: str = ""
    device_x: float | None = None  # at sync
    device_settled_x: float | None = None
    device_finished_x: float | None = None
    write_bytes_x: float | None = None  # as the process's own counter says
    num_writes: int | None = None
    small_share: float | None = None
    num_flushes: int | None = None
    num_files: int | None = None
    disk_bytes: int | None = None
    insert_ns_p50: float | None = None
    insert_ns_p99: float | None = None
    rows_per_s: float | None = None
    finish_s: float | None = None
    first_ns: float | None = None
    cold_ns_p50: float | None = None
    cold_ns_p99: float | None = None
    warm_ns_p50: float | None = None
    warm_ns_p99: float | None = None
    resident_at_start_bytes: int | None = None  # of the files, before the first query
    first_reads: int | None = None  # of the first query, when nothing was in memory
    first_rounds: int | None = None
    reads_per_query: float | None = None
    read_bytes_per_query: float | None = None
    rounds_per_query: float | None = None
    warm_reads_per_query: float | None = None
    recall: float | None = None
    resident_bytes: int | None = None
    kills: list[dict[str, object]] = field(default_factory=list)
    cuts: list[dict[str, object]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def place_for(work: Path, options: BenchOptions, *, image: int | None = None) -> Place:
    """Return where an engine is measured: a loop device where that is allowed."""
    return Shared(work) if why_not() else LoopDisk(work, size_bytes=options.disk_bytes, image=image)


def measure(about: About, options: BenchOptions, work: Path, *, python: str = "", on: Progress) -> Measured:
    """Return the figures of one engine; an engine that fails has its own words in `notes`.

    Raises: IoError, ConfigError where the place cannot be had.
    """
    options.check()
    said = about.durable if options.is_durable and about.durable else about.acknowledged
    found = Measured(about.name, options.batch, said)
    with place_for(work, options) as place:
        found.source = place.source
        try:
            _write(about, options, place, work, found, python, on)
            _search(about, options, place, work, found, python, on)
        except KvtideError as error:
            found.notes.append(str(error))
    return found


def start(about: About, options: BenchOptions, place: Place, python: str) -> Worker:
    """Return a worker with the engine open in its place."""
    return Worker(
        about.name, place.folder, dim=options.dim, seed=options.seed, is_durable=options.is_durable, python=python
    )


def _write(
    about: About, options: BenchOptions, place: Place, work: Path, found: Measured, python: str, on: Progress
) -> None:
    on(f"{about.name}: {options.rows} rows, {options.batch} a call")
    with start(about, options, place, python) as worker:
        sync_file_system(place.folder)
        before, before_io = place.counts(), worker.order("io")
        with recording(place.number, work, is_own=place.is_own) as recorded:
            done = worker.order("insert", first=0, num=options.rows, batch=options.batch, rate=options.rate)
            io = worker.order("io")
            sync_file_system(place.folder)
            after = place.counts()
            found.num_files, found.disk_bytes = files_of(place.folder)
        if options.settle_s:
            on(f"{about.name}: {options.settle_s:g} s of rest")
            time.sleep(options.settle_s)
            sync_file_system(place.folder)
            found.device_settled_x = (place.counts() - before).write_bytes / options.user_bytes
        on(f"{about.name}: finish")
        found.finish_s = worker.order("finish")["seconds"]
        sync_file_system(place.folder)
        found.device_finished_x = (place.counts() - before).write_bytes / options.user_bytes
        found.resident_bytes = worker.order("io")["resident_bytes"]
        worker.close()
    counts = after - before
    found.device_x = counts.write_bytes / options.user_bytes
    found.write_bytes_x = (io["write_bytes"] - before_io["write_bytes"]) / options.user_bytes
    found.num_writes, found.num_flushes = counts.num_writes, counts.num_flushes
    found.small_share = small_share(recorded)
    if recorded.why:
        found.notes.append(f"no block trace: {recorded.why}")
    if recorded.num_lost:
        found.notes.append(f"{recorded.num_lost} events of the trace were lost")
    found.insert_ns_p50, found.insert_ns_p99 = np.percentile(done["took_ns"], [50, 99]).tolist()
    found.rows_per_s = options.rows / done["seconds"]


def _search(
    about: About, options: BenchOptions, place: Place, work: Path, found: Measured, python: str, on: Progress
) -> None:
    on(f"{about.name}: {options.queries} queries")
    place.refresh()
    with start(about, options, place, python) as worker:
        evict(place.folder)
        found.resident_at_start_bytes = resident_bytes(place.folder)
        with recording(place.number, work, is_own=place.is_own) as recorded:
            cold = worker.order("search", num=options.queries, k=TOP)
            warm = worker.order("search", num=options.queries, k=TOP)
        worker.close()
    begin, end = (np.array(cold[name], np.int64) for name in ("begin_ns", "end_ns"))
    took = end - begin
    found.first_ns = float(took[0])
    found.cold_ns_p50, found.cold_ns_p99 = np.percentile(took, [50, 99]).tolist()
    again = np.array(warm["end_ns"], np.int64) - np.array(warm["begin_ns"], np.int64)
    found.warm_ns_p50, found.warm_ns_p99 = np.percentile(again, [50, 99]).tolist()
    if not recorded.why:
        found.first_reads = found.first_rounds = 0
        found.reads_per_query = found.read_bytes_per_query = found.rounds_per_query = found.warm_reads_per_query = 0.0
    if recorded.frame is not None:
        reads = reads_of(recorded.frame, begin, end)
        found.reads_per_query, found.read_bytes_per_query = float(reads.reads.mean()), float(reads.bytes.mean())
        found.rounds_per_query = float(reads.rounds.mean())
        found.first_reads, found.first_rounds = int(reads.reads[0]), int(reads.rounds[0])
        later = reads_of(recorded.frame, np.array(warm["begin_ns"], np.int64), np.array(warm["end_ns"], np.int64))
        found.warm_reads_per_query = float(later.reads.mean())
    queries = corpus.queries_of(options.queries, options.dim, seed=options.seed)
    true = corpus.exact(queries, options.rows, TOP, seed=options.seed)
    found.recall = corpus.recall_of(np.array(warm["ids"], np.int64), true)


def files_of(folder: Path) -> tuple[int, int]:
    """Return the number of files under `folder`, and the bytes they take on disk."""
    num, size = 0, 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.lstat(os.path.join(where, name)).st_blocks * 512  # noqa: PTH118
            except FileNotFoundError:
                continue
            num += 1
    return num, size


def evict(folder: Path) -> None:
    """Drop the files' pages from memory, but for those that a process has mapped."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def resident_bytes(folder: Path) -> int:
    """Return how many bytes of the files under `folder` are in the page cache, as mincore says."""
    total = 0
    for path in folder.rglob("*"):
        size = path.stat().st_size if path.is_file() else 0
        if not size:
            continue
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        os.close(fd)
        if address == ctypes.c_void_p(-1).value:
            continue
        pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        if not _LIBC.mincore(address, size, pages):
            total += int((np.frombuffer(pages.raw, np.uint8) & 1).sum()) * mmap.PAGESIZE
        _LIBC.munmap(address, size)
    return total
