"""LMCache's disk tiers as targets: the L2 adapters fs and raw_block, and the local disk of its storage manager.

Decides what LMCache's configuration would say. Keys are those of its token hashers, with its defaults. The L2 adapters
are told of dtype by the objects and the layout that come with a task; the local disk by its metadata.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, ClassVar

import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey, ipc_key_to_object_keys
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.raw_block_l2_adapter import RawBlockL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.token_hasher import TokenHasher

from kvtide.check.contract import MODEL, Reported, Setup, Traits
from kvtide.check.foreign.jobs import PAUSE_S, JobTarget

CHUNK_TOKENS = 16
STORE_S, NEXT_STORE_S = 5.0, 0.5  # a store that is not in the index by then is taken for failed; after one that was not
DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
MANY_BYTES, META_BYTES = 256 << 20, 1 << 20  # without a bound; of raw_block's index


def _key(text: bytes) -> ObjectKey:
    """Return the key that `L2Target.keys` wrote."""
    model, rank, chunk, salt = text.decode().split("@")
    return ObjectKey(bytes.fromhex(chunk), model, int(rank), 0, salt)


class L2Target(JobTarget):
    """An adapter of LMCache's second level. Subclasses name its configuration."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        dtype = DTYPES[setup.identity["dtype"]]
        self._shape = torch.Size((setup.value_bytes,))
        self._layout, self._dtype = MemoryLayoutDesc([self._shape], [dtype]), dtype
        self._tasks: dict[tuple[str, int], tuple[int, int]] = {}
        self._adapter = create_l2_adapter_from_registry(self._config(), None)
        self._adapter.set_backend_identity("check")

    def _config(self) -> Any:
        raise NotImplementedError

    def keys(self, chains: Sequence[Sequence[int]]) -> list[bytes]:
        hasher, tp, salt = TokenHasher(CHUNK_TOKENS), int(self._setup.identity["tp"]), self._setup.salt
        found = []
        for chain in chains:
            asked = IPCCacheServerKey(MODEL, tp, 0, tuple(chain), 0, len(chain), "keys", salt)
            (key,) = ipc_key_to_object_keys(asked, hasher.compute_chunk_hashes(list(chain))[-1:], [0])[0]
            found.append(f"{key.model_name}@{key.kv_rank}@{key.chunk_hash.hex()}@{key.cache_salt}".encode())
        return found

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        found = self._hold(keys)
        self._release([key for key, is_there in zip(keys, found, strict=True) if is_there])
        return found

    def drop(self, keys: Sequence[bytes]) -> None:
        """Delete until nothing is left: what a load has locked stays, and that is not told."""
        until = time.monotonic() + STORE_S
        left = list(keys)
        while left and time.monotonic() < until:
            self._adapter.delete([_key(key) for key in left])
            left = [key for key, is_there in zip(left, self.has(left), strict=True) if is_there]
            if left:
                time.sleep(PAUSE_S)
        if left:
            raise TimeoutError(
                f"{len(left)} of {len(keys)} objects are still there {STORE_S:g} s after they were deleted"
            )

    def reported(self) -> Reported:
        return Reported(used_bytes=self._adapter.get_usage().total_bytes_used)

    def close(self) -> None:
        self._adapter.close()

    def _hold(self, keys: Sequence[bytes]) -> list[bool]:
        task = self._adapter.submit_lookup_and_lock_task([_key(key) for key in keys], {0: self._layout})
        while (found := self._adapter.query_lookup_and_lock_result(task)) is None:
            time.sleep(PAUSE_S)
        there = set(found.get_indices_list())
        return [place in there for place in range(len(keys))]

    def _release(self, keys: Sequence[bytes]) -> None:
        self._adapter.submit_unlock([_key(key) for key in keys])

    def _submit(self, job: int, kind: str, keys: Sequence[bytes], rows: Any) -> None:
        asked, objects = [_key(key) for key in keys], [self._object(torch.from_numpy(row)) for row in rows]
        submit = self._adapter.submit_store_task if kind == "put" else self._adapter.submit_load_task
        self._tasks[kind, submit(asked, objects)] = job, len(keys)

    def _ended(self) -> dict[int, list[bool]]:
        ended = {}
        for task, result in self._adapter.pop_completed_store_tasks().items():
            job, num = self._tasks.pop(("put", task))
            ended[job] = [result.is_successful()] * num
        for kind, task in [one for one in self._tasks if one[0] == "get"]:
            found = self._adapter.query_load_result(task)
            if found is not None:
                job, num = self._tasks.pop((kind, task))
                there = set(found.get_indices_list())
                ended[job] = [place in there for place in range(num)]
        return ended

    def _object(self, row: torch.Tensor) -> TensorMemoryObj:
        known = MemoryObjMetadata(
            *(self._shape, self._dtype, row.data_ptr(), row.numel(), 1),
            fmt=MemoryFormat.KV_2LTD,
            shapes=[self._shape],
            dtypes=[self._dtype],
        )
        return TensorMemoryObj(row, known, None)


