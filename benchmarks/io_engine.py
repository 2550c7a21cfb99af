"""Is our io_uring engine as fast as fio's? Random direct reads, size by depth, in turns on one file.

Two fio runs stand beside ours: `fio` with its defaults, and from depth 32 on `fio batched`, which submits and reaps
in eighths of the depth as our engine does. The plain baseline is an `os.preadv` loop, which is depth 1. Our buffers
are numpy arrays, which ask for huge pages from 4 MiB on; fio's come from malloc, so at large sizes part of the CPU
ratio is page pinning, not the engine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from _bench import RESULTS, environment, parser, summary, warnings_of, write_result
from kvtide.errors import UnsupportedError
from kvtide.io.ops import OP, WRITE, address_of, aligned_buffer
from kvtide.io.uring import REFILL_PARTS, UringEngine

KIB = 1024
SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 128 * KIB, 1024 * KIB)
DEPTHS = (1, 8, 32, 128)
BATCHED_DEPTH_MIN = 32
WARM_UP_S = 0.1  # fio touches its buffers for the first time in the run; ours are touched before
FEED_DEPTHS = 4  # operations handed over at a time, in depths: a tier hands over whole batches


@dataclass(frozen=True)
class Case:
    """One size at one depth, on one file, for so long."""

    path: Path
    file_bytes: int
    size: int
    depth: int
    seconds: float
    seed: int


@dataclass(frozen=True)
class Run:
    """What one run gave; CPU is user and system time of the process, per operation."""

    iops: float
    cpu_us: float


def main() -> int:
    """Run every case in turns and write the result."""
    made = parser(__doc__ or "")
    made.add_argument("--mib", type=int, default=1024, help="size of the file")
    made.add_argument("--seconds", type=float, default=0.5, help="length of one run")
    args = made.parse_args()
    missing = skipped()
    if missing:
        print(f"io_engine: skipped, {missing}", file=sys.stderr)
        payload: dict[str, Any] = {"result": "skipped", "reason": missing}
    else:
        payload = measure(args)
    if args.json:
        print(json.dumps(payload, indent=1, default=str))
    write_result("io_engine", payload, args.out or (None if args.smoke else RESULTS / "io_engine.json"))
    return 0


def skipped() -> str:
    """Return why nothing can be compared here, or nothing."""
    if shutil.which("fio") is None:
        return "fio is not installed (apt install fio)"
    try:
        UringEngine(depth_max=1).close()
    except UnsupportedError as refused:
        return str(refused)
    return ""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the whole result."""
    sizes: tuple[int, ...] = SIZES
    depths: tuple[int, ...] = DEPTHS
    repeats: int = args.repeats
    seconds, file_bytes = args.seconds, args.mib * KIB * KIB
    if args.smoke:
        sizes, depths, repeats, seconds, file_bytes = (4 * KIB,), (1, 32), 1, 0.05, 16 * KIB * KIB
    args.dir.mkdir(parents=True, exist_ok=True)
    path = args.dir / "io_engine.dat"
    prepare(path, file_bytes, args.seed)
    cases = [Case(path, file_bytes, size, depth, seconds, args.seed) for size in sizes for depth in depths]
    runs: dict[Case, dict[str, list[Run]]] = {case: {} for case in cases}
    for repeat in range(repeats):
        for case in cases:
            ways = ways_of(case)
            for name in list(ways) if repeat % 2 == 0 else list(ways)[::-1]:
                runs[case].setdefault(name, []).append(ways[name](case, repeat))
        print(f"round {repeat + 1} of {repeats}", file=sys.stderr)
    path.unlink()
    rows = [row_of(case, runs[case]) for case in cases]
    if not args.json:
        show(rows)
    return {
        "result": "measured",
        "environment": environment(args.dir),
        "access": "cold: O_DIRECT random reads",
        "file_bytes": file_bytes,
        "seconds_per_run": seconds,
        "repeats": repeats,
        "seed": args.seed,
        "smoke": args.smoke,
        "fio": subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip(),
        "cases": rows,
    }


