from __future__ import annotations

import json
import math
import os
import select
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import engines

engines.use("lmcache")

from lmcache.v1.distributed.api import ObjectKey  # noqa: E402
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface  # noqa: E402

from kvtide.blocks import KEY  # noqa: E402
from kvtide.errors import ConfigError, IoError  # noqa: E402
from kvtide.integrations.lmcache import KvtideL2Adapter, adapter  # noqa: E402
from kvtide.integrations.lmcache.forms import from_told, text_of  # noqa: E402
from kvtide.integrations.lmcache.names import Names  # noqa: E402

SHAPE = (2, 4, 16, 32)  # 8 KiB of bfloat16
WAIT_MS = 20_000


class Object:
    """What the adapter asks a `MemoryObj`."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, row: np.ndarray, address: int) -> None:
        self._shape, self._dtype, self.row, self.data_ptr = torch.Size(shape), dtype, row, address

    def get_shapes(self) -> list[torch.Size]:
        return [self._shape]

    def get_dtypes(self) -> list[torch.dtype]:
        return [self._dtype]

    def get_memory_format(self) -> Any:
        return None


def objects(
    num: int,
    shape: tuple[int, ...] = SHAPE,
    dtype: torch.dtype = torch.bfloat16,
    *,
    seed: int | None = None,
    shift: int = 0,
) -> list[Object]:
    memory = engines.Memory(num, math.prod(shape) * dtype.itemsize, seed=seed, shift=shift)
    return [Object(shape, dtype, memory.rows[row], int(memory.addresses[row])) for row in range(num)]


def names(num: int, **changed: Any) -> list[ObjectKey]:
    told = {"model_name": "model", "kv_rank": 1 << 24} | changed
    return [ObjectKey(digest, **told) for digest in engines.digests(num)]


class Single(Object):
    """An object that knows one shape only."""

    def get_shapes(self) -> list[torch.Size]:
        raise AssertionError

    def get_shape(self) -> torch.Size:
        return self._shape

    def get_dtype(self) -> torch.dtype:
        return self._dtype


class Listener:
    """Counts what an adapter tells."""

    def __init__(self) -> None:
        self.sizes: dict[ObjectKey, int] = {}
        self.accessed: list[ObjectKey] = []

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        for key, size in zip(keys, sizes, strict=True):
            self.sizes[key] = self.sizes.get(key, 0) + size

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        for key in keys:
            del self.sizes[key]


def made(directory: Path, capacity: str = "1MiB", **told: Any) -> KvtideL2Adapter:
    return KvtideL2Adapter({"directory": str(directory), "capacity": capacity, **told}, l1_memory_desc=None)


def until(fd: int, ask: Any) -> Any:
    """Ask until there is an answer, waiting for the event before each time."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while not (answer := ask()):
        assert poll.poll(WAIT_MS), "nobody signalled"
        os.eventfd_read(fd)
    return answer


def store(one: KvtideL2Adapter, keys: list[ObjectKey], some: list[Object]) -> Any:
    task = one.submit_store_task(keys, some)
    return until(one.get_store_event_fd(), one.pop_completed_store_tasks)[task]


def load(one: KvtideL2Adapter, keys: list[ObjectKey], some: list[Object]) -> list[int]:
    task = one.submit_load_task(keys, some)
    found = until(one.get_load_event_fd(), lambda: [one.query_load_result(task)] if task in one._loaded else None)
    assert one.query_load_result(task) is None
    return found[0].get_indices_list()


def lock(one: KvtideL2Adapter, keys: list[ObjectKey]) -> list[int]:
    task = one.submit_lookup_and_lock_task(keys, {})
    found = until(one.get_lookup_and_lock_event_fd(), lambda: one.query_lookup_and_lock_result(task))
    assert one.query_lookup_and_lock_result(task) is None
    return found.get_indices_list()


def has(one: KvtideL2Adapter, keys: list[ObjectKey]) -> list[int]:
    found = []
    for row, key in enumerate(keys):  # one by one, since only half of what there is room for can be locked
        found += [row] * len(lock(one, [key]))
        one.submit_unlock([key])
    return found


