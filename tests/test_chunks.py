from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import chunks_killed
from engines import Memory, break_disk, digests, flip_bytes, keys
from kvtide.chunks import LOAD, STORE, ChunkOptions, ChunkStore, SeveralStores, Transfer, fold, fold_one
from kvtide.chunks.several import Kind
from kvtide.errors import ConfigError, IoError
from kvtide.io.ops import address_of, aligned_buffer
from kvtide.tiers.contract import CORRUPT, FAILED, FULL, MISSING, OK

SIZE = 8192


def options(root: Path, *, num: int = 20, size: int = SIZE, pieces: tuple[int, ...] = (), **facts: str) -> ChunkOptions:
    made = ChunkOptions(root, 0, size, "model", facts, engine="threads", piece_bytes=pieces)
    slot = made.slot_layout().slot_bytes
    return ChunkOptions(root, 4096 + num * slot, size, "model", facts, engine="threads", piece_bytes=pieces)


@given(st.lists(st.binary(max_size=48)), st.integers(28, 44))
def test_fold_equals_fold_one(some: list[bytes], length: int) -> None:
    alike = [(digest * 2)[:length] for digest in digests(5)]
    for listed in (some, alike, alike + some):
        assert fold(listed).tolist() == [fold_one(key) for key in listed]


def test_fold_keeps_hashes_and_tells_what_is_beside_them() -> None:
    (digest,) = digests(1)
    assert fold_one(digest) == digest == fold_one(digest + b"\0\0\0\0")
    assert len({fold_one(digest + group.to_bytes(4, "big")) for group in range(300)}) == 300
    assert len(fold_one(b"short")) == len(fold_one(b"x" * 100)) == 32


@pytest.mark.parametrize(
    ("size", "pieces", "shift"),
    [
        (8192, (), 0),
        (8192, (), 8),
        (5000, (), 0),
        (12288, (8192, 4096), 0),
        (12288, (8192, 4096), 8),
        (300, (100, 200), 0),
    ],
)
def test_bytes_are_right_after_a_restart(tmp_path: Path, size: int, pieces: tuple[int, ...], shift: int) -> None:
    told = options(tmp_path, size=size, pieces=pieces)
    parts = told.pieces()
    stored = [Memory(10, part, shift=shift, seed=number) for number, part in enumerate(parts)]
    wanted = [Memory(10, part, shift=shift) for part in parts]
    store = ChunkStore(told)
    assert (store.store(keys(10), np.stack([one.addresses for one in stored], 1)) == OK).all()
    store.close()
    store = ChunkStore(told)
    assert store.has(keys(12)).tolist() == [True] * 10 + [False] * 2
    order = np.arange(10)[::-1]
    statuses = store.load(keys(12), np.stack([one.addresses[[*order, 0, 0]] for one in wanted], 1))
    assert statuses.tolist() == [OK] * 10 + [MISSING] * 2
    for before, after in zip(stored, wanted, strict=True):
        assert (before.rows == after.rows[order]).all()
    store.close()


def test_chunks_of_other_facts_sizes_or_pieces_are_not_found(tmp_path: Path) -> None:
    memory = Memory(4, SIZE, seed=1)
    store = ChunkStore(options(tmp_path, dtype="a"))
    store.store(keys(4), memory.addresses)
    store.close()
    others = [options(tmp_path, dtype="b"), options(tmp_path), options(tmp_path, dtype="a", pieces=(4096, 4096))]
    for other in others:
        store = ChunkStore(other)
        assert not store.has(keys(4)).any()
        store.close()


def test_two_stores_of_one_directory_are_refused(tmp_path: Path) -> None:
    store = ChunkStore(options(tmp_path))
    with pytest.raises(IoError, match="owned by process"):
        ChunkStore(options(tmp_path))
    store.close()
    store.close()
    with pytest.raises(IoError, match="closed"):
        store.store(keys(1), Memory(1, SIZE).addresses)


@pytest.mark.parametrize("size", [0, 1 << 31])
def test_sizes_out_of_range_are_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(ConfigError, match="bytes"):
        ChunkStore(ChunkOptions(tmp_path, 1 << 20, size, "model"))
    with pytest.raises(ConfigError, match="add up"):
        ChunkStore(ChunkOptions(tmp_path, 1 << 20, SIZE, "model", piece_bytes=(SIZE, SIZE)))


