"""A memory killed at every step of a merge that the file system sees, and reopened: exactly what was acknowledged.

`python tests/recall_merged.py --dir DIR` kills at each of them. A process of its own, as Lance cannot be forked once it
is at work: here only children use it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import lance
import numpy as np

from kvtide.recall import Memory

DIM, LOG_BYTES, KEYS, STEPS_MAX = 8, 64 << 10, 1500, 400
MERGE_ROWS, NEVER = 500, 1 << 30
Round = tuple[np.ndarray, np.ndarray, list[bytes], np.ndarray]


def rounds(num: int) -> Iterator[Round]:
    """Yield rows to add, and ids to delete then."""
    rng = np.random.default_rng(3)
    for _ in range(num):
        ids = rng.integers(0, KEYS, 100)
        yield (
            ids,
            rng.standard_normal((100, DIM)).astype(np.float32),
            [rng.bytes(20) for _ in ids],
            rng.integers(0, KEYS, 25),
        )


def truth(num: int) -> list[bytes | None]:
    """Return the payload of every id after so many rounds."""
    kept: list[bytes | None] = [None] * KEYS
    for ids, _, payloads, gone in rounds(num):
        for one, payload in zip(ids.tolist(), payloads, strict=True):
            kept[one] = payload
        for one in gone.tolist():
            kept[one] = None
    return kept


def make(path: Path, num: int, num_merges: int) -> None:
    """Write the rounds: until there were so many merges with merging, then without until one more is due."""
    merging = True
    memory = Memory.open(path, DIM, log_bytes=LOG_BYTES, merge_rows=MERGE_ROWS)
    for ids, rows, payloads, gone in rounds(num):
        memory.add(ids, rows, payloads)
        memory.delete(gone)
        memory.merger.wait()
        if merging and memory.merger.num_merges == num_merges:
            merging = False
            memory.close()
            memory = Memory.open(path, DIM, log_bytes=LOG_BYTES, merge_rows=NEVER)
    memory.close()
    assert len(list(path.glob("segment-*"))) == num_merges
    assert len(list(path.glob("log-*"))) > 1


def judge(path: Path, wanted: list[bytes | None]) -> None:
    """Reopen without merging: what was acknowledged is there once, and nothing else."""
    there = [one for one, payload in enumerate(wanted) if payload is not None]
    with Memory.open(path, DIM, log_bytes=LOG_BYTES, merge_rows=NEVER) as memory:
        assert memory.get(np.arange(KEYS)) == wanted
        found, _ = memory.search(np.ones((1, DIM), np.float32), KEYS)
        assert sorted(one for one in found[0].tolist() if one >= 0) == there
        assert len(memory) == len(there)


def die_at(step: int) -> None:
    """End this process before the `step`-th call of the merge that changes files for good."""
    count = 0

    def before(name: str) -> None:
        real = getattr(os, name)

        def called(*args: object, **named: object) -> object:
            nonlocal count
            if threading.current_thread().name == "kvtide-merge":
                count += 1
                if count == step:
                    os._exit(9)
            return real(*args, **named)

        setattr(os, name, called)

    for name in ("fsync", "rename", "unlink", "mkdir", "rmdir"):
        before(name)


def attempt(path: Path, wanted: list[bytes | None], before: Path | None, step: int) -> None:
    """Judge what the attempt before left, then merge and die at a step, or end."""
    if before is not None:
        judge(before, wanted)
    die_at(step)
    with Memory.open(path, DIM, log_bytes=LOG_BYTES, merge_rows=MERGE_ROWS) as memory:
        memory.merger.wait()
        assert memory.merger.num_merges == 1
    judge(path, wanted)


def forked(work: Callable[[], None]) -> int:
    """Do something in a child and return its exit status."""
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def campaign(folder: Path, *, num_merges: int, num_rounds: int, every: int) -> int:
    """Kill a merge at each `every`-th step; return how often it was killed."""
    wanted, made = truth(num_rounds), folder / "made"
    assert forked(lambda: make(made, num_rounds, num_merges)) == 0
    before: Path | None = None
    for kills, step in enumerate(range(1, STEPS_MAX, every)):
        path = folder / f"m{step}"
        shutil.copytree(made, path)
        status = forked(lambda path=path, before=before, step=step: attempt(path, wanted, before, step))
        if before is not None:
            shutil.rmtree(before)
        if status == 0:
            return kills
        assert status == 9, f"step {step}: status {status}"
        before = path
    raise AssertionError("a merge without end")


def main() -> None:
    """Kill a merge of logs, then one of logs and seven segments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1)
    given = parser.parse_args()
    for name in ("one", "tier"):
        (given.dir / name).mkdir()
    one = campaign(given.dir / "one", num_merges=1, num_rounds=24, every=given.every)
    tier = campaign(given.dir / "tier", num_merges=7, num_rounds=90, every=5 * given.every)
    print(f"{one} + {tier} kills, Lance {lance.__version__}")


if __name__ == "__main__":
    main()
