"""Measuring one device: a grid of sizes and depths, in turns, within a time budget.

Decides which cells there are, how long each runs and in what order. Knows an engine and an open file, not what device
is under it. Next: fit.

Theory. A cell keeps `depth` ops in flight: it submits as many as it has reaped, and reaps an eighth of the depth at a
time, as our engine does for the tiers. Its rate is ops over the time from the first submission to the last completion.
Both a drive limited by latency and one that is saturated give their true rate that way, because the last ops drain as
fast as the first ones filled. Cells run in shuffled order and every cell at least twice, the rounds far apart: drift,
caches and other users of the drive show as rounds that disagree, not as a shape of the curve.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from kvtide.errors import IoError, ShortIo
from kvtide.io.ops import OP, READ, WRITE, Batch, Completions, Engine, address_of
from kvtide.io.uring import REFILL_PARTS
from kvtide.units import format_bytes

KIB = 1024
ARENA_BYTES = 64 << 20  # buffers of a cell; a deeper queue of large ops uses them twice, which costs nothing
IN_FLIGHT_BYTES_MAX = 128 << 20  # more depth than this holds gains nothing and takes long to drain
WINDOW_NS_MIN, WINDOW_NS_MAX = 5_000_000, 1_000_000_000  # of one run; a larger budget gives more rounds
WINDOW_NS_GOOD = 60_000_000  # a grid is chosen so that a run gets at least this
DRAIN_WINDOWS_MAX = 3  # a cell whose ops take longer than this many windows is left out: the drive is too slow for it
OPS_MIN = 4096  # prepared for a cell, and then used again: the access is direct
ROUNDS_MIN = 2
DISAGREE = 0.2  # rounds of a cell that differ by more are reported

GRIDS = (  # sizes in KiB, depths, whether sequential too; the largest that the budget allows
    ((4, 16, 64, 128, 256, 1024, 4096), (1, 4, 16, 32, 64, 128, 256), True),
    ((4, 16, 64, 256, 1024, 4096), (1, 8, 32, 128), True),
    ((4, 64, 256, 1024), (1, 8, 32, 128), False),
    ((4, 64, 1024), (1, 32), False),
)


@dataclass(frozen=True, slots=True, order=True)
class Spot:
    """What is measured: one size at one depth, in one direction and order."""

    is_write: bool
    is_random: bool
    size_bytes: int
    depth: int

    def __str__(self) -> str:
        order, kind = "random" if self.is_random else "sequential", "writes" if self.is_write else "reads"
        return f"{order} {kind} of {format_bytes(self.size_bytes)} at depth {self.depth}"


@dataclass(frozen=True, slots=True)
class Reading:
    """What one run of a spot gave. Latency is from submission to being reaped."""

    num_ops: int
    window_ns: int
    latency_ns_mean: float
    latency_ns_p50: float
    latency_ns_p99: float
    host_ns: float  # CPU time, user and system of all threads, of one op
    depth_mean: float  # in flight on average, by Little's law

    @property
    def ops_per_s(self) -> float:
        """Return the rate of the run."""
        return self.num_ops / self.window_ns * 1e9


@dataclass(frozen=True, slots=True)
class Cell:
    """A spot after all rounds: medians over the rounds."""

    is_write: bool
    is_random: bool
    size_bytes: int
    depth: int
    num_rounds: int
    num_ops: int  # of all rounds
    ops_per_s: float
    bytes_per_s: float
    latency_ns_mean: float
    latency_ns_p50: float
    latency_ns_p99: float
    host_ns: float
    depth_mean: float
    spread: float  # fastest round over slowest, less 1; of five and more without the outer fifths

    @property
    def spot(self) -> Spot:
        """Return what was measured."""
        return Spot(self.is_write, self.is_random, self.size_bytes, self.depth)


@dataclass(slots=True)
class Bench:
    """An engine on an open file. `arena` holds random bytes; reads and writes use the same buffers."""

    engine: Engine
    fd: int
    file_bytes: int
    arena: npt.NDArray[np.uint8]
    clock_ns: Callable[[], int]
    settle: Callable[[], None]  # after each run: let the drive finish, forget cached pages
    rng: np.random.Generator
    cpu_ns: Callable[[], int] = time.process_time_ns  # user and system, all threads, those of io_uring too


@dataclass(slots=True)
class Measured:
    """All cells, and what could not be measured."""

    cells: list[Cell]
    num_too_slow: int  # spots left out because their ops would take too long
    num_missing: int  # spots that ran fewer than ROUNDS_MIN times
    num_rounds: int


def choose_spots(budget_ns: float, *, depth_max: int, file_bytes: int) -> list[Spot]:
    """Return the spots of the largest grid that gives each run a good window within `budget_ns`."""
    for sizes, depths, has_sequential in GRIDS:
        orders = (True, False) if has_sequential else (True,)
        spots = [
            Spot(is_write, is_random, size * KIB, depth)
            for is_write, is_random, size, depth in product((False, True), orders, sizes, depths)
            if depth <= depth_max and depth * size * KIB <= min(IN_FLIGHT_BYTES_MAX, file_bytes)
        ]
        if len(spots) * ROUNDS_MIN * WINDOW_NS_GOOD <= budget_ns:
            break
    return spots


def measure(
    bench: Bench, spots: list[Spot], end_ns: int, *, on_progress: Callable[[int, int], None] | None = None
) -> Measured:
    """Run every spot in shuffled rounds until about `end_ns`; `on_progress` gets runs done and runs planned.

    Raises: IoError that names the spot whose ops fail.
    """
    fair_ns = (end_ns - bench.clock_ns()) / max(1, len(spots) * ROUNDS_MIN)
    kept = _fast_enough(bench, spots, fair_ns)
    readings: dict[Spot, list[Reading]] = {spot: [] for spot in kept}
    fair_ns = (end_ns - bench.clock_ns()) / max(1, len(kept))
    num_rounds = max(ROUNDS_MIN, round(fair_ns / WINDOW_NS_MAX))
    planned = [kept[index] for _ in range(num_rounds) for index in bench.rng.permutation(len(kept))]
    for done, spot in enumerate(planned):
        left_ns = end_ns - bench.clock_ns()
        if left_ns < WINDOW_NS_MIN and done:
            break
        window_ns = min(max(left_ns // (len(planned) - done), WINDOW_NS_MIN), WINDOW_NS_MAX)
        readings[spot].append(run_spot(bench, spot, window_ns))
        bench.settle()
        if on_progress is not None:
            on_progress(done + 1, len(planned))
    return Measured(
        [combine(spot, found) for spot, found in sorted(readings.items()) if found],
        num_too_slow=len(spots) - len(kept),
        num_missing=sum(len(found) < ROUNDS_MIN for found in readings.values()),
        num_rounds=num_rounds,
    )


def _fast_enough(bench: Bench, spots: list[Spot], fair_ns: float) -> list[Spot]:
    """Return the spots whose queue drains in a few windows, judged by one short run of small and one of large ops."""
    limit_ns, kept = DRAIN_WINDOWS_MAX * fair_ns, []
    for is_write in sorted({spot.is_write for spot in spots}):
        mine = [spot for spot in spots if spot.is_write == is_write]
        sizes = sorted({spot.size_bytes for spot in mine})
        depth = min(4, bench.engine.depth_max)
        ends = [Spot(is_write, is_random=True, size_bytes=size, depth=depth) for size in (sizes[0], sizes[-1])]
        runs = [run_spot(bench, spot, WINDOW_NS_MIN) for spot in ends]
        bench.settle()
        op_ns = [run.window_ns / run.num_ops for run in runs]
        byte_ns = op_ns[1] / sizes[-1]
        for spot in mine:
            took_ns = spot.depth * max(op_ns[0], spot.size_bytes * byte_ns)
            if took_ns <= limit_ns or spot.depth == 1:
                kept.append(spot)
    return kept


def run_spot(bench: Bench, spot: Spot, window_ns: int) -> Reading:
    """Keep `spot.depth` ops in flight for `window_ns`, and at least once the depth.

    Raises: IoError, ShortIo that name the spot.
    """
    ops = _prepare(bench, spot)
    before_ns = bench.cpu_ns()
    done = _drive(bench.engine, ops, spot.depth, bench.clock_ns() + window_ns, bench.clock_ns)
    cpu_ns = bench.cpu_ns() - before_ns
    failed = done["error"].nonzero()[0]
    if len(failed):
        number = int(done["error"][failed[0]])
        raise IoError(number, f"{spot}: {os.strerror(number)} ({len(failed)} of {len(done)} ops failed)")
    if (done["length"] != spot.size_bytes).any():
        raise ShortIo(0, f"{spot}: the device moved fewer bytes than asked for")
    took_ns = np.maximum(done["complete_ns"] - done["submit_ns"], 1)
    whole_ns = max(1, int(done["complete_ns"].max() - done["submit_ns"].min()))
    p50, p99 = np.percentile(took_ns, (50, 99))
    return Reading(
        len(done), whole_ns, float(took_ns.mean()), float(p50), float(p99), cpu_ns / len(done),
        float(took_ns.sum() / whole_ns),
    )  # fmt: skip


def _prepare(bench: Bench, spot: Spot) -> Batch:
    """Return ops enough that the engine can be fed from slices of them, again and again."""
    num = max(OPS_MIN, 4 * spot.depth)
    num_places, num_buffers = bench.file_bytes // spot.size_bytes, len(bench.arena) // spot.size_bytes
    if spot.is_random:
        places = bench.rng.integers(0, num_places, num)
    else:
        places = (bench.rng.integers(0, num_places) + np.arange(num)) % num_places
    ops = np.zeros(num, OP)
    ops["fd"], ops["kind"], ops["length"] = bench.fd, WRITE if spot.is_write else READ, spot.size_bytes
    ops["offset"] = places * spot.size_bytes
    ops["address"] = address_of(bench.arena) + np.arange(num) % num_buffers * spot.size_bytes
    return ops


def _drive(engine: Engine, ops: Batch, depth: int, end_ns: int, clock_ns: Callable[[], int]) -> Completions:
    """Keep `depth` ops in flight until `end_ns`, let them drain, and return all completions."""
    part, parts = max(1, depth // REFILL_PARTS), []
    engine.submit(ops[:depth])
    first = in_flight = depth
    while in_flight:
        done = engine.reap(min(part, in_flight))
        parts.append(done)
        in_flight -= len(done)
        if clock_ns() < end_ns:
            num = min(depth - in_flight, len(ops) - first)
            engine.submit(ops[first : first + num])
            first = (first + num) % len(ops)
            in_flight += num
    return np.concatenate(parts)


def combine(spot: Spot, readings: list[Reading]) -> Cell:
    """Return the medians over the rounds, and how far the rounds differ."""
    rates = np.sort([reading.ops_per_s for reading in readings])
    trim = len(rates) // 5  # of many rounds, some are always far off
    rate = float(np.median(rates))
    return Cell(
        spot.is_write,
        spot.is_random,
        spot.size_bytes,
        spot.depth,
        num_rounds=len(readings),
        num_ops=sum(reading.num_ops for reading in readings),
        ops_per_s=rate,
        bytes_per_s=rate * spot.size_bytes,
        latency_ns_mean=float(np.median([reading.latency_ns_mean for reading in readings])),
        latency_ns_p50=float(np.median([reading.latency_ns_p50 for reading in readings])),
        latency_ns_p99=float(np.median([reading.latency_ns_p99 for reading in readings])),
        host_ns=float(np.median([reading.host_ns for reading in readings])),
        depth_mean=float(np.median([reading.depth_mean for reading in readings])),
        spread=float(rates[-1 - trim] / rates[trim] - 1),
    )