def test_the_oldest_give_way_but_what_is_touched_or_loaded_stays(tmp_path: Path) -> None:
    gone: list[bytes] = []
    store, memory = (
        ChunkStore(options(tmp_path, num=20), lambda left: gone.extend(left.tolist())),
        Memory(30, SIZE, seed=2),
    )
    named = keys(30)
    store.store(named[:20], memory.addresses[:20])
    store.touch(named[:3])
    store.load(named[5:6], memory.addresses[5:6])
    store.store(named[20:], memory.addresses[20:])
    there = store.has(named)
    assert there[[0, 1, 2, 5]].all()
    assert there[20:].all()
    assert store.num_chunks == store.num_chunks_max == 20
    assert sorted(gone) == sorted(named[~there].tolist())
    assert store.counts.evicted == 10
    store.close()


def test_pinned_chunks_stay_until_they_are_unpinned_as_often(tmp_path: Path) -> None:
    store, memory, named = ChunkStore(options(tmp_path, num=8)), Memory(40, SIZE, seed=3), keys(40)
    store.store(named[:8], memory.addresses[:8])
    assert store.pin(named[:9]).tolist() == [True] * 4 + [False] * 5  # half of 8, and one that is not there
    assert store.pin(named[:1]).all()
    statuses = store.store(named[8:20], memory.addresses[8:20])
    assert (statuses == OK).sum() == 4
    assert set(statuses.tolist()) == {OK, FULL}
    assert store.has(named[:4]).all()
    store.unpin(named[:4])
    store.store(named[20:24], memory.addresses[20:24])
    store.store(named[24:32], memory.addresses[24:32])
    assert store.has(named[:4]).tolist() == [True, False, False, False]
    store.unpin(named[:4])
    assert store.num_pinned == 0
    store.store(named[32:], memory.addresses[32:])
    assert named[0].tobytes() not in store.held
    store.close()


def test_corrupt_chunks_are_a_miss_and_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gone: list[bytes] = []
    store, memory = ChunkStore(options(tmp_path), lambda left: gone.extend(left.tolist())), Memory(3, SIZE, seed=4)
    store.store(keys(3), memory.addresses)
    flip_bytes(store.path, memory.rows[1].tobytes()[:64])
    into = Memory(3, SIZE)
    assert store.load(keys(3), into.addresses).tolist() == [OK, CORRUPT, OK]
    assert store.has(keys(3)).tolist() == [True, False, True]
    assert gone == [keys(3)[1].tobytes()]
    assert "corrupt" in caplog.text
    assert store.store(keys(3), memory.addresses).tolist() == [OK] * 3
    assert store.load(keys(3), into.addresses).tolist() == [OK] * 3
    store.close()


def test_a_failing_disk_ends_every_transfer_and_later_recovers(tmp_path: Path) -> None:
    store, memory, named = ChunkStore(options(tmp_path, num=40)), Memory(30, SIZE, seed=5), keys(30)
    store.store(named[:10], memory.addresses[:10])
    disk = break_disk(store)
    begun = [
        store.submit(Transfer(STORE, named[10 + i : 11 + i], memory.addresses[10 + i : 11 + i])) for i in range(10)
    ]
    begun.append(store.submit(Transfer(LOAD, named[:10], memory.addresses[:10])))
    store.drain()
    assert all(one.done and not one.is_good and (one.statuses == FAILED).all() for one in begun)
    assert (store.counts.failed, store.counts.refused, store.counts.known) == (20, 0, 0)
    disk.fails = False
    assert (store.store(named, memory.addresses) == OK).all()
    into = Memory(30, SIZE)
    assert (store.load(named, into.addresses) == OK).all()
    assert (into.rows == memory.rows).all()
    store.close()


