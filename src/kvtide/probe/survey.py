"""A whole probe: look at the device, fill a file, measure, fit, copy memory, and say what is doubtful.

Decides how the time budget is shared and which warnings are given. Next: cli_probe.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from kvtide.errors import ConfigError
from kvtide.io.opening import open_engine
from kvtide.io.ops import aligned_buffer
from kvtide.probe.caps import DeviceCaps, caps_of
from kvtide.probe.file import Probe
from kvtide.probe.fit import RoofFit, fit
from kvtide.probe.measure import ARENA_BYTES, DISAGREE, ROUNDS_MIN, Bench, Measured, choose_spots, measure
from kvtide.probe.memory import Dram, measure_dram, measure_gpu_copies
from kvtide.probe.scratch import FILE_BYTES_MAX, Scratch
from kvtide.units import format_bytes, printable

SECONDS_MIN, SECONDS_MAX = 1.0, 3600.0
DEPTH_MAX = 256
MEASURE_SHARE_MIN = 0.4  # of the budget, for measuring itself
FILL_SHARE = 0.2  # of the budget, at most
MEMORY_SHARE, MEMORY_S_MAX = 0.05, 2.0
ERROR_MAX = 0.25  # median error of a fit from which on it is called poor
NAMED_MAX = 3  # cells named in one warning


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """Knobs of a probe; all change how exact it is."""

    seconds: float = 60.0
    seed: int = 0
    engine: str = "auto"
    file_bytes_max: int = FILE_BYTES_MAX


def probe_path(
    path: Path,
    options: ProbeOptions,
    *,
    version: str,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Probe:
    """Measure the device under `path`; `on_progress` gets a word for the stage, what is done and all there is.

    Raises: ConfigError for a path or a budget that will not do; IoError where the device refuses.
    """
    check_seconds(options.seconds)
    start_ns, tell = time.monotonic_ns(), on_progress or _tell_nobody
    caps = caps_of(path)
    directory = directory_of(path)
    end_ns = start_ns + int(options.seconds * 1e9)
    with (
        Scratch(directory, is_memory=caps.is_memory, file_bytes_max=options.file_bytes_max) as scratch,
        open_engine(options.engine, depth_max=DEPTH_MAX) as engine,
    ):
        tell("memory", 0, 1)
        memory_s = min(MEMORY_SHARE * options.seconds, MEMORY_S_MAX)
        dram, gpu = measure_dram(memory_s), measure_gpu_copies()
        rng = np.random.default_rng(options.seed)
        arena = aligned_buffer(ARENA_BYTES)
        arena[:] = np.frombuffer(rng.bytes(ARENA_BYTES), np.uint8)
        tell("fill", 0, scratch.wanted_bytes)
        fill_end_ns = time.monotonic_ns() + int(FILL_SHARE * options.seconds * 1e9)
        scratch.fill(engine, arena, fill_end_ns, on_progress=lambda done: tell("fill", done, scratch.wanted_bytes))
        # Where memory or the disk were slow to make ready, it takes longer than asked for, rather than measure nothing.
        end_ns = max(end_ns, time.monotonic_ns() + int(MEASURE_SHARE_MIN * options.seconds * 1e9))
        spots = choose_spots(end_ns - time.monotonic_ns(), depth_max=engine.depth_max, file_bytes=scratch.file_bytes)
        bench = Bench(engine, scratch.fd, scratch.file_bytes, arena, time.monotonic_ns, scratch.sync, rng)
        measured = measure(bench, spots, end_ns, on_progress=lambda done, total: tell("measure", done, total))
        fallback, engine_name = engine.fallback_reason, type(engine).__name__
    read, write = (fit([cell for cell in measured.cells if cell.is_write == kind]) for kind in (False, True))
    return Probe(
        caps,
        measured.cells,
        read,
        write,
        engine="uring" if engine_name == "UringEngine" else "threads",
        is_direct=scratch.is_direct,
        file_bytes=scratch.file_bytes,
        seconds=options.seconds,
        num_rounds=measured.num_rounds,
        seed=options.seed,
        dram=dram,
        gpu=gpu,
        warnings=[
            *_of_device(caps, scratch, fallback),
            *_of_runs(measured, engine.depth_max),
            *_of_fit("reads", read),
            *_of_fit("writes", write),
            *_of_dram(dram),
        ],
        kvtide_version=version,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        host=platform.node(),
        kernel=platform.release(),
    )


def check_seconds(seconds: float) -> None:
    """Refuse a budget no probe can keep.

    Raises: ConfigError unless it is from SECONDS_MIN to SECONDS_MAX.
    """
    if not SECONDS_MIN <= seconds <= SECONDS_MAX:  # NaN too
        raise ConfigError(f"--seconds is {seconds:g}; type a number from {SECONDS_MIN:g} to {SECONDS_MAX:g}")


def _tell_nobody(_stage: str, _done: int, _total: int) -> None:
    return


def directory_of(path: Path) -> Path:
    """Return the directory to measure in: `path`, or that of the file it names.

    Raises: ConfigError for neither, or one that may not be written to.
    """
    if path.is_block_device() or path.is_char_device():
        raise ConfigError(f"{path} is a device; a probe writes files: type a directory of a file system on it")
    directory = path if path.is_dir() else path.absolute().parent
    if not path.exists():
        raise ConfigError(f"{path} does not exist; type a directory, or a file in it")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"{directory} may not be written to; type another directory")
    return directory


def _of_device(caps: DeviceCaps, scratch: Scratch, fallback: str) -> list[str]:
    """Say what is not as it should be about the place that was measured."""
    said = []
    if caps.is_memory:
        said.append(f"{printable(caps.mount_point)} is {caps.file_system}: no device is under it, memory was measured")
    elif not caps.name:
        said.append(f"no block device of its own is under this path ({caps.file_system or 'unknown'} file system)")
    if not scratch.is_direct:
        said.append("this file system refuses direct I/O: the page cache was measured, not the drive")
    if fallback:
        said.append(f"measured with threads, which cost more CPU than io_uring: {fallback}")
    if caps.is_virtual:
        said.append("the drive is virtual: its host may cache, throttle or share it")
    if scratch.file_bytes < scratch.wanted_bytes:
        said.append(
            f"filling took long: the file has {format_bytes(scratch.file_bytes)} of the wanted "
            f"{format_bytes(scratch.wanted_bytes)}; a drive's cache may hold it"
        )
    return said


def _of_runs(measured: Measured, depth_max: int) -> list[str]:
    """Say which cells are doubtful or missing."""
    said, cells = [], measured.cells
    doubtful = sorted((cell for cell in cells if cell.spread > DISAGREE), key=lambda cell: -cell.spread)
    if doubtful:
        named = "; ".join(f"{cell.spot} ({cell.spread:.0%})" for cell in doubtful[:NAMED_MAX])
        more = f", and {len(doubtful) - NAMED_MAX} more" if len(doubtful) > NAMED_MAX else ""
        said.append(
            f"runs of {len(doubtful)} of {len(cells)} cells disagree by more than {DISAGREE:.0%}: {named}{more}; "
            f"other work on this machine or on the drive disturbs, or more --seconds are needed"
        )
    if measured.num_too_slow:
        said.append(f"{measured.num_too_slow} cells were left out: their ops take too long for this time")
    if measured.num_missing:
        said.append(f"{measured.num_missing} cells ran fewer than {ROUNDS_MIN} times: more --seconds are needed")
    if depth_max < DEPTH_MAX:
        said.append(f"depths beyond {depth_max} were not measured: this engine does not go deeper")
    return said


def _of_fit(name: str, fitted: RoofFit) -> list[str]:
    said = []
    if fitted.error_median > ERROR_MAX:
        said.append(f"the roofs of {name} fit poorly: half of the cells are off by more than {fitted.error_median:.0%}")
    if fitted.is_host_bound:
        said.append(
            f"the IOPS roof of {name} is this machine's: one thread was busy with small ops, the drive may do more"
        )
    return said


def _of_dram(dram: Dram) -> list[str]:
    if dram.buffer_bytes >= dram.cache_bytes > 0:
        return []
    if not dram.cache_bytes:
        return ["the size of the last-level cache is unknown: the memory rate may be that of the cache"]
    sizes = f"{format_bytes(dram.buffer_bytes)} fit the last-level cache of {format_bytes(dram.cache_bytes)}"
    return [f"buffers of {sizes}: the memory rate may be that of the cache"]
