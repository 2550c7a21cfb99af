"""What the scripts about LMCache share: an L2 adapter and its keys, and its storage manager over a local disk."""

import os

os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="CRITICAL", DO_NOT_TRACK="1")

import importlib.util
import mmap
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _disk import SIZE
from lmcache.v1.distributed.api import MemoryLayoutDesc, ipc_key_to_object_keys
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.raw_block_l2_adapter import RawBlockL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.token_hasher import TokenHasher

HEADER_BYTES, INDEX_BYTES = 4096, 1 << 20  # of raw_block: a slot is a value behind its header


def told(**said: object) -> None:
    """Print what was stored or what came back."""
    for name, value in said.items():
        print(f"lmcache {version('lmcache')}: {name}: {value}")


def adapter_fs(folder: str, *, direct: bool = False) -> Any:
    """Return the configuration of the adapter `fs`."""
    return FSL2AdapterConfig(folder, use_odirect=direct)


def adapter_raw_block(folder: str, *, slots: int = 32, direct: bool = False) -> Any:
    """Return the configuration of the adapter `raw_block` on a file of as many slots for values of 64 KiB."""
    if importlib.util.find_spec("lmcache_rust_raw_block_io") is None:
        sys.exit(print("lmcache-rust-raw-block-io is not installed here", file=sys.stderr) or 2)
    path, slot = Path(folder) / "device", HEADER_BYTES + SIZE
    if not path.exists():
        path.touch()
        os.truncate(path, INDEX_BYTES + slots * slot)
    sizes = {"slot_bytes": slot, "header_bytes": HEADER_BYTES, "meta_total_bytes": INDEX_BYTES}
    return RawBlockL2AdapterConfig(device_path=str(path), use_odirect=direct, **sizes)


def page_aligned(size: int) -> torch.Tensor:
    """Return bytes that start at a page."""
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, size), np.uint8))


class L2:
    """An adapter, called as LMCache's server calls it."""

    def __init__(self, config: Any) -> None:
        self.adapter = create_l2_adapter_from_registry(config, None)
        self.adapter.set_backend_identity("fault")

    def key(self, tokens: list[int]) -> Any:
        asked = IPCCacheServerKey("some/model", 1, 0, tuple(tokens), 0, len(tokens), "request")
        return ipc_key_to_object_keys(asked, TokenHasher(16).compute_chunk_hashes(tokens)[-1:], [0])[0][0]

    def put(self, key: Any, values: torch.Tensor) -> bool:
        task = self.adapter.submit_store_task([key], [self._object(values)])
        while True:
            done = self.adapter.pop_completed_store_tasks()
            if task in done:
                return bool(done[task].is_successful())
            time.sleep(0.001)

    def has(self, key: Any, like: torch.Tensor) -> bool:
        return bool(self.num_there([key], like))

    def num_there(self, keys: list[Any], like: torch.Tensor) -> int:
        task = self.adapter.submit_lookup_and_lock_task(keys, {0: MemoryLayoutDesc([like.shape], [like.dtype])})
        while (found := self.adapter.query_lookup_and_lock_result(task)) is None:
            time.sleep(0.001)
        self.adapter.submit_unlock(keys)
        return len(found.get_indices_list())

    def get(self, key: Any, into: torch.Tensor) -> bool:
        return self.get_all([key], [into])

    def get_all(self, keys: list[Any], into: list[torch.Tensor]) -> bool:
        task = self.adapter.submit_load_task(keys, [self._object(one) for one in into])
        while (found := self.adapter.query_load_result(task)) is None:
            time.sleep(0.001)
        return bool(found.get_indices_list())

    def close(self) -> None:
        self.adapter.close()

    def _object(self, values: torch.Tensor) -> Any:
        raw = values.view(torch.uint8)
        known = MemoryObjMetadata(
            *(values.shape, values.dtype, raw.data_ptr(), raw.numel(), 1),
            fmt=MemoryFormat.KV_2LTD,
            shapes=[values.shape],
            dtypes=[values.dtype],
        )
        return TensorMemoryObj(raw, known, None)


class Disk:
    """LMCache's storage manager with a local disk and no copies in DRAM. Values are of 64 KiB."""

    def __init__(self, folder: str, *, dram_mib: int = 64, disk_mib: int = 64) -> None:
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.event_manager import EventManager
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.storage_manager import StorageManager
        from lmcache.v1.token_database import ChunkedTokenDatabase

        sizes = {"max_local_cpu_size": dram_mib / 1024, "max_local_disk_size": disk_mib / 1024}
        config = LMCacheEngineConfig.from_defaults(chunk_size=16, local_cpu=False, local_disk=folder, **sizes)
        metadata = LMCacheMetadata(
            "some/model", 1, 1, 0, 0, torch.uint8, (1, 2, 16, 1, 2048), role="worker", chunk_size=16
        )
        self.tokens, self.manager = (
            ChunkedTokenDatabase(config, metadata),
            StorageManager(config, metadata, EventManager()),
        )
        self.backend = self.manager.storage_backends["LocalDiskBackend"]

    def key(self, tokens: list[int]) -> Any:
        return list(self.tokens.process_tokens(tokens))[-1][2]

    def put(self, key: Any, byte: int, wait_s: float = 5.0) -> bool:
        room = self.manager.allocate(
            torch.Size((2, 1, 16, 2048)), torch.uint8, fmt=MemoryFormat.KV_2LTD, busy_loop=False
        )
        if room is None:
            return False
        room.tensor.fill_(byte)
        self.manager.batched_put([key], [room])
        until = time.monotonic() + wait_s
        while self.backend.exists_in_put_tasks(key) and time.monotonic() < until:
            time.sleep(0.001)
        return self.manager.contains(key) is not None

    def get(self, keys: list[Any]) -> list[bytes | None]:
        found = self.manager.batched_get(keys, location="LocalDiskBackend")
        values = [None if one is None else one.tensor.numpy().tobytes() for one in found]
        for one in found:
            if one is not None:
                one.ref_count_down()
        return values
