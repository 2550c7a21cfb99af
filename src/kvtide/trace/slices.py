"""Events of one level, counted cell by cell: cause, phase and direction. Next: indicators.

Decides what is counted of an event, and which cells make a slice. Memory does not grow with the number of events.

Theory. Every figure of a slice is a sum over cells, so one pass serves the whole, each cause and each phase. Only what
depends on the order of ops (time with any in flight, gaps) is kept for each slice apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.trace.bins import NUM_BINS, TimeBins
from kvtide.trace.buckets import NUM_BUCKETS, Ints, SizeCounts, bucket_of, latency_of
from kvtide.trace.events import UNKNOWN
from kvtide.trace.figures import Latency, Side, Slice, Timeline
from kvtide.trace.flow import Flow, Runs
from kvtide.trace.objects import PHASES, Phases
from kvtide.trace.rows import ALL_CAUSES, NEITHER, READS, WRITES, Rows

NUM_CELLS = len(ALL_CAUSES) * len(PHASES) * 2
DEVICES_MAX = 2048  # more share the keys of the first, see flow.OFFSET_BITS
BURST_BIN_NS = 100_000_000  # burstiness is of bytes in bins of 100 ms, or a 200th of a short window
BURST_BINS_MIN, BURST_BINS_MAX = 20, 200
DEPTH_LEAST = 1e-6  # of a bin; below lies what rounding leaves of the difference of two large sums
BURST_OPS_MIN = 8  # a bin, on average: with fewer, chance alone makes bins uneven

Floats = npt.NDArray[np.float64]
Cells = npt.NDArray[np.int64]
ALL_CELLS: Cells = np.arange(NUM_CELLS)


def cells_of(*, cause: int | None = None, phase: int | None = None, direction: int | None = None) -> Cells:
    """Return the cells of a slice: those of one cause, one phase, one direction, or all. Shapes: [n]."""
    causes, rest = np.divmod(ALL_CELLS, len(PHASES) * 2)
    phases, directions = np.divmod(rest, 2)
    chosen = np.ones(NUM_CELLS, bool)
    for wanted, values in ((cause, causes), (phase, phases), (direction, directions)):
        if wanted is not None:
            chosen &= values == wanted
    return ALL_CELLS[chosen]


@dataclass(frozen=True, slots=True)
class Window:
    """What a slice is measured over. Shapes: bins [n] of bool, those of the timeline that are inside."""

    ns: int
    bins: npt.NDArray[np.bool_]


class _Durations:
    """Durations of each cell, in buckets."""

    def __init__(self) -> None:
        self.counts: Ints = np.zeros((NUM_CELLS, NUM_BUCKETS), np.int64)
        self.total_ns: Ints = np.zeros(NUM_CELLS, np.int64)
        self.least_ns: Ints = np.full(NUM_CELLS, np.iinfo(np.int64).max)
        self.most_ns: Ints = np.zeros(NUM_CELLS, np.int64)

    def add(self, cells: Ints, took_ns: Ints) -> None:
        self.counts += np.bincount(cells * NUM_BUCKETS + bucket_of(took_ns), minlength=self.counts.size).reshape(
            self.counts.shape
        )
        for cell in np.flatnonzero(np.bincount(cells, minlength=NUM_CELLS)).tolist():
            values = took_ns[cells == cell]
            self.total_ns[cell] += values.sum()
            self.least_ns[cell] = min(self.least_ns[cell], values.min())
            self.most_ns[cell] = max(self.most_ns[cell], values.max())


class SliceMeter:
    """Counts the events of one level."""

    def __init__(self, axis: TimeBins, phases: Phases) -> None:
        self.num_rows = 0
        self.num_flushes = self.num_errors = 0
        self.first_ns, self.last_ns = np.iinfo(np.int64).max, np.iinfo(np.int64).min
        self.bytes_of_device: dict[int, int] = {}
        self._axis, self._phases = axis, phases
        self._num: dict[str, Ints] = {
            name: np.zeros(NUM_CELLS, np.int64)
            for name in ("ops", "bytes", "placed", "sequential", "readahead", "meta", "matched")
        }
        self._sizes = SizeCounts()
        self._device, self._queue = _Durations(), _Durations()
        self._bytes_in_bins = axis.rows(NUM_CELLS)
        self._moments = axis.rows(4)  # matched issues and completions, then those without the other
        self._flows: dict[str, Flow] = {}
        self._runs = Runs()
        self._device_keys: dict[int, int] = {}

    def add(self, rows: Rows) -> None:
        """Count rows; pieces about in order of time."""
        num = len(rows.at_ns)
        if not num:
            return
        self.num_rows += num
        self.num_flushes, self.num_errors = self.num_flushes + rows.num_flushes, self.num_errors + rows.num_errors
        first, last = int(rows.at_ns[0]), int(max(rows.at_ns[-1], rows.complete_ns.max()))
        self.first_ns, self.last_ns = min(self.first_ns, first), max(self.last_ns, last)
        self._axis.cover(first, last)
        cells = (rows.cause * len(PHASES) + self._phases.at(rows.at_ns)) * 2 + np.minimum(rows.direction, WRITES)
        is_data = rows.direction != NEITHER
        has_both = (rows.time_ns != UNKNOWN) & (rows.complete_ns != UNKNOWN)
        self._add_moments(rows, has_both, is_data)
        self._add_counts(rows, cells, is_data)
        self._add_durations(rows, cells, is_data & has_both)
        self._add_flows(rows, cells, has_both & is_data)

    def _add_moments(self, rows: Rows, has_both: npt.NDArray[np.bool_], is_data: npt.NDArray[np.bool_]) -> None:
        """Count issues and completions over time. Flushes are left out: kernels trace them in part."""
        pairs = has_both & is_data
        self._moments.add(rows.time_ns[pairs], 0, is_timed=True)
        self._moments.add(np.maximum(rows.complete_ns, rows.time_ns)[pairs], 1, is_timed=True)
        if not has_both.all():
            lone = ~has_both & is_data
            self._moments.add(rows.time_ns[lone & (rows.time_ns != UNKNOWN)], 2)
            self._moments.add(rows.complete_ns[lone & (rows.complete_ns != UNKNOWN)], 3)

    def _add_counts(self, rows: Rows, cells: Ints, is_data: npt.NDArray[np.bool_]) -> None:
        cells, lengths = cells[is_data], np.maximum(rows.length[is_data], 0)
        self._num["ops"] += _count(cells)
        self._num["bytes"] += np.bincount(cells, lengths, minlength=NUM_CELLS).astype(np.int64)
        self._sizes.add(cells[lengths > 0], lengths[lengths > 0])
        self._bytes_in_bins.add(rows.at_ns[is_data], cells, lengths)
        for name, flags in (("readahead", rows.is_readahead), ("meta", rows.is_meta)):
            if flags is not None and flags.any():
                self._num[name] += _count(cells[flags[is_data]])
        devices, offsets = rows.device[is_data], rows.offset[is_data]
        keys = self._keys(devices, lengths)
        is_placed = offsets != UNKNOWN
        if is_placed.any():
            cells, offsets, lengths, keys = (part[is_placed] for part in (cells, offsets, lengths, keys))
            self._num["placed"] += _count(cells)
            self._num["sequential"] += _count(cells[self._runs.add(keys * 2 + (cells & 1), offsets, lengths)])

    def _keys(self, devices: Ints, lengths: Ints) -> Ints:
        """Return a small number for each device, and count the bytes it moved."""
        if not len(devices):
            return devices
        known = devices[:1] if devices.min() == devices.max() else np.unique(devices)
        places = np.searchsorted(known, devices)
        moved = np.bincount(places, lengths)
        keys = np.zeros(len(known), np.int64)
        for place, device in enumerate(known.tolist()):
            keys[place] = self._device_keys.setdefault(device, len(self._device_keys)) % (DEVICES_MAX // 2)
            self.bytes_of_device[device] = self.bytes_of_device.get(device, 0) + int(moved[place])
        return keys[places]

    def _add_durations(self, rows: Rows, cells: Ints, chosen: npt.NDArray[np.bool_]) -> None:
        cells, times = cells[chosen], rows.time_ns[chosen]
        self._num["matched"] += _count(cells)
        self._device.add(cells, np.maximum(0, rows.complete_ns[chosen] - times))
        if rows.queue_ns is not None:
            queued = rows.queue_ns[chosen]
            is_known = queued != UNKNOWN
            if is_known.any():
                self._queue.add(cells[is_known], np.maximum(0, (times - queued)[is_known]))

    def _add_flows(self, rows: Rows, cells: Ints, has_both: npt.NDArray[np.bool_]) -> None:
        is_issued = rows.time_ns != UNKNOWN
        causes, phases = rows.cause, cells // 2 % len(PHASES)
        chosen: list[tuple[str, npt.NDArray[np.bool_] | None]] = [("whole", None)]
        for kind, codes in (("cause", causes), ("phase", phases)):
            present = np.flatnonzero(np.bincount(codes))
            chosen += [(f"{kind} {code}", None if len(present) == 1 else codes == code) for code in present.tolist()]
        for name, inside in chosen:
            flow = self._flows.setdefault(name, Flow())
            flow.add_issues(rows.time_ns[is_issued if inside is None else is_issued & inside])
            spans = has_both if inside is None else has_both & inside
            flow.add_spans(rows.time_ns[spans], rows.complete_ns[spans])

    @property
    def has_completions(self) -> bool:
        return bool(self._num["matched"].sum())

    def total(self, name: str, cells: Cells = ALL_CELLS) -> int:
        """Return a count of `cells`: ops, bytes, matched, ..."""
        return int(self._num[name][cells].sum())

    def device_ns(self, cells: Cells = ALL_CELLS) -> int:
        """Return the sum of the time from issue to completion."""
        return int(self._device.total_ns[cells].sum())

    def path_ns(self, direction: int) -> int:
        """Return the sum of the time from the block layer to completion."""
        cells = cells_of(direction=direction)
        return int(self._device.total_ns[cells].sum() + self._queue.total_ns[cells].sum())

    @property
    def busy_ns(self) -> int:
        return self._flows["whole"].busy_ns if "whole" in self._flows else 0

    def slice_of(self, name: str, window: Window, *, cause: int | None = None, phase: int | None = None) -> Slice:
        """Return the figures of a slice."""
        made = Slice(name=name, window_ns=window.ns)
        made.read = self._side(cells_of(cause=cause, phase=phase, direction=READS), window)
        made.write = self._side(cells_of(cause=cause, phase=phase, direction=WRITES), window)
        key = f"cause {cause}" if cause is not None else f"phase {phase}" if phase is not None else "whole"
        flow, cells = self._flows.get(key), cells_of(cause=cause, phase=phase)
        if key == "whole":
            made.num_flushes, made.num_errors = self.num_flushes, self.num_errors
        if flow is None or not window.ns or not self.total("matched", cells):
            return made
        device_ns = self.device_ns(cells)
        made.depth = device_ns / window.ns
        made.depth_busy = device_ns / flow.busy_ns if flow.busy_ns else None
        made.busy_share = min(1.0, flow.busy_ns / window.ns)
        median_ns = self._latency(self._device, cells).p50_ns
        if flow.gap_ns is not None and median_ns:
            made.submit_gap_ratio = flow.gap_ns / median_ns
        return made

    def both_sides(self, window_ns: int) -> Side:
        """Return reads and writes together, without their shape over time."""
        return self._side(ALL_CELLS, Window(window_ns, np.zeros(NUM_BINS, bool)))

    def _latency(self, durations: _Durations, cells: Cells) -> Latency:
        return latency_of(
            durations.counts[cells].sum(axis=0),
            total_ns=float(durations.total_ns[cells].sum()),
            least_ns=int(durations.least_ns[cells].min()),
            most_ns=int(durations.most_ns[cells].max()),
        )

    def _side(self, cells: Cells, window: Window) -> Side:
        num_ops, num_bytes = self.total("ops", cells), self.total("bytes", cells)
        made = Side(num_ops=num_ops, num_bytes=num_bytes)
        if not num_ops:
            return made
        made.sizes = self._sizes.sizes(cells, num_bytes)
        made.device, made.queue = self._latency(self._device, cells), self._latency(self._queue, cells)
        placed = self.total("placed", cells)
        made.sequential_share = self.total("sequential", cells) / placed if placed else None
        made.readahead_share = self.total("readahead", cells) / num_ops
        made.meta_share = self.total("meta", cells) / num_ops
        if window.ns:
            made.bytes_per_s, made.ops_per_s = num_bytes / window.ns * 1e9, num_ops / window.ns * 1e9
            made.depth = self.device_ns(cells) / window.ns if self.total("matched", cells) else None
        self._fill_evenness(made, self._bytes_in_bins.sums[cells].sum(axis=0)[window.bins], window.ns)
        return made

    @staticmethod
    def _fill_evenness(side: Side, per_bin: Floats, window_ns: int) -> None:
        """Set how unevenly bytes are spread over time. Nothing can be told from few ops."""
        wanted = min(max(BURST_BINS_MAX, window_ns // BURST_BIN_NS), len(per_bin), side.num_ops // BURST_OPS_MIN)
        if wanted < BURST_BINS_MIN:
            return
        width = -(-len(per_bin) // wanted)
        even = per_bin[: len(per_bin) // width * width].reshape(-1, width).sum(axis=1)
        if not even.any():
            return
        side.burstiness = float(even.std() / even.mean())
        side.active_share = float(np.count_nonzero(even) / len(even))
        side.num_bursts = int(np.count_nonzero(np.diff((even > even.mean()).astype(np.int8), prepend=0) == 1))

    def timeline(self, bins: npt.NDArray[np.bool_]) -> Timeline:
        """Return what happens over time, in the bins chosen."""
        sums = self._bytes_in_bins.sums
        depth = (self._moments.integral(0) - self._moments.integral(1)) / self._axis.width_ns
        by_cause = {name: sums[cells_of(cause=code)].sum(axis=0)[bins] for code, name in enumerate(ALL_CAUSES)}
        return Timeline(
            start_ns=self._axis.start_ns + int(np.argmax(bins)) * self._axis.width_ns,
            bin_ns=self._axis.width_ns,
            depth=np.where(depth > DEPTH_LEAST, depth, 0.0)[bins],
            read_bytes=sums[cells_of(direction=READS)].sum(axis=0)[bins],
            write_bytes=sums[cells_of(direction=WRITES)].sum(axis=0)[bins],
            by_cause={name: values for name, values in by_cause.items() if values.any()},
        )

    def matching(self, start_ns: int, end_ns: int) -> tuple[float, float | None]:
        """Return the share of events without their other half, and by how much Little's law is missed.

        Those that were in flight when the trace began or ended are forgiven: issues less than the longest time in
        flight before the end, completions as soon after the start. N counts every event, those without their other
        half as in flight for the 99th percentile; X R counts pairs only. Taking a lone issue as in flight for ever, as
        the plain difference of issues and completions does, would let one lost event spoil a whole trace.
        """
        longest_ns = int(self._device.most_ns.max())
        edges = self._axis.start_ns + np.arange(NUM_BINS) * self._axis.width_ns
        is_inner = np.stack([edges + self._axis.width_ns <= end_ns - longest_ns, edges > start_ns + longest_ns])
        num_lone = float((self._moments.sums[2:] * is_inner).sum())
        num_known = float(self._moments.sums[0].sum())
        share = num_lone / (num_lone + num_known) if num_lone else 0.0
        pairs_ns = float(self._device.total_ns.sum())
        if not pairs_ns:
            return share, None
        lone_ns = num_lone * self._latency(self._device, ALL_CELLS).p99_ns
        return share, lone_ns / (pairs_ns + lone_ns)


def _count(cells: Ints) -> Ints:
    return np.bincount(cells, minlength=NUM_CELLS)
