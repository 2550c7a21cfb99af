"""What a verdict is made of, and the case it is about: the direction that matters. Next: remedies.

Decides which direction is judged and whether its sizes are the program's. Pure values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtide.roofline import Roof, Roofline
from kvtide.trace.figures import Indicators, Side
from kvtide.trace.file import About, Device
from kvtide.trace.thresholds import CAP_TOLERANCE, QUEUED_MIN, READAHEAD_MIN, WAITING_MIN, Threshold
from kvtide.units import format_bytes

VERDICTS = (
    "cannot-say",
    "page-cache",
    "recompute-is-cheaper",
    "copy-bound",
    "metadata-bound",
    "write-burst",
    "host-bound",
    "healthy",
    "depth-starved",
    "iops-bound",
    "size-bound",
    "bandwidth-bound",
)
NO_PROBE = "no probe file: type kvtide probe PATH"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One figure that a verdict rests on."""

    name: str
    value: str
    threshold: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing that would help. `factor`: how many times as fast, None where that cannot be told."""

    what: str
    gain: str
    factor: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits the I/O of a trace. `reason` says why nothing can be said, or why it is not certain."""

    name: str
    sentence: str
    evidence: list[Evidence] = field(default_factory=list)
    remedies: list[Remedy] = field(default_factory=list)
    is_certain: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """A trace as the rules look at it: the direction that takes most of the device's time, while anything is in flight.

    Rates are over the time with anything in flight, so that a program's start and end do not make a drive look slow.
    """

    figures: Indicators
    about: About | None
    way: str  # read or write
    side: Side
    roof: Roof | None
    size: float  # mean, in bytes: where a kernel splits large requests unevenly, the median is that of the remnants
    depth: float  # while anything is in flight
    busy: float  # share of the window
    bytes_per_s: float
    ops_per_s: float
    cap: str  # why the size is not the program's; empty if it may be

    @property
    def queued(self) -> float | None:
        """Device latency over what the roofline says one op alone takes."""
        if self.roof is None or not self.side.device.num:
            return None
        alone_ns = self.roof.latency_ns + self.side.sizes.mean_bytes / self.roof.channel_bytes_per_s * 1e9
        return self.side.device.mean_ns / alone_ns

    @property
    def waiting(self) -> float:
        """Time in the block layer over time in the device: what the program has outstanding beyond `depth`."""
        queue, device = self.side.queue, self.side.device
        return queue.mean_ns / device.mean_ns if queue.num and device.mean_ns else 0.0

    @property
    def busy_active(self) -> float:
        """Share of the time with anything in flight, from the first op to the last: not while the program starts."""
        return min(1.0, self.busy / (self.figures.whole.span_share or 1.0))

    @property
    def depth_asked(self) -> float:
        """Ops outstanding below the program: a driver with a short queue lets few of them reach the device."""
        return self.depth * (1 + self.waiting)

    @property
    def is_queued(self) -> bool:
        """Whether ops wait for each other, in the device or in front of it."""
        return (self.queued or 0.0) >= QUEUED_MIN.value or self.waiting >= WAITING_MIN.value

    def gain(self, *, size: float, depth: float) -> float:
        """Return how many times as many bytes a second the roofline promises at `size` and `depth` as it does now."""
        assert self.roof is not None, "rules ask for gains only where there is a roofline"
        now = float(self.roof.bytes_per_s(self.size, self.depth))
        return float(self.roof.bytes_per_s(size, depth)) / now


def case_of(figures: Indicators, *, roofline: Roofline | None, about: About | None) -> Case:
    """Return the case that the rules judge."""
    whole = figures.whole
    read_weight, write_weight = (
        side.num_bytes if whole.depth is None else side.depth or 0.0 for side in (whole.read, whole.write)
    )
    way, side = ("read", whole.read) if read_weight >= write_weight else ("write", whole.write)
    roof = None if roofline is None else getattr(roofline, way)
    busy = whole.busy_share if whole.busy_share is not None else 1.0
    depth = whole.depth_busy if whole.depth_busy is not None else whole.depth or 0.0
    scale = 1 / busy if busy else 0.0
    size = side.sizes.mean_bytes
    cap = _cap(figures, side, about)
    rates = side.bytes_per_s * scale, side.ops_per_s * scale
    return Case(figures, about, way, side, roof, size, depth, busy, *rates, cap)


def _cap(figures: Indicators, side: Side, about: About | None) -> str:
    """Return a sentence if the size of commands is what the kernel or the device makes of larger requests."""
    if figures.level not in {"block", "sample"} or not side.sizes.median_bytes:
        return ""
    device = about.devices.get(figures.device, Device()) if about is not None else Device()
    caps = {"read-ahead": device.read_ahead_bytes, "largest command": device.max_sectors_bytes}
    if not any(caps.values()):
        caps = {"largest command": figures.cap_bytes}
    median = side.sizes.median_bytes
    for name, cap in caps.items():
        if name == "read-ahead" and side is figures.whole.write:
            continue
        if cap and abs(median - cap) <= CAP_TOLERANCE.value * cap:
            return (
                f"the median size of {format_bytes(median)} is the {name} of the device: "
                "the block level shows this cap, the program may ask for other sizes"
            )
    if side.readahead_share >= READAHEAD_MIN.value:
        return (
            f"{side.readahead_share:.0%} of the commands were made by the kernel's read-ahead: "
            f"their median size of {format_bytes(median)} is not the size the program asks for"
        )
    return ""


def shown(threshold: Threshold, *, above: bool = True) -> str:
    """Return a limit as evidence shows it."""
    return f"{'above' if above else 'below'} {threshold.text}"
