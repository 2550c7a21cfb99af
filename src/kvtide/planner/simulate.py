"""The plan by simulation: the production cache, its tiers and its scheduler under virtual time.

Counts and sizes of operations are those of production; only time is modelled. Steps are run until they take the same
time three times in a row, and how much they differ is told. Next: closed (the other form), report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvtide.errors import ConfigError, IoError
from kvtide.planner.closed import hand_over_ns
from kvtide.planner.compute import RooflineCompute
from kvtide.planner.inputs import Job, Machine
from kvtide.planner.placement import place
from kvtide.planner.virtual import Budgets, HostCosts, VirtualCache, virtual_cache
from kvtide.units import format_bytes

FRAGMENTS_MAX = 4_000_000  # of one step: some half a minute of computing
STEADY = 0.02  # steps this much alike are called equal
NUM_ALIKE, STEPS_MAX = 3, 24
SPARE_DISK = 1.25  # disk room over the KV there is: slots are replaced before the old one is given back


@dataclass(slots=True)
class Simulated:
    """What a simulation found. Times in ns; `spread` is (longest - shortest) / mean of the last steps."""

    ttft_ns: float  # of the whole batch, one sequence after the other
    itl_ns: float
    spread: float
    is_steady: bool
    step_ns: list[int] = field(default_factory=list)
    num_reads: int = 0  # of one step at the end
    read_bytes: int = 0
    num_writes: int = 0  # of the whole run
    written_bytes: int = 0
    wait_share: float = 0.0  # of the last steps, standing still for KV
    hand_over_ns: float = 0.0  # in ttft_ns, where another machine prefills
    mover_share: float = 0.0  # of all time, the mover at work


def simulate(job: Job, machine: Machine, *, on_progress: Callable[[int, int], None] | None = None) -> Simulated:
    """Run a batch: every prompt, then decode steps of all sequences together.

    Raises: ConfigError for what cannot be, does not fit, or is too large to simulate.
    """
    if job.select < 1.0 or job.fragment_bytes is not None:
        raise ConfigError("only whole contexts in kvtide's own layout are simulated: leave out --select and --fragment")
    try:
        return _simulate(job, machine, on_progress)
    except IoError as error:
        raise ConfigError(f"the simulated tiers have no room: {error}") from None


def _simulate(job: Job, machine: Machine, on_progress: Callable[[int, int], None] | None) -> Simulated:
    virtual = _open(job, machine)
    driver = virtual.driver(RooflineCompute(job, machine))
    made = Simulated(0.0, 0.0, 0.0, is_steady=False)
    sequences = []
    for row in range(job.batch):
        prompt = np.arange(job.context, dtype=np.int64) + row * job.context  # no two prompts begin alike
        sequence = virtual.cache.open(prompt % (1 << 32))
        driver.prefill(sequence, prompt.tolist(), job.context)
        sequences.append(sequence)
        if on_progress is not None:
            on_progress(row + 1, job.batch)
    made.ttft_ns = virtual.main.now_ns()
    virtual.cache.drain()
    if job.is_disaggregated and machine.network is not None:
        kv_bytes = job.batch * job.context * job.shape().bytes_per_token
        made.hand_over_ns = hand_over_ns(job, machine, kv_bytes, made.ttft_ns)[0]
        made.ttft_ns += made.hand_over_ns
    waits = []
    for step in range(STEPS_MAX):
        before, began, waited = _reads(virtual), virtual.main.now_ns(), virtual.cache.wait_ns
        driver.step(sequences, [[step]] * job.batch, job.context + STEPS_MAX)
        made.step_ns.append(virtual.main.now_ns() - began)
        waits.append(virtual.cache.wait_ns - waited)
        made.num_reads, made.read_bytes = (after - old for after, old in zip(_reads(virtual), before, strict=True))
        last = np.array(made.step_ns[-NUM_ALIKE:], np.float64)
        made.spread, made.itl_ns = float((last.max() - last.min()) / last.mean()), float(last.mean())
        made.is_steady = len(made.step_ns) > NUM_ALIKE and made.spread <= STEADY
        if made.is_steady:
            break
    made.wait_share = sum(waits[-NUM_ALIKE:]) / max(1, sum(made.step_ns[-NUM_ALIKE:]))
    made.mover_share = virtual.mover.busy_ns / max(1, virtual.main.now_ns())
    if virtual.tier is not None:
        made.num_writes, made.written_bytes = virtual.tier.stats().num_writes, virtual.tier.stats().written_bytes
    virtual.cache.close()
    return made


def _open(job: Job, machine: Machine) -> VirtualCache:
    slot, placement = job.slot(), place(job, machine)
    num_groups = -(-(job.context + STEPS_MAX) // slot.tokens_per_group)  # of one sequence at the end
    num_fragments = job.batch * slot.num_fragments * -(-job.context // slot.tokens_per_group)
    if num_fragments > FRAGMENTS_MAX:
        raise ConfigError(
            f"a step of {num_fragments:,} fragments is too long to simulate; at most {FRAGMENTS_MAX:,}: type a smaller "
            f"--batch, or a larger --group-blocks"
        )
    layer_bytes = job.batch * max(layer.token_bytes for layer in slot.shape.layers)
    window_bytes = layer_bytes * num_groups * slot.tokens_per_group
    device_bytes = max(placement.room_bytes["device"], 2 * window_bytes)
    kv_bytes = job.batch * num_groups * slot.slot_bytes
    disk_bytes = min(machine.disk_bytes, int(kv_bytes * SPARE_DISK) + (64 << 20))
    dram_bytes = min(machine.dram_bytes, int(kv_bytes * SPARE_DISK) + (1 << 30))
    if not dram_bytes:
        raise ConfigError("the file tier is read through DRAM: type a --dram of some groups of every layer")
    budgets = Budgets(device_bytes, dram_bytes, disk_bytes if machine.ssd is not None else 0)
    drive = machine.ssd.device_model() if machine.ssd is not None else None
    return virtual_cache(
        slot,
        budgets,
        drive,
        costs=HostCosts(op_ns=machine.io_path.host_ns / machine.num_io_threads),
        copy_time_ns=lambda num_bytes: num_bytes / machine.link_bytes_per_s(num_bytes) * 1e9,
        depth_max=machine.depth,
    )


def _reads(virtual: VirtualCache) -> tuple[int, int]:
    """Return operations and bytes read so far."""
    return (virtual.tier.stats().num_reads, virtual.tier.stats().read_bytes) if virtual.tier is not None else (0, 0)


def describe(found: Simulated) -> str:
    """Return the result in one sentence."""
    state = f"steady, the last steps differ by {found.spread:.1%}" if found.is_steady else "NOT steady"
    return (
        f"Simulated on the production cache: {found.itl_ns / 1e6:,.2f} ms a step ({state}), {found.num_reads:,} reads "
        f"of {format_bytes(found.read_bytes)} a step, {found.wait_share:.0%} of decode waiting for KV"
    )
