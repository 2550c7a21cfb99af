"""Virtual time for the production cache: its mover, its device memory and its file tier without threads or bytes.

Two timelines run side by side, as two threads do in production: the *main* one computes and waits, the *mover's* one
runs jobs. Jobs are executed when the main line reaches the moment they would have begun, so every decision is taken by
the production code in the order production would take it. Next: simulate, timed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvtide.cache import CacheOptions, TieredCache
from kvtide.cache.choice import Pace, Reuse
from kvtide.cache.mover import DEMAND, Mover
from kvtide.errors import ConfigError
from kvtide.io.drive import DeviceModel, DeviceQueue
from kvtide.io.hollow import HollowEngine
from kvtide.io.ops import PAGE_BYTES, Engine
from kvtide.io.process import Opener
from kvtide.io.sim import VirtualClock
from kvtide.planner.driver import Compute, Driver
from kvtide.spec import SlotLayout
from kvtide.tiers.file import FileTier
from kvtide.tiers.memory import HollowFramePool
from kvtide.tiers.slotio import SlotIo
from kvtide.trace.record import Recorder
from kvtide.units import format_bytes

HOLLOW_FD = 1 << 20  # no descriptor of this process
NO_DIGEST = bytes(32)


@dataclass(frozen=True, slots=True)
class HostCosts:
    """What the host's processor adds to each thing the mover does. Times in ns, rates in bytes/s; 0: nothing, at once.

    An op costs `op_ns` to submit and reap; a round of completions `round_ns` of bookkeeping, however many they are;
    bytes are checked at `check_bytes_per_s` and copied to the device at `copy_bytes_per_s`, `copy_ns` a copy; a job
    costs `job_ns`.
    """

    op_ns: float = 0.0
    round_ns: float = 0.0
    job_ns: float = 0.0
    check_bytes_per_s: float = 0.0
    copy_bytes_per_s: float = 0.0
    copy_ns: float = 0.0
    call_ns: float = 0.0  # of the calls the computing thread makes, a layer of a step

    @property
    def put_ns(self) -> float:
        """Return the time the computing thread takes for a byte of new KV: its place is cleared, then filled."""
        return 2e9 / self.copy_bytes_per_s if self.copy_bytes_per_s else 0.0

    def copy_time_ns(self, num_bytes: int) -> float:
        """Return the time of one copy to the device."""
        return self.copy_ns + _time_ns(num_bytes, self.copy_bytes_per_s)

    def check_time_ns(self, num_bytes: int) -> float:
        """Return the time to check bytes."""
        return _time_ns(num_bytes, self.check_bytes_per_s)


FREE = HostCosts()


def _time_ns(num_bytes: int, bytes_per_s: float) -> float:
    return num_bytes / bytes_per_s * 1e9 if bytes_per_s else 0.0


class _Timed(Future[object]):
    """A future that is done when the main line has reached the moment its job ended."""

    def __init__(self, mover: VirtualMover) -> None:
        super().__init__()
        self.done_ns = -1
        self._mover = mover

    def result(self, timeout: float | None = None) -> object:
        del timeout
        self._mover.wait_for(self)
        return super().result(0)

    def done(self) -> bool:
        return super().done() and self.done_ns <= self._mover.main.now_ns()


class VirtualMover(Mover):
    """The mover under virtual time: one job after the other, most urgent first, on a timeline of its own."""

    def __init__(self, main: VirtualClock, own: VirtualClock, *, job_ns: float = 0.0) -> None:
        self.main, self.own = main, own
        self.busy_ns = self.worked_ns = 0  # with something to do; with the processor
        self.job_ns = job_ns
        self._jobs: list[tuple[int, int, int, Callable[[], object], _Timed]] = []
        self._numbers = itertools.count()
        self._is_closed, self._opener = False, Opener()

    def submit(self, job: Callable[[], object], priority: int) -> Future[object]:
        """Queue `job` now; what began before now has begun before it."""
        if self._is_closed:
            raise ConfigError("this cache is closed; open its store again")
        self.run_until(self.main.now_ns())
        future = _Timed(self)
        heapq.heappush(self._jobs, (priority, next(self._numbers), self.main.now_ns(), job, future))
        return future

    def hasten(self, future: Future[object]) -> None:
        """Let a queued job run as demand."""
        for index, (_, number, submit_ns, job, queued) in enumerate(self._jobs):
            if queued is future:
                self._jobs[index] = (DEMAND, number, submit_ns, job, queued)
                heapq.heapify(self._jobs)
                return

    def now_ns(self) -> int:
        """Return the time on the mover's line."""
        return self.own.now_ns()

    def run_until(self, time_ns: int) -> None:
        """Run every job that begins before `time_ns`."""
        while self._jobs and max(self.own.now_ns(), self._jobs[0][2]) < time_ns:
            self._run_one()

    def wait_for(self, future: _Timed) -> None:
        """Let the main line wait until the job of `future` ended."""
        while not Future.done(future):
            self._run_one()
        self.main.advance_to(future.done_ns)

    def drain(self) -> None:
        """Let the main line wait until nothing is left to do."""
        while self._jobs:
            self._run_one()
        self.main.advance_to(self.own.now_ns())

    def close(self) -> None:
        """Finish what is queued. Idempotent."""
        self.drain()
        self._is_closed = True

    def _run_one(self) -> None:
        _, _, submit_ns, job, future = heapq.heappop(self._jobs)
        self.own.advance_to(submit_ns)
        started = self.own.now_ns()
        self.spend(self.job_ns)
        try:
            outcome = job()
        except BaseException as error:  # whoever waits for the future gets it, whatever it is
            future.done_ns = self.own.now_ns()
            future.set_exception(error)
        else:
            future.done_ns = self.own.now_ns()
            future.set_result(outcome)
        self.busy_ns += self.own.now_ns() - started

    def spend(self, time_ns: float) -> None:
        """Let the processor work on the mover's line."""
        self.worked_ns += round(time_ns)
        self.own.advance_to(self.own.now_ns() + round(time_ns))


