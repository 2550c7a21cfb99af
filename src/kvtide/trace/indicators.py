"""All figures of a trace, measured in one pass over its rows. Next: thresholds, verdict.

Decides which level the figures are counted from and how levels are compared. Knows no terminal and judges nothing.
Memory does not grow with the number of events. docs/indicators.md says what each figure means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtide.roofline import Roof, Roofline
from kvtide.trace.bins import NUM_BINS, TimeBins
from kvtide.trace.events import COLUMNS, shaped
from kvtide.trace.figures import Indicators, Side, Slice, Trust
from kvtide.trace.file import About, Device, TraceFile
from kvtide.trace.objects import COLUMNS_USED as OBJECT_COLUMNS
from kvtide.trace.objects import PHASES, ObjectMeter
from kvtide.trace.rows import ALL_CAUSES, COLUMNS_USED, READS, Calls, data_rows, split_calls
from kvtide.trace.series import SampleMeter
from kvtide.trace.slices import SliceMeter, Window, cells_of

if TYPE_CHECKING:
    import polars as pl

EVENT_LEVELS = ("block", "op", "call")
USED = {level: frozenset(names) for level, names in COLUMNS_USED.items()} | {
    "object": frozenset(OBJECT_COLUMNS),
    "sample": frozenset(COLUMNS["sample"]),
}
NS_PER_DAY = 86_400 * 10**9
DAY_WINDOW_NS_MIN = 10**9  # from less than a second of writes nothing is said about a day
STACK_PAGE_CACHE_MAX = 0.5  # calls that the page cache answers tell nothing about the way to the device
CPU_SERIES = ("process", "cpu_share")  # source and name of the samples of CPU time, as a share of one core


def measure(
    trace: TraceFile, *, roofline: Roofline | None = None, start_ns: int | None = None, end_ns: int | None = None
) -> Indicators:
    """Return the figures of `trace`, or of what began in it from `start_ns` to before `end_ns`.

    Raises: FormatError if the file does not hold what it says.
    """
    meter = Meter(trace.about, roofline, start_ns=start_ns, end_ns=end_ns)
    for level, columns in [("object", OBJECT_COLUMNS), ("sample", None), *COLUMNS_USED.items()]:
        for frame in trace.frames(level, columns):
            meter.add(level, frame)
    return meter.result()


class Meter:
    """Adds up rows of any level. Object rows of a time come before the events of that time, so that phases are known.

    Threads: one at a time.
    """

    def __init__(
        self,
        about: About,
        roofline: Roofline | None = None,
        *,
        start_ns: int | None = None,
        end_ns: int | None = None,
    ) -> None:
        self._about, self._roofline = about, roofline
        self._start_ns, self._end_ns = start_ns, end_ns
        first = about.start_ns if start_ns is None else start_ns
        self._axis = TimeBins(first, about.end_ns if end_ns is None else end_ns)
        self._objects, self._samples, self._calls = ObjectMeter(), SampleMeter(), Calls()
        self._meters = {level: SliceMeter(self._axis, self._objects.phases) for level in EVENT_LEVELS}
        self._num_rows = dict.fromkeys(("object", "op", "call", "block", "sample"), 0)
        self._sample_ns: list[int] = []  # first and last

    def add(self, level: str, frame: pl.DataFrame) -> None:
        """Add rows of `level`; columns as in `events`, those that are missing are unknown."""
        if not len(frame):
            return
        if not USED[level] <= set(frame.columns):
            frame = shaped(level, frame)
        frame = self._inside(frame)
        if not len(frame):
            return
        self._num_rows[level] += len(frame)
        if level == "object":
            self._objects.add(frame)
        elif level == "sample":
            self._samples.add(frame)
            times = frame["time_ns"].to_numpy()
            ends = [*self._sample_ns, int(times.min()), int(times.max())]
            self._sample_ns = [min(ends), max(ends)]
        else:
            if level == "call":
                frame, calls = split_calls(frame)
                self._calls.add(calls)
            if len(frame):
                self._meters[level].add(data_rows(level, frame))

    def _inside(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return the rows of the time asked for: of an event its start, or its end where the start is not known."""
        from kvtide.tables import pl

        at = pl.col("time_ns")
        if "complete_ns" in frame.columns:
            at = pl.when(at == -1).then(pl.col("complete_ns")).otherwise(at)
        if self._start_ns is not None:
            frame = frame.filter(at >= self._start_ns)
        return frame if self._end_ns is None else frame.filter(at < self._end_ns)

    def result(self) -> Indicators:
        """Return the figures so far. Rows may still be added."""
        made = Indicators(level=self._level(), num_rows=dict(self._num_rows))
        start_ns, end_ns = self._window()
        self._fill_trust(made, start_ns, end_ns)
        if made.level == "sample":
            made.whole = self._samples.busiest(end_ns - start_ns) or Slice(window_ns=end_ns - start_ns)
        else:
            self._fill_slices(made, start_ns, end_ns)
        self._fill_device(made)
        self._fill_calls(made)
        block = self._meters["block"]
        read_bytes = block.total("bytes", cells_of(direction=READS)) if block.num_rows else None
        made.kv = self._objects.result(end_ns - start_ns, read_bytes)
        made.series = self._samples.means
        shares = [value for key, value in made.series.items() if _is_cpu(key)]
        made.host_cpu_share = sum(shares) if shares else None
        return made

    def _level(self) -> str:
        """Return the level that says most about a device."""
        for level in EVENT_LEVELS:
            if self._meters[level].has_completions:
                return level
        for level in EVENT_LEVELS:
            if self._meters[level].num_rows:
                return level
        return "sample" if self._num_rows["sample"] else "block"

    def _window(self) -> tuple[int, int]:
        """Return the time the figures are of: what was asked for, else what the trace says and all that lies in it."""
        meters = [meter for meter in self._meters.values() if meter.num_rows]
        starts = [meter.first_ns for meter in meters] + self._sample_ns[:1]
        ends = [meter.last_ns for meter in meters] + self._sample_ns[1:]
        if self._about.end_ns > self._about.start_ns:
            starts.append(self._about.start_ns)
            ends.append(self._about.end_ns)
        start_ns = self._start_ns if self._start_ns is not None else min(starts, default=0)
        end_ns = self._end_ns if self._end_ns is not None else max(ends, default=0)
        return start_ns, max(start_ns, end_ns)

    def _fill_slices(self, made: Indicators, start_ns: int, end_ns: int) -> None:
        meter, phases = self._meters[made.level], self._objects.phases
        edges = self._axis.start_ns + np.arange(NUM_BINS) * self._axis.width_ns
        until_ns = end_ns if self._end_ns is not None else end_ns + 1  # the last event is inside
        bins = (edges + self._axis.width_ns > start_ns) & (edges < until_ns)
        whole = Window(end_ns - start_ns, bins)
        made.whole = meter.slice_of("all", whole)
        made.timeline = meter.timeline(bins)
        used = np.flatnonzero(made.timeline.depth)
        if made.whole.depth is not None and len(used):
            made.whole.span_share = float((used[-1] - used[0] + 1) / len(made.timeline.depth))
        for code, name in enumerate(ALL_CAUSES):
            if meter.total("ops", cells_of(cause=code)):
                made.causes[name] = meter.slice_of(name, whole, cause=code)
        lasting = phases.windows_ns(start_ns, end_ns)
        of_bin = phases.at(edges + self._axis.width_ns // 2)
        for code, name in enumerate(PHASES):
            if code and not phases.is_empty and lasting[code]:
                window = Window(int(lasting[code]), bins & (of_bin == code))
                made.phases[name] = meter.slice_of(name, window, phase=code)
        for part in (made.whole, *made.causes.values(), *made.phases.values()):
            _fill_roofs(part, self._roofline)
        num_bytes = meter.total("bytes")
        if "cause" in COLUMNS_USED[made.level] and num_bytes:
            unknown = cells_of(cause=ALL_CAUSES.index("unknown"))
            made.attributed_share = 1 - meter.total("bytes", unknown) / num_bytes

    def _fill_device(self, made: Indicators) -> None:
        """Set what is known of the device that moved most bytes."""
        moved = self._meters["block"].bytes_of_device
        known = self._about.devices
        made.device = str(max(moved, key=lambda number: moved[number])) if moved else next(iter(known), "")
        device = known.get(made.device, Device())
        made.cap_bytes = min(filter(None, (device.read_ahead_bytes, device.max_sectors_bytes)), default=0)
        if made.level != "call" and made.whole.window_ns >= DAY_WINDOW_NS_MIN:
            made.write_bytes_per_day = made.whole.write.num_bytes / made.whole.window_ns * NS_PER_DAY
            if device.capacity_bytes:
                made.drive_writes_per_day = made.write_bytes_per_day / device.capacity_bytes

    def _fill_calls(self, made: Indicators) -> None:
        """Compare what the program asked for with what the device did."""
        calls, block, told = self._meters["call"], self._meters["block"], self._calls
        made.call_bytes, made.block_bytes = calls.total("bytes"), block.total("bytes")
        if told.num_data + told.num_meta:
            made.meta_call_share = told.num_meta / (told.num_data + told.num_meta)
            time_ns = told.data_ns + told.meta_ns
            made.meta_time_share = told.meta_ns / time_ns if time_ns else None
        if not calls.num_rows:
            return
        made.call = calls.both_sides(made.whole.window_ns)
        asked = calls.total("bytes", cells_of(direction=READS))
        if not asked:
            return
        read_cells = cells_of(direction=READS)
        made.page_cache_share = 1 - block.total("bytes", read_cells) / asked
        call_ns, path_ns = calls.device_ns(read_cells), block.path_ns(READS)
        if not block.has_completions or not call_ns or made.page_cache_share > STACK_PAGE_CACHE_MAX:
            return
        # One call may be many commands at once, whose times overlap; then the times with any in flight are compared.
        share = path_ns / call_ns if path_ns <= call_ns else block.busy_ns / max(1, calls.busy_ns)
        made.stack_share = max(0.0, 1 - share)

    def _fill_trust(self, made: Indicators, start_ns: int, end_ns: int) -> None:
        health, num_all = self._about.health, sum(self._num_rows.values())
        trust = Trust(num_events=self._num_rows[made.level], num_impossible=self._samples.num_impossible)
        trust.lost_share = health.num_lost / (health.num_lost + num_all) if health.num_lost else 0.0
        trust.malformed_share = health.num_malformed / (health.num_malformed + num_all) if health.num_malformed else 0.0
        if made.level == "sample":
            trust.num_events = self._samples.num_disk_samples
            trust.little_residual = self._samples.little_residual
            trust.has_completions = bool(self._samples.num_disk_samples)
        else:
            meter = self._meters[made.level]
            trust.has_completions = health.has_completions and meter.has_completions
            if meter.num_rows:
                trust.unmatched_share, trust.little_residual = meter.matching(start_ns, end_ns)
        made.trust = trust


def _fill_roofs(part: Slice, roofline: Roofline | None) -> None:
    if roofline is None:
        return
    for side, roof in ((part.read, roofline.read), (part.write, roofline.write)):
        side.roof_share = _roof_share(side, roof)


def _roof_share(side: Side, roof: Roof) -> float | None:
    if not side.depth or not side.sizes.median_bytes:
        return None
    modelled = float(roof.bytes_per_s(side.sizes.median_bytes, side.depth))
    return side.bytes_per_s / modelled if modelled else None


def _is_cpu(key: str) -> bool:
    parts = key.split("/")
    return parts[0] == CPU_SERIES[0] and parts[-1] == CPU_SERIES[1]
