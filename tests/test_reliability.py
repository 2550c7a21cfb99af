"""What a store must live through beside kills: full disks, clocks that jump, forks, Ctrl-C, thousands of openings."""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from engines import Memory, keys
from kvhelp import open_small, small_cache, small_layout
from kvtide.blocks import KEY
from kvtide.chunks import LOAD, ChunkOptions, ChunkStore, Transfer
from kvtide.errors import IoError
from kvtide.io.ops import Batch, Completions, Engine
from kvtide.tiers.contract import FAILED, FULL, OK
from kvtide.tiers.departures import read_departures
from kvtide.tiers.owner import lock, unlock
from simkv import Groups, check_slots, group_key

# Another test of this process may have loaded Lance; no child here uses it.
pytestmark = pytest.mark.filterwarnings("ignore:lance is not fork-safe:UserWarning")

ROOT = Path(__file__).parent.parent
LAYOUT = small_layout()
GROUPS = Groups(LAYOUT)
KEYS = [group_key(number) for number in range(8)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid():
        pytest.skip("mounting a small file system needs root")
    words = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(tmp_path)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a small file system")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)  # a test that failed may have it open


# Disk full


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_store_lives_on_a_full_disk_and_grows_when_there_is_room(small_disk: Path) -> None:
    open_small(small_disk / "store", LAYOUT, 8).close()
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space"):
        fill(ballast)
    space = open_small(small_disk / "store", LAYOUT, 8)
    assert GROUPS.write(space.tier, KEYS[:8], [0] * 8) == [OK] * 8  # room was reserved when it was made
    space.tier.drop(np.frombuffer(KEYS[0], KEY))
    space.close()  # with no room for a checkpoint
    assert not list(small_disk.rglob("*.partial"))
    with pytest.raises(IoError, match="type a smaller --disk") as full:
        open_small(small_disk / "store", LAYOUT, 25)
    assert full.value.errno == errno.ENOSPC
    space = open_small(small_disk / "store", LAYOUT, 8)
    for key in KEYS[1:]:
        statuses, parts = GROUPS.read_group(space.tier, key)
        assert set(statuses) == {OK}
        assert GROUPS.version_of(key, parts, [0]) == 0
    check_slots(space.tier)
    space.close()
    ballast.unlink()
    space = open_small(small_disk / "store", LAYOUT, 16)
    assert len(space.tier.held) >= 7
    check_slots(space.tier)
    space.close()
    space = open_small(small_disk / "store", LAYOUT, 16)
    assert space.was_clean
    space.close()


def test_writes_refused_for_their_place_cost_only_room(tmp_path: Path) -> None:
    space = open_small(tmp_path, LAYOUT, 8, "threads")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096 + 4 * LAYOUT.slot_bytes, hard))
    try:
        assert GROUPS.write(space.tier, KEYS[:8], [0] * 8) == [OK] * 4 + [FAILED] * 4
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    check_slots(space.tier)
    found = space.tier.lookup(np.frombuffer(b"".join(KEYS[:8]), KEY))
    assert found.tolist() == [True] * 4 + [False] * 4, "a write that failed is not visible"
    assert GROUPS.write(space.tier, KEYS[4:8], [1] * 4) == [OK] * 4
    assert GROUPS.write(space.tier, [group_key(99)], [0]) == [FULL]
    check_slots(space.tier)
    space.close()


# Clocks


@pytest.mark.parametrize("step_ns", [-(10**18), 10**18])
def test_clocks_that_jump_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_ns: int) -> None:
    def jumping(name: str) -> Callable[[], int]:
        real, calls = getattr(time, name), iter(range(10**9))
        return lambda: max(0, real() + (step_ns if next(calls) % 2 else 0))

    for name in ("time_ns", "monotonic_ns", "perf_counter_ns"):
        monkeypatch.setattr(time, name, jumping(name))
    for number in range(3):
        space = open_small(tmp_path, LAYOUT, 4)
        assert len(space.tier.held) == min(number, 1)
        assert GROUPS.write(space.tier, KEYS[:2], [number] * 2) == [OK] * 2
        statuses, parts = GROUPS.read_group(space.tier, KEYS[1])
        assert set(statuses) == {OK}
        assert GROUPS.version_of(KEYS[1], parts, [number]) == number
        space.tier.drop(np.frombuffer(KEYS[0], KEY), reason="evicted")
        check_slots(space.tier)
        path = space.path
        space.close()
    left = GROUPS.records(KEYS[:1]).block_keys[0, 0].tobytes()
    assert read_departures(path / "departures.kvt")[left].reason == "evicted"
    store, memory = ChunkStore(chunk_options(tmp_path / "chunks")), Memory(4, 8192, seed=1)
    assert (store.store(keys(4), memory.addresses) == OK).all()
    store.close()


