"""What one change would gain, from which prefix on loading beats computing, and what a drive endures. Pure.

Next: report.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kvtide.errors import ConfigError
from kvtide.hardware import Catalogue, raid0
from kvtide.planner.closed import (
    Plan,
    compute_use,
    cxl_use,
    drive_use,
    link_use,
    memory_use,
    overlap,
    plan,
    read_pattern,
)
from kvtide.planner.inputs import Job, Machine
from kvtide.planner.placement import place
from kvtide.sizing import step_work
from kvtide.spec import Layout

GAIN_MIN = 1.005  # a change that gains less is not shown as one
DAY_S = 86_400.0
_FASTER_LINK = {"pcie3-x16": "pcie4-x16", "pcie4-x16": "pcie5-x16", "pcie5-x16": "pcie6-x16", "pcie6-x16": "nvlink-c2c"}
_FASTER_PATH = {"buffered": "direct", "direct": "io_uring", "io_uring": "passthrough", "passthrough": "spdk"}


@dataclass(frozen=True, slots=True)
class Change:
    """One change and what it does. Gains are old time over new time; `reason` says why it cannot be, if it cannot."""

    name: str
    ttft_gain: float = 1.0
    itl_gain: float = 1.0
    bound: str = ""
    reason: str = ""


def changes(found: Plan, catalogue: Catalogue) -> list[Change]:
    """Return every single change tried, best first."""
    made = []
    for name, of_job, of_machine in _variants(found.job, found.machine, catalogue):
        try:
            other = plan(replace(found.job, **of_job), replace(found.machine, **of_machine))
        except ConfigError as refused:
            made.append(Change(name, reason=str(refused)))
            continue
        gains = found.ttft_ns / other.ttft_ns, found.itl_ns / other.itl_ns
        made.append(Change(name, *gains, bound=other.phases["decode"].bound))
    return sorted(made, key=lambda change: (bool(change.reason), -change.itl_gain, -change.ttft_gain))


def _variants(job: Job, machine: Machine, catalogue: Catalogue) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield each change: its name, and what differs in the job and in the machine."""
    num_ssds, depth, threads = 2 * machine.num_ssds, 4 * machine.depth, 2 * machine.num_io_threads
    if machine.ssd is not None:
        yield "twice as many drives", {}, {"ssd": raid0(machine.ssd, 2), "num_ssds": num_ssds}
        yield f"depth {depth} instead of {machine.depth}", {}, {"depth": depth}
        yield "twice as many threads for I/O", {}, {"num_io_threads": threads}
    if faster := _FASTER_PATH.get(machine.io_path.name):
        yield f"I/O path {faster}", {}, {"io_path": catalogue.io_path(faster)}
    if machine.link is not None and (faster := _FASTER_LINK.get(machine.link.name)):
        yield f"link {faster}", {}, {"link": catalogue.link(faster)}
    if on_drives := place(job, machine).kv_bytes["ssd"]:
        yield "all KV in DRAM", {}, {"dram_bytes": machine.dram_bytes + on_drives}
        cxl = machine.cxl or catalogue.memory("cxl-expander")
        yield "CXL memory for what is on the drives", {}, {"cxl": cxl, "cxl_bytes": machine.cxl_bytes + on_drives}
    yield "twice as many GPUs", {}, {"num_gpus": 2 * machine.num_gpus}
    group = job.slot().group_blocks
    if job.fragment_bytes is not None:
        yield "reads four times as large", {"fragment_bytes": 4 * job.fragment_bytes}, {}
    elif job.select == 1.0:
        larger = {"layout": Layout.LAYER_MAJOR, "group_blocks": 4 * group}
        yield f"groups of {4 * group} blocks instead of {group}", larger, {}
    yield "reading a tenth of the KV a step", {"select": job.select / 10}, {}
    if not job.is_overlapped:
        yield "loading the next layer while one computes", {"is_overlapped": True}, {}
    yield "half the batch", {"batch": max(1, job.batch // 2)}, {}


@dataclass(frozen=True, slots=True)
class BreakEven:
    """From how many tokens on loading a prefix from a tier beats computing it; None: never, up to the context."""

    tier: str
    tokens: int | None
    load_ns: float  # of the whole context of one sequence
    compute_ns: float


def break_even(job: Job, machine: Machine) -> list[BreakEven]:
    """Return for each tier below the device from which prefix length on loading is faster, one sequence at a time."""
    rows = []
    for tier in ("dram", "cxl", "ssd"):
        if (tier == "ssd" and machine.ssd is None) or (tier == "cxl" and machine.cxl is None):
            continue
        one = replace(job, batch=1, select=1.0)
        low, high = 1, job.context
        if _load_ns(one, machine, tier, high) >= _compute_ns(one, machine, high):
            found: int | None = None
        else:
            while low < high:
                middle = (low + high) // 2
                is_better = _load_ns(one, machine, tier, middle) < _compute_ns(one, machine, middle)
                low, high = (low, middle) if is_better else (middle + 1, high)
            found = low
        loading, computing = _load_ns(one, machine, tier, job.context), _compute_ns(one, machine, job.context)
        rows.append(BreakEven(tier, found, loading, computing))
    return rows


def _load_ns(job: Job, machine: Machine, tier: str, num_tokens: int) -> float:
    num_ops, size, together = read_pattern(job, num_tokens)
    num_bytes = num_ops * size
    uses = {"link": link_use(num_bytes, size, machine)}
    uses[tier] = cxl_use(machine, num_bytes) if tier == "cxl" else memory_use(machine, num_bytes)
    if tier == "ssd" and machine.ssd is not None:
        uses["ssd"] = drive_use(machine.ssd.read, num_bytes, num_ops, size, machine, together=together)
    latency_ns = machine.link.latency_ns * job.shape().num_layers if machine.link else 0.0
    return latency_ns + overlap(uses, job.shape().num_layers, is_overlapped=job.is_overlapped)


def _compute_ns(job: Job, machine: Machine, num_tokens: int) -> float:
    work = step_work(job.model, job.shape(), num_new=num_tokens, num_old=0, batch=1)
    return compute_use(work, job, machine).time_ns


@dataclass(frozen=True, slots=True)
class Endurance:
    """What a machine that is never idle writes to its drives. `rated` is what they are made for; None: not known."""

    bytes_per_day: float
    drive_writes_per_day: float
    rated: float | None


def endurance(found: Plan) -> Endurance | None:
    """Return the wear when one batch follows the other and all KV is written through; None without drives."""
    machine, job = found.machine, found.job
    if machine.ssd is None or not machine.disk_bytes:
        return None
    written = job.batch * (job.context + job.output) * job.shape().bytes_per_token
    batch_s = (found.ttft_ns + found.job.output * found.itl_ns) / 1e9
    a_day = written / batch_s * DAY_S
    return Endurance(a_day, a_day / machine.disk_bytes, machine.ssd.drive_writes_per_day)


def cost_per_million(found: Plan, gpu_hour: float) -> float:
    """Return the price of a million output tokens, in the currency of `gpu_hour`."""
    batch_s = (found.ttft_ns + found.job.output * found.itl_ns) / 1e9
    tokens_per_s = found.job.batch * found.job.output / batch_s
    return gpu_hour * found.machine.num_gpus / 3600 / tokens_per_s * 1e6
