"""Memory is asked for ahead of need: all of it, bounded in time, and never in the way."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from kvhelp import Walker, open_small, small_identity, small_layout
from kvtide.cache import CacheOptions, CpuArena, TieredCache
from kvtide.cache import warm as warming
from kvtide.cache.mover import DEMAND, Mover
from kvtide.tiers.memory import Arena, FramePool

MIB = 1 << 20


def test_every_byte_is_asked_for_once() -> None:
    seen: list[tuple[str, int, int]] = []
    mover = Mover()
    parts = [(lambda start, num: seen.append(("a", start, num)), 20 * MIB), (lambda s, n: seen.append(("b", s, n)), 5)]
    warming.warm(parts, mover)
    mover.close()
    assert seen == [("a", 0, 8 * MIB), ("a", 8 * MIB, 8 * MIB), ("a", 16 * MIB, 4 * MIB), ("b", 0, 5)]


def test_the_rest_comes_behind_demands_and_holds_up_no_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "OPENING_NS", 0)
    mover, started, seen = Mover(), threading.Event(), []
    go_on = threading.Event()

    def populate(start: int, num: int) -> None:
        del num
        seen.append(start)
        if start == 8 * MIB:
            started.set()
            go_on.wait(10)

    warming.warm([(populate, 800 * MIB)], mover)
    assert started.wait(10)
    demanded = mover.submit(lambda: seen.append("demand"), DEMAND)
    go_on.set()
    demanded.result(10)
    assert seen.index("demand") == 2  # after what ran, before all the rest
    mover.drain()
    mover.close()


def test_closing_gives_up_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "OPENING_NS", 0)
    mover, seen = Mover(), []

    def hold() -> None:
        while not mover.is_closed:
            time.sleep(0.001)

    mover.submit(hold, DEMAND)
    warming.warm([(lambda start, num: seen.append(start + num * 0), 8000 * MIB)], mover)
    mover.close()
    assert seen == [0]


def test_populated_memory_is_zero_and_writable() -> None:
    arena = Arena(3 * MIB)
    arena.populate(0, 3 * MIB)
    assert not arena.buffer.any()
    arena.buffer[:] = 7
    arena.populate(MIB, MIB)  # asking again changes nothing
    assert (arena.buffer == 7).all()
    pool = FramePool(4, 4096)
    pool.populate(0, 4 * 4096)
    assert not pool.rows.any()


def test_a_reopened_store_is_warmed_by_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, asked, used = small_layout(), [], [0]

    def populate(_pool: FramePool, _start: int, num: int) -> None:
        asked.append(num)

    monkeypatch.setattr(FramePool, "populate", populate)
    for opening in range(2):
        namespace = open_small(tmp_path, layout)
        cache = TieredCache(
            layout,
            small_identity(layout).digest(),
            CpuArena(4 * MIB),
            CacheOptions(dram_bytes=MIB),
            tier=namespace.tier,
        )
        Walker(cache).step([cache.open(list(range(32)))], [list(range(32))] if not opening else [[31]])
        cache.close()
        used.append(namespace.tier.stats().used_bytes)
        namespace.close()
        assert bool(asked) == bool(opening)
    assert sum(asked) == used[1]
