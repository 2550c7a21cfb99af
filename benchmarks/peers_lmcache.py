"""kvtide's adapter against LMCache's own for files and for raw blocks, all behind its L2 interface in one process.

LMCache must be installed: `make test-engines` makes such an environment.

    .venv-engines/bin/python benchmarks/peers_lmcache.py
"""

from __future__ import annotations

import importlib.util
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

try:
    import torch
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
    from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2AdapterConfig
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
    from lmcache.v1.distributed.l2_adapters.raw_block_l2_adapter import RawBlockL2AdapterConfig
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
except ImportError:
    sys.exit(print("peers_lmcache: skipped, LMCache is not installed here: see docs/engines.md", file=sys.stderr))

from _peers import MIB, Rows, chunk_key, run_peers

META_BYTES = 16 * MIB  # of the raw adapter's index


class Tier:
    """An L2 adapter of LMCache."""

    is_direct = True

    def __init__(self, config: Any, rows: Rows) -> None:
        rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
        self._keys = [ObjectKey(chunk_key(number), "benchmark", rank) for number in range(len(rows))]
        self._objects = [_object(torch.from_numpy(row)) for row in rows]
        self._adapter = create_l2_adapter_from_registry(config, None)
        self._adapter.set_backend_identity("plugin")

    def store(self, jobs: list[range]) -> None:
        adapter = self._adapter
        left = {adapter.submit_store_task(self._keys[job.start : job.stop], self._part(job)) for job in jobs}

        def collect() -> bool:
            for task, result in adapter.pop_completed_store_tasks().items():
                assert result.is_successful(), result
                left.discard(task)
            return not left

        _wait(adapter.get_store_event_fd(), collect)

    def load(self, jobs: list[range]) -> None:
        adapter = self._adapter
        left = {adapter.submit_load_task(self._keys[job.start : job.stop], self._part(job)): len(job) for job in jobs}

        def collect() -> bool:
            for task in list(left):
                found = adapter.query_load_result(task)
                if found is not None:
                    assert len(found.get_indices_list()) == left.pop(task), "not all were loaded"
            return not left

        _wait(adapter.get_load_event_fd(), collect)

    def close(self) -> None:
        self._adapter.close()

    def _part(self, job: range) -> list[Any]:
        return self._objects[job.start : job.stop]


def _object(row: Any) -> Any:
    """Return a memory object of LMCache over the bytes of `row`."""
    shape = torch.Size((row.numel() // 2,))
    known = MemoryObjMetadata(
        shape, torch.bfloat16, 0, row.numel(), 1, fmt=MemoryFormat.KV_2LTD, shapes=[shape], dtypes=[torch.bfloat16]
    )
    return TensorMemoryObj(row, known, None)


def _wait(fd: int, collect: Callable[[], bool]) -> None:
    """Return when `collect` has all, asking it whenever the event `fd` is signalled."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while not collect():
        assert poll.poll(60_000), "no answer within a minute"
        os.eventfd_read(fd)


def kvtide_tier(directory: Path, rows: Rows) -> Tier:
    """kvtide, with room for all chunks and a tenth more."""
    capacity = int(rows.size * 1.1) + len(rows) * 4096 + (1 << 20)
    named = {"module_path": "kvtide.integrations.lmcache", "class_name": "KvtideL2Adapter"}
    params = {"directory": str(directory / "kv"), "capacity": capacity}
    return Tier(PluginL2AdapterConfig.from_dict({"type": "plugin", **named, "adapter_params": params}), rows)


def own_tier(directory: Path, rows: Rows) -> Tier:
    """LMCache's adapter of one file an object, past the page cache."""
    return Tier(FSL2AdapterConfig(str(directory / "fs"), use_odirect=True), rows)


def raw_tier(directory: Path, rows: Rows) -> Tier:
    """LMCache's adapter of slots on a device, here a file whose space was allocated, past the page cache."""
    path, slot = directory / "raw", rows.shape[1] + 4096
    size = META_BYTES + len(rows) * 11 // 10 * slot
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(fd, 0, size)
    os.close(fd)
    sizes = {"slot_bytes": slot, "meta_total_bytes": META_BYTES}
    return Tier(RawBlockL2AdapterConfig(device_path=str(path), use_odirect=True, **sizes), rows)


TIERS = {"kvtide": kvtide_tier, "lmcache-fs": own_tier}
if importlib.util.find_spec("lmcache_rust_raw_block_io") is not None:  # its helper, in Rust, comes apart
    TIERS["lmcache-raw"] = raw_tier

if __name__ == "__main__":
    sys.exit(run_peers("peers_lmcache", __doc__ or "", TIERS))