# Forks


def chunk_options(root: Path) -> ChunkOptions:
    return ChunkOptions(root, 4096 + 10 * (8192 + 4096), 8192, "model")


def in_a_child(*actions: Callable[[], object]) -> list[str]:
    """Do things in a forked child; return what each raised."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        told = []
        for action in actions:
            try:
                action()
                told.append("")
            except BaseException as error:  # told to the parent
                told.append(f"{type(error).__name__}: {error}")
        os.write(write_end, json.dumps(told).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as file:
        told = json.load(file)
    assert os.waitpid(pid, 0)[1] == 0
    return told


@pytest.mark.parametrize("engine", ["threads", "auto"])
def test_a_forked_child_gets_errors_and_does_no_harm(tmp_path: Path, engine: str) -> None:
    space = open_small(tmp_path, LAYOUT, 8, engine)
    GROUPS.write(space.tier, KEYS[:4], [0] * 4)
    told = in_a_child(
        lambda: GROUPS.read_group(space.tier, KEYS[0]),
        lambda: GROUPS.write(space.tier, KEYS[4:6], [0, 0]),
        lambda: space.tier.drop(np.frombuffer(KEYS[0], KEY)),
        lambda: space.engine.submit(np.zeros(0, np.uint8)),
        lambda: space.write_pace("no"),
        space.close,
        space.close,
    )
    assert all(f"opened by process {os.getpid()}" in one and "after the fork" in one for one in told[:4])
    assert told[4:] == ["", "", ""]
    assert space.read_pace() == ""
    check_slots(space.tier)
    assert len(space.tier.held) == 4
    assert GROUPS.write(space.tier, KEYS[4:6], [0, 0]) == [OK] * 2
    with pytest.raises(IoError, match="is owned by process"):
        open_small(tmp_path, LAYOUT, 8)
    space.close()
    space = open_small(tmp_path, LAYOUT, 8)
    assert space.was_clean
    assert len(space.tier.held) == 6
    space.close()


def test_a_child_that_lives_on_keeps_nobody_out(tmp_path: Path) -> None:
    path = tmp_path / "space"
    path.mkdir()
    begin, end = os.pipe()
    fd = lock(path)
    pid = os.fork()
    if not pid:
        os.close(end)
        os.read(begin, 1)  # until the parent closes its end
        os._exit(0)
    os.close(fd)  # as the kernel does for an owner that is killed: the child's copy would keep the lock
    again = lock(path)
    unlock(again)
    os.close(end)
    os.waitpid(pid, 0)
    os.close(begin)


def test_a_childs_chunk_store_and_cache_refuse_at_once(tmp_path: Path) -> None:
    store, memory = ChunkStore(chunk_options(tmp_path / "chunks")), Memory(4, 8192, seed=1)
    named = keys(4)
    store.store(named, memory.addresses)
    space = open_small(tmp_path / "tier", LAYOUT, 8)
    cache = small_cache(LAYOUT, space.tier)
    told = in_a_child(
        lambda: store.submit(Transfer(LOAD, named, memory.addresses)),
        lambda: store.drop(named),
        store.drain,
        cache.flush,
        cache.drain,
        store.close,
        cache.close,
    )
    assert all(f"opened by process {os.getpid()}" in one for one in told[:5])
    assert told[5:] == ["", ""]
    assert (store.load(named, memory.addresses) == OK).all()
    store.close()
    cache.close()
    space.close()


# Signals: `test_kill.py` sends real ones at random moments; here one comes at every moment of waiting.


class Interrupting:
    """An engine whose n-th wait is interrupted; it knows what is still under way."""

    def __init__(self, engine: Engine, at: int) -> None:
        self._engine, self._at, self.num_under_way, self.depth_max = engine, at, 0, engine.depth_max

    def submit(self, batch: Batch) -> None:
        self._engine.submit(batch)
        self.num_under_way += len(batch)

    def reap(self, wait_num: int = 0) -> Completions:
        self._at -= 1
        if self._at == 0:
            raise KeyboardInterrupt
        done = self._engine.reap(wait_num)
        self.num_under_way -= len(done)
        return done


@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("engine", ["threads", "auto"])
def test_an_interrupt_leaves_nothing_under_way_and_no_slot_lost(tmp_path: Path, engine: str, at: int) -> None:
    space = open_small(tmp_path, LAYOUT, 4, engine)
    tier = space.tier
    GROUPS.write(tier, KEYS[:2], [0, 0])
    tier.drop(np.frombuffer(KEYS[1], KEY))  # its header must be wiped first
    real, tier._io.engine = tier._io.engine, Interrupting(tier._io.engine, at)

    def work() -> None:
        for _ in range(4):
            GROUPS.write(tier, KEYS[1:3], [1, 1])
            GROUPS.read_group(tier, KEYS[0])

    with pytest.raises(KeyboardInterrupt):
        work()
    assert tier._io.engine.num_under_way == 0
    tier._io.engine = real
    check_slots(tier)
    assert GROUPS.write(tier, [KEYS[3]], [0]) == [OK]
    space.close()
    space = open_small(tmp_path, LAYOUT, 4, engine)
    assert {KEYS[0], KEYS[3]} <= set(space.tier.held)
    for key in list(space.tier.held):
        statuses, parts = GROUPS.read_group(space.tier, key)
        assert set(statuses) == {OK}
        assert GROUPS.version_of(key, parts, [0, 1]) is not None
    check_slots(space.tier)
    space.close()


# Openings


def test_hundreds_of_openings_leave_no_memory_descriptor_or_thread(tmp_path: Path) -> None:
    me, memory = psutil.Process(), Memory(2, 8192, seed=1)

    def once(number: int) -> None:
        space = open_small(tmp_path / "tier", LAYOUT, 4, ("threads", "auto")[number % 2])
        GROUPS.write(space.tier, KEYS[:1], [0])
        space.close()
        if number % 4 == 0:
            store = ChunkStore(chunk_options(tmp_path / "chunks"))
            store.store(keys(2), memory.addresses)
            store.close()

    def now() -> tuple[int, int, int]:
        gc.collect()
        return me.num_fds(), threading.active_count(), me.memory_info().rss

    for number in range(20):
        once(number)
    num_fds, num_threads, num_bytes = now()
    for number in range(100):
        once(number)
    later = now()
    assert later[:2] == (num_fds, num_threads)
    assert later[2] - num_bytes < 16 << 20


# The programs that run for hours


@pytest.mark.parametrize("words", [("--minutes", "0.04"), ("--kills", "6")])
def test_a_soak_runs_and_says_what_it_did(tmp_path: Path, words: tuple[str, str]) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "fuzz/soak.py", *words, "--seed", "1", "--dir", tmp_path / "soak", "-o", out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "seed 1" in done.stderr
    found = json.loads(out.read_text())
    assert found["failures"] == found["leaks"]["found"] == []
    assert "--kills" not in words or found["kills"] >= 6
    assert found["environment"]["commit"]


def test_a_child_that_closes_what_it_inherited_keeps_the_lock_of_its_own(tmp_path: Path) -> None:
    layout, (mine, its) = small_layout(), (tmp_path / "mine", tmp_path / "its")
    space = open_small(mine, layout, 4)

    def work() -> None:
        own = open_small(its, layout, 4)
        space.close()
        with pytest.raises(IoError, match="owned by process"):
            open_small(its, layout, 4)
        own.close()

    assert in_a_child(work) == [""]
    space.close()


def test_a_lock_is_taken_where_nobody_can_write_who_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _body: bytes, _offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    fd = lock(tmp_path)
    with pytest.raises(IoError, match="owned by process"):
        lock(tmp_path)
    unlock(fd)
    unlock(lock(tmp_path))