def ways_of(case: Case) -> dict[str, Callable[[Case, int], Run]]:
    """Return what is compared in this case."""
    ways: dict[str, Callable[[Case, int], Run]] = {"ours": run_ours, "fio": run_fio}
    if case.depth >= BATCHED_DEPTH_MIN:
        ways["fio batched"] = run_fio_batched
    if case.depth == 1:
        ways["preadv"] = run_preadv
    return ways


def prepare(path: Path, file_bytes: int, seed: int) -> None:
    """Write the file in full, with bytes no drive can compress or deduplicate."""
    size = 1024 * KIB
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, file_bytes)
    rng = np.random.default_rng(seed)
    with UringEngine(depth_max=8) as engine:
        for first in range(0, file_bytes, 16 * size):
            arena = aligned_buffer(min(16 * size, file_bytes - first))
            arena[:] = np.frombuffer(rng.bytes(len(arena)), np.uint8)
            ops = np.zeros(len(arena) // size, OP)
            ops["fd"], ops["kind"], ops["length"] = fd, WRITE, size
            ops["offset"] = first + np.arange(len(ops)) * size
            ops["address"] = address_of(arena) + np.arange(len(ops)) * size
            engine.submit(ops)
            assert not engine.reap(len(ops))["error"].any()
    os.fsync(fd)
    os.close(fd)


def random_reads(case: Case, fd: int, arena: np.ndarray, seed: int) -> np.ndarray:
    """Return more reads than one run needs to wrap around without caching: the access is direct."""
    ops = np.zeros(64 * max(case.depth, 64), OP)
    rng = np.random.default_rng([case.seed, seed])
    ops["fd"], ops["length"] = fd, case.size
    ops["offset"] = rng.integers(0, case.file_bytes // case.size, len(ops)) * case.size
    ops["address"] = address_of(arena) + np.arange(len(ops)) % case.depth * case.size
    return ops


def timed(body: Callable[[], int]) -> Run:
    """Run `body`, which returns how many operations it did."""
    before, start_ns = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter_ns()
    num = body()
    seconds = (time.perf_counter_ns() - start_ns) / 1e9
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(num / seconds, cpu_s / num * 1e6)


def run_ours(case: Case, repeat: int) -> Run:
    """Feed our engine in batches, or one operation a call at depth 1."""
    fd = os.open(case.path, os.O_RDONLY | os.O_DIRECT)
    arena = aligned_buffer(case.depth * case.size)
    arena[:] = 1
    ops = random_reads(case, fd, arena, repeat)
    with UringEngine(depth_max=case.depth) as engine:
        run = timed(lambda: one_by_one(case, engine, ops) if case.depth == 1 else in_batches(case, engine, ops))
    os.close(fd)
    return run


def one_by_one(case: Case, engine: UringEngine, ops: np.ndarray) -> int:
    """Submit and reap one operation at a time; return how many."""
    end_ns, num = time.perf_counter_ns() + int(case.seconds * 1e9), 0
    while time.perf_counter_ns() < end_ns:
        index = num % len(ops)
        engine.submit(ops[index : index + 1])
        engine.reap(1)
        num += 1
    return num


def in_batches(case: Case, engine: UringEngine, ops: np.ndarray) -> int:
    """Keep the engine's queue filled and reap as completions come; return how many operations."""
    end_ns, feed = time.perf_counter_ns() + int(case.seconds * 1e9), FEED_DEPTHS * case.depth
    first = outstanding = num = 0
    wait_num = max(1, case.depth // REFILL_PARTS)
    while outstanding or time.perf_counter_ns() < end_ns:
        if outstanding <= feed // 2 and time.perf_counter_ns() < end_ns:
            engine.submit(ops[first : first + feed])
            outstanding += min(feed, len(ops) - first)
            first = (first + feed) % len(ops)
        done = engine.reap(wait_num)
        outstanding -= len(done)
        num += len(done)
    return num


def run_preadv(case: Case, repeat: int) -> Run:
    """Read with one blocking call after another."""
    fd = os.open(case.path, os.O_RDONLY | os.O_DIRECT)
    arena = aligned_buffer(case.size)
    offsets = random_reads(case, fd, arena, repeat)["offset"].tolist()

    def loop() -> int:
        end_ns, num, buffers = time.perf_counter_ns() + int(case.seconds * 1e9), 0, [arena.data]
        while time.perf_counter_ns() < end_ns:
            os.preadv(fd, buffers, offsets[num % len(offsets)])
            num += 1
        return num

    run = timed(loop)
    os.close(fd)
    return run


def run_fio_batched(case: Case, repeat: int) -> Run:
    """Run fio with our batching."""
    part = max(1, case.depth // REFILL_PARTS)
    return run_fio(
        case,
        repeat,
        (
            f"--iodepth_batch_submit={part}",
            f"--iodepth_batch_complete_min={part}",
            f"--iodepth_batch_complete_max={case.depth}",
        ),
    )


def run_fio(case: Case, repeat: int, more: tuple[str, ...] = ()) -> Run:
    """Run fio's io_uring engine on the same case."""
    command = [
        "fio",
        "--name=io_engine",
        f"--filename={case.path}",
        f"--size={case.file_bytes}",
        "--ioengine=io_uring",
        "--rw=randread",
        "--direct=1",
        "--norandommap",
        f"--bs={case.size}",
        f"--iodepth={case.depth}",
        f"--runtime={int(case.seconds * 1000)}ms",
        "--time_based",
        f"--ramp_time={int(WARM_UP_S * 1000)}ms",
        f"--randseed={case.seed * 1000 + repeat}",
        "--output-format=json",
        *more,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout)["jobs"][0]
    iops = float(job["read"]["iops"])
    return Run(iops, (job["usr_cpu"] + job["sys_cpu"]) / 100 / iops * 1e6)


def row_of(case: Case, runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Return one case of the result: figures of each way, and ours over each of the others."""
    row: dict[str, Any] = {"size_bytes": case.size, "depth": case.depth, "ways": {}, "ratios": {}, "warnings": []}
    for name, found in runs.items():
        iops, cpu = [run.iops for run in found], [run.cpu_us for run in found]
        row["ways"][name] = {"iops": summary(iops), "cpu_us_per_op": summary(cpu), "iops_runs": iops, "cpu_runs": cpu}
        row["warnings"] += warnings_of(f"{name} {case.size} B depth {case.depth}", iops)
    ours = row["ways"]["ours"]
    for name, way in row["ways"].items():
        if name != "ours":
            row["ratios"][name] = {
                "iops": ours["iops"]["median"] / way["iops"]["median"],
                "cpu_per_op": ours["cpu_us_per_op"]["median"] / max(way["cpu_us_per_op"]["median"], 1e-9),
            }
    return row


def show(rows: list[dict[str, Any]]) -> None:
    """Print the medians and ratios as a table."""
    print(f"{'KiB':>8} {'depth':>5} {'way':>12} {'IOPS':>9} {'spread':>7} {'CPU us/op':>10} {'ours/it':>10} {'CPU':>6}")
    for row in rows:
        for name, way in row["ways"].items():
            ratio = row["ratios"].get(name)
            beside = f"{ratio['iops']:>10.2f} {ratio['cpu_per_op']:>6.2f}" if ratio else ""
            print(
                f"{row['size_bytes'] // KIB:>8} {row['depth']:>5} {name:>12} {way['iops']['median']:>9.0f} "
                f"{way['iops']['spread']:>7.0%} {way['cpu_us_per_op']['median']:>10.1f} {beside}"
            )
    ratios = [row["ratios"]["fio"]["iops"] for row in rows]
    print(f"ours / fio, IOPS: median {statistics.median(ratios):.2f}, lowest {min(ratios):.2f}")
    noisy = sum(bool(row["warnings"]) for row in rows)
    if noisy:
        print(f"{noisy} of {len(rows)} cases are noisy; see `warnings` in the JSON")


if __name__ == "__main__":
    sys.exit(main())
