"""kvtide's tier against vLLM's own disk tier, both behind vLLM's interface in one process, where vLLM is installed.

.venv-vllm/bin/python benchmarks/peers_vllm.py
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from _peers import Rows, chunk_key, run_peers

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


if __name__ == "__main__":
    sys.exit(run_peers("peers_vllm", __doc__ or "", {"kvtide": kvtide_tier, "vllm-fs": own_tier}))
