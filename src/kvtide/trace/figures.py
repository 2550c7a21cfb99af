"""What is measured of a trace: the values that indicators fill, verdicts judge and reports draw. Next: indicators.

Pure values. Sizes in bytes, times in ns, rates in bytes or ops a second, shares from 0 to 1. None: it cannot be told
from this trace.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class Latency:
    """Percentiles of a duration. Within 2 % (log-linear buckets)."""

    num: int = 0
    mean_ns: float = 0.0
    p50_ns: float = 0.0
    p90_ns: float = 0.0
    p99_ns: float = 0.0
    p999_ns: float = 0.0
    max_ns: float = 0.0


@dataclass(slots=True)
class Sizes:
    """How large ops are. `sizes` ascending, with the number of ops of each; rare sizes are gathered in buckets.

    Shapes: sizes, counts [n].
    """

    sizes: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    mode_bytes: int = 0  # most frequent size
    mode_share: float = 0.0  # of the ops
    median_bytes: int = 0  # by count
    median_by_bytes: int = 0  # half of the bytes are in ops of at most this size
    mean_bytes: float = 0.0


@dataclass(slots=True)
class Side:
    """One direction of a slice: its reads or its writes."""

    num_ops: int = 0
    num_bytes: int = 0
    bytes_per_s: float = 0.0  # over the slice's window
    ops_per_s: float = 0.0
    sizes: Sizes = field(default_factory=Sizes)
    device: Latency = field(default_factory=Latency)  # issue to completion
    queue: Latency = field(default_factory=Latency)  # handed to the block layer until issue, where both are known
    sequential_share: float | None = None  # ops that begin where the one before, in this direction, ended
    readahead_share: float = 0.0  # ops the kernel's read-ahead made
    meta_share: float = 0.0  # ops flagged as metadata
    depth: float | None = None  # effective: sum of device time over the window
    burstiness: float | None = None  # coefficient of variation of bytes a bin: 0 even; above 1 bursts
    active_share: float | None = None  # bins with any bytes
    num_bursts: int = 0  # runs of bins with more bytes than the mean
    roof_share: float | None = None  # achieved over roofline at the same size and depth


@dataclass(slots=True)
class Slice:
    """A part of a trace: all of it, one cause or one phase."""

    name: str = "all"
    window_ns: int = 0
    read: Side = field(default_factory=Side)
    write: Side = field(default_factory=Side)
    depth: float | None = None  # effective, both directions
    depth_busy: float | None = None  # mean depth while anything is in flight
    busy_share: float | None = None  # of the window with anything in flight
    span_share: float | None = None  # of the window from the first time anything is in flight to the last
    submit_gap_ratio: float | None = None  # median time between issues over median device time; 1 / depth when even
    num_flushes: int = 0
    num_errors: int = 0


@dataclass(slots=True)
class Timeline:
    """Figures over time, in bins of equal width. Shapes: [num_bins]."""

    start_ns: int = 0
    bin_ns: int = 0
    depth: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    read_bytes: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    write_bytes: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    by_cause: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)  # bytes


@dataclass(slots=True)
class Kv:
    """What the cache wanted, against what moved. Only for traces with object rows."""

    wanted_bytes: int = 0
    dram_bytes: int = 0
    file_bytes: int = 0
    device_hit_share: float = 0.0  # of the wanted bytes that were on the device already
    dram_hit_share: float = 0.0  # of the wanted bytes that were copied from DRAM; the rest came from the file
    device_bytes_ratio: float | None = None  # block bytes read over bytes asked of the file
    num_steps: int = 0
    stall_ns_step: float = 0.0  # mean wait of a step
    stall_share: float = 0.0  # of the window the model stood still
    decode_step_ns: float | None = None  # mean time from one decode step to the next
    load_ns: int = 0  # spent waiting while a prefix was restored
    recompute_ns: int | None = None  # estimate: what computing the restored tokens again would take


@dataclass(slots=True)
class Trust:
    """Whether figures can be believed."""

    num_events: int = 0  # of the level counted; of samples the moments with a disk's rates, times and depth
    lost_share: float = 0.0
    unmatched_share: float = 0.0  # issues without completion and completions without issue, but for the edges
    little_residual: float | None = None  # |N - X R| / max of both: N counts every event, X R pairs only
    malformed_share: float = 0.0
    has_completions: bool = True
    num_impossible: int = 0  # samples that cannot be, such as a device busy for 264 % of the time


@dataclass(slots=True)
class Indicators:
    """All figures of a trace."""

    level: str = "block"  # the level that slices are counted from: block where there is any, else op, else call, sample
    num_rows: dict[str, int] = field(default_factory=dict)  # of each level
    device: str = ""  # number of the device that moved most bytes, as `about.devices` has it
    whole: Slice = field(default_factory=Slice)
    causes: dict[str, Slice] = field(default_factory=dict)
    phases: dict[str, Slice] = field(default_factory=dict)  # prefill, restore, decode
    timeline: Timeline = field(default_factory=Timeline)
    kv: Kv | None = None
    trust: Trust = field(default_factory=Trust)
    call: Side | None = None  # reads and writes as the program asked for them, latency in `device`
    stack_share: float | None = None  # 1 - (queue + device time) / call time: what software above the device took
    page_cache_share: float | None = None  # 1 - block bytes / bytes the program asked for; below 0 read-ahead waste
    call_bytes: int = 0  # read and written, as the program asked for them
    block_bytes: int = 0  # read and written by the device
    meta_call_share: float | None = (
        None  # calls that touch names, attributes or wait for a disk, of these and data calls
    )
    meta_time_share: float | None = None  # time in them, of the time in these and data calls
    host_cpu_share: float | None = None  # of a core, from samples
    attributed_share: float | None = None  # block bytes with a known cause
    write_bytes_per_day: float | None = None
    drive_writes_per_day: float | None = None
    cap_bytes: int = 0  # largest command the kernel makes: min(read-ahead, max sectors) of what is known; 0 unknown
    series: dict[str, float] = field(default_factory=dict)  # means of samples, by source/subject/name
