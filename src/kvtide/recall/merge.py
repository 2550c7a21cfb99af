"""Sealed logs become segments, and small segments larger ones, in the background. Next: memory.

Decides when and what (`planned`), and in which order things become durable, so that a crash between any two steps
leaves the old parts or the new segment, never both visible, nor neither:

    segment written and synced; whole by its own entry; opened; manifest noted; seen by searches; old parts removed

A merge carries over rows that are live, unchecked, with their checks. It keeps ids that died in segments older than
itself, as long as there are such: else they would come back when the log that killed them is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtide.errors import KvtideError
from kvtide.recall.contract import LOG_BYTES_A_ROW, MemoryOptions
from kvtide.recall.manifest import (
    SEGMENT_NAME,
    Entry,
    Manifest,
    manifest_path,
    numbers,
    read_manifest,
    segment_path,
    write_manifest,
)
from kvtide.recall.place import Place
from kvtide.recall.records import Ids
from kvtide.recall.segments import MISSING, Rows, Segment, is_installed, write_segment
from kvtide.recall.shelf import Shelf, Volume
from kvtide.tiers.owner import named
from kvtide.trace.events import CAUSES
from kvtide.trace.record import OP_EVENT, Recorder

TIER = 8  # segments of one size become one of the next
BATCH_BYTES = 1 << 20
POLL_S = 0.002  # readers of a part that was replaced end soon
_log = logging.getLogger("kvtide.recall")


def planned(segment_rows: Sequence[int], log_rows: int, log_bytes: int, *, merge_rows: int) -> int | None:
    """Return the first segment to merge with the sealed logs, the number of segments for none; None: nothing is due.

    Logs become a segment once they hold `merge_rows`. With seven segments of its tier before it they become one of the
    next tier, at once: each row is written once a tier.
    """
    if log_rows < merge_rows and log_bytes < merge_rows * LOG_BYTES_A_ROW:
        return None
    first, rows = len(segment_rows), log_rows
    while True:
        tier, begin = _tier(rows, merge_rows), first
        while begin and _tier(segment_rows[begin - 1], merge_rows) <= tier:
            begin -= 1
        if first - begin < TIER - 1:
            return first
        rows += sum(segment_rows[begin:first])
        first = begin


def _tier(rows: int, merge_rows: int) -> int:
    tier = 0
    while rows >= merge_rows * TIER ** (tier + 1):
        tier += 1
    return tier


@dataclass(frozen=True, slots=True)
class _Job:
    """What is merged: segments and sealed logs next to each other, and the rows of each that live."""

    segments: list[Segment]
    logs: list[Volume]
    live: list[Ids]
    deleted: Ids

    @property
    def sources(self) -> list[Segment | Volume]:
        return [*self.segments, *self.logs]


class _Closed(Exception):  # noqa: N818
    """The memory is being closed: what a merge began is thrown away."""


class Merger:
    """Merges of a memory, in a thread that begins with the first.

    Threads: `wake` and `close` from any.
    """

    def __init__(self, shelf: Shelf, place: Place, options: MemoryOptions, recorder: Recorder | None = None) -> None:
        self._shelf, self._place, self._options, self._recorder = shelf, place, options, recorder
        self._manifest = Manifest()
        self._due, self._is_closed, self._is_told = threading.Event(), False, False
        self._thread: threading.Thread | None = None
        self.num_merges = self.num_rows = 0  # done since opening, and the rows they wrote

    def load(self) -> int:
        """Open the segments, remove what a crash left beside them; return the last log that is in them.

        Raises: UnsupportedError if there are segments and no pylance; FormatError for one that is not whole; IoError.
        """
        path, described = self._place.path, self._place.description
        with named(path):
            self._manifest = read_manifest(path)
            known = {one.number for one in self._manifest.entries}
            for number in set(numbers(path, SEGMENT_NAME)) - known:
                shutil.rmtree(segment_path(path, number))
            merged = [number for number in self._place.logs() if number <= self._manifest.logs_to]
        if merged:
            self._place.retire_logs(merged)
        for entry in self._manifest.entries:
            made = Segment(path, entry, described.metric, described.dim, described.salt)
            for older in self._shelf.segments:
                older.kill(made.ids)
                older.kill(made.deleted)
            self._shelf.segments.append(made)
        return self._manifest.logs_to

    def wake(self) -> None:
        """Merge, if something is due; returns at once."""
        if self._first() is None or self._is_closed:
            return
        if not is_installed():
            if not self._is_told:
                _log.warning("%s stays a row of logs, searched one by one: %s", self._place.path, MISSING)
            self._is_told = True
            return
        self._due.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtide-merge", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # a library's thread that outlives the interpreter aborts the process

    def wait(self) -> None:
        """Return when nothing is due, or a merge failed."""
        while self._due.is_set():
            time.sleep(POLL_S)

    def close(self) -> None:
        """Give up the merge under way, and end the thread. Idempotent."""
        self._is_closed = True
        self._due.set()
        if self._thread is not None:
            self._thread.join()
        atexit.unregister(self.close)

    def _run(self) -> None:
        while not self._is_closed:
            self._due.wait()
            try:
                while not self._is_closed and (first := self._first()) is not None:
                    self._merge(first)
            except (_Closed, KvtideError, OSError) as error:
                if self._is_closed:
                    return
                if not self._is_told:
                    _log.warning("merge failed, and is tried again when the next log is full: %s", error)
                self._is_told = True
            self._due.clear()

    def _sealed(self) -> list[Volume]:
        return [one for one in self._shelf.volumes[:-1] if one.part.is_sealed]

    def _first(self) -> int | None:
        with self._shelf.lock:
            logs = self._sealed()
            rows = [one.num_live for one in self._shelf.segments]
            log_rows, log_bytes = sum(one.part.num_rows for one in logs), sum(one.log.end for one in logs)
        return planned(rows, log_rows, log_bytes, merge_rows=self._options.merge_rows)

    # One merge

    def _merge(self, first: int) -> None:
        job = self._job(first)
        path = self._place.path
        with named(path):
            number = max(numbers(path, SEGMENT_NAME), default=0) + 1
        entry = Entry(
            number=number,
            num_rows=0,
            num_deleted=0,
            rows_check="",
            replaces=tuple(one.entry.number for one in job.segments),
            logs_to=job.logs[-1].log.number,
            is_indexed=sum(map(len, job.live)) >= self._options.index_rows,
        )
        try:
            made = self._written(job, entry)
        except BaseException:
            self._undo(number)
            raise
        self._swap(job, made)
        self._remove(job)
        self.num_merges, self.num_rows = self.num_merges + 1, self.num_rows + made.num_rows

    def _job(self, first: int) -> _Job:
        with self._shelf.lock:
            segments, logs = self._shelf.segments[first:], self._sealed()
            sources: list[Segment | Volume] = [*segments, *logs]
            live = [np.flatnonzero(one.part.live[: one.part.num_rows]) for one in sources]
            older = self._shelf.segments[:first]
            dead = [one.ids[~one.live] for one in older]
        later: Ids = np.zeros(0, np.int64)  # said by segments that stay
        deleted = later
        for one, ids in zip(reversed(older), reversed(dead), strict=True):
            deleted = np.union1d(deleted, np.setdiff1d(ids, later))
            later = reduce(np.union1d, (later, one.ids, one.deleted))
        return _Job(segments, logs, live, deleted)

    def _written(self, job: _Job, entry: Entry) -> Segment:
        path, described = self._place.path, self._place.description
        args = described.metric, described.dim, described.salt
        begun_ns = time.monotonic_ns()
        entry = write_segment(path, self._rows(job), job.deleted, entry, *args)
        if self._recorder is not None:
            self._recorder.record_ops(_written_files(segment_path(path, entry.number), begun_ns))
        made = Segment(path, entry, *args)
        manifest = self._manifest.after(entry)
        write_manifest(path, manifest)
        self._manifest = manifest
        return made

    def _undo(self, number: int) -> None:
        """Remove a segment that was not finished, unless the manifest names it: then it is as good as what it has."""
        noted = manifest_path(self._place.path, self._manifest.number + 1)
        with contextlib.suppress(OSError, KvtideError):
            noted.unlink(missing_ok=True)
            self._place.sync()
            shutil.rmtree(segment_path(self._place.path, number), ignore_errors=True)

    def _rows(self, job: _Job) -> Iterator[Rows]:
        """Yield what lives, about 1 MiB at a time, not faster than the budget."""
        begin, moved = time.monotonic(), 0
        for source, live in zip(job.sources, job.live, strict=True):
            for rows in _batches(source, live, self._place.description.dim):
                made = source.rows(rows) if isinstance(source, Segment) else _log_rows(source, rows)
                moved += made.vectors.nbytes + made.payloads.nbytes + 28 * len(rows)
                due = begin + moved / self._options.merge_bytes_per_s
                while not self._is_closed and (ahead := due - time.monotonic()) > 0:
                    time.sleep(min(ahead, 0.05))
                if self._is_closed:
                    raise _Closed
                yield made

    def _swap(self, job: _Job, made: Segment) -> None:
        """Let searches see the segment in place of what it replaces; what died meanwhile is dead."""
        with self._shelf.lock:
            live = [one.part.live[rows] for one, rows in zip(job.sources, job.live, strict=True)]
            made.live = np.concatenate(live)
            first = len(self._shelf.segments) - len(job.segments)
            self._shelf.segments[first:] = [made]
            del self._shelf.volumes[: len(job.logs)]

    def _remove(self, job: _Job) -> None:
        for one in job.sources:
            while one.part.num_readers:
                time.sleep(POLL_S)
            one.close()
        self._place.retire_logs([volume.log.number for volume in job.logs])
        with named(self._place.path):
            for segment in job.segments:
                shutil.rmtree(segment.folder)
        self._place.sync()


def _written_files(folder: Path, begun_ns: int) -> npt.NDArray[np.void]:
    """Return an event for each file of a segment: Lance writes them by itself, at some time since `begun_ns`."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    events = np.zeros(len(sizes), OP_EVENT)
    events["time_ns"], events["complete_ns"] = begun_ns, time.monotonic_ns()
    events["cause"], events["is_write"], events["fd"] = CAUSES.index("memory-segment"), True, -1
    events["length"] = np.minimum(sizes, np.iinfo(np.uint32).max)
    events["num_fragments"], events["depth"], events["layer"], events["slot"] = 1, 1, -1, -1
    return events


def _log_rows(volume: Volume, rows: Ids) -> Rows:
    placed = volume.part.placed[rows]
    payloads, ends = volume.part.payloads(rows)
    return Rows(placed["id"], placed["check"], volume.part.vectors(rows), payloads, ends)


def _batches(source: Segment | Volume, rows: Ids, dim: int) -> Iterator[Ids]:
    """Yield runs of rows of about a batch each; payloads of a segment are taken to be small."""
    sizes = np.full(len(rows), 4 * dim + 28, np.int64)
    if isinstance(source, Volume):
        sizes += source.part.placed["payload_bytes"][rows]
    portion = np.cumsum(sizes) // BATCH_BYTES
    edges = [0, *(np.flatnonzero(np.diff(portion)) + 1).tolist(), len(rows)]
    for first, end in itertools.pairwise(edges):
        if end > first:
            yield rows[first:end]
