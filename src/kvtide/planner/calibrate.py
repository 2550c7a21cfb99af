"""What this machine's processor adds to KV I/O: checks, copies, bookkeeping, and handing a job to the mover.

Bookkeeping is timed by running the production code under virtual time, where nothing else takes real time. Takes about
two seconds. Decides nothing; planner.virtual spends what is found. Next: driver.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import xxhash

from kvtide.cache import CacheOptions, CpuArena, TieredCache
from kvtide.cache.mover import DEMAND, Mover
from kvtide.io.drive import DeviceModel
from kvtide.planner.driver import Driver, NoCompute
from kvtide.planner.virtual import Budgets, HostCosts, VirtualMover, virtual_cache
from kvtide.spec import Dtype, KVShape, LayerShape, SlotLayout
from kvtide.tiers.memory import Arena

ARENA_BYTES = 96 << 20  # more than caches hold
SMALL_BYTES, LARGE_BYTES = 4 << 10, 256 << 10  # copies whose times tell cost and rate apart
ROUNDS = 5
NUM_LAYERS = 8
FRAGMENTS = (4, 48)  # a layer
INSTANT = DeviceModel(0, 0, 0, 1_000_000_000, 1 << 60, 1 << 60, 1024)


def measure_host(*, op_ns: float) -> HostCosts:
    """Return what was measured; `op_ns`, the processor's time of one op, comes from a probe."""
    copy_ns, copy_rate = _copies()
    job_ns, round_ns = _bookkeeping()
    return HostCosts(
        op_ns=op_ns,
        round_ns=round_ns,
        job_ns=job_ns + _hand_over(),
        check_bytes_per_s=_checks(),
        copy_bytes_per_s=copy_rate,
        copy_ns=copy_ns,
        call_ns=_calls(),
    )


def _time_of(run: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - started)
    return float(median(times))


def _checks() -> float:
    """Return bytes a second of checking fragments that no cache holds."""
    arena = Arena(ARENA_BYTES)
    arena.buffer[:] = 1
    views = [
        (ctypes.c_uint8 * LARGE_BYTES).from_address(arena.address + at)
        for at in range(0, ARENA_BYTES - LARGE_BYTES, LARGE_BYTES)
    ]
    took_ns = _time_of(lambda: [xxhash.xxh3_64_intdigest(view) for view in views])
    return len(views) * LARGE_BYTES / took_ns * 1e9


def _copies() -> tuple[float, float]:
    """Return the time of a copy without its bytes, and bytes a second."""
    source, target = Arena(ARENA_BYTES), CpuArena(ARENA_BYTES)
    source.buffer[:] = 1
    target.buffer[:] = 1
    times = {}
    for size in (SMALL_BYTES, LARGE_BYTES):
        places = range(0, min(ARENA_BYTES, 256 * size) - size, size)

        def run(size: int = size, places: range = places) -> None:
            for at in places:
                target.write(at, source.buffer[at : at + size])

        times[size] = _time_of(run) / len(places)
    rate = (LARGE_BYTES - SMALL_BYTES) / max(1.0, times[LARGE_BYTES] - times[SMALL_BYTES])
    return max(0.0, times[SMALL_BYTES] - SMALL_BYTES / rate), rate * 1e9


def _hand_over() -> float:
    """Return the time from asking for a job to having its result, for a job that does nothing."""
    mover = Mover()
    try:
        mover.submit(int, DEMAND).result()
        return _time_of(lambda: [mover.submit(int, DEMAND).result() for _ in range(50)]) / 50
    finally:
        mover.close()


def _calls() -> float:
    """Return the time of one layer's calls where all KV is on the device."""
    layout, context = _layout(), 64 * 16
    cache = TieredCache(
        layout, bytes(32), CpuArena(4 * context * layout.shape.bytes_per_token), CacheOptions(dram_bytes=64 << 20)
    )
    rows = np.zeros((64, 4096), np.uint8)
    try:
        driver = Driver(
            cache, NoCompute(), clock=time.perf_counter_ns, advance=lambda _: None,
            make_rows=lambda num_tokens, row_bytes: rows[:num_tokens, :row_bytes],
        )  # fmt: skip
        sequence = cache.open()
        for step in range(8):
            driver.step([sequence], [list(range(64 * step, 64 * step + 64))], context)
        return _time_of(lambda: driver.step([sequence], [[1]], context)) / NUM_LAYERS
    finally:
        cache.close()


def _layout() -> SlotLayout:
    """Return a layout whose bytes do not count."""
    layer = LayerShape(k_bytes=256, v_bytes=256, num_heads=2)
    shape = KVShape(dtype=Dtype.BF16, layers=(layer,) * NUM_LAYERS, layer_index=tuple(range(NUM_LAYERS)))
    return SlotLayout(shape, 16, 1)


class _Watched(VirtualMover):
    """A mover that notes how long its jobs really took."""

    def _run_one(self) -> None:
        started = time.perf_counter_ns()
        super()._run_one()
        self.real_ns.append(time.perf_counter_ns() - started)

    real_ns: list[int]


def _bookkeeping() -> tuple[float, float]:
    """Return the time of a job, and of a round of completions: here one read each, as nothing takes virtual time."""
    layout = _layout()
    times, read = [], []
    for num in FRAGMENTS:
        context = num * layout.tokens_per_group
        dram_bytes = (2 * NUM_LAYERS + 8 + 2 * num) * max(layout.fragment_padded_bytes)
        window_bytes = context * 4 * layout.shape.layers[0].token_bytes
        budgets = Budgets(2 * window_bytes, dram_bytes, 4 * num * layout.slot_bytes + (1 << 20))
        virtual = virtual_cache(layout, budgets, INSTANT, mover=_Watched)
        driver = virtual.driver(NoCompute())
        watched = virtual.mover
        assert isinstance(watched, _Watched)
        watched.real_ns = []
        sequence = virtual.cache.open(np.arange(context))
        for start in range(0, context, layout.tokens_per_group):
            driver.step([sequence], [list(range(start, start + layout.tokens_per_group))], context + 64)
        virtual.cache.drain()
        watched.real_ns.clear()
        assert virtual.tier is not None
        reads = virtual.tier.stats().num_reads
        for step in range(ROUNDS):
            driver.step([sequence], [[step]], context + 64)
        read.append((virtual.tier.stats().num_reads - reads) / len(watched.real_ns))
        times.append(median(watched.real_ns))
        virtual.cache.close()
    round_ns = max(0.0, (times[1] - times[0]) / max(1.0, read[1] - read[0]))
    return max(0.0, times[0] - read[0] * round_ns), round_ns
