"""kvtide's storage against SGLang's own file backend, both behind its interface in one process, where SGLang is
installed: `make test-engines` makes such an environment. SGLang's backend is buffered: what it wrote is flushed within
its time to store, and forgotten by the page cache before it is read.

    .venv-engines/bin/python benchmarks/peers_sglang.py
"""

# ruff: noqa: E402 - what is imported below is found only then

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

found = importlib.machinery.PathFinder.find_spec("sglang")
if found is None:
    sys.exit(print("peers_sglang: skipped, SGLang is not installed here: see docs/engines.md", file=sys.stderr))
bare = types.ModuleType("sglang")  # without its language for prompts, which needs much of what a server needs
bare.__path__, bare.__spec__ = list(found.submodule_search_locations or []), found
sys.modules["sglang"] = bare

import torch
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE, HiCacheFile, HiCacheStorageConfig

from _peers import Rows, chunk_key, run_peers
from kvtide.integrations.sglang import KvtideStorage


class Pool:
    """Host memory of one token a page, K and V in one piece."""

    page_size, dtype, layout = 1, torch.bfloat16, "page_first"

    def __init__(self, rows: Rows) -> None:
        self.rows = torch.from_numpy(rows)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        first, size = self.rows.data_ptr(), self.rows.shape[1]
        return [first + page * size for page in indices.tolist()], [size] * len(indices)


class Kvtide:
    """kvtide, through the calls that copy nothing."""

    is_direct = True

    def __init__(self, directory: Path, rows: Rows) -> None:
        capacity = int(rows.size * 1.1) + len(rows) * 4096 + (1 << 20)
        self._keys = [chunk_key(number).hex() for number in range(len(rows))]
        pool = Pool(rows)
        self._storage = KvtideStorage(
            _config({"interface_v1": 1, "directory": str(directory / "kv"), "capacity": capacity}), {}
        )
        self._storage.register_mem_pool_host(pool)
        self._storage.on_host_pools_registered()

    def store(self, jobs: list[range]) -> None:
        for job in jobs:
            assert all(self._storage.batch_set_v1(self._keys[job.start : job.stop], torch.arange(job.start, job.stop)))

    def load(self, jobs: list[range]) -> None:
        for job in jobs:
            assert all(self._storage.batch_get_v1(self._keys[job.start : job.stop], torch.arange(job.start, job.stop)))

    def close(self) -> None:
        self._storage.close()


class File:
    """SGLang's backend of one file a page."""

    is_direct = False

    def __init__(self, directory: Path, rows: Rows) -> None:
        self._keys = [chunk_key(number).hex() for number in range(len(rows))]
        self._rows = torch.from_numpy(rows)
        self._storage = HiCacheFile(_config({}), str(directory / "files"))

    def store(self, jobs: list[range]) -> None:
        for job in jobs:
            assert self._storage.batch_set(self._keys[job.start : job.stop], list(self._rows[job.start : job.stop]))

    def load(self, jobs: list[range]) -> None:
        for job in jobs:
            got = self._storage.batch_get(self._keys[job.start : job.stop], list(self._rows[job.start : job.stop]))
            assert all(one is not None for one in got)

    def close(self) -> None:
        """Nothing is held."""


def _config(extra: dict[str, Any]) -> Any:
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    return HiCacheStorageConfig(
        **ranks,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="benchmark",
        extra_config=extra,
    )


TIERS = {"kvtide": Kvtide, "sglang-file": File}

if __name__ == "__main__":
    sys.exit(run_peers("peers_sglang", __doc__ or "", TIERS, job_chunks=STORAGE_BATCH_SIZE))
