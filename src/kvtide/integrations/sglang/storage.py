"""The storage backend that SGLang's hierarchical cache writes its host pages to and prefetches them from.

SGLang calls it from threads of its own and waits there, so pages move while it waits, many at once. Whatever fails is
a miss: its warning says why, and the engine computes what it did not get.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvtide.blocks import KeyArray
from kvtide.chunks import ChunkOptions, ChunkStore, SeveralStores
from kvtide.errors import UnsupportedError
from kvtide.integrations.options import PlugInOptions
from kvtide.integrations.sglang.facts import facts_of, kind_of
from kvtide.integrations.sglang.keys import keys_of
from kvtide.integrations.sglang.pages import FlatPages, Pages, addresses_of, num_bytes, pages_of
from kvtide.integrations.weights import digest_of_weights
from kvtide.metrics import StoresMetrics
from kvtide.tiers.contract import OK
from kvtide.units import parse_bytes

_log = logging.getLogger("kvtide.sglang")
DIRECTORY = "~/.cache/kvtide/sglang"
_KV = str(PoolName.KV)
_ENGINES_OWN = {"backend_name", "module_path", "class_name", "interface_v1"}
Good = npt.NDArray[np.bool_]


class KvtideStorage(HiCacheStorage):
    """Pages of SGLang's host pools in bounded files, one for each pool.

    `storage_config.extra_config` has the keys of `PlugInOptions`; a rank's metrics port is that many higher.
    With `interface_v1` pages move straight between host memory and disk; without, SGLang copies each one first.

    Raises: ConfigError for unknown keys; UnsupportedError on ranks that would only read. Where the pools are known,
    ConfigError, FormatError and IoError of the stores: SGLang then does not attach the storage, and shows the message.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        del kwargs
        told = dict(storage_config.extra_config or {})
        self._config = storage_config
        self._options = PlugInOptions.of(told, where="the extra config", directory=DIRECTORY, engines_own=_ENGINES_OWN)
        self._in_place = bool(told.get("interface_v1", 0))
        if not storage_config.is_storage_writer:
            raise UnsupportedError(
                f"rank {storage_config.tp_rank} of {storage_config.tp_size}: of a model whose KV is the same on all "
                "ranks (MLA) only one rank stores, and a kvtide store belongs to one process, so the others would "
                "never hit; use --tp-size 1, or --enable-dp-attention with --dp-size equal to --tp-size"
            )
        rank = (getattr(storage_config, "pp_rank", 0) or 0) * storage_config.tp_size + storage_config.tp_rank
        self._metrics = StoresMetrics(self._options.metrics_port, integration="sglang", rank=rank)
        self.registered_pools: dict[str, Any] = {}
        self._pages: dict[str, Pages] = {}
        self._stores: SeveralStores | None = None
        self._lock = threading.Lock()
        self._refused: set[str] = set()
        self._are_all_known = False
        self._moved: dict[str, list[tuple[int, float]]] = {"load": [], "store": []}

    # Pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host
        self._register(_KV, mem_pool_host, in_place=self._in_place)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if str(host_pool_name) != _KV or _KV not in self._pages:
            self._register(str(host_pool_name), host_pool, in_place=True)

    def on_host_pools_registered(self) -> None:
        self._are_all_known = True
        self._open()

    def _register(self, name: str, pool: Any, *, in_place: bool) -> None:
        self.registered_pools[name] = pool
        self._pages[name] = pages_of(pool, in_place=in_place)
        if self._are_all_known:  # a pool that came later
            self._open()

    def _open(self) -> None:
        """Open the stores of all pools that have none."""
        with self._lock:
            kinds = [
                kind_of(name, self.registered_pools.get(name), pages)
                for name, pages in self._pages.items()
                if pages.piece_bytes  # SGLang's logical pools hold no bytes
            ]
            if self._stores is None and kinds:
                self._stores = SeveralStores(
                    self._shared(), recorder_of=self._metrics.recorder, on_open=self._metrics.add
                )
            if self._stores is not None:
                self._stores.open(kinds)

    def _shared(self) -> ChunkOptions:
        name, tag = (
            self._config.model_name or "unnamed",
            getattr(self.registered_pools.get(_KV), "storage_format_tag", ""),
        )
        return ChunkOptions(
            Path(self._options.directory).expanduser(),
            parse_bytes(str(self._options.capacity)),
            1,
            name[:256],
            facts_of(self._config, self._options.salt),
            digest_of_weights(name.removesuffix(f"-{tag}")),
            master=self._options.master(),
        )

    def _store_of(self, name: str) -> ChunkStore | None:
        """Return the store of a pool; None where it holds no bytes, is not known, or its store cannot be opened."""
        found = self._stores.stores.get(name) if self._stores is not None else None
        if found is None and name not in self._refused and name in self._pages and self._pages[name].piece_bytes:
            try:
                self._open()
                found = self._stores.stores.get(name) if self._stores is not None else None
            except Exception as error:  # the engine goes on without it
                _log.warning("kvtide: pages of %s are not stored: %s", name, error)
                self._refused.add(name)
        return found

    # Pages in place

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._load(_KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._save(_KV, keys, host_indices)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {one.name: self._load(str(one.name), one.keys or [], one.host_indices) for one in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {one.name: self._save(str(one.name), one.keys or [], one.host_indices) for one in transfers}

    def _load(self, name: str, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[bool]:
        return self._pooled("load", name, keys, host_indices, lambda pages: pages.load)

    def _save(self, name: str, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[bool]:
        return self._pooled("store", name, keys, host_indices, lambda pages: pages.store)

    def _pooled(
        self,
        what: str,
        name: str,
        keys: Sequence[str],
        host_indices: torch.Tensor | None,
        how: Callable[[Pages], Callable[[ChunkStore, KeyArray, torch.Tensor], Good]],
    ) -> list[bool]:
        """Move pages of a pool; say of each whether it arrived."""
        pages = self._pages.get(name)
        if pages is not None and not pages.piece_bytes:
            return [True] * len(keys)
        wanted = len(keys) * getattr(self.registered_pools.get(name), "page_size", 1)
        if pages is None or host_indices is None or len(host_indices) != wanted:
            found = "no pool of this name" if pages is None else f"{0 if host_indices is None else len(host_indices)}"
            _log.warning(
                "kvtide: cannot %s %d pages of %s: need %d indices, got %s", what, len(keys), name, wanted, found
            )
            return [False] * len(keys)
        indices = host_indices
        return self._tried(what, name, keys, lambda store, folded: how(pages)(store, folded, indices)).tolist()

    def _tried(self, what: str, name: str, keys: Sequence[str], move: Callable[[ChunkStore, KeyArray], Good]) -> Good:
        """Do `move`, and note its pace; where it fails nothing arrived."""
        store, began = self._store_of(name), time.perf_counter()
        good = np.zeros(len(keys), np.bool_)
        if store is None or not len(keys):
            return good
        try:
            good = move(store, keys_of(keys))
        except Exception as error:  # the engine goes on without these pages
            _log.warning("kvtide: cannot %s %d pages of %s: %s", what, len(keys), name, error)
        seconds = max(time.perf_counter() - began, 1e-9)
        if self._config.enable_storage_metrics and good.any():
            num = int(good.sum())
            self._moved[what].append((num, num * store.chunk_bytes / (1 << 30) / seconds))
        return good

    # What there is

    def exists(self, key: str) -> bool:
        return bool(self._has(_KV, [key])[0])

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return _leading(self._has(_KV, keys))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        num = _leading(self._has(_KV, keys))
        found: dict[str, int] = {PoolName.KV: num} if num else {}
        fits = np.ones(num, np.bool_)  # of each prefix, 1 page long and up
        for one in pool_transfers or []:
            there = self._has(str(one.name), keys[:num])
            if one.hit_policy == PoolHitPolicy.ALL_PAGES:
                fitting = np.arange(num) < _leading(there)
            elif one.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                fitting = _window_whole(there, max(1, len(one.keys or [])))
            else:
                continue  # groups of blocks never bound the prefix; without a verdict SGLang expects nothing of them
            if fitting.any():
                found[one.name] = int(np.flatnonzero(fitting)[-1]) + 1
            fits &= fitting
        restorable = (np.flatnonzero(fits) + 1).tolist()
        return PoolTransferResult(restorable[-1] if restorable else 0, found, restorable)

    def _has(self, name: str, keys: Sequence[str]) -> Good:
        pages = self._pages.get(name)
        if pages is not None and not pages.piece_bytes:
            return np.ones(len(keys), np.bool_)  # the other pools decide
        store = self._store_of(name)
        if store is None or not len(keys):
            return np.zeros(len(keys), np.bool_)
        folded = keys_of(keys)
        store.touch(folded)
        return store.has(folded)

    # Pages that SGLang copies

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: list[torch.Tensor] | None = None, target_sizes: Any | None = None
    ) -> list[torch.Tensor | None]:
        pages = self._pages.get(_KV)
        if pages is None or not keys:
            return [None] * len(keys)
        targets = target_locations or [torch.empty(sum(pages.piece_bytes), dtype=torch.uint8) for _ in keys]
        good = self._tried(
            "load", _KV, keys, lambda store, folded: store.load(folded, addresses_of(targets, pages.piece_bytes)) == OK
        )
        return [target if is_good else None for target, is_good in zip(targets, good.tolist(), strict=True)]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: list[torch.Tensor] | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        if not values:
            return not keys
        if _KV not in self._pages:  # no pool was registered: pages are as large as the first one
            self._pages[_KV] = _Loose(values[0])
        flat, pieces = [value.contiguous() for value in values], self._pages[_KV].piece_bytes
        good = self._tried(
            "store", _KV, keys, lambda store, folded: store.store(folded, addresses_of(flat, pieces)) == OK
        )
        return bool(good.all())

    # The end

    def clear(self) -> bool:
        try:
            for store in self._stores.stores.values() if self._stores is not None else ():
                store.drop(store.keys())
        except Exception as error:  # such as a store that is closed
            _log.warning("kvtide: the storage is not cleared: %s", error)
            return False
        return True

    def get_stats(self) -> Any:
        if not self._config.enable_storage_metrics:
            return None
        try:
            from sglang.srt.observability.metrics_collector import StorageMetrics
        except ImportError:  # it needs more than a server without metrics has
            return None
        moved, self._moved = self._moved, {"load": [], "store": []}
        return StorageMetrics(
            prefetch_pgs=[num for num, _ in moved["load"]],
            backup_pgs=[num for num, _ in moved["store"]],
            prefetch_bandwidth=[pace for _, pace in moved["load"]],
            backup_bandwidth=[pace for _, pace in moved["store"]],
        )

    def close(self) -> None:
        """Finish what was begun, then give up files and locks. Idempotent."""
        self._metrics.close()
        if self._stores is not None:
            self._stores.close()


class _Loose(FlatPages):
    """Pages that belong to no pool."""

    def __init__(self, first: torch.Tensor) -> None:
        self.piece_bytes: tuple[int, ...] = (num_bytes(first),)


def _leading(there: Good) -> int:
    """Return how many are there before the first that is not."""
    return len(there) if there.all() else int(there.argmin())


def _window_whole(there: Good, num: int) -> Good:
    """Say of each prefix whether its last `num` pages are all there; of a shorter one, all its pages."""
    sums = np.concatenate([[0], np.cumsum(there)])
    ends = np.arange(1, len(there) + 1)
    starts = np.maximum(0, ends - num)
    return sums[ends] - sums[starts] == ends - starts
