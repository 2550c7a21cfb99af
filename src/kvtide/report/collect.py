"""What charts need beyond the figures: places over time, latency distributions, where wanted KV was. Next: drill.

One pass over the level that the figures are counted from. Everything is counted into arrays of fixed size, so memory
does not grow with the trace. Draws nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtide.trace.bins import BinRows, TimeBins
from kvtide.trace.buckets import NUM_BUCKETS, bucket_of, percentiles
from kvtide.trace.events import UNKNOWN
from kvtide.trace.figures import Indicators, Timeline
from kvtide.trace.file import TraceFile
from kvtide.trace.rows import COLUMNS_USED, NEITHER, READS, WRITES, Rows, data_rows, split_calls

TIME_COLUMNS, PLACE_ROWS = 120, 64  # of a heat map: readable on a phone, and 15,360 cells for both directions
PLACES_MAX = 4  # devices or files that are counted; the one with most bytes is drawn
NINES_MAX = 5.0  # percentiles are drawn up to 99.999 %
CURVE_POINTS = 101
PIECE_ROWS = 1 << 18
DIRECTIONS = {READS: "read", WRITES: "write"}
KINDS = ("device", "queue")
FLOW_COLUMNS = ("wanted_bytes", "dram_bytes", "file_bytes")

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class Heat:
    """Bytes by time and place, of one device or file. Shapes: read, write [place, time]; edges one longer."""

    place: int  # number of the device, or of the open file
    time_edges_ns: Floats
    place_edges_bytes: Floats
    read: Floats
    write: Floats


@dataclass(slots=True)
class Curve:
    """A latency distribution: `ns` at each of `nines`, -log10 of the share that is slower. Shapes: [n] each."""

    direction: str
    kind: str  # device or queue
    nines: Floats
    ns: Floats


@dataclass(slots=True)
class KvFlow:
    """Where the KV was that the cache wanted for one cause. Sizes in bytes."""

    cause: str
    device_bytes: int
    dram_bytes: int
    file_bytes: int


@dataclass(slots=True)
class Collected:
    """What charts are drawn from."""

    heat: Heat | None = None
    curves: list[Curve] = field(default_factory=list)
    flows: list[KvFlow] = field(default_factory=list)


def collect(trace: TraceFile, figures: Indicators) -> Collected:
    """Return what charts of `trace` need; `figures` say the level, the device and the window."""
    found = Collected(flows=_flows(trace))
    if figures.level not in COLUMNS_USED:
        return found
    places, latencies = PlaceMeter(figures.timeline), LatencyMeter()
    for frame in trace.frames(figures.level, COLUMNS_USED[figures.level], rows=PIECE_ROWS):
        data = split_calls(frame)[0] if figures.level == "call" else frame
        if not len(data):
            continue
        rows = data_rows(figures.level, data)
        places.add(rows)
        latencies.add(rows)
    found.heat, found.curves = places.result(), latencies.result()
    return found


class PlaceMeter:
    """Counts bytes by time and offset, for each device or file. An op counts where and when it begins.

    Offsets are cut as `TimeBins` cuts time: bins of equal width that become twice as wide when an offset lies outside.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._start_ns = timeline.start_ns
        self._width_ns = max(1, -(-timeline.bin_ns * max(1, len(timeline.depth)) // TIME_COLUMNS))
        self._places: dict[int, BinRows] = {}  # by device or file; rows: reads by time, then writes by time

    def add(self, rows: Rows) -> None:
        """Count rows."""
        column = (rows.at_ns - self._start_ns) // self._width_ns
        is_inside = (column >= 0) & (column < TIME_COLUMNS) & (rows.offset != UNKNOWN) & (rows.direction != NEITHER)
        for place in np.unique(rows.device[is_inside]).tolist():
            if place not in self._places:
                if len(self._places) == PLACES_MAX:
                    continue
                self._places[place] = TimeBins().rows(2 * TIME_COLUMNS)
            chosen = is_inside & (rows.device == place)
            bins, offsets = self._places[place], rows.offset[chosen]
            bins.axis.cover(int(offsets.min()), int(offsets.max()))
            bins.add(offsets, column[chosen] + rows.direction[chosen] * TIME_COLUMNS, rows.length[chosen])

    def result(self) -> Heat | None:
        """Return the bytes of the place where most were moved; None where no offset is known."""
        if not self._places:
            return None
        place, bins = max(self._places.items(), key=lambda item: float(item[1].sums.sum()))
        used = np.flatnonzero(bins.sums.any(axis=0))
        first, last = (int(used[0]), int(used[-1])) if len(used) else (0, 0)
        merged = -(-(last - first + 1) // PLACE_ROWS)  # bins that make one row
        num_rows = -(-(last - first + 1) // merged)
        padded = np.zeros((2, TIME_COLUMNS, num_rows * merged))
        kept = bins.sums[:, first : last + 1].reshape(2, TIME_COLUMNS, -1)
        padded[:, :, : kept.shape[2]] = kept
        read, write = padded.reshape(2, TIME_COLUMNS, num_rows, merged).sum(axis=3).transpose(0, 2, 1)
        width = bins.axis.width_ns  # of a bin, in bytes
        return Heat(
            place,
            self._start_ns + np.arange(TIME_COLUMNS + 1.0) * self._width_ns,
            bins.axis.start_ns + (first + np.arange(num_rows + 1.0) * merged) * width,
            read,
            write,
        )


class LatencyMeter:
    """Counts how long ops were in the device and in the queue before it, in buckets."""

    def __init__(self) -> None:
        shape = (len(DIRECTIONS), len(KINDS))
        self._counts: Ints = np.zeros((*shape, NUM_BUCKETS), np.int64)
        self._least: Ints = np.full(shape, np.iinfo(np.int64).max)
        self._most: Ints = np.zeros(shape, np.int64)

    def add(self, rows: Rows) -> None:
        """Count rows."""
        is_issued = (rows.time_ns != UNKNOWN) & (rows.direction != NEITHER)
        self._count(0, is_issued & (rows.complete_ns != UNKNOWN), rows.complete_ns - rows.time_ns, rows.direction)
        if rows.queue_ns is not None:
            self._count(1, is_issued & (rows.queue_ns != UNKNOWN), rows.time_ns - rows.queue_ns, rows.direction)

    def _count(self, kind: int, is_known: npt.NDArray[np.bool_], took_ns: Ints, direction: Ints) -> None:
        for way in DIRECTIONS:
            took = np.maximum(took_ns[is_known & (direction == way)], 0)
            if len(took):
                self._counts[way, kind] += np.bincount(bucket_of(took), minlength=NUM_BUCKETS)
                self._least[way, kind] = min(self._least[way, kind], took.min())
                self._most[way, kind] = max(self._most[way, kind], took.max())

    def result(self) -> list[Curve]:
        """Return a curve for each direction and kind that was seen, as far as its number of ops allows."""
        curves = []
        for way, direction in DIRECTIONS.items():
            for kind, name in enumerate(KINDS):
                counts = self._counts[way, kind]
                num = int(counts.sum())
                if num:
                    nines = np.linspace(0, min(NINES_MAX, np.log10(num)), CURVE_POINTS)
                    least, most = int(self._least[way, kind]), int(self._most[way, kind])
                    ns = percentiles(counts, 1 - 10.0**-nines, least=least, most=most)
                    curves.append(Curve(direction, name, nines, ns))
        return curves


def _flows(trace: TraceFile) -> list[KvFlow]:
    from kvtide.tables import pl

    parts = [
        frame.group_by("cause").agg(pl.col(name).clip(0).sum() for name in FLOW_COLUMNS)
        for frame in trace.frames("object", ("cause", *FLOW_COLUMNS))
    ]
    if not parts:
        return []
    sums = pl.concat(parts).group_by("cause").agg(pl.col(name).sum() for name in FLOW_COLUMNS).sort("cause")
    return [KvFlow(cause, max(0, wanted - dram - file), dram, file) for cause, wanted, dram, file in sums.iter_rows()]
