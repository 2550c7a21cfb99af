"""SGLang's HiCacheFile, one file a page, as a target, without a server. Next: lmcache.

Decides what SGLang's configuration would say. Keys are hashed as its controllers hash them, by its own extension, which
is compiled when it is first used. It is told of the KV's dtype and layout by the host pool that is registered.
"""

# ruff: noqa: E402 - what is imported below is found only then

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Sequence
from importlib.metadata import version
from typing import ClassVar

_found = importlib.machinery.PathFinder.find_spec("sglang")
if _found is None:
    raise ImportError("SGLang is not installed here: see docs/engines.md")
_bare = types.ModuleType("sglang")  # without its language for prompts, which needs much of what a server needs
_bare.__path__, _bare.__spec__ = list(_found.submodule_search_locations or []), _found
sys.modules["sglang"] = _bare

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.mem_cache.utils import get_storage_hash_str

from kvtide.check.contract import MODEL, Reported, Setup, Traits

CHUNK_TOKENS = 16
_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class _Prompt:
    """What SGLang hashes: tokens, and what parts their namespace. An adapter goes into `extra_key`."""

    def __init__(self, token_ids: list[int], extra_key: str | None, cache_salt: str | None) -> None:
        self.token_ids, self.extra_key, self.cache_salt = token_ids, extra_key, cache_salt

    def __len__(self) -> int:
        return len(self.token_ids)


class SglangFileTarget:
    """The backend that `--hicache-storage-backend file` names."""

    traits: ClassVar[Traits] = Traits(
        name="sglang-file",
        package="sglang",
        version=version("sglang"),
        is_bounded=True,
        is_durable=True,
        is_on_disk=True,
        can_be_shared=True,
        facts=("dtype", "layout", "tp", "adapter"),
        has_salt=True,
        chunk_tokens=CHUNK_TOKENS,
        note="HiCacheFile in-process, default key scheme; bounded by its option max_size, without which it is not",
    )

    def __init__(self, setup: Setup) -> None:
        self._setup, told = setup, setup.identity
        limits = {} if setup.capacity_bytes is None else {"max_size": setup.capacity_bytes}
        ranks = {"tp_rank": 0, "tp_size": int(told["tp"]), "pp_rank": 0, "pp_size": 1}
        config = HiCacheStorageConfig(
            **ranks,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=told["layout"] == "page-first",
            model_name=MODEL,
            extra_config=limits,
        )
        self._store = HiCacheFile(config, str(setup.directory))
        layout = told["layout"].replace("-", "_")
        self._store.register_mem_pool_host(types.SimpleNamespace(dtype=_DTYPES[told["dtype"]], layout=layout))

    def keys(self, chains: Sequence[Sequence[int]]) -> list[bytes]:
        adapter, salt = self._setup.identity["adapter"] or None, self._setup.salt or None
        prompts = [_Prompt(list(chain), adapter, salt) for chain in chains]
        return [get_storage_hash_str(prompt, page_size=CHUNK_TOKENS)[-1].encode() for prompt in prompts]

    def put(self, keys: Sequence[bytes], values: Sequence[bytes]) -> list[bool]:
        pages = [torch.frombuffer(bytearray(value), dtype=torch.uint8) for value in values]
        return [bool(self._store.set(key.decode(), page)) for key, page in zip(keys, pages, strict=True)]

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [bool(self._store.exists(key.decode())) for key in keys]

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        pages = [torch.zeros(self._setup.value_bytes, dtype=torch.uint8) for _ in keys]
        found = self._store.batch_get([key.decode() for key in keys], pages)
        return [None if page is None else page.numpy().tobytes() for page in found]

    def reported(self) -> Reported:
        held = self._store._evictor  # noqa: SLF001 - what it evicts by
        return Reported(used_bytes=held._total_bytes, num_values=len(held._lru)) if held.enabled else Reported()  # noqa: SLF001

    def close(self) -> None:
        """Nothing is held: the backend has no call to close it."""
