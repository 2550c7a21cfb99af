"""A program made to be killed: forks a worker that fills a store until somebody ends it. `tests/test_kill.py` runs it.

Each line on stdin is `ROOT SEED ENGINE`; the answer is the worker's pid, and once it is dead, its exit status.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np

from kvhelp import open_small, small_layout
from kvtide.blocks import KEY
from kvtide.tiers.contract import MISSING, OK
from simkv import Groups, group_key

NUM_SLOTS, NUM_KEYS = 12, 30


def work(root: Path, seed: int, engine: str) -> None:
    """Store, drop and read groups at random; close and open now and then; never return."""
    layout, rng = small_layout(), np.random.default_rng(seed)
    groups = Groups(layout)
    while True:
        space = open_small(root, layout, NUM_SLOTS, engine)
        try:
            for _ in range(int(rng.integers(1, 20))):
                keys = [group_key(int(number)) for number in rng.integers(0, NUM_KEYS, int(rng.integers(1, 7)))]
                groups.write(space.tier, keys, [0] * len(keys))
                statuses, parts = groups.read_group(space.tier, keys[0])
                if set(statuses) != {MISSING}:
                    assert set(statuses) == {OK}
                    assert groups.version_of(keys[0], parts, [0]) == 0
                space.tier.drop(np.frombuffer(b"".join(keys[: int(rng.integers(0, 6))]), KEY))
        finally:
            space.close()


def main() -> None:
    """Fork a worker for every line."""
    for line in sys.stdin:
        root, seed, engine = line.split()
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                work(Path(root), int(seed), engine)
            except KeyboardInterrupt:
                os._exit(130)
            except BaseException as error:  # the test shows it
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    main()