class LmcacheFsTarget(L2Target):
    """The adapter `fs`: one file an object."""

    traits: ClassVar[Traits] = Traits(
        name="lmcache-fs",
        package="lmcache",
        version=version("lmcache"),
        is_durable=True,
        is_on_disk=True,
        can_be_direct=True,
        can_be_shared=True,
        facts=("dtype", "tp"),
        has_salt=True,
        chunk_tokens=CHUNK_TOKENS,
        value_multiple=4096,
        note="FSL2Adapter in-process, without the multiprocess server; it declares no capacity",
    )

    def _config(self) -> Any:
        return FSL2AdapterConfig(str(self._setup.directory), use_odirect=self._setup.direct)


class LmcacheRawBlockTarget(L2Target):
    """The adapter `raw_block`, on a file: slots of one size."""

    traits: ClassVar[Traits] = Traits(
        name="lmcache-raw-block",
        package="lmcache",
        version=version("lmcache"),
        is_durable=True,
        is_on_disk=True,
        can_be_direct=True,
        facts=("dtype", "tp"),
        has_salt=True,
        chunk_tokens=CHUNK_TOKENS,
        value_multiple=4096,
        note="RawBlockL2Adapter in-process on a file, helper lmcache-rust-raw-block-io; eviction is its caller's",
    )

    def _config(self) -> Any:
        slot = self._setup.value_bytes + 4096
        path, room = self._setup.directory / "device", META_BYTES + (self._setup.capacity_bytes or MANY_BYTES)
        if not path.exists():
            with path.open("wb") as file:
                file.truncate(room // slot * slot + META_BYTES)
        sizes = {"slot_bytes": slot, "meta_total_bytes": META_BYTES}
        return RawBlockL2AdapterConfig(device_path=str(path), use_odirect=self._setup.direct, **sizes)


class LmcacheDiskTarget:
    """The local disk under LMCache's storage manager: one file a chunk, values pass through its DRAM."""

    traits: ClassVar[Traits] = Traits(
        name="lmcache-disk",
        package="lmcache",
        version=version("lmcache"),
        is_bounded=True,
        is_on_disk=True,
        can_be_direct=True,
        has_memory=True,
        facts=("dtype", "tp"),
        chunk_tokens=CHUNK_TOKENS,
        value_multiple=4096,
        note="StorageManager in-process with local_cpu off; keys with the default hash, `builtin`",
    )

    def __init__(self, setup: Setup) -> None:
        from lmcache.v1.event_manager import EventManager
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.storage_manager import StorageManager
        from lmcache.v1.token_database import ChunkedTokenDatabase

        gib = float(1 << 30)
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS,
            local_cpu=False,
            max_local_cpu_size=(setup.memory_bytes or MANY_BYTES) / gib,
            local_disk=str(setup.directory),
            max_local_disk_size=(setup.capacity_bytes or 4 * MANY_BYTES) / gib,
            extra_config={"use_odirect": setup.direct},
        )
        tp, row = int(setup.identity["tp"]), setup.value_bytes // (2 * CHUNK_TOKENS)
        self._dtype, self._shape = DTYPES[setup.identity["dtype"]], torch.Size((2, 1, CHUNK_TOKENS, row))
        ranks, shape = (tp, tp, 0, 0), (1, 2, CHUNK_TOKENS, 1, row)
        metadata = LMCacheMetadata(MODEL, *ranks, self._dtype, shape, role="worker", chunk_size=CHUNK_TOKENS)
        self._tokens, self._patience_s = ChunkedTokenDatabase(config, metadata), STORE_S
        self._manager = StorageManager(config, metadata, EventManager())
        self._disk = self._manager.storage_backends["LocalDiskBackend"]

    def keys(self, chains: Sequence[Sequence[int]]) -> list[bytes]:
        found = [list(self._tokens.process_tokens(list(chain)))[-1][2] for chain in chains]
        return [str(key.to_string()).encode() for key in found]

    def put(self, keys: Sequence[bytes], values: Sequence[bytes]) -> list[bool]:
        """Store values and wait for each until the manager is done with it, or should have been."""
        named = [_engine_key(key) for key in keys]
        for key, value in zip(named, values, strict=True):
            room = self._manager.allocate(
                self._shape, self._dtype, fmt=MemoryFormat.KV_2LTD, eviction=True, busy_loop=False
            )
            if room is not None:
                memoryview(room.byte_array).cast("B")[:] = value
                self._manager.batched_put([key], [room])
                self._settle(key)
        return [self._disk.contains(key) for key in named]

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [self._manager.contains(_engine_key(key)) is not None for key in keys]

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        found = list[bytes | None]()
        for got in self._manager.batched_get([_engine_key(key) for key in keys], location="LocalDiskBackend"):
            found.append(None if got is None else bytes(got.byte_array))
            if got is not None:
                got.ref_count_down()
        return found

    def drop(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._disk.remove(_engine_key(key))

    def reported(self) -> Reported:
        return Reported(used_bytes=int(self._disk.current_cache_size), num_values=len(self._disk.dict))

    def close(self) -> None:
        self._manager.close()

    def _settle(self, key: Any) -> None:
        until = time.monotonic() + self._patience_s
        while self._disk.exists_in_put_tasks(key):
            if time.monotonic() > until:
                self._patience_s = NEXT_STORE_S
                return
            time.sleep(PAUSE_S)
        self._patience_s = STORE_S


def _engine_key(text: bytes) -> Any:
    from lmcache.utils import CacheEngineKey

    return CacheEngineKey.from_string(text.decode())
