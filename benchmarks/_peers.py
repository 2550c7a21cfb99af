"""What the benchmarks against other engines' disk tiers share: equal chunks, equal order, interleaved rounds.

Each engine's file runs in its own environment and offers tiers behind `Tiered`. Knows no engine.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from _bench import RESULTS, environment, parser, write_result

KIB, MIB = 1 << 10, 1 << 20
SIZES = {16 * KIB: 4096, 64 * KIB: 2048, MIB: 256, 2949120: 96}  # chunks of each; the last is SmolLM2's 128 tokens
SMOKE = {64 * KIB: 64}
JOB_CHUNKS = 8  # in one job, where the engine says nothing else
LATENCY_JOBS = 48
REST_S = 2.0  # before loads: or a drive that still writes by itself would slow whoever stored fast

Rows = npt.NDArray[np.uint8]


class Tiered(Protocol):
    """One tier under test. Chunks are known by number."""

    is_direct: bool

    def store(self, jobs: list[range]) -> None:
        """Write all chunks of all jobs, and return when the tier says that they are stored."""

    def load(self, jobs: list[range]) -> None:
        """Read them back to where they came from."""

    def close(self) -> None:
        """Give everything back."""


Make = Callable[[Path, Rows], Tiered]
"""Makes a tier in a directory for chunks that lie in memory. Shapes: [chunks, bytes]."""


@dataclass
class Round:
    """One round of one tier. Latencies are of jobs, one at a time."""

    store_s: float
    load_s: float
    store_cpu_s: float
    load_cpu_s: float
    job_s: list[float]
    num_files: int
    disk_bytes: int


def run_rounds(
    tiers: Mapping[str, Make], directory: Path, sizes: Mapping[int, int], repeats: int, job_chunks: int
) -> list[dict[str, Any]]:
    """Run every tier at every size `repeats` times, in turn, each time in another order; return medians and ranges.

    All rounds of a size use one memory, as an engine keeps its own: direct I/O from and to memory that is new after a
    buffered tier's round was three times as slow on a virtual machine; why is not known.
    """
    draw, found_rows = random.Random(0), []
    for size, num in sizes.items():
        rows = np.frombuffer(mmap.mmap(-1, size * (num + 1)), np.uint8).reshape(num + 1, size)
        found: dict[str, list[Round]] = {name: [] for name in tiers}
        for turn in range(repeats):
            for name in draw.sample(list(tiers), len(tiers)):
                found[name].append(_round(tiers[name], directory / f"{name}-{size}-{turn}", rows, job_chunks))
                print(f"{name} {size // KIB} KiB: round {turn + 1} of {repeats}", file=sys.stderr)
        found_rows += [_row(name, size, num, rounds) for name, rounds in found.items()]
    return found_rows


def chunk_key(number: int) -> bytes:
    """Return the 32 bytes an engine would know a chunk by."""
    return hashlib.sha256(str(number).encode()).digest()


def _round(make: Make, directory: Path, rows: Rows, job_chunks: int) -> Round:
    num, size = len(rows) - 1, rows.shape[1]
    rows[:] = np.random.default_rng(size).integers(0, 256, rows.shape, np.uint8)
    wanted = rows.copy()
    directory.mkdir(parents=True)
    tier = make(directory, rows)
    try:
        tier.store([range(num, num + 1)])  # not counted: some open their files with the first chunk
        jobs = [range(first, min(num, first + job_chunks)) for first in range(0, num, job_chunks)]
        store_s, store_cpu_s = _timed(lambda: (tier.store(jobs), None if tier.is_direct else _flush(directory)))
        num_files, disk_bytes = _on_disk(directory)
        rows[:] = 0
        forget(directory)
        time.sleep(REST_S)
        load_s, load_cpu_s = _timed(lambda: tier.load(jobs))
        assert np.array_equal(rows[:num], wanted[:num]), f"{directory.name}: wrong bytes"
        forget(directory)
        job_s = [_timed(lambda job=job: tier.load([job]))[0] for job in jobs[:LATENCY_JOBS]]
    finally:
        tier.close()
        shutil.rmtree(directory)
    return Round(store_s, load_s, store_cpu_s, load_cpu_s, job_s, num_files, disk_bytes)


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds `work` takes, and those of processor time in this process."""
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - cpu


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def _flush(directory: Path) -> None:
    """Have the drive take what a buffered tier wrote: a direct one is not done before that either."""
    for path in _files(directory):
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.close(fd)


def forget(directory: Path) -> None:
    """Drop what the page cache has of a tier's files."""
    for path in _files(directory):
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _on_disk(directory: Path) -> tuple[int, int]:
    files = _files(directory)
    return len(files), sum(path.stat().st_blocks * 512 for path in files)


def _row(name: str, size: int, num: int, rounds: list[Round]) -> dict[str, Any]:
    megabytes = size * num / 1e6
    jobs = np.concatenate([one.job_s for one in rounds])

    def rate(field: str) -> dict[str, float]:
        rates = [megabytes / getattr(one, field) for one in rounds]
        return {"median": round(median(rates), 1), "least": round(min(rates), 1), "most": round(max(rates), 1)}

    def cpu(field: str) -> float:
        return round(median(getattr(one, field) for one in rounds) / (megabytes / 1e3), 3)

    return {
        "tier": name,
        "chunk_bytes": size,
        "num_chunks": num,
        "store_mb_per_s": rate("store_s"),
        "load_mb_per_s": rate("load_s"),
        "store_cpu_s_per_gb": cpu("store_cpu_s"),
        "load_cpu_s_per_gb": cpu("load_cpu_s"),
        "job_ms": {f"p{at}": round(float(np.percentile(jobs, at)) * 1e3, 3) for at in (50, 99)},
        "num_files": rounds[0].num_files,
        "disk_bytes_over_chunk_bytes": round(rounds[0].disk_bytes / (size * num), 3),
    }


def run_peers(
    name: str,
    told: str,
    tiers: Mapping[str, Make],
    more: Mapping[str, Callable[[Path, int], Any]] | None = None,
    *,
    job_chunks: int = JOB_CHUNKS,
) -> int:
    """Run all rounds and what `more` has to measure, print and keep the result; return the exit code."""
    args = parser(told).parse_args()
    directory = Path(args.dir) / f"{name}-{os.getpid()}"
    try:
        rows = run_rounds(tiers, directory, SMOKE if args.smoke else SIZES, args.repeats, job_chunks)
        found = {what: measure(directory / what, args.repeats) for what, measure in (more or {}).items()}
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    payload = {
        "question": "how fast are chunks stored and loaded, through the engine's own interface, bytes verified?",
        "environment": environment(args.dir),
        "repeats": args.repeats,
        "job_chunks": job_chunks,
        "rows": rows,
        **found,
    }
    for row in rows:
        print(
            f"{row['tier']:14} {row['chunk_bytes'] // KIB:5} KiB  store {row['store_mb_per_s']['median']:7.0f}  "
            f"load {row['load_mb_per_s']['median']:7.0f} MB/s  p99 of a job {row['job_ms']['p99']:7.2f} ms  "
            f"CPU {row['store_cpu_s_per_gb']:.2f} and {row['load_cpu_s_per_gb']:.2f} s/GB  {row['num_files']} files"
        )
    for what, rows_found in found.items():
        for row in rows_found:
            print(f"{what}: {json.dumps(row)}")
    write_result(name, payload, args.out or (None if args.smoke else RESULTS / f"{name}.json"))
    return 0
