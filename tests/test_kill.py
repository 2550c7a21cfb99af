"""A store whose owner is killed at any moment holds right bytes or misses, and opens again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from killed import NUM_KEYS, NUM_SLOTS
from kvhelp import open_small, small_layout
from kvtide.errors import UnsupportedError
from kvtide.io.uring import UringEngine
from kvtide.tiers.contract import OK
from kvtide.tiers.owner import unlock
from simkv import Groups, check_slots, group_key

KILLS_EACH = 100  # of each of two workers
LIFE_S_MAX = 0.08
PATIENCE_S = 1


@dataclass
class Toll:
    """What was found after the kills."""

    num_clean: int = 0
    num_groups: int = 0
    statuses: tuple[int, ...] = ()


def has_uring() -> bool:
    try:
        UringEngine(depth_max=1).close()
    except UnsupportedError:
        return False
    return True


def let_work(pid: int, life_s: float) -> None:
    """Return when the process has worked for that long: where others work, too, it may hardly have begun by then."""
    clock = ~pid << 3 | 2  # of its processor time, as clock_getcpuclockid(3) makes it
    until = time.monotonic() + 10 * life_s  # it may wait for the disk instead
    while time.clock_gettime(clock) < life_s and time.monotonic() < until:
        time.sleep(0.001)


def kill_one(pipes: tuple[IO[str], IO[str]], root: Path, seed: int, engine: str, number: int, life_s: float) -> int:
    stdin, stdout = pipes
    stdin.write(f"{root} {seed} {engine}\n")
    stdin.flush()
    pid = int(stdout.readline())
    let_work(pid, life_s)
    os.kill(pid, number)
    patience = threading.Timer(PATIENCE_S, os.kill, (pid, signal.SIGKILL))  # as a user would in the end
    patience.start()
    status = int(stdout.readline())
    patience.cancel()
    patience.join()
    return status


def check_store(root: Path, toll: Toll) -> None:
    layout = small_layout()
    groups = Groups(layout)
    space = open_small(root, layout, NUM_SLOTS)
    check_slots(space.tier)
    keys = {group_key(number) for number in range(NUM_KEYS)}
    held = [key.tobytes() for key in space.tier.inventory().keys]
    assert len(set(held)) == len(held)
    assert set(held) <= keys
    for key in held:
        statuses, parts = groups.read_group(space.tier, key)
        assert statuses == [OK] * layout.num_fragments, "every header that is whole has whole fragments"
        assert groups.version_of(key, parts, [0]) == 0
    check_slots(space.tier)
    toll.num_clean += space.was_clean
    toll.num_groups += len(held)
    os.close(space.fd)  # give it up as it is: the next owner finds what the killed one left
    unlock(space.lock_fd)
    space.engine.close()


def kill_many(folder: Path, seed: int, engine: str, numbers: list[int]) -> Toll:
    rng, toll, statuses = random.Random(seed), Toll(), []
    here = Path(__file__).parent
    command = [sys.executable, str(here / "killed.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=here) as herald:
        pipes = herald.stdin, herald.stdout
        for index, number in enumerate(numbers):
            root = folder / f"{seed}-{index // 10}"  # some kills hit a store that is being made
            life_s = rng.random() * LIFE_S_MAX * rng.choice([0.1, 1.0])
            statuses.append(kill_one(pipes, root, seed * 1000 + index, engine, number, life_s))
            check_store(root, toll)
        herald.stdin.close()
    toll.statuses = tuple(statuses)
    return toll


def both_engines(folder: Path, numbers: list[int]) -> list[Toll]:
    engines = ["uring" if has_uring() else "threads", "threads"]
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(kill_many, folder, seed, engine, numbers) for seed, engine in enumerate(engines, 1)]
        return [job.result() for job in jobs]


def test_a_killed_owner_leaves_right_bytes_or_misses(tmp_path: Path) -> None:
    for toll in both_engines(tmp_path, [signal.SIGKILL] * KILLS_EACH):
        assert set(toll.statuses) == {signal.SIGKILL}
        assert toll.num_groups > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_owner_does_so_too(tmp_path: Path, number: int) -> None:
    for toll in both_engines(tmp_path, [number] * 10):
        assert set(toll.statuses) <= {number, signal.SIGKILL, 130 << 8}
        assert number == signal.SIGTERM or 130 << 8 in toll.statuses
