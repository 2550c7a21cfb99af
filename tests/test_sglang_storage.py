from __future__ import annotations

import dataclasses
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

import engines

IS_REAL = engines.use("sglang")

from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)

from kvtide.errors import ConfigError, UnsupportedError  # noqa: E402
from kvtide.integrations.sglang import KvtideStorage  # noqa: E402
from kvtide.integrations.sglang.keys import keys_of  # noqa: E402

PAGE = 4
CONFIG = HiCacheStorageConfig(
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    attn_cp_rank=0,
    attn_cp_size=1,
    is_mla_model=False,
    enable_storage_metrics=True,
    is_page_first_layout=True,
    model_name="model",
)


class HostPool:
    """K and V of `num` pages of host memory, each page of each `row` bytes a token."""

    page_size = PAGE
    start_layer, end_layer = 0, 2

    def __init__(
        self, num: int = 24, *, seed: int | None = None, row: int = 2048, layout: str = "page_first", dtype: Any = None
    ) -> None:
        self.layout, self.dtype = layout, dtype or torch.bfloat16
        self.memory = [
            engines.Memory(1, num * PAGE * row, seed=None if seed is None else seed + part) for part in range(2)
        ]
        self.rows = [one.rows.reshape(num, PAGE * row) for one in self.memory]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        size = self.rows[0].shape[1]
        first = [int(one.addresses[0]) for one in self.memory]
        at = [base + index // PAGE * size for index in indices.tolist()[::PAGE] for base in first]
        return at, [size] * len(at)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        assert flat
        return torch.cat([torch.from_numpy(one[int(index) // PAGE]) for one in self.rows])

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(2 * self.rows[0].shape[1], dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        size = self.rows[0].shape[1]
        for part, one in enumerate(self.rows):
            one[int(index) // PAGE] = data_page[part * size : (part + 1) * size].numpy()

    def equals(self, other: HostPool, pages: slice = slice(None)) -> bool:
        return all((mine[pages] == its[pages]).all() for mine, its in zip(self.rows, other.rows, strict=True))


class FlatPool(HostPool):
    """A pool that cannot say where its pages lie."""

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        raise NotImplementedError(len(indices))


def storage(
    directory: Path, pool: Any = None, *, interface: int = 1, pools: Any = None, **changed: Any
) -> KvtideStorage:
    extra = {"backend_name": "kvtide", "module_path": "m", "class_name": "c", "interface_v1": interface}
    told = {name: changed.pop(name) for name in ("capacity", "salt", "metrics_port", "wrong") if name in changed}
    extra |= {"directory": str(directory), "capacity": "4MiB", **told}
    one = KvtideStorage(dataclasses.replace(CONFIG, extra_config=extra, **changed), {})
    if pool is not None:
        one.register_mem_pool_host(pool)
        for name, other in (pools or {}).items():
            one.register_mem_host_pool_v2(other, name)
        one.on_host_pools_registered()
    return one


def names(num: int, label: str = "page") -> list[str]:
    return [digest.hex() for digest in engines.digests(num, label)]


def indices(first: int, last: int) -> torch.Tensor:
    return torch.arange(first * PAGE, last * PAGE)


@pytest.mark.parametrize("row", [2048, 96])
@pytest.mark.parametrize("kind", [HostPool, FlatPool])
def test_bytes_are_right_after_a_restart(tmp_path: Path, kind: type[HostPool], row: int) -> None:
    stored, wanted = kind(seed=1, row=row), kind(row=row)
    one = storage(tmp_path, stored)
    assert isinstance(one, HiCacheStorage)
    assert one.batch_set_v1(names(20), indices(0, 20)) == [True] * 20
    one.close()
    one = storage(tmp_path, wanted)
    assert one.batch_exists(names(22)) == 20
    assert one.batch_exists(["x", *names(20)]) == 0
    assert one.exists(names(1)[0])
    assert one.batch_get_v1(names(22), indices(0, 22)) == [True] * 20 + [False] * 2
    assert wanted.equals(stored, slice(20))
    one.close()
    one.close()
    assert one.batch_get_v1(names(1), indices(0, 1)) == [False]


@pytest.mark.skipif(IS_REAL, reason="the real class needs all of a server's packages")
def test_the_pace_is_told_once(tmp_path: Path) -> None:
    one = storage(tmp_path, HostPool(seed=1))
    one.batch_set_v1(names(5), indices(0, 5))
    one.batch_get_v1(names(4), indices(0, 4))
    one.batch_get_v1(names(1, "b"), indices(0, 1))
    stats = one.get_stats()
    assert (stats.prefetch_pgs, stats.backup_pgs) == ([4], [5])
    assert min(stats.prefetch_bandwidth + stats.backup_bandwidth) > 0
    assert one.get_stats().prefetch_pgs == []
    one.close()


@pytest.mark.parametrize("pieces", [True, False])
def test_pages_that_the_engine_copies(tmp_path: Path, pieces: bool) -> None:
    pool = HostPool(seed=2)
    pages = [pool.get_data_page(index * PAGE) for index in range(5)]
    one = storage(tmp_path, pool, interface=int(pieces))
    assert one.batch_set(names(5), pages)
    assert one.set(names(6)[5], pages[0])
    assert not one.set("short", pages[0][:5])
    one.close()
    one = storage(tmp_path, pool, interface=int(pieces))
    found = one.batch_get(names(7), [torch.zeros_like(pages[0]) for _ in range(7)])
    assert all(torch.equal(page, got) for page, got in zip([*pages, pages[0]], found[:6], strict=True))
    assert found[6] is None
    assert torch.equal(one.get(names(1)[0]), pages[0])
    assert one.get("nothing", torch.zeros_like(pages[0])) is None
    one.close()
    one = storage(tmp_path, pool, interface=int(not pieces))
    assert one.batch_exists(names(5)) == 0, "flat pages and pieces order their bytes differently"
    one.close()


def test_pages_of_no_pool(tmp_path: Path) -> None:
    page = torch.arange(5000, dtype=torch.int16)
    one = storage(tmp_path, interface=0)
    assert one.get("a", page) is None
    assert not one.exists("a")
    assert one.set("a", page)
    assert torch.equal(one.get("a", torch.zeros_like(page)), page)
    one.close()


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": torch.float16},
        {"layout": "page_first_direct"},
        {"tp_size": 2},
        {"tp_size": 2, "tp_rank": 1},
        {"pp_size": 2},
        {"attn_cp_size": 2},
        {"dp_rank": 1},
        {"model_name": "other"},
        {"is_mla_model": True},
        {"salt": "tenant"},
        {"row": 1024},
    ],
    ids=str,
)
def test_other_facts_find_nothing(tmp_path: Path, changed: dict[str, Any]) -> None:
    one = storage(tmp_path, HostPool(seed=3))
    assert all(one.batch_set_v1(names(4), indices(0, 4)))
    one.close()
    pool = HostPool(**{name: changed.pop(name) for name in ("dtype", "layout", "row") if name in changed})
    one = storage(tmp_path, pool, **changed)
    assert one.batch_exists(names(4)) == 0
    assert one.batch_get_v1(names(4), indices(0, 4)) == [False] * 4
    one.close()


def test_it_is_bounded_and_the_oldest_give_way(tmp_path: Path) -> None:
    pool = HostPool(24, seed=4)
    one = storage(tmp_path, pool, capacity="256KiB")
    for page in range(24):
        assert one.batch_set_v1(names(24)[page : page + 1], indices(page, page + 1)) == [True]
    assert one.batch_exists(names(24)) == 0
    room = one._stores.stores["kv"].num_chunks_max
    assert one.batch_exists(names(24)[24 - room :]) == room < 24
    assert sum(file.stat().st_size for file in tmp_path.glob("*/data.kvt")) <= 256 << 10
    assert one.clear()
    assert one.batch_exists(names(24)[23:]) == 0
    one.close()


def test_corrupt_pages_are_a_miss_and_forgotten(tmp_path: Path) -> None:
    stored, wanted = HostPool(seed=5), HostPool()
    one = storage(tmp_path, stored)
    one.batch_set_v1(names(4), indices(0, 4))
    path = one._stores.stores["kv"].path
    one.close()
    engines.flip_bytes(path, stored.rows[1][2].tobytes()[:64])  # V of the third page
    one = storage(tmp_path, wanted)
    assert one.batch_exists(names(4)) == 4
    assert one.batch_get_v1(names(4), indices(0, 4)) == [True, True, False, True]
    assert one.batch_exists(names(4)) == 2
    assert wanted.equals(stored, slice(2))
    one.close()


def test_a_failing_disk_is_a_miss_and_later_recovers(tmp_path: Path) -> None:
    stored = HostPool(seed=6)
    one = storage(tmp_path, stored)
    one.batch_set_v1(names(4), indices(0, 4))
    disk = engines.break_disk(one._stores.stores["kv"])
    assert one.batch_get_v1(names(4), indices(0, 4)) == [False] * 4
    assert one.batch_set_v1(names(4, "b"), indices(0, 4)) == [False] * 4
    assert not one.batch_set(names(1, "c"), [stored.get_data_page(0)])
    assert one.batch_exists(names(4)) == 0
    disk.fails = False
    assert one.batch_set_v1(names(4), indices(0, 4)) == [True] * 4
    assert one.batch_get_v1(names(4), indices(4, 8)) == [True] * 4
    assert all((one_part[4:8] == one_part[:4]).all() for one_part in stored.rows)
    one.close()


def test_calls_that_do_not_fit_are_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = storage(tmp_path, HostPool(seed=7))
    assert one.batch_set_v1(names(4), indices(0, 3)) == [False] * 4
    assert one.batch_get_v2([PoolTransfer(PoolName.SWA, keys=names(2), host_indices=indices(0, 2))]) == {
        PoolName.SWA: [False, False]
    }
    assert "need 16 indices, got 12" in caplog.text
    assert "no pool of this name" in caplog.text
    assert one.batch_set_v1([], indices(0, 0)) == []
    assert one.batch_exists([]) == 0
    one.close()


def test_pools_of_a_hybrid_model(tmp_path: Path) -> None:
    stored = {
        PoolName.KV: HostPool(seed=8),
        PoolName.INDEXER: HostPool(seed=10, row=512),
        PoolName.SWA: FlatPool(seed=12),
    }
    others = {name: pool for name, pool in stored.items() if name != PoolName.KV}
    one = storage(tmp_path, stored[PoolName.KV], pools=stored)
    assert {str(name) for name in stored} == set(one._stores.stores)
    assert len({store.num_chunks_max for store in one._stores.stores.values()}) == 1
    one.batch_set_v1(names(8), indices(0, 8))
    one.batch_set_v2([PoolTransfer(PoolName.INDEXER, keys=names(7), host_indices=indices(0, 7))])
    swa = [PoolTransfer(PoolName.SWA, keys=names(8)[at : at + 1], host_indices=indices(at, at + 1)) for at in (2, 3, 5)]
    assert [one.batch_set_v2([each]) for each in swa] == [{PoolName.SWA: [True]}] * 3
    whole = PoolTransfer(PoolName.INDEXER)
    last = PoolTransfer(PoolName.SWA, keys=["window", "window"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    groups = PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.BLOCK_GROUPS, block_pages=2, group_pages=2)
    found = one.batch_exists_v2(names(9), [whole, last, groups])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [4])
    assert found.extra_pool_hit_pages == {PoolName.KV: 8, PoolName.INDEXER: 7, PoolName.SWA: 4}
    only = PoolTransfer(PoolName.SWA, keys=["one"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert one.batch_exists_v2(names(9), [only]).restorable_prefix_pages == [3, 4, 6]
    assert one.batch_exists_v2(names(9)).kv_hit_pages == 8
    none = one.batch_exists_v2(["x"], [whole, last])
    assert (none.kv_hit_pages, none.extra_pool_hit_pages, none.restorable_prefix_pages) == (0, {}, [])
    one.close()
    wanted = {PoolName.KV: HostPool(), PoolName.INDEXER: HostPool(row=512), PoolName.SWA: FlatPool()}
    one = storage(tmp_path, wanted[PoolName.KV], pools=wanted)
    transfers = [PoolTransfer(name, keys=names(8)[2:4], host_indices=indices(2, 4)) for name in others]
    assert one.batch_get_v2(transfers) == {name: [True, True] for name in others}
    assert all(wanted[name].equals(stored[name], slice(2, 4)) for name in others)
    one.close()


def test_logical_pools_hold_no_bytes_and_bound_no_prefix(tmp_path: Path) -> None:
    class Logical(FlatPool):
        def get_page_buffer_meta(self, indices: torch.Tensor) -> Any:
            del indices

        def get_dummy_flat_data_page(self) -> torch.Tensor:
            return torch.empty(0, dtype=torch.uint8)

    one = storage(tmp_path, Logical(), pools={PoolName.INDEXER: HostPool(seed=14)})
    assert one.batch_set_v1(names(3), indices(0, 3)) == [True] * 3
    one.batch_set_v2([PoolTransfer(PoolName.INDEXER, keys=names(2), host_indices=indices(0, 2))])
    assert one.batch_exists_v2(names(3), [PoolTransfer(PoolName.INDEXER)]).kv_hit_pages == 2
    assert one.batch_get_v1(names(3), indices(0, 3)) == [True] * 3
    one.close()


def test_a_rank_that_would_only_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="rank 1 of 2"):
        storage(tmp_path, is_mla_model=True, tp_size=2, tp_rank=1)


def test_unknown_keys_of_the_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="has wrong; kvtide's keys are capacity, directory, key_file, metrics_port, salt"
    ):
        storage(tmp_path, wrong=1)


def test_metrics_tell_of_every_pool(tmp_path: Path) -> None:
    one = storage(tmp_path, HostPool(), pools={PoolName.INDEXER: FlatPool()}, metrics_port=0)
    endpoint = one._metrics.endpoint
    assert endpoint is not None
    one.batch_set_v1(names(3), indices(0, 3))
    with urllib.request.urlopen(endpoint.url, timeout=10) as answer:  # noqa: S310 - our own endpoint
        told = answer.read().decode()
    assert one._stores is not None
    for store in one._stores.stores.values():
        assert f'kvtide_groups{{store="{store.path.name[:16]}",tier="file"}} {store.num_chunks}' in told
    assert "kvtide_operation_bytes_bucket" in told
    one.close()


def test_keys_are_hashes_as_they_are_or_hashed() -> None:
    some = [*names(3), "short", "x" * 64, " " + "0" * 62 + " ", "0" * 64]
    assert keys_of(some).tolist() == [keys_of([one])[0].tobytes() for one in some]
    assert keys_of(names(3)).tolist() == engines.digests(3, "page")
    assert len(set(keys_of(some).tolist())) == len(some)
    assert keys_of([]).shape == (0,)
