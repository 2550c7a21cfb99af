"""Every limit that a verdict compares with: the one table of them. Next: findings, rules.

Decides no verdict. A limit that nobody has published is a proposal of ours, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass

OURS = "proposed here, calibrated in tests/test_planted_sim.py"


@dataclass(frozen=True, slots=True)
class Threshold:
    """A limit, where it comes from, and what lies beyond it."""

    value: float
    unit: str
    meaning: str
    source: str = OURS

    @property
    def text(self) -> str:
        """The limit as people read it."""
        if self.unit == "share":
            return f"{self.value * 100:g} %"
        if self.unit == "bytes":
            return f"{self.value / 1024:g} KiB"
        return f"{self.value:g} {self.unit}".strip()


EVENTS_MIN = Threshold(100, "events", "below: too few for a verdict")
LOST_MAX = Threshold(0.001, "share", "above: too many events were lost by the recorder")
MALFORMED_MAX = Threshold(0.01, "share", "above: too many lines could not be read")
UNMATCHED_MAX = Threshold(0.01, "share", "above: too many issues without completion, or the other way round")
LITTLE_MAX = Threshold(
    0.1, "share", "above: N and X R disagree, so some figure is wrong", f"Little's law; the limit: {OURS}"
)

PAGE_CACHE_MIN = Threshold(0.9, "share", "above: the page cache served the program, the device was hardly used")
CACHED_LATENCY_NS = Threshold(5_000, "ns", "below, with bytes at memory speed: faster than drives answer")
CACHED_BYTES_PER_S = Threshold(4e9, "bytes/s", "speed of a copy from the page cache by one thread, at the slow end")

RECOMPUTE_RATIO = Threshold(1.2, "", "above: loading took this many times as long as computing would")
LOAD_SHARE_MIN = Threshold(0.05, "share", "below: loading hardly matters")

STALL_HIGH = Threshold(0.3, "share", "above: the model waits for KV")
STALL_LOW = Threshold(0.05, "share", "below: the model hardly waits")
COPY_SHARE_MIN = Threshold(0.8, "share", "above: most KV comes from DRAM, not from the drive")
COPY_BUSY_MAX = Threshold(0.5, "share", "below, of the time waited: the drive is not what the model waits for")

META_SHARE_MIN = Threshold(0.3, "share", "above: too many commands or calls for metadata")
META_TIME_MIN = Threshold(0.5, "share", "above: calls for metadata take most of the time in calls")
FLUSHES_MIN = Threshold(0.5, "flushes a write", "above: the program waits for the drive to flush its cache")

STACK_MIN = Threshold(
    0.5, "share", "above: software takes most of a call", f"84 % in arXiv:2606.14779; the limit: {OURS}"
)
GAP_RATIO_MIN = Threshold(
    2.0, "", "above: the program waits longer than the device works", f"5.2 in LMCache issue 4697; the limit: {OURS}"
)
IDLE_MIN = Threshold(0.5, "share", "above: the device waits for the program while I/O goes on")
CPU_MIN = Threshold(0.9, "share", "above, of one core: the submitting thread has no time left")

WRITE_SHARE_MIN = Threshold(0.3, "share", "above: writes matter beside reads")
BURST_CV_MIN = Threshold(1.5, "", "above: bytes written come in bursts (active less than 31 % of the time)")
BURSTS_MIN = Threshold(3, "bursts", "below: work that ran once, not a pattern")

BUSY_LOW = Threshold(0.05, "share", "below: the device is hardly used")
BUSY_MIN = Threshold(0.7, "share", "below, while I/O goes on: no limit of the device, if there is no roofline to ask")
BUSY_HIGH = Threshold(0.9, "share", "below: it is said how much of the time faster I/O could win at all")
DEPTH_STARVED = Threshold(2.5, "ops", "below: little overlaps; the kernel's read-ahead keeps two in flight")
DEPTH_MODERATE = Threshold(3.5, "ops", "above: some ops overlap, so that size is the first thing to mend")
DEPTH_HIGH = Threshold(16.0, "ops", "above: a deep queue; no roofline is needed to say so")
DEPTH_AIM = Threshold(32.0, "ops", "depth that remedies aim at")
GAIN_MIN = Threshold(2.0, "", "below: a change would gain too little to call its lack a bound")
SMALL_BYTES = Threshold(64 * 1024, "bytes", "below, with a roofline that gains from more: small")
SMALL_BYTES_ALONE = Threshold(16 * 1024, "bytes", "below: small without a roofline to ask")
LARGE_BYTES = Threshold(128 * 1024, "bytes", "above: large without a roofline to ask")
SIZE_AIM = Threshold(256 * 1024, "bytes", "size that remedies aim at")
CAP_TOLERANCE = Threshold(0.02, "share", "within: the median size is the cap of the kernel or the device")
READAHEAD_MIN = Threshold(0.5, "share", "above: the kernel's read-ahead chose the size, not the program")
AT_ROOF = Threshold(0.7, "share", "above: the device gives about what it can; a probe is good to about 30 %")
QUEUED_MIN = Threshold(2.0, "", "above, of the latency without a queue: ops wait for each other in the device")
WAITING_MIN = Threshold(1.0, "", "above, of the device latency: ops wait in the block layer for a place in the device")
ROOF_LOW = Threshold(
    0.5, "share", "below: the device is slower than probed", f"best of MLPerf Storage KV 78 %; the limit: {OURS}"
)
TAIL_MIN = Threshold(10.0, "", "above, p99 over p50: garbage collection, or writes in the way of reads")

TABLE: dict[str, Threshold] = {name: value for name, value in list(globals().items()) if isinstance(value, Threshold)}
