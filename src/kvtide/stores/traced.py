"""A block trace of a store's own device, in pieces: write sizes, and the reads of each query. Next: bench.

Where the kernel may not be traced, nothing is known and None is said, never 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvtide.errors import KvtideError
from kvtide.stores.rounds import Ints, queries_of, rounds_of
from kvtide.trace.events import READ, UNKNOWN, WRITE

if TYPE_CHECKING:
    import polars as pl

SMALL_BYTES = 16 << 10  # below: small, as `thresholds.SMALL_BYTES_ALONE`


@dataclass(slots=True)
class Recorded:
    """Block commands of a piece of time; `why` says why there are none."""

    frame: pl.DataFrame | None = None
    num_lost: int = 0
    why: str = ""
    frames: list[pl.DataFrame] = field(default_factory=list)

    def of(self, kind: int) -> pl.DataFrame | None:
        """Return the commands that carry data one way."""
        if self.frame is None:
            return None
        return self.frame.filter((self.frame["flags"] & kind != 0) & (self.frame["length"] > 0))


@contextmanager
def recording(device: int, folder: Path, *, is_own: bool) -> Iterator[Recorded]:
    """Record what the device does inside; `folder` must lie elsewhere. Only of a device of one's own."""
    from kvtide.tables import pl
    from kvtide.trace.kernel import Capture, CaptureOptions

    recorded = Recorded()
    capture = None
    try:
        if is_own:
            capture = Capture(CaptureOptions(device=device, has_uring=False, folder=folder))
            capture.start()
        else:
            recorded.why = "the device is shared with others"
    except KvtideError as refused:
        recorded.why = str(refused)
    try:
        yield recorded
        if capture is not None:
            capture.stop()
            recorded.num_lost = capture.num_lost
            frames = [frame for level, frame in capture.frames() if level == "block"]
            recorded.frame = pl.concat(frames) if frames else None
    finally:
        if capture is not None:
            capture.close()


def small_share(recorded: Recorded) -> float | None:
    """Return the share of write commands that are small."""
    writes = recorded.of(WRITE)
    return None if writes is None or not len(writes) else float((writes["length"] < SMALL_BYTES).mean())  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class QueryReads:
    """What each query read from the device. Shapes: [q]."""

    reads: Ints
    bytes: Ints
    rounds: Ints


def reads_of(frame: pl.DataFrame, begin_ns: Ints, end_ns: Ints) -> QueryReads:
    """Return the reads of each query, from block commands. Shapes: begin_ns, end_ns [q]."""
    reads = frame.filter((frame["flags"] & READ != 0) & (frame["length"] > 0))
    queued, issued, complete = (reads[name].to_numpy() for name in ("queue_ns", "time_ns", "complete_ns"))
    start = np.where(queued == UNKNOWN, issued, queued)
    query = queries_of(start, begin_ns, end_ns)
    known = query >= 0
    num = len(begin_ns)
    return QueryReads(
        np.bincount(query[known], minlength=num).astype(np.int64),
        np.bincount(query[known], weights=reads["length"].to_numpy()[known], minlength=num).astype(np.int64),
        rounds_of(query, start, complete, num_queries=num),
    )
