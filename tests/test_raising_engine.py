"""An engine that raises instead of answering: no slot, frame or pin stays taken, and room can be used again."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines import keys
from kvhelp import Walker, small_cache, small_layout
from kvtide.blocks import KEY
from kvtide.cache import TieredCache
from kvtide.chunks import ChunkOptions, ChunkStore
from kvtide.io.drive import SimDrive
from kvtide.io.ops import OP, READ, WRITE, Batch, Completions, address_of, aligned_buffer
from kvtide.io.threads import ThreadEngine
from kvtide.tiers import slotwriter
from kvtide.tiers.cipher import MasterKey
from kvtide.tiers.contract import FAILED, OK
from simkv import MODEL, Groups, check_cache, check_slots, group_key, sim_tier

KEYS = [group_key(number) for number in range(8)]
TOKENS = list(range(60))


class RaisingEngine:
    """Raises at its next call number `at` of submit or of reap, once; else it is the engine behind it."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._at = engine, -1
        self._method = ""
        self.depth_max = engine.depth_max

    def arm(self, method: str, at: int) -> None:
        self._method, self._at = method, at

    @property
    def has_raised(self) -> bool:
        return self._at < 0

    def _call(self, method: str) -> None:
        if method == self._method:
            self._at -= 1
            if self._at == -1:
                raise MemoryError("the engine has none")

    def submit(self, batch: Batch) -> None:
        self._call("submit")
        self._engine.submit(batch)

    def reap(self, wait_num: int = 0) -> Completions:
        self._call("reap")
        return self._engine.reap(wait_num)

    def register(self, arena: np.ndarray) -> None:
        self._engine.register(arena)

    def close(self) -> None:
        self._engine.close()


def armed(tier: Any) -> RaisingEngine:
    engine = RaisingEngine(tier._io.engine)
    tier._io.engine = engine
    return engine


@pytest.mark.parametrize("is_packed", [False, True], ids=["in steps", "packed"])
@pytest.mark.parametrize(("method", "at"), [("submit", 0), ("submit", 1), ("submit", 2), ("reap", 0), ("reap", 1)])
def test_slots_of_a_write_that_raised_are_free(
    method: str, at: int, monkeypatch: pytest.MonkeyPatch, *, is_packed: bool
) -> None:
    layout = small_layout()
    monkeypatch.setattr(slotwriter, "PORTION_BYTES", 2 * layout.slot_bytes)  # three portions of two groups, or one
    tier, groups = sim_tier(SimDrive(MODEL), layout, 8, is_packed=is_packed), Groups(layout)
    groups.write(tier, KEYS[:2], [1, 1])
    groups.write(tier, KEYS[2:6], [1] * 4)
    tier.drop(np.frombuffer(b"".join(KEYS[2:6]), KEY))  # whose headers are to be wiped first
    engine = armed(tier)
    engine.arm(method, at)
    try:
        groups.write(tier, KEYS[2:8], [2] * 6)
    except MemoryError:
        check_slots(tier)
    assert engine.has_raised
    assert tier.stats().num_groups in {2, 8}
    assert groups.write(tier, KEYS[2:8], [3] * 6) == [OK] * 6, "all room can be used again"
    check_slots(tier)
    for key, version in [(KEYS[0], 1), (KEYS[7], 3)]:
        statuses, parts = groups.read_group(tier, key)
        assert statuses == [OK] * 3
        assert groups.version_of(key, parts, [version]) == version


def test_nothing_moves_into_memory_after_a_read_that_raised() -> None:
    layout = small_layout()
    drive = SimDrive(MODEL)
    tier, groups = sim_tier(drive, layout, 8), Groups(layout)
    groups.write(tier, KEYS, [1] * 8)
    engine = armed(tier)
    engine.arm("reap", 0)
    with pytest.raises(MemoryError):
        groups.read_group(tier, KEYS[0])
    assert not len(engine.reap(1)), "nothing is in flight"
    assert groups.read_group(tier, KEYS[0])[0] == [OK] * 3
    check_slots(tier)


@pytest.mark.parametrize(("method", "at"), [(method, at) for method in ("submit", "reap") for at in range(0, 26, 5)])
def test_a_cache_over_it_loses_no_room(method: str, at: int) -> None:
    layout = small_layout()
    tier = sim_tier(SimDrive(MODEL), layout, 30)
    engine = armed(tier)
    cache = small_cache(layout, tier, tokens=256, dram_groups=3, windows=1)
    walker, sequence = Walker(cache), cache.open(TOKENS)
    engine.arm(method, at)
    go_on(cache, walker, sequence, TOKENS)
    for token in range(60, 66):
        go_on(cache, walker, sequence, [*TOKENS, *range(60, token + 1)])
    assert engine.has_raised
    check_all(cache, sequence)


def go_on(cache: TieredCache, walker: Walker, sequence: Any, tokens: list[int]) -> None:
    """Step to the end of `tokens` whatever is raised on the way."""
    num_raised = 0
    while sequence.num_tokens < len(tokens):
        at = sequence.num_tokens
        try:
            walker.step([sequence], [tokens[at : at + 8]])
        except MemoryError:
            num_raised += 1
            assert num_raised < 3
            cache.heal(sequence)


def check_all(cache: TieredCache, sequence: Any) -> None:
    check_cache(cache, [sequence])
    cache.release(sequence)
    cache._store_error = None  # a store in the background raised: flush would tell
    cache.ledger.was_refused[:] = False
    cache.flush()
    check_cache(cache, [])
    cache.close()