def test_every_chunk_to_be_stored_is_counted_once(tmp_path: Path) -> None:
    store, memory, named = ChunkStore(options(tmp_path, num=10)), Memory(30, SIZE, seed=5), keys(30)
    store.store(named[:4], memory.addresses[:4])
    twice = np.array([0, 1, 4, 5, 5, 4])
    assert (store.store(named[twice], memory.addresses[twice]) == OK).all()
    assert (store.counts.stored, store.counts.known, store.counts.refused, store.counts.failed) == (6, 4, 0, 0)
    statuses = store.store(named, memory.addresses)
    assert (store.counts.stored, store.counts.known) == (6 + 10, 4)
    assert store.counts.refused == (statuses == FULL).sum() == 20
    store.close()


def test_what_gave_way_is_told_where_the_journal_cannot_be_written(tmp_path: Path) -> None:
    gone: list[bytes] = []
    store = ChunkStore(options(tmp_path, num=4), lambda found: gone.extend(found.tolist()))
    memory, named = Memory(8, SIZE, seed=5), keys(8)
    store.store(named[:4], memory.addresses[:4])

    def fail() -> None:
        raise IoError(5, "no")

    store._tier.flush_departures = fail  # type: ignore[method-assign]
    store.store(named[4:], memory.addresses[4:])
    assert sorted(gone) == sorted(named[:4].tolist())
    store.close()


def test_close_finishes_what_was_begun(tmp_path: Path) -> None:
    store, memory, named = ChunkStore(options(tmp_path, num=200)), Memory(200, SIZE, seed=6), keys(200)
    ended: list[Transfer] = []
    for row in range(200):
        store.submit(Transfer(STORE, named[row : row + 1], memory.addresses[row : row + 1], ended.append))
    store.close()
    assert len(ended) == 200
    assert all(one.is_good and one.ended_ns >= one.began_ns > 0 for one in ended)
    store = ChunkStore(options(tmp_path, num=200))
    assert store.num_chunks == 200
    store.close()


def test_a_callback_that_fails_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(what: object) -> None:
        raise ValueError(f"no {type(what).__name__}")

    store, memory = ChunkStore(options(tmp_path, num=4), fail), Memory(8, SIZE, seed=7)
    store.submit(Transfer(STORE, keys(4), memory.addresses[:4], fail))
    store.drain()
    assert (store.store(keys(8), memory.addresses) == OK).sum() == 4
    assert "the engine's answer" in caplog.text
    store.close()


def test_an_empty_transfer_is_done_at_once(tmp_path: Path) -> None:
    store, ended = ChunkStore(options(tmp_path)), []
    store.submit(Transfer(LOAD, keys(0), np.zeros(0, np.uint64), ended.append))
    assert len(ended) == 1
    assert ended[0].is_good
    store.drain()
    store.close()


def test_many_threads_store_and_load(tmp_path: Path) -> None:
    store, memory, named = ChunkStore(options(tmp_path, num=160)), Memory(160, SIZE, seed=8), keys(160)
    into, wrong = Memory(160, SIZE), []

    def work(first: int) -> None:
        for row in range(first, 160, 8):
            one = slice(row, row + 1)
            wrong.extend([row] * int(store.store(named[one], memory.addresses[one])[0] != OK))
            wrong.extend([row] * int(store.load(named[one], into.addresses[one])[0] != OK))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert (into.rows == memory.rows).all()
    store.close()


def test_drop_and_resize(tmp_path: Path) -> None:
    gone: list[bytes] = []
    store = ChunkStore(options(tmp_path, num=20), lambda left: gone.extend(left.tolist()))
    memory, named = Memory(20, SIZE, seed=9), keys(20)
    store.store(named, memory.addresses)
    store.drop(named[:5])
    assert not gone
    assert store.has(named).tolist() == [False] * 5 + [True] * 15
    store.resize(options(tmp_path, num=12).capacity_bytes)
    there = store.has(named)
    assert store.num_chunks_max == 12
    assert sorted(gone) == sorted(named[5:][~there[5:]].tolist())
    into = Memory(20, SIZE)
    assert ((store.load(named, into.addresses) == OK) == there).all()
    assert (into.rows[there] == memory.rows[there]).all()
    with pytest.raises(ConfigError, match="holds no group"):
        store.resize(100)
    assert (store.has(named) == there).all()
    assert (store.store(named, memory.addresses) == OK).sum() >= 12
    store.close()


