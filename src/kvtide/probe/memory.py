"""How fast memory is copied: in DRAM with one thread and with all cores, and between host and GPU where there is one.

Decides buffers large enough that no cache holds them. A copy of n bytes counts as n bytes, though it reads n and
writes n. The GPU part needs torch, is imported only where a driver is loaded, and has not been run by us on hardware.
"""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

KIB, MIB = 1 << 10, 1 << 20
BUFFER_BYTES_MIN, BUFFER_BYTES_MAX = 64 * MIB, 512 * MIB
AVAILABLE_SHARE = 8  # a buffer takes at most this part of what is free
SLOWEST_BYTES_PER_S = 4 << 30  # assumed for the first touch and the copies, when the buffer is cut to the time there is
REPEATS_MIN = 3
COPY_SIZES = tuple(4 * KIB << shift for shift in range(0, 15, 2))  # 4 KiB to 64 MiB
COPY_BYTES = 256 * MIB  # moved for one size, at most
COPY_OPS_MAX = 2000
CPU, PROC = Path("/sys/devices/system/cpu"), Path("/proc")


@dataclass(frozen=True, slots=True)
class Dram:
    """Rate of copying in memory, in bytes copied a second."""

    buffer_bytes: int
    cache_bytes: int  # of the last level; 0 unknown
    num_threads: int  # of the second rate
    bytes_per_s_one: float
    bytes_per_s_all: float


@dataclass(frozen=True, slots=True)
class GpuCopies:
    """Rate of copying between pinned host memory and the GPU, by size; same order in all three lists."""

    name: str = ""
    reason: str = ""  # why there are no rates
    sizes_bytes: tuple[int, ...] = field(default=())
    to_device_bytes_per_s: tuple[float, ...] = field(default=())
    to_host_bytes_per_s: tuple[float, ...] = field(default=())


def available_bytes() -> int:
    """Return how much memory can be taken without swapping, 0 if the kernel does not say."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", (PROC / "meminfo").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


def cache_bytes() -> int:
    """Return the size of the largest cache the first core has, 0 if unknown."""
    sizes = [0]
    for path in (CPU / "cpu0" / "cache").glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KM])?\s*", path.read_text())
        sizes.append(int(found[1]) * {None: 1, "K": KIB, "M": MIB}[found[2]] if found else 0)
    return max(sizes)


def measure_dram(budget_s: float) -> Dram:
    """Copy between two buffers for about `budget_s`, first with one thread, then with one a core."""
    cache = cache_bytes()
    buffer_bytes = min(
        max(BUFFER_BYTES_MIN, cache),
        BUFFER_BYTES_MAX,
        max(MIB, available_bytes() // AVAILABLE_SHARE),
        max(MIB, int(budget_s * SLOWEST_BYTES_PER_S) // (2 * REPEATS_MIN + 2)),
    )
    buffer_bytes = buffer_bytes // MIB * MIB
    source, target = np.ones(buffer_bytes, np.uint8), np.ones(buffer_bytes, np.uint8)
    num_threads = max(1, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_threads) as pool:
        rates = [_copy_rate(source, target, parts, pool, budget_s / 3) for parts in (1, num_threads)]
    return Dram(buffer_bytes, cache, num_threads, *rates)


def _copy_rate(
    source: npt.NDArray[np.uint8],
    target: npt.NDArray[np.uint8],
    num_parts: int,
    pool: ThreadPoolExecutor,
    budget_s: float,
) -> float:
    """Return the median rate of copying all of `source` in `num_parts` at once. numpy copies without the GIL."""
    sources, targets = np.array_split(source, num_parts), np.array_split(target, num_parts)
    rates: list[float] = []
    end_s = time.monotonic() + budget_s
    while len(rates) < REPEATS_MIN or time.monotonic() < end_s:
        start_ns = time.perf_counter_ns()
        list(pool.map(np.copyto, targets, sources))
        rates.append(source.nbytes / (time.perf_counter_ns() - start_ns) * 1e9)
    return float(np.median(rates))


def measure_gpu_copies() -> GpuCopies:
    """Return copy rates of the first GPU by size, or why there are none."""
    if not (PROC / "driver" / "nvidia").exists():
        return GpuCopies(reason="no NVIDIA driver is loaded")
    try:
        import torch
    except ImportError:
        return GpuCopies(reason="torch is not installed; type pip install 'kvtide[transformers]'")
    if not torch.cuda.is_available():
        return GpuCopies(reason="torch finds no usable GPU")
    try:
        host = torch.empty(COPY_SIZES[-1], dtype=torch.uint8, pin_memory=True)
        device = torch.empty(COPY_SIZES[-1], dtype=torch.uint8, device="cuda")
        to_device = tuple(_gpu_rate(host[:size], device[:size], size) for size in COPY_SIZES)
        to_host = tuple(_gpu_rate(device[:size], host[:size], size) for size in COPY_SIZES)
    except RuntimeError as error:  # what torch raises for no memory, and for every fault of CUDA
        return GpuCopies(reason=f"the GPU refused: {str(error).splitlines()[0]}")
    return GpuCopies(torch.cuda.get_device_name(), "", COPY_SIZES, to_device, to_host)


def _gpu_rate(source: object, target: object, size: int) -> float:
    """Return bytes a second of many copies of one size on one stream, between two events."""
    import torch

    num = max(4, min(COPY_OPS_MAX, COPY_BYTES // size))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for is_timed in (False, True):
        if is_timed:
            start.record()
        for _ in range(num if is_timed else 2):
            target.copy_(source, non_blocking=True)  # type: ignore[attr-defined]
    end.record()
    end.synchronize()
    return float(num * size / (start.elapsed_time(end) / 1e3))