class VirtualDevice:
    """Device memory without bytes: a copy to it takes time on the mover's line."""

    def __init__(self, num_bytes: int, mover: VirtualMover, copy_time_ns: Callable[[int], float]) -> None:
        self.num_bytes = num_bytes
        self.copy_time_ns, self._mover = copy_time_ns, mover

    def write(self, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """Take the time of one copy."""
        del offset
        self._mover.spend(self.copy_time_ns(data.size))

    def populate(self, start: int, num_bytes: int) -> None:
        """Do nothing."""


class VirtualFileTier(FileTier):
    """The file tier without bytes. What the host does beside the drive takes time on the mover's line."""

    def __init__(
        self, device: DeviceModel, mover: VirtualMover, layout: SlotLayout, num_slots: int, costs: HostCosts,
        *, depth_max: int, recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        engine = HollowEngine(DeviceQueue(device), mover.own, depth_max=depth_max, host_ns=round(costs.op_ns))
        self.mover, self._costs = mover, costs
        super().__init__(engine, HOLLOW_FD, layout, NO_DIGEST, num_slots, recorder=recorder)

    def _make_io(self, engine: Engine, recorder: Recorder | None) -> SlotIo:
        io = _CostedIo(engine, HOLLOW_FD, self.layout, self._stats, recorder)
        io.mover, io.costs = self.mover, self._costs
        return io


class _CostedIo(SlotIo):
    """Operations that take the host's time as well as the drive's; nothing is hashed."""

    mover: VirtualMover
    costs: HostCosts

    def _count(self, num: int, num_bytes: int, *, is_write: bool) -> None:
        self.mover.spend(self.costs.round_ns)
        super()._count(num, num_bytes, is_write=is_write)

    def checksums(
        self, fragments: npt.NDArray[np.integer], addresses: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.uint64]:
        num_bytes = int(self._lengths[fragments].sum())
        self.mover.spend(self.costs.check_time_ns(num_bytes))
        return np.zeros(len(addresses), np.uint64)


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes of each tier, the device, DRAM and disk; `disk_bytes` 0 means no file tier."""

    device_bytes: int
    dram_bytes: int
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class VirtualCache:
    """A production cache on virtual tiers, and its two clocks' keeper.

    `steal` is how much longer the main line computes for each ns that the mover's processor works beside it: 1 where
    a model splits its work evenly over all cores, 0 where it computes on a GPU.
    """

    cache: TieredCache
    mover: VirtualMover
    device: VirtualDevice
    budgets: Budgets
    options: CacheOptions
    tier: VirtualFileTier | None
    recorder: Recorder | None
    steal: float = 0.0

    @property
    def main(self) -> VirtualClock:
        """The clock of the line that computes and waits."""
        return self.mover.main

    def driver(self, compute: Compute, costs: HostCosts = FREE) -> Driver:
        """Return a driver of this cache; of `costs` it spends those of the computing thread."""
        return Driver(
            self.cache,
            compute,
            clock=self.main.now_ns,
            advance=self.advance,
            make_rows=make_hollow_rows,
            call_ns=costs.call_ns,
            byte_ns=costs.put_ns,
        )

    def advance(self, time_ns: float) -> None:
        """Let the main line compute."""
        worked = self.mover.worked_ns
        self.main.advance_to(self.main.now_ns() + round(time_ns))
        self.mover.run_until(self.main.now_ns())
        if self.steal:
            self.main.advance_to(self.main.now_ns() + round(self.steal * (self.mover.worked_ns - worked)))


def virtual_cache(
    layout: SlotLayout,
    budgets: Budgets,
    drive: DeviceModel | None,
    *,
    costs: HostCosts = FREE,
    copy_time_ns: Callable[[int], float] | None = None,
    depth_max: int = 64,
    write_policy: Literal["through", "back"] = "through",
    evictor: str = "lip",
    reuse: Reuse = "auto",
    recorder: Recorder | None = None,
    mover: type[VirtualMover] | None = None,
    steal: float = 0.0,
) -> VirtualCache:
    """Return an empty cache under virtual time. `copy_time_ns` replaces the host's copies by those of a link.

    Raises: ConfigError for budgets too small.
    """
    made = (mover or VirtualMover)(VirtualClock(), VirtualClock(), job_ns=costs.job_ns)
    tier = None
    if drive is not None and budgets.disk_bytes:
        num_slots = (budgets.disk_bytes - PAGE_BYTES) // layout.slot_bytes
        if num_slots < 1:
            raise ConfigError(f"a disk of {format_bytes(budgets.disk_bytes)} holds no group of this layout")
        tier = VirtualFileTier(drive, made, layout, num_slots, costs, depth_max=depth_max, recorder=recorder)
    options = CacheOptions(dram_bytes=budgets.dram_bytes, write_policy=write_policy, evictor=evictor, reuse=reuse)
    return _on_tiers(layout, budgets, made, tier, options, copy_time_ns or costs.copy_time_ns, steal, recorder)


def reopened(old: VirtualCache, *, pace: Pace | None = None) -> VirtualCache:
    """Return a new cache on what `old` left in its file tier, as after a restart; `old` is closed.

    `pace` is what the new one knows of the old one's measurements.
    """
    old.cache.close()
    mover = type(old.mover)(old.mover.main, old.mover.own, job_ns=old.mover.job_ns)
    if old.tier is not None:
        old.tier.mover = mover
    return _on_tiers(
        old.cache.layout,
        old.budgets,
        mover,
        old.tier,
        old.options,
        old.device.copy_time_ns,
        old.steal,
        old.recorder,
        pace,
    )


def _on_tiers(
    layout: SlotLayout,
    budgets: Budgets,
    mover: VirtualMover,
    tier: VirtualFileTier | None,
    options: CacheOptions,
    copy_time_ns: Callable[[int], float],
    steal: float,
    recorder: Recorder | None,
    pace: Pace | None = None,
) -> VirtualCache:
    device = VirtualDevice(budgets.device_bytes, mover, copy_time_ns)
    cache = TieredCache(
        layout,
        NO_DIGEST,
        device,
        options,
        tier=tier,
        recorder=recorder,
        clock=mover.main.now_ns,
        mover=mover,
        frame_pool=HollowFramePool,
        pace=pace,
    )
    return VirtualCache(cache, mover, device, budgets, options, tier, recorder, steal)


def make_hollow_rows(num_tokens: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    """Return KV that takes no memory. Shapes: [num_tokens, row_bytes]."""
    return np.broadcast_to(np.uint8(0), (num_tokens, row_bytes))
