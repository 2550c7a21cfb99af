"""Our own events: every object the cache wanted and every operation an engine did for it. Next: io.ops.

Recording is one array copy a batch into a bounded ring: the newest `max_events` of each level are kept, the older
ones counted as lost. Nothing is formatted until `write_parquet`. Knows no tier and no kernel; times are those of the
clock its callers read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtide.trace.events import CAUSES, schema
from kvtide.trace.file import About, TraceWriter

if TYPE_CHECKING:
    import polars as pl

OBJECT_EVENT = np.dtype(
    [
        ("time_ns", "<i8"),
        ("sequence_id", "<i8"),
        ("layer", "<i4"),
        ("cause", "u1"),
        ("num_tokens", "<i4"),
        ("wanted_bytes", "<i8"),
        ("dram_bytes", "<i8"),  # copied to the device from DRAM
        ("file_bytes", "<i8"),  # read from the tier below
        ("wait_ns", "<i8"),  # how long the caller stood still
        ("step", "<i8"),  # of the cache, counted from 0
        ("step_tokens", "<i4"),  # new tokens the step computes
    ]
)
OP_EVENT = np.dtype(
    [
        ("time_ns", "<i8"),  # submitted
        ("complete_ns", "<i8"),
        ("cause", "u1"),
        ("is_write", "?"),
        ("fd", "<i4"),
        ("offset", "<u8"),
        ("length", "<u4"),
        ("num_fragments", "<u4"),
        ("depth", "<u4"),
        ("error", "<i4"),
        ("layer", "<i4"),  # of the first fragment
        ("slot", "<i8"),  # of the first fragment
    ]
)


class Ring:
    """The newest `max_events` rows of one kind; grows by doubling up to that, then wraps."""

    def __init__(self, dtype: np.dtype[np.void], max_events: int) -> None:
        self.max_events = max_events
        self.num_seen = 0
        self._rows = np.zeros(min(1024, max_events), dtype)

    @property
    def num_lost(self) -> int:
        return max(0, self.num_seen - self.max_events)

    def extend(self, rows: npt.NDArray[np.void]) -> None:
        """Keep `rows`, dropping the oldest where there is no room."""
        num_dropped = max(0, len(rows) - self.max_events)
        kept, first = rows[num_dropped:], self.num_seen + num_dropped
        self.num_seen += len(rows)
        while len(self._rows) < min(self.num_seen, self.max_events):
            grown = np.zeros(min(self.max_events, 2 * len(self._rows)), self._rows.dtype)
            grown[: len(self._rows)] = self._rows
            self._rows = grown
        at = first % len(self._rows)
        head = min(len(kept), len(self._rows) - at)
        self._rows[at : at + head] = kept[:head]
        self._rows[: len(kept) - head] = kept[head:]

    def rows(self, start: int = 0, end: int | None = None) -> npt.NDArray[np.void]:
        """Return a copy of what is kept of the rows numbered `start` to `end` as they were seen, oldest first."""
        size = len(self._rows)
        end = self.num_seen if end is None else min(end, self.num_seen)
        start = max(start, self.num_seen - size, 0)
        if end <= start:
            return self._rows[:0].copy()
        first, last = start % size, (end - 1) % size + 1
        if first < last:
            return self._rows[first:last].copy()
        return np.concatenate([self._rows[first:], self._rows[:last]])


class Recorder:
    """Collects events of both levels.

    Threads: any thread may record; a lock is held for one array copy.
    """

    def __init__(self, max_events: int = 1 << 20) -> None:
        self.objects = Ring(OBJECT_EVENT, max_events)
        self.ops = Ring(OP_EVENT, max_events)
        self.choices: deque[tuple[int, int, dict[str, float]]] = deque(maxlen=max_events)
        self._lock = threading.Lock()

    def record_objects(self, rows: npt.NDArray[np.void]) -> None:
        """Record what the cache wanted. Shapes: rows [n] OBJECT_EVENT."""
        with self._lock:
            self.objects.extend(rows)

    def record_ops(self, rows: npt.NDArray[np.void]) -> None:
        """Record what an engine did. Shapes: rows [n] OP_EVENT."""
        with self._lock:
            self.ops.extend(rows)

    def record_choice(self, time_ns: int, sequence_id: int, figures: Mapping[str, float]) -> None:
        """Record what became of a kept prefix, and what was expected of each way."""
        with self._lock:
            self.choices.append((time_ns, sequence_id, dict(figures)))

    def counts(self) -> tuple[int, int]:
        """Return how many object and op events were seen so far: marks for `ops_between`."""
        with self._lock:
            return self.objects.num_seen, self.ops.num_seen

    def ops_between(self, start: int, end: int) -> npt.NDArray[np.void]:
        """Return the op events recorded between two marks, as far as they are still kept. Shapes: [n] OP_EVENT."""
        with self._lock:
            return self.ops.rows(start, end)

    def objects_between(self, start: int, end: int) -> npt.NDArray[np.void]:
        """Return the object events recorded between two marks, as far as they are still kept. Shapes: [n]."""
        with self._lock:
            return self.objects.rows(start, end)

    def write_parquet(self, path: Path, about: About | None = None) -> int:
        """Write both levels as one trace file; return the number of rows. `about` says where they come from.

        Raises: ConfigError if `path` cannot be a file; IoError where it cannot be written.
        """
        from kvtide.tables import pl

        about = about or About()
        about.source = about.source or "kvtide"
        with self._lock:
            kept = {"object": self.objects.rows(), "op": self.ops.rows()}
            choices = list(self.choices)
            about.health.num_lost = self.objects.num_lost + self.ops.num_lost
        with TraceWriter(path) as writer:
            for level, rows in kept.items():
                columns = {name: np.ascontiguousarray(rows[name]) for name in rows.dtype.names or () if name != "cause"}
                causes = pl.Series(np.array(CAUSES, object)[rows["cause"]].tolist(), dtype=pl.String)
                writer.add(level, pl.DataFrame(columns).with_columns(causes.alias("cause")))
            writer.add("sample", _samples(choices))
            known = np.concatenate([kept["object"]["time_ns"], kept["op"]["time_ns"], kept["op"]["complete_ns"]])
            about.start_ns, about.end_ns = (int(known.min()), int(known.max())) if len(known) else (0, 0)
            return writer.finish(about)


def _samples(choices: list[tuple[int, int, dict[str, float]]]) -> pl.DataFrame:
    """Return the rows of level `sample`: one a figure of each decision."""
    from kvtide.tables import pl

    rows = [
        (time_ns, "kvtide", f"sequence {sequence}", name, float(value))
        for time_ns, sequence, figures in choices
        for name, value in figures.items()
    ]
    return pl.DataFrame(rows, schema=schema("sample"), orient="row")