def test_a_store_that_cannot_be_opened_again_has_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[bytes] = []
    store = ChunkStore(options(tmp_path, num=20), lambda left: gone.extend(left.tolist()))
    memory, named, before = Memory(5, SIZE, seed=9), keys(5), store.held
    store.store(named, memory.addresses)
    with monkeypatch.context() as patched:
        patched.setattr("kvtide.chunks.store.open_namespace", lambda *_, **__: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            store.resize(options(tmp_path, num=12).capacity_bytes)
    assert sorted(gone) == sorted(named.tolist())
    assert not store.has(named).any()
    assert not store.pin(named).any()
    assert (len(before), len(store.keys()), store.num_chunks) == (0, 0, 0)
    assert (store.load(named, memory.addresses) == FAILED).all()
    assert (store.store(named, memory.addresses) == FAILED).all()
    store.resize(options(tmp_path, num=12).capacity_bytes)
    assert (store.load(named, memory.addresses) == OK).all()
    store.close()


def test_another_number_of_pieces_is_refused(tmp_path: Path) -> None:
    store, memory = ChunkStore(options(tmp_path, pieces=(4096, SIZE - 4096))), Memory(2, SIZE)
    with pytest.raises(ConfigError, match="addresses of 1 pieces a chunk; chunks here have 2"):
        store.store(keys(2), memory.addresses)
    store.close()


def test_what_gives_way_is_written_down_under_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, memory, free = ChunkStore(options(tmp_path, num=4)), Memory(8, SIZE), []
    flush = store._space.departures.flush
    monkeypatch.setattr(store._space.departures, "flush", lambda: (free.append(not store._pins.lock.locked()), flush()))
    for row in range(8):
        store.store(keys(8)[row : row + 1], memory.addresses[row : row + 1])
    assert store.counts.evicted
    assert all(free)
    store.close()


def test_what_was_dropped_stays_away_when_the_store_shrinks(tmp_path: Path) -> None:
    store, memory = ChunkStore(options(tmp_path, num=60)), Memory(60, SIZE, seed=1)
    store.store(keys(60), memory.addresses)
    store.drop(keys(60)[:10])
    store.resize(4096 + 10 * store.layout.slot_bytes)
    assert not store.has(keys(60)).any()
    store.close()


def log_calls(store: ChunkStore, monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    order: list[str] = []
    for name in names:
        real = getattr(store._tier, name)
        monkeypatch.setattr(
            store._tier, name, lambda *args, real=real, name=name, **more: (order.append(name), real(*args, **more))[1]
        )
    return order


def test_a_load_begins_while_the_one_before_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.chunks.store.LOAD_BYTES", SIZE)  # one chunk at a time
    store, before, after = ChunkStore(options(tmp_path)), Memory(9, SIZE, seed=1), Memory(9, SIZE)
    store.store(keys(9), before.addresses)
    flip_bytes(store.path, before.rows[4].tobytes())
    order = log_calls(store, monkeypatch, "begin_read", "finish_read")
    done = store.load(keys(9), after.addresses)
    assert done.tolist() == [OK] * 4 + [CORRUPT] + [OK] * 4
    assert order == ["begin_read", *["begin_read", "finish_read"] * 8, "finish_read"]
    good = done == OK
    assert (after.rows[good] == before.rows[good]).all()
    store.store(keys(9), before.addresses)  # what follows waits until nothing is read
    assert (store.load(keys(9), after.addresses) == OK).all()
    assert (after.rows == before.rows).all()
    store.close()


def refuse(store: ChunkStore, monkeypatch: pytest.MonkeyPatch, which: range) -> None:
    engine, calls = store._tier._io.engine, itertools.count(1)
    submit = engine.submit

    def submit_or_raise(batch: np.ndarray) -> None:
        if next(calls) in which:
            raise IoError(5, "planted")
        submit(batch)

    monkeypatch.setattr(engine, "submit", submit_or_raise)


@pytest.mark.parametrize("failing", [1, 2])
def test_an_engine_that_raises_while_another_load_is_under_way_fails_both_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    monkeypatch.setattr("kvtide.chunks.store.LOAD_BYTES", SIZE)
    store, before, after = ChunkStore(options(tmp_path)), Memory(4, SIZE, seed=1), Memory(4, SIZE)
    store.store(keys(4), before.addresses)
    refuse(store, monkeypatch, range(failing, failing + 3))  # and when it is tried again
    done = store.load(keys(4), after.addresses)
    assert set(done.tolist()) == {OK, FAILED}
    assert (after.rows[done == OK] == before.rows[done == OK]).all()
    assert (store.load(keys(4), after.addresses) == OK).all()
    assert (after.rows == before.rows).all()
    store.close()


@pytest.mark.parametrize("shift", [0, 8], ids=["straight", "through our own memory"])
def test_a_store_begins_while_the_one_before_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    monkeypatch.setattr("kvtide.tiers.slotwriter.PORTION_BYTES", SIZE)  # one chunk at a time
    store, num = ChunkStore(options(tmp_path)), 9
    memory = aligned_buffer(num * SIZE + shift)[shift:].reshape(num, SIZE)
    memory[:] = np.random.default_rng(1).integers(0, 256, memory.shape, np.uint8)
    addresses, after = address_of(memory) + np.arange(num, dtype=np.uint64) * SIZE, Memory(num, SIZE)
    order = log_calls(store, monkeypatch, "begin_write", "finish_write")
    assert (store.store(keys(num), addresses) == OK).all()
    assert order == ["begin_write", *["begin_write", "finish_write"] * (num - 1), "finish_write"]
    assert (store.load(keys(num), after.addresses) == OK).all()
    assert (after.rows == memory).all()
    store.close()


def test_a_store_waits_until_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, memory, gate = ChunkStore(options(tmp_path)), Memory(4, SIZE, seed=1), threading.Event()
    store.store(keys(2), memory.addresses[:2])
    order = log_calls(store, monkeypatch, "begin_read", "finish_read", "begin_write", "finish_write")
    waiting = threading.Thread(target=lambda: store._between(lambda: gate.wait(60)))
    waiting.start()
    both = [Transfer(LOAD, keys(2), memory.addresses[:2]), Transfer(STORE, keys(4)[2:], memory.addresses[2:])]
    for transfer in both:
        store.submit(transfer)
    gate.set()
    assert [set(transfer.result().tolist()) for transfer in both] == [{OK}, {OK}]
    waiting.join()
    assert order == ["begin_read", "finish_read", "begin_write", "finish_write"]
    store.close()


def test_a_chunk_that_is_being_written_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.tiers.slotwriter.PORTION_BYTES", SIZE)
    store, memory = ChunkStore(options(tmp_path)), Memory(4, SIZE, seed=1)
    order = log_calls(store, monkeypatch, "begin_write", "finish_write")
    twice = np.repeat(keys(4), 2)
    assert (store.store(twice, np.repeat(memory.addresses, 2)) == OK).all()
    assert order == ["begin_write", "finish_write"] * 4
    assert (store.counts.stored, store.counts.known) == (4, 4)
    store.close()


def test_room_counts_what_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.tiers.slotwriter.PORTION_BYTES", SIZE)
    gone: list[int] = []
    store = ChunkStore(options(tmp_path), lambda left: gone.append(len(left)))
    num = store.num_chunks_max + 20
    memory = Memory(num, SIZE, seed=1)
    assert (store.store(keys(num), memory.addresses) == OK).all()
    assert (sum(gone), store.num_chunks) == (20, num - 20)
    after = Memory(num, SIZE)
    there = store.has(keys(num))
    assert (store.load(keys(num), after.addresses)[there] == OK).all()
    assert (after.rows[there] == memory.rows[there]).all()
    store.close()


@pytest.mark.parametrize("failing", [1, 2])
def test_an_engine_that_raises_while_another_store_is_under_way_fails_both_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    monkeypatch.setattr("kvtide.tiers.slotwriter.PORTION_BYTES", SIZE)
    store, memory, after = ChunkStore(options(tmp_path)), Memory(4, SIZE, seed=1), Memory(4, SIZE)
    refuse(store, monkeypatch, range(failing, failing + 1))
    done = store.store(keys(4), memory.addresses)
    assert done.tolist() == [FAILED] * failing + [OK] * (4 - failing)
    assert store.has(keys(4)).tolist() == (done == OK).tolist()
    assert (store.store(keys(4), memory.addresses) == OK).all()
    assert (store.load(keys(4), after.addresses) == OK).all()
    assert (after.rows == memory.rows).all()
    assert store._tier.num_free == store.num_chunks_max - 4, "no slot is lost"
    store.close()


def test_who_keeps_an_index_of_chunks_is_told_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that was there when its transfer began may give way before that ends: it was not stored, then."""
    monkeypatch.setattr("kvtide.tiers.slotwriter.PORTION_BYTES", 2 * SIZE)
    index: set[bytes] = set()
    slot_bytes = options(tmp_path).slot_layout().slot_bytes
    store = ChunkStore(
        replace(options(tmp_path), capacity_bytes=4096 + 8 * slot_bytes),
        lambda left: index.difference_update(left.tolist()),
    )
    memory, named = Memory(1, SIZE, seed=1), keys(40)

    def note(done: Transfer) -> None:
        index.update(done.keys[done.statuses == OK].tolist())

    moves = [[number, 0] if number % 3 == 0 else [number, number + 1] for number in range(1, 39)]
    transfers = [Transfer(STORE, named[rows], np.repeat(memory.addresses, 2), note) for rows in moves]
    for transfer in transfers:
        store.submit(transfer)
    store.drain()
    assert index == set(named[store.has(named)].tolist())
    store.close()


@pytest.mark.parametrize("num", [1, 2])
def test_a_store_of_few_chunks_takes_one_after_the_other(tmp_path: Path, num: int) -> None:
    large = ChunkOptions(tmp_path, 0, 20 << 20, "model", engine="threads")
    store = ChunkStore(replace(large, capacity_bytes=4096 + num * large.slot_layout().slot_bytes))
    memory = Memory(1, 20 << 20, seed=1)
    transfers = [store.submit(Transfer(STORE, keys(4)[row : row + 1], memory.addresses)) for row in range(4)]
    assert [transfer.result().tolist() for transfer in transfers] == [[OK]] * 4
    store.close()


def test_several_kinds_share_one_capacity(tmp_path: Path) -> None:
    told, gone = ChunkOptions(tmp_path, 1 << 20, 1, "model", engine="threads"), []
    several = SeveralStores(told, lambda kind, left: gone.append((kind, len(left))))
    several.open([Kind("large", (32768,))])
    alone = several.stores["large"].num_chunks_max
    memory = Memory(alone, 32768, seed=10)
    several.stores["large"].store(keys(alone), memory.addresses)
    several.open([Kind("large", (32768,)), Kind("small", (4096,))])
    both = several.stores["large"].num_chunks_max
    assert both == several.stores["small"].num_chunks_max < alone
    assert gone == [("large", alone - both)]
    files = list(tmp_path.glob("*/data.kvt"))
    assert sum(file.stat().st_size for file in files) <= 1 << 20
    several.close()
    several = SeveralStores(told)
    several.adopt()
    assert set(several.stores) == {"large", "small"}
    assert several.stores["large"].num_chunks == both
    assert several.stores["large"].num_chunks_max == both
    several.close()
    with pytest.raises(ConfigError, match="2 kinds"):
        SeveralStores(ChunkOptions(tmp_path / "b", 30000, 1, "m")).open([Kind("a", (8192,)), Kind("b", (16384,))])


def test_a_killed_owner_leaves_right_chunks_or_misses(tmp_path: Path) -> None:
    into = Memory(chunks_killed.NUM, chunks_killed.SIZE)
    named, num_right = keys(chunks_killed.NUM), 0
    for seed in range(2):
        command = [sys.executable, str(Path(chunks_killed.__file__)), str(tmp_path), str(seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"ready\n"
            threading.Event().wait(0.05 + 0.05 * seed)
            worker.send_signal(signal.SIGKILL)
        store = ChunkStore(chunks_killed.options(tmp_path))
        good = store.load(named, into.addresses) == OK
        store.close()
        num_right += int(good.sum())
        assert all((into.rows[row] == chunks_killed.content(row)).all() for row in np.flatnonzero(good).tolist())
    assert num_right


class ChunkMachine(RuleBasedStateMachine):
    """A store against a dict: what it has is right; what it must have, it has."""

    chunks = Bundle("chunks")

    @initialize(pieces=st.sampled_from([(), (4096, 4096), (100, 200)]), shift=st.sampled_from([0, 8]))
    def begin(self, pieces: tuple[int, ...], shift: int) -> None:
        import tempfile

        self.scratch = tempfile.TemporaryDirectory()
        self.told = options(Path(self.scratch.name), num=6, size=sum(pieces) or SIZE, pieces=pieces)
        self.parts = self.told.pieces()
        self.memory = [Memory(10, part, shift=shift) for part in self.parts]
        self.at = np.stack([one.addresses for one in self.memory], 1)
        self.gone: list[bytes] = []
        self.known: dict[int, int] = {}
        self.pinned: dict[int, int] = {}
        self.names = keys(10)
        self.open()

    def open(self) -> None:
        self.store = ChunkStore(self.told, lambda left: self.gone.extend(left.tolist()))

    def fill(self, row: int, seed: int) -> None:
        for number, one in enumerate(self.memory):
            one.rows[row] = np.random.default_rng([seed, number]).integers(0, 256, one.rows.shape[1], np.uint8)

    def forget_gone(self) -> None:
        rows = {self.names[row].tobytes(): row for row in range(10)}
        for key in self.gone:
            row = rows[key]
            assert row not in self.pinned, "a pinned chunk was given up"
            del self.known[row]
        self.gone.clear()

    @rule(rows=st.lists(st.integers(0, 9), min_size=1, max_size=8), seed=st.integers(0, 9))
    def save(self, rows: list[int], seed: int) -> None:
        for row in rows:
            self.fill(row, seed)
        statuses = self.store.store(self.names[rows], self.at[rows])
        self.forget_gone()
        for row, status in zip(rows, statuses.tolist(), strict=True):
            assert status in {OK, FULL, FAILED}
            if status == OK:
                self.known.setdefault(row, seed)  # what was there stays
            assert (row in self.known) == (status == OK)

    @rule(rows=st.lists(st.integers(0, 9), min_size=1, max_size=8, unique=True))
    def restore(self, rows: list[int]) -> None:
        statuses = self.store.load(self.names[rows], self.at[rows])
        for row, status in zip(rows, statuses.tolist(), strict=True):
            assert status == (OK if row in self.known else MISSING)
            if status == OK:
                for number, one in enumerate(self.memory):
                    wanted = np.random.default_rng([self.known[row], number]).integers(
                        0, 256, one.rows.shape[1], np.uint8
                    )
                    assert (one.rows[row] == wanted).all()

    @rule(row=st.integers(0, 9))
    def drop(self, row: int) -> None:
        self.store.drop(self.names[[row]])
        self.known.pop(row, None)

    @rule(row=st.integers(0, 9))
    def pin(self, row: int) -> None:
        if self.store.pin(self.names[[row]])[0]:
            assert row in self.known
            self.pinned[row] = self.pinned.get(row, 0) + 1

    @rule(row=st.integers(0, 9))
    def unpin(self, row: int) -> None:
        self.store.unpin(self.names[[row]])
        if self.pinned.get(row, 0) > 1:
            self.pinned[row] -= 1
        else:
            self.pinned.pop(row, None)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.pinned.clear()
        self.open()

    @invariant()
    def has_what_it_must(self) -> None:
        assert set(np.flatnonzero(self.store.has(self.names)).tolist()) == set(self.known)
        assert self.store.num_chunks == len(self.known) <= 6

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.scratch.cleanup()


def test_a_store_does_what_a_dict_does() -> None:
    run_state_machine_as_test(ChunkMachine, settings=settings(max_examples=8, stateful_step_count=12, deadline=None))


def test_waiting_for_a_transfer_ends_for_all_who_wait() -> None:
    transfer = Transfer(LOAD, keys(1), np.zeros(1, np.uint64))
    assert [transfer.wait(0), transfer.wait(-1), transfer.done] == [False, False, False]
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(transfer.wait, 60) for _ in range(8)]
        transfer.finish()
        assert all(one.result() for one in waiting)
    assert transfer.done
    assert transfer.wait(0)
