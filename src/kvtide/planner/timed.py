"""Replaying requests through the production cache: on virtual tiers, or on the real ones of this machine.

The same driver makes the same calls on both. On real tiers made-up bytes are kept, and a GPU's time is slept where one
is given. Next: cli_replay.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtide.cache import CacheOptions, CpuArena, TieredCache
from kvtide.cache.choice import Reuse
from kvtide.errors import ConfigError
from kvtide.planner.driver import Compute, Driver, NoCompute
from kvtide.planner.inputs import Job, Machine
from kvtide.planner.virtual import FREE, Budgets, HostCosts, virtual_cache
from kvtide.spec import Identity
from kvtide.tiers.namespace import open_namespace
from kvtide.trace.record import Recorder
from kvtide.workload import Workload, tokens_of

ANSWER_TOKENS_MAX = 16  # run of each answer: enough for a pace, few enough to end
ROWS = 4096  # of made-up KV


@dataclass(slots=True)
class Timed:
    """What a timed replay did. Times in ns, one entry a request or a step."""

    label: str  # measured or simulated
    ttft_ns: list[int] = field(default_factory=list)
    step_ns: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    matched_tokens: int = 0
    num_reads: int = 0
    num_writes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    depth_mean: float = 0.0


def run_virtual(
    workload: Workload, job: Job, machine: Machine, budgets: Budgets, compute: Compute | None,
    *, costs: HostCosts | None = None, on_progress: Callable[[int, int], None] | None = None,
) -> Timed:  # fmt: skip
    """Replay on virtual tiers; `costs` are those of this machine's processor, None: only what an op costs.

    Raises: ConfigError for budgets too small.
    """
    recorder = Recorder()
    virtual = virtual_cache(
        job.slot(),
        budgets,
        machine.ssd.device_model() if machine.ssd is not None else None,
        costs=costs or HostCosts(op_ns=machine.io_path.host_ns),
        copy_time_ns=None if costs else lambda size: size / machine.link_bytes_per_s(size) * 1e9,
        depth_max=machine.depth,
        recorder=recorder,
        reuse=_reuse(compute),
    )
    driver = virtual.driver(compute or NoCompute(), costs or FREE)
    made = _drive(driver, workload, "simulated", on_progress)
    virtual.cache.close()
    return _counted(made, recorder)


def run_real(
    workload: Workload, job: Job, directory: Path, budgets: Budgets, compute: Compute | None,
    *, engine: str = "auto", depth: int = 64, on_progress: Callable[[int, int], None] | None = None,
) -> Timed:  # fmt: skip
    """Replay on this machine's tiers, in a namespace of its own under `directory`, which is kept.

    Raises: ConfigError for budgets too small or a foreign directory; IoError where the disk refuses.
    """
    slot = job.slot()
    identity = Identity.of(
        job.model,
        slot.shape,
        block_tokens=slot.block_tokens,
        group_blocks=slot.group_blocks,
        weights_digest="0" * 64,
        tokenizer_digest="0" * 64,
        revision="replay",
        adapter="",
        split=slot.split,
    )
    recorder = Recorder()
    widest = max(max(layer.k_bytes, layer.v_bytes) for layer in slot.shape.layers)
    rows = np.random.default_rng(1).integers(0, 256, (ROWS, widest), dtype=np.uint8)
    namespace = open_namespace(
        directory,
        identity,
        slot,
        capacity_bytes=budgets.disk_bytes,
        engine=engine,
        depth_max=depth,
        recorder=recorder,
    )
    try:
        options = CacheOptions(dram_bytes=budgets.dram_bytes, reuse=_reuse(compute))
        arena = CpuArena(budgets.device_bytes)
        cache = TieredCache(slot, identity.digest(), arena, options, tier=namespace.tier, recorder=recorder)
        try:
            driver = Driver(
                cache,
                compute or NoCompute(),
                clock=time.perf_counter_ns,
                advance=Sleeper(),
                make_rows=lambda num_tokens, row_bytes: _rows(rows, num_tokens, row_bytes),
            )
            made = _drive(driver, workload, "measured", on_progress)
        finally:
            cache.close()
    finally:
        namespace.close()
    return _counted(made, recorder)


def _reuse(compute: Compute | None) -> Reuse:
    """Return whether kept KV may be computed again: not where computing takes no time."""
    return "auto" if compute is not None else "always"


class Sleeper:
    """Lets a GPU's time pass; what one sleep took too long, the next is shorter."""

    def __init__(self) -> None:
        self._owed_ns = 0.0

    def __call__(self, time_ns: float) -> None:
        """Sleep, if there is anything to sleep."""
        self._owed_ns += time_ns
        if self._owed_ns > 0:
            started = time.perf_counter_ns()
            time.sleep(self._owed_ns / 1e9)
            self._owed_ns -= time.perf_counter_ns() - started


def _rows(rows: npt.NDArray[np.uint8], num_tokens: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    repeats = -(-num_tokens // len(rows))
    return (rows if repeats == 1 else np.tile(rows, (repeats, 1)))[:num_tokens, :row_bytes]


def _drive(driver: Driver, workload: Workload, label: str, on_progress: Callable[[int, int], None] | None) -> Timed:
    made = Timed(label)
    for request in range(workload.num_requests):
        if on_progress is not None:
            on_progress(request, workload.num_requests)
        prompt = tokens_of(workload, request).tolist()
        if not prompt:
            continue
        num_answer = int(min(ANSWER_TOKENS_MAX, max(1, workload.output_tokens[request])))
        times = driver.turn(prompt, list(range(num_answer)))
        made.ttft_ns.append(times.ttft_ns)
        made.step_ns += times.step_ns
        made.prompt_tokens += len(prompt)
        made.matched_tokens += times.matched.num_tokens
    return made


def _counted(made: Timed, recorder: Recorder) -> Timed:
    if recorder.ops.num_lost:
        raise ConfigError(f"{recorder.ops.num_seen} operations are more than are kept; type a smaller --limit")
    ops = recorder.ops_between(0, recorder.counts()[1])
    ops = ops[ops["layer"] >= 0]  # headers are not KV: a namespace that is opened reads some of its own
    writes, length = ops["is_write"], ops["length"].astype(np.int64)
    made.num_writes, made.num_reads = int(writes.sum()), int((~writes).sum())
    made.read_bytes, made.written_bytes = int(length[~writes].sum()), int(length[writes].sum())
    made.depth_mean = float(ops["depth"].mean()) if len(ops) else 0.0
    return made
