"""kvtide's tier against vLLM's own disk tier, both behind vLLM's interface in one process, where vLLM is installed.

.venv-vllm/bin/python benchmarks/peers_vllm.py
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

try:
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
except ImportError:
    sys.exit(print("peers_vllm: skipped, vLLM is not installed here: see docs/engines.md", file=sys.stderr))

from _bench import summary
from _peers import JOB_CHUNKS, Rows, chunk_key, forget, run_peers

NUM_KEYS = 8000
NUM_LOOK_UPS = 20  # at least: how often the interpreter goes to the other thread is chance
THREADS = 4  # of vLLM's tier, each way; its default of 16 was slower on 2 cores


class Tier:
    """A secondary tier of vLLM."""

    is_direct = True

    def __init__(self, config: dict[str, Any], rows: Rows) -> None:
        self._keys = [make_offload_key(chunk_key(number), 0) for number in range(len(rows))]
        self._tier = SecondaryTierFactory.create_secondary_tier(config, memoryview(rows), _spec())
        self._next_id = 0

    def store(self, jobs: list[range]) -> None:
        self._run(self._tier.submit_store, jobs, is_promotion=False)

    def load(self, jobs: list[range]) -> None:
        self._run(self._tier.submit_load, jobs, is_promotion=True)

    def close(self) -> None:
        self._tier.shutdown()

    def _run(self, submit: Any, jobs: list[range], *, is_promotion: bool) -> None:
        for job in jobs:
            keys = self._keys[job.start : job.stop]
            submit(TransferJob(self._next_id, keys, np.arange(job.start, job.stop), is_promotion, None))
            self._next_id += 1
        left = len(jobs)
        while left:
            for done in self._tier.get_finished_jobs():
                assert done.success, done
                left -= 1
            time.sleep(0 if len(jobs) == 1 else 1e-4)

    def look_up(self) -> float:
        """Return the seconds until it is known of each chunk whether it is there, asked as the scheduler does."""
        context, left, began = ReqContext(req_id=f"request-{self._next_id}"), self._keys, time.perf_counter()
        self._next_id += 1
        while left:
            look_up, again = self._tier.lookup, LookupResult.RETRY
            left = [key for key in left if look_up(key, context) is again]
            self._tier.on_schedule_end(ScheduleEndContext((), ()))
        seconds = time.perf_counter() - began
        self._tier.on_request_finished(context)
        return seconds


def look_ups(directory: Path, repeats: int) -> list[dict[str, Any]]:
    """Look 8,000 chunks up while another thread holds the interpreter busy; return milliseconds a tier."""
    rows = np.zeros((NUM_KEYS, 4096), np.uint8)
    rows[:, :4] = np.arange(NUM_KEYS, dtype=np.uint32)[:, None].view(np.uint8)
    aligned = np.frombuffer(mmap.mmap(-1, rows.nbytes), np.uint8).reshape(rows.shape)
    aligned[:] = rows
    found = {
        name: _look_ups_of(make(directory / name, aligned), max(NUM_LOOK_UPS, repeats)) for name, make in TIERS.items()
    }
    return [
        {"tier": name, "num_keys": NUM_KEYS, "num_look_ups": len(times), "ms": summary(times), "ms_worst": max(times)}
        for name, times in found.items()
    ]


def _look_ups_of(tier: Tier, repeats: int) -> list[float]:
    """Return the milliseconds of each look-up. One tier at a time: threads of the other would compute, too."""
    is_over = threading.Event()
    busy = threading.Thread(target=_spin, args=(is_over,))
    with closing(tier):
        tier.store([range(NUM_KEYS)])
        busy.start()
        try:
            return [tier.look_up() * 1e3 for _ in range(repeats)]
        finally:
            is_over.set()
            busy.join()


def beside_a_busy_processor(directory: Path, repeats: int) -> list[dict[str, Any]]:
    """Load large chunks alone and beside a process that only computes: does the drive itself need our processors?"""
    size, num = 2949120, 96
    rows = np.frombuffer(mmap.mmap(-1, size * num), np.uint8).reshape(num, size)
    rows[:] = np.random.default_rng(0).integers(0, 256, rows.shape, np.uint8)
    jobs = [range(first, first + JOB_CHUNKS) for first in range(0, num, JOB_CHUNKS)]
    tiers = {name: make(directory / name, rows) for name, make in TIERS.items()}
    found: dict[tuple[str, bool], list[float]] = {(name, is_busy): [] for name in TIERS for is_busy in (False, True)}
    try:
        for tier in tiers.values():
            tier.store(jobs)
        for _ in range(2 * repeats):
            for (name, is_busy), rates in found.items():
                forget(directory / name)
                other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if is_busy else None
                began = time.perf_counter()
                tiers[name].load(jobs)
                rates.append(rows.nbytes / 1e6 / (time.perf_counter() - began))
                if other is not None:
                    other.kill()
                    other.wait()
    finally:
        for tier in tiers.values():
            tier.close()
    return [
        {"tier": name, "chunk_bytes": size, "is_beside_busy": is_busy, "load_mb_per_s": summary(rates)}
        for (name, is_busy), rates in found.items()
    ]


def _spin(is_over: threading.Event) -> None:
    """Compute nothing, in Python."""
    while not is_over.is_set():
        pass


def _spec() -> Any:
    """Return what a tier wants to know of vLLM's configuration."""
    named = SimpleNamespace
    parallel = named(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True)
    config = named(
        groups=(named(tokens_per_block=16, layer_names=("layer",), group_id=0),),
        parallel=parallel,
        canonical_layout=False,
        replicated_layout=False,
        kv_cache_layout=None,
        extra_config={},
        model=named(name="benchmark", dtype="bfloat16"),
        cache=named(tokens_per_hash=16, blocks_per_chunk=1),
    )
    events = named(enable_kv_cache_events=False)
    return named(config=config, blocks_per_chunk=1, kv_events_config=events, extra_config={})


def kvtide_tier(directory: Path, rows: Rows) -> Tier:
    """kvtide, with room for all chunks and a tenth more."""
    capacity = int(rows.size * 1.1) + len(rows) * 4096 + (1 << 20)
    config = {"type": "KvtideTier", "module_path": "kvtide.integrations.vllm"}
    return Tier({**config, "directory": str(directory), "capacity": capacity}, rows)


def own_tier(directory: Path, rows: Rows) -> Tier:
    """VLLM's tier of one file a chunk."""
    threads = {"n_read_threads": THREADS, "n_write_threads": THREADS}
    return Tier({"type": "fs", "root_dir": str(directory), **threads}, rows)


TIERS = {"kvtide": kvtide_tier, "vllm-fs": own_tier}

MORE = {"look_ups": look_ups, "beside_a_busy_processor": beside_a_busy_processor}

if __name__ == "__main__":
    sys.exit(run_peers("peers_vllm", __doc__ or "", TIERS, MORE))
