"""Sums and histograms of recorded events, made when somebody asks. Next: sources.

Nothing is counted while operations run: what came into the recorder's rings since the last time is taken out as one
array and added up. Events that were overwritten in between are counted as lost.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtide.trace.events import CAUSES
from kvtide.trace.record import Recorder

DIRECTIONS = ("read", "write")
PORTION = 1 << 15  # events added up at once: a few milliseconds

# Upper bounds, the last one without end. Times from what a fast drive takes for a page to what a stuck one does;
# sizes from a page to the largest operation; depths to the largest `depth_max` that is of any use.
SECONDS = np.array([*(5.0**i * 2.0**j / 1e5 for i in range(7) for j in (0, 1)), np.inf])
BYTES = np.array([*(float(1 << power) for power in range(12, 22)), np.inf])
DEPTHS = np.array([*(float(1 << power) for power in range(9)), np.inf])


@dataclass(slots=True)
class Histogram:
    """Counts under upper `bounds`, not cumulative, and the sum of all values."""

    bounds: npt.NDArray[np.float64]
    total: float = 0.0
    counts: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = np.zeros(len(self.bounds), np.int64)

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Count `values`. A value that equals a bound lies under it."""
        edges = np.concatenate([[-np.inf], np.nextafter(self.bounds[:-1], np.inf), [np.inf]])
        self.counts += np.histogram(values, edges)[0]
        self.total += float(values.sum())

    def cumulative(self) -> list[tuple[str, float]]:
        """Return bounds as Prometheus writes them, each with how many values lie under it."""
        names = [f"{bound:.12g}" for bound in self.bounds[:-1].tolist()] + ["+Inf"]
        return list(zip(names, np.cumsum(self.counts).astype(float).tolist(), strict=True))


Place = tuple[str, str]  # direction and cause


class EventSums:
    """What the events of one recorder add up to.

    Threads: any may call.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._lock = threading.Lock()
        self._seen = (0, 0)
        self.seconds: dict[Place, Histogram] = {}
        self.sizes: dict[Place, Histogram] = {}
        self.depths: dict[str, Histogram] = {}
        self.moved: Counter[tuple[str, str, str]] = Counter()  # bytes by tier, direction, cause
        self.errors: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()

    def update(self) -> None:
        """Take in what was recorded since the last time."""
        with self._lock:
            end = self._recorder.counts()
            while self._seen != end:  # in portions, so that the threads that move KV get their turn
                start = self._seen
                self._seen = min(start[0] + PORTION, end[0]), min(start[1] + PORTION, end[1])
                objects = self._recorder.objects_between(start[0], self._seen[0])
                ops = self._recorder.ops_between(start[1], self._seen[1])
                self.lost["object"] += self._seen[0] - start[0] - len(objects)
                self.lost["op"] += self._seen[1] - start[1] - len(ops)
                self._add_objects(objects)
                self._add_ops(ops)

    def _add_objects(self, rows: npt.NDArray[np.void]) -> None:
        for cause, mine in _by_cause(rows):
            dram, file = int(mine["dram_bytes"].sum()), int(mine["file_bytes"].sum())
            there = np.maximum(mine["wanted_bytes"] - mine["dram_bytes"] - mine["file_bytes"], 0)
            self.moved["device", "read", cause] += int(there.sum())
            self.moved["dram", "read", cause] += dram + file  # what comes from a file passes through DRAM

    def _add_ops(self, rows: npt.NDArray[np.void]) -> None:
        for is_write, direction in enumerate(DIRECTIONS):
            mine = rows[rows["is_write"] == is_write]
            if not len(mine):
                continue
            self.errors[direction] += int((mine["error"] != 0).sum())
            self.depths.setdefault(direction, Histogram(DEPTHS)).add(mine["depth"].astype(float))
            for cause, some in _by_cause(mine):
                place = direction, cause
                took = (some["complete_ns"] - some["time_ns"]) / 1e9
                self.seconds.setdefault(place, Histogram(SECONDS)).add(np.maximum(took, 0.0))
                self.sizes.setdefault(place, Histogram(BYTES)).add(some["length"].astype(float))
                self.moved["file", direction, cause] += int(some["length"].sum(dtype=np.int64))


def _by_cause(rows: npt.NDArray[np.void]) -> Iterator[tuple[str, npt.NDArray[np.void]]]:
    """Yield each cause with its rows."""
    for cause in np.unique(rows["cause"]).tolist():
        yield CAUSES[cause], rows[rows["cause"] == cause]