@pytest.mark.parametrize("shift", [0, 64])
def test_bytes_are_right_after_a_restart(tmp_path: Path, shift: int) -> None:
    small, groups = (1, 3, 5), names(4, object_group_id=1)
    stored = [*objects(10, seed=1, shift=shift), *objects(4, small, torch.float8_e4m3fn, seed=2)]
    one = made(tmp_path)
    assert isinstance(one, L2AdapterInterface)
    done = store(one, names(10) + groups, stored)
    assert (done.is_successful(), done.bytes_transferred()) == (True, 10 * 8192 + 4 * 15)
    again = store(one, names(10), stored[:10])
    assert (again.is_successful(), again.bytes_transferred()) == (True, 0)
    one.close()
    one.close()
    one = made(tmp_path)
    assert one.get_usage().total_bytes_used == 10 * 8192 + 4 * 15
    wanted = [*objects(10, shift=shift), *objects(4, small, torch.float8_e4m3fn)]
    assert lock(one, names(12) + groups) == [*range(10), 12, 13, 14, 15]
    assert load(one, names(10) + groups, wanted) == list(range(14))
    one.submit_unlock(names(10) + groups)
    assert one.report_status()["locked_key_count"] == 0
    assert all((before.row == after.row).all() for before, after in zip(stored, wanted, strict=True))
    assert load(one, [], []) == []
    assert store(one, [], []).is_successful()
    one.close()


@pytest.mark.parametrize(
    "changed", [{"model_name": "b"}, {"kv_rank": 2 << 24}, {"object_group_id": 1}, {"cache_salt": "tenant"}], ids=str
)
def test_other_keys_find_nothing(tmp_path: Path, changed: dict[str, Any]) -> None:
    one = made(tmp_path)
    store(one, names(4), objects(4, seed=3))
    assert has(one, names(4)) == [0, 1, 2, 3]
    assert has(one, names(4, **changed)) == []
    assert load(one, names(4, **changed), objects(4)) == []
    one.close()
    one = made(tmp_path, salt="deployment")
    assert has(one, names(4)) == []
    one.close()


@pytest.mark.parametrize(
    "other", [(SHAPE, torch.float16), ((4, 2, 16, 32), torch.bfloat16), ((2, 4, 32, 32), torch.bfloat16)]
)
def test_objects_of_another_form_are_a_miss_and_forgotten(tmp_path: Path, other: Any) -> None:
    one, wanted = made(tmp_path), objects(4, *other)
    store(one, names(4), objects(4, seed=4))
    store(one, names(8)[7:], objects(1, *other, seed=5))
    assert load(one, names(4), wanted) == []
    assert not any(each.row.any() for each in wanted)
    until_forgotten(one, names(4))
    stored = objects(4, *other, seed=6)
    assert store(one, names(4), stored).is_successful()
    assert load(one, names(4), wanted) == [0, 1, 2, 3]
    assert all((before.row == after.row).all() for before, after in zip(stored, wanted, strict=True))
    one.close()


def until_forgotten(one: KvtideL2Adapter, keys: list[ObjectKey]) -> None:
    one._aside.submit(lambda: None).result(20)
    assert has(one, keys) == []


def test_it_is_bounded_and_tells_what_gave_way(tmp_path: Path) -> None:
    one, listener = made(tmp_path, "256KiB"), Listener()
    one.register_listener(listener)
    for row in range(60):
        assert store(one, names(60)[row : row + 1], objects(1, seed=row)).is_successful()
    there = has(one, names(60))
    assert there == list(range(60 - len(there), 60))
    assert set(listener.sizes) == {names(60)[row] for row in there}
    usage = one.get_usage()
    assert usage.total_bytes_used == sum(listener.sizes.values()) == len(there) * 8192
    assert dict(usage.bytes_by_cache_salt) == {"": len(there) * 8192}
    assert usage.total_capacity_bytes == 256 << 10
    store(one, names(4, object_group_id=1), objects(4, (5000,), torch.uint8, seed=7))
    assert set(listener.sizes.values()) == {5000, 8192}
    assert sum(file.stat().st_size for file in tmp_path.glob("*/data.kvt")) <= 256 << 10
    assert sum(listener.sizes.values()) == one.get_usage().total_bytes_used
    kept = dict(listener.sizes)
    one.close()
    one, listener = made(tmp_path, "256KiB"), Listener()
    one.set_backend_identity("plugin")
    one.register_listener(listener)
    assert listener.sizes == kept
    assert one.get_usage().total_bytes_used == sum(kept.values())
    one.close()


