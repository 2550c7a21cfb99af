"""The production cache under virtual time: order of jobs, and the same operations as real tiers do."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvhelp import small_identity
from kvtide.cache import CacheOptions, CpuArena, TieredCache
from kvtide.cache.mover import DEMAND, PREFETCH, WRITE_BACK
from kvtide.errors import ConfigError
from kvtide.io.drive import DeviceModel, DeviceQueue
from kvtide.io.hollow import HollowEngine
from kvtide.io.ops import OP, READ
from kvtide.io.sim import VirtualClock
from kvtide.planner.driver import Driver, TurnTimes
from kvtide.planner.virtual import Budgets, HostCosts, VirtualMover, make_hollow_rows, reopened, virtual_cache
from kvtide.spec import Dtype, KVShape, LayerShape, SlotLayout, Split
from kvtide.tiers.memory import HollowFramePool
from kvtide.tiers.namespace import open_namespace
from kvtide.trace.record import Recorder

MIB = 1 << 20
DRIVE = DeviceModel(100_000, 50_000, 0, 100_000, 2_000_000_000, 1_000_000_000, 32)


class Slow:
    """A model slow enough that what a step leaves to do is done before the next; on real tiers that is waited for."""

    def layer_ns(self, num_new: int, num_old: int, rows: int) -> tuple[float, float]:
        del num_old, rows
        return 2e5, 2e6 if num_new == 1 else 1e7

    def step_ns(self, num_new: int, num_old: int, rows: int) -> float:
        del num_old, rows
        return 2e6 if num_new == 1 else 5e7

    def turn_ns(self) -> float:
        return 0.0


def mover_at(now_ns: int = 0) -> VirtualMover:
    return VirtualMover(VirtualClock(now_ns), VirtualClock())


def test_jobs_run_most_urgent_first_when_their_time_has_come() -> None:
    mover, seen = mover_at(), []

    def job(name: str, took_ns: int) -> object:
        def run() -> str:
            seen.append((name, mover.own.now_ns()))
            mover.spend(took_ns)
            return name

        return run

    mover.submit(job("store", 100), WRITE_BACK)
    mover.submit(job("prefetch", 100), PREFETCH)
    mover.main.advance_to(50)
    mover.run_until(50)
    assert seen == [("prefetch", 0)]  # both came at once, and one does not fit into 50 ns more
    demanded = mover.submit(job("demand", 10), DEMAND)
    assert not demanded.done()
    assert demanded.result() == "demand"
    assert seen[1] == ("demand", 100)  # what runs is not interrupted
    assert mover.main.now_ns() == 110
    mover.drain()
    assert seen[2] == ("store", 110)
    assert mover.main.now_ns() == 210
    assert mover.busy_ns == 210


def test_a_future_is_done_when_its_time_has_come_and_not_before() -> None:
    mover = mover_at()
    future = mover.submit(lambda: mover.spend(100), DEMAND)
    mover.main.advance_to(10)
    mover.run_until(10)
    assert not future.done()  # it runs, until 100
    mover.main.advance_to(100)
    assert future.done()


def test_a_hastened_job_runs_next_and_an_error_reaches_who_waits() -> None:
    mover, seen = mover_at(), []
    mover.submit(lambda: seen.append("first"), WRITE_BACK)
    later = mover.submit(lambda: seen.append("later"), WRITE_BACK)
    mover.hasten(later)
    later.result()
    assert seen == ["later"]
    failing = mover.submit(lambda: 1 // 0, DEMAND)
    with pytest.raises(ZeroDivisionError):
        failing.result()
    mover.close()
    assert seen == ["later", "first"]
    with pytest.raises(ConfigError, match="closed"):
        mover.submit(int, DEMAND)


def test_hollow_frames_take_no_memory() -> None:
    pool = HollowFramePool(1 << 20, 1 << 28)  # 256 TiB
    frames = pool.take(3)
    pool.clear(frames)
    pool.copy(frames, frames)
    pool.put(0, 0, 4096, 0, make_hollow_rows(10, 4096))
    assert pool.rows.shape == (1 << 20, 1 << 28)
    assert pool.rows.strides == (0, 0)
    assert pool.num_free == (1 << 20) - 3


def test_a_hollow_engine_keeps_depth_and_order_of_the_device() -> None:
    clock = VirtualClock()
    engine = HollowEngine(DeviceQueue(DRIVE), clock, depth_max=4, host_ns=1000)
    batch = np.zeros(10, OP)
    batch["kind"], batch["length"], batch["tag"] = READ, 4096, np.arange(10)
    engine.submit(batch)
    done = engine.reap(10)
    assert sorted(done["tag"].tolist()) == list(range(10))
    assert done["depth"].max() == 4
    assert (done["length"] == 4096).all()
    assert (np.diff(done["complete_ns"]) >= 0).all()
    assert clock.now_ns() == done["complete_ns"].max()
    assert len(engine.reap(1)) == 0
    engine.close()


def layout_of(group_blocks: int, split: Split = "none") -> SlotLayout:
    layer = LayerShape(k_bytes=512, v_bytes=512, num_heads=2)
    shape = KVShape(dtype=Dtype.BF16, layers=(layer,) * 6, layer_index=tuple(range(6)))
    return SlotLayout(shape, 16, group_blocks, split)


def counts(recorder: Recorder, start: int) -> tuple[int, int, int]:
    ops = recorder.ops_between(start, recorder.counts()[1])
    writes, length = ops["is_write"], ops["length"].astype(np.int64)
    return len(ops), int(length[~writes].sum()), int(length[writes].sum())


def run_turns(driver: Driver, recorder: Recorder) -> list[tuple[int, tuple[int, int, int]]]:
    """Three turns of one conversation and one of another that begins alike."""
    rng, found = np.random.default_rng(1), []
    document = rng.integers(0, 1000, 700).tolist()
    told = list(document)
    for turn in range(4):
        told = [*(document if turn == 3 else told), *rng.integers(0, 1000, 24).tolist()]
        answer = rng.integers(0, 1000, 4).tolist()
        start = recorder.counts()[1]
        times: TurnTimes = driver.turn(told, answer)
        found.append((times.matched.num_tokens, counts(recorder, start)))
        told += answer
    return found


@pytest.mark.parametrize(("group_blocks", "split"), [(1, "none"), (4, "none"), (4, "kv"), (2, "head")])
@pytest.mark.parametrize(("device", "dram"), [(0.5, 0.7), (0.9, 0.4), (2.0, 3.0)])
def test_virtual_and_real_tiers_do_the_same_operations(
    tmp_path: Path, group_blocks: int, split: Split, device: float, dram: float
) -> None:
    layout = layout_of(group_blocks, split)
    whole = 800 * layout.shape.bytes_per_token
    budgets = Budgets(int(device * whole) // 64 * 64, int(dram * whole) + 4 * MIB, 8 * whole)
    virtual_recorder, real_recorder = Recorder(), Recorder()
    virtual = virtual_cache(
        layout, budgets, DRIVE, costs=HostCosts(1000, 20_000, 50_000), recorder=virtual_recorder, reuse="always"
    )
    driver = virtual.driver(Slow())
    expected = run_turns(driver, virtual_recorder)
    virtual.cache.close()

    layers = tuple((index, 512, 512, 2, 0) for index in range(layout.num_layers))
    identity = replace(small_identity(layout), layers=layers)
    namespace = open_namespace(tmp_path, identity, layout, capacity_bytes=budgets.disk_bytes, recorder=real_recorder)
    rows = np.random.default_rng(2).integers(0, 256, (512, 512), dtype=np.uint8)
    cache = TieredCache(
        layout,
        identity.digest(),
        CpuArena(budgets.device_bytes),
        CacheOptions(dram_bytes=budgets.dram_bytes, reuse="always"),
        tier=namespace.tier,
        recorder=real_recorder,
    )
    try:
        driver = Driver(
            cache,
            Slow(),
            clock=time.perf_counter_ns,
            advance=lambda num_ns: cache.drain() if num_ns else None,
            make_rows=lambda num_tokens, row_bytes: rows[:num_tokens, :row_bytes],
        )
        found = run_turns(driver, real_recorder)
    finally:
        cache.close()
        namespace.close()
    assert found == expected


def test_a_restart_keeps_what_was_stored_and_time_goes_on() -> None:
    layout = layout_of(2)
    virtual = virtual_cache(layout, Budgets(4 * MIB, 8 * MIB, 32 * MIB), DRIVE)
    prompt = list(range(500))

    def turn() -> TurnTimes:
        driver = virtual.driver(Slow())
        return driver.turn(prompt, [1])

    first = turn()
    ended = virtual.main.now_ns()
    virtual = reopened(virtual)
    second = turn()
    assert first.matched.num_tokens == 0
    assert second.matched.num_tokens == 496
    assert second.matched.file_bytes == 496 * layout.shape.bytes_per_token
    assert second.prefill_wait_ns > first.prefill_wait_ns == 0
    assert virtual.main.now_ns() > ended


def test_work_of_the_mover_slows_a_model_that_shares_its_processor() -> None:
    layout = layout_of(2)

    def ttft(steal: float) -> int:
        costs = HostCosts(1000, 200_000, 200_000, 1e9, 1e9, 2000)
        virtual = virtual_cache(layout, Budgets(4 * MIB, 8 * MIB, 32 * MIB), DRIVE, costs=costs, steal=steal)
        driver = virtual.driver(Slow())
        return driver.turn(list(range(900)), [1]).ttft_ns

    assert ttft(0.5) > ttft(0.0)