@pytest.mark.parametrize(("method", "at"), [("submit", 0), ("reap", 0)])
def test_a_chunk_store_over_it_loses_no_room(tmp_path: Path, method: str, at: int) -> None:
    options = chunk_options(tmp_path)
    with_store(options, lambda store: check_chunks(store, method, at))


def chunk_options(folder: Path) -> ChunkOptions:
    return ChunkOptions(folder / "store", 1 << 18, 4096, "model")


def with_store(options: ChunkOptions, check: Callable[[ChunkStore], None]) -> None:
    store = ChunkStore(options)
    try:
        check(store)
    finally:
        store.close()


def check_chunks(store: ChunkStore, method: str, at: int) -> None:
    num = store.num_chunks_max
    memory = aligned_buffer(num * 4096)
    addresses = address_of(memory) + np.arange(num, dtype=np.uint64) * np.uint64(4096)
    keys = np.frombuffer(b"".join(group_key(number) for number in range(num)), KEY)
    engine = armed(store._tier)
    for transfer in (store.store, store.load, store.load):
        engine.arm(method, at)
        statuses = transfer(keys, addresses)
        assert engine.has_raised or not len(statuses) or (statuses == OK).all()
        check_slots(store._tier)
        if transfer == store.store and not store.num_chunks:
            assert set(statuses.tolist()) == {FAILED}
            assert (store.store(keys, addresses) == OK).all()
    assert store.num_chunks == num
    assert (store.load(keys, addresses) == OK).all()


def test_of_a_store_that_was_cut_short_nothing_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ChunkStore(ChunkOptions(tmp_path, 1 << 20, 4096, "m", engine="threads"))
    memory = aligned_buffer(6 * 4096)
    addresses = address_of(memory) + np.arange(6, dtype=np.uint64) * np.uint64(4096)
    own, calls = store._tier._own, []

    def interrupted(key: bytes, slot: int) -> None:
        calls.append(slot)
        if len(calls) == 3:
            raise MemoryError
        own(key, slot)

    monkeypatch.setattr(store._tier, "_own", interrupted)
    assert (store.store(keys(6), addresses) == FAILED).all()
    assert not store.has(keys(6)).any()
    check_slots(store._tier)
    assert (store.store(keys(6), addresses) == OK).all()
    store.close()


def test_chunks_of_an_encrypted_batch_that_was_cut_short_take_no_room(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    size, num, master = 1 << 20, 20, MasterKey(bytes(32))
    slot_bytes = ChunkOptions(tmp_path, 1, size, "m", master=master).slot_layout().slot_bytes
    store = ChunkStore(ChunkOptions(tmp_path, 4096 + num * slot_bytes, size, "m", engine="threads", master=master))
    memory = aligned_buffer(num * size)
    addresses = address_of(memory) + np.arange(num, dtype=np.uint64) * np.uint64(size)
    engine = RaisingEngine(store._tier._io.engine)
    store._tier._io.engine = engine
    engine.arm("submit", 2)
    statuses = store.store(keys(2 * num)[:num], addresses)
    assert engine.has_raised
    assert set(statuses.tolist()) == {OK, FAILED}
    assert store.has(keys(2 * num)[:num]).tolist() == (statuses == OK).tolist()
    check_slots(store._tier)
    assert (store.store(keys(2 * num)[num:], addresses) == OK).all()
    assert store.num_chunks == num
    store.close()


def test_threads_that_cannot_start_are_told_or_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = threading.Thread.start, [2]

    def start(thread: threading.Thread) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        real(thread)

    page, batch = aligned_buffer(4096), np.zeros(6, OP)
    with tempfile.TemporaryFile() as file, ThreadEngine(depth_max=4) as engine:
        file.write(b"x" * 4096)
        file.flush()
        batch["fd"], batch["kind"], batch["address"], batch["length"] = file.fileno(), READ, address_of(page), 512
        monkeypatch.setattr(threading.Thread, "start", start)
        left[0] = 0
        with pytest.raises(RuntimeError, match="can't start"):
            engine.submit(batch)
        assert not len(engine.reap(6))
        left[0] = 1
        engine.submit(batch)
        assert sum(len(engine.reap(1)) for _ in range(6)) == 6


class ShortEngine:
    """Does what it is asked, and says that each write moved a page less."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._writes = engine, set[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, batch: Batch) -> None:
        self._writes.update(batch["tag"][batch["kind"] == WRITE].tolist())
        self._engine.submit(batch)

    def reap(self, wait_num: int = 0) -> Completions:
        done = self._engine.reap(wait_num).copy()
        done["length"][np.isin(done["tag"], list(self._writes))] -= 4096
        return done


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_write_that_moved_less_is_not_there(is_packed: bool) -> None:
    layout = small_layout()
    tier, groups = sim_tier(SimDrive(MODEL), layout, 4, is_packed=is_packed), Groups(layout)
    engine = tier._io.engine
    tier._io.engine = ShortEngine(engine)
    assert groups.write(tier, KEYS[:2], [1, 1]) == [FAILED, FAILED]
    tier._io.engine = engine
    assert not tier.lookup(np.frombuffer(b"".join(KEYS[:2]), KEY)).any()
    assert groups.write(tier, KEYS[:4], [2] * 4) == [OK] * 4
    check_slots(tier)