def test_locked_objects_stay_until_they_are_unlocked(tmp_path: Path) -> None:
    one, named = made(tmp_path, "256KiB"), names(60)
    store(one, named[:4], objects(4, seed=8))
    assert lock(one, named[:4]) == lock(one, named[:4]) == [0, 1, 2, 3]
    for row in range(4, 50):
        store(one, named[row : row + 1], objects(1, seed=row))
    one.submit_unlock(named[:4])
    assert load(one, named[:4], objects(4)) == [0, 1, 2, 3]
    one.submit_unlock(named[:4])
    one.submit_unlock(named[:4])
    for row in range(4, 60):
        store(one, named[row : row + 1], objects(1, seed=row))
    assert has(one, named[:4]) == []
    one.close()


def test_corrupt_objects_are_a_miss_of_their_own_and_forgotten(tmp_path: Path) -> None:
    one, listener, stored = made(tmp_path), Listener(), objects(5, seed=9)
    store(one, names(5), stored)
    one.register_listener(listener)
    (path,) = (kept.path for kept in one._stores.stores.values())
    engines.flip_bytes(path, stored[2].row.tobytes()[:64])
    wanted = objects(6)
    assert load(one, names(6), wanted) == [0, 1, 3, 4]
    assert has(one, names(6)) == [0, 1, 3, 4]
    assert names(6)[2] not in listener.sizes
    assert listener.accessed == [names(6)[row] for row in (0, 1, 3, 4)]
    assert one.get_usage().total_bytes_used == 4 * 8192
    one.close()


def test_a_failing_disk_ends_every_task_and_later_recovers(tmp_path: Path) -> None:
    one, stored = made(tmp_path), objects(20, seed=10)
    store(one, names(4), stored[:4])
    disk = engines.break_disk(next(iter(one._stores.stores.values())))
    tasks = {one.submit_store_task(names(20)[row : row + 1], stored[row : row + 1]) for row in range(4, 20)}
    ended: dict[int, Any] = {}
    until(one.get_store_event_fd(), lambda: ended.update(one.pop_completed_store_tasks()) or set(ended) == tasks)
    assert not any(found.is_successful() for found in ended.values())
    assert load(one, names(4), objects(4)) == []
    assert has(one, names(20)) == []
    assert one.get_usage().total_bytes_used == 0
    disk.fails = False
    assert store(one, names(20), stored).is_successful()
    assert load(one, names(20), objects(20)) == list(range(20))
    assert one.report_status()["failed"] == 20
    one.close()


def test_many_tasks_from_two_threads(tmp_path: Path) -> None:
    one, named, stored, wanted = made(tmp_path, "2MiB"), names(100), objects(100, seed=11), objects(100)
    first = store(one, named[:50], stored[:50])
    loads: list[int] = []

    def restore() -> None:
        loads.extend(one.submit_load_task(named[row : row + 1], wanted[row : row + 1]) for row in range(50))

    thread = threading.Thread(target=restore)
    thread.start()
    stores = [one.submit_store_task(named[row : row + 1], stored[row : row + 1]) for row in range(50, 100)]
    thread.join()
    one.submit_load_task(named[50:], wanted[50:])
    ended: dict[int, Any] = {}
    until(one.get_store_event_fd(), lambda: ended.update(one.pop_completed_store_tasks()) or len(ended) == 50)
    assert first.is_successful()
    assert set(ended) == set(stores)
    assert len({*loads, *stores}) == 100
    for store_of in one._stores.stores.values():
        store_of.drain()
    assert all(one.query_load_result(task).popcount() == 1 for task in loads)
    assert all((stored[row].row == wanted[row].row).all() for row in range(50))
    one.close()


def test_delete_and_list(tmp_path: Path) -> None:
    one, listener = made(tmp_path), Listener()
    one.register_listener(listener)
    store(one, names(10), objects(10, seed=12))
    store(one, names(3, model_name="other"), objects(3, seed=13))
    one.delete(names(4) + names(2, cache_salt="x"))
    assert has(one, names(10)) == [4, 5, 6, 7, 8, 9]
    assert set(listener.sizes) == set(names(10)[4:] + names(3, model_name="other"))
    one.close()
    one = made(tmp_path)
    listed: list[Any] = []
    cursor = None
    while True:
        page = one.list_l2_keys(page_size=4, cursor=cursor)
        listed += page.entries
        if (cursor := page.next_page_token) is None:
            break
    assert {entry.key for entry in listed} == {key.to_encoded_object_key() for key in listener.sizes}
    assert {entry.size_bytes for entry in listed} == {8192}
    assert len(one.list_l2_keys(model_name="other").entries) == 3
    with pytest.raises(ValueError, match="page_size"):
        one.list_l2_keys(page_size=0)
    one.close()


def test_an_object_of_one_shape_is_of_the_same_form(tmp_path: Path) -> None:
    one, some, into = made(tmp_path), objects(2, seed=15), objects(2)
    single = [Single(SHAPE, torch.bfloat16, each.row, each.data_ptr) for each in some]
    assert store(one, names(2), single).is_successful()
    assert load(one, names(2), into) == [0, 1]
    assert all((before.row == after.row).all() for before, after in zip(some, into, strict=True))
    one.close()


def test_names_that_are_torn_or_lost_only_hide_objects(tmp_path: Path) -> None:
    one = made(tmp_path)
    store(one, names(3), objects(3, seed=14))
    one.close()
    (file,) = tmp_path.glob("*/names.jsonl")
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], "[1, 2", "{}", '["zz", "m", 1, 0, ""]', lines[1][:-5]]))
    one = made(tmp_path)
    assert len(one.list_l2_keys().entries) == 1
    assert has(one, names(3)) == [0, 1, 2]
    one.close()


def test_the_file_of_names_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.integrations.lmcache.names.SLACK_LINES", 10)
    one, keys = Names(tmp_path, np.zeros(0, KEY)), names(2)
    for number in range(50):
        one.take([b"a"])
        one.add([(b"a", keys[number % 2])])
        one.write()
    (file,) = tmp_path.iterdir()
    assert len(file.read_text().splitlines()) <= 2 + 10
    assert file.stat().st_mode & 0o777 == 0o600
    one.close()


def test_a_listener_that_fails_and_a_store_after_close_end_their_tasks(tmp_path: Path) -> None:
    one = made(tmp_path)
    listener = Listener()
    one.register_listener(listener)
    listener.on_l2_keys_stored = lambda *_: 1 // 0  # type: ignore[method-assign,assignment]
    assert store(one, names(2), objects(2, seed=14)).is_successful()
    assert has(one, names(2)) == [0, 1]
    one.close()
    task = one.submit_store_task(names(1), objects(1, (77,), torch.uint8))
    assert not one.pop_completed_store_tasks()[task].is_successful()


def test_too_many_forms_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(adapter, "FORMS_MAX", 2)
    one = made(tmp_path)
    done = [
        store(one, names(1, object_group_id=size), objects(1, (size,), torch.uint8, seed=size)) for size in (7, 8, 9, 9)
    ]
    assert [found.is_successful() for found in done] == [True, True, False, False]
    assert caplog.text.count("serdes") == 1
    one.close()


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="has wrong; kvtide's keys are capacity, directory, key_file, metrics_port, salt"
    ):
        made(tmp_path, wrong=1)
    one = made(tmp_path)
    store(one, names(1), objects(1))
    fds = {one.get_store_event_fd(), one.get_lookup_and_lock_event_fd(), one.get_load_event_fd()}
    assert len(fds) == 3
    with pytest.raises(IoError, match="owned by process"):
        made(tmp_path)
    one.close()
    with pytest.raises((TypeError, ValueError)):
        from_told([1, 2])
    (key,) = names(1)
    assert from_told(json.loads(text_of(key))) == key
    parts = [key.chunk_hash.hex(), key.model_name, key.kv_rank, key.object_group_id, key.cache_salt]
    assert text_of(key) == json.dumps(parts)  # or what earlier versions stored would not be found
