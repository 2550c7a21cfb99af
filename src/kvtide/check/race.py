"""Readers, writers and droppers of one target at once, and the history they leave. Next: driver.

*Theory.* All times are of CLOCK_MONOTONIC, which processes of one machine share, so that histories of several children
can be joined. A write's version is unique: base + count.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtide.check.values import value_of, version_of

Row = tuple[str, int, int, int, int]
"""What was done: "put", "get" or "drop"; key index; version (-1: a miss, -2: wrong bytes, -3: it raised); ns begun and
ended."""
MISS, WRONG, RAISED = -1, -2, -3
TIMES_MIN = 4  # of each thread: on a busy machine the time may be up before one begins


@dataclass(frozen=True, slots=True)
class Plan:
    """Threads of each kind, on keys `0..num_keys`, each working on `batch` keys at a time for `seconds`."""

    num_keys: int
    value_bytes: int
    seconds: float
    num_readers: int = 1
    num_writers: int = 1
    num_droppers: int = 0
    batch: int = 2
    base: int = 0
    seed: int = 0
    num_ops: int = 1_000_000  # of each thread, at most


def run_race(target: Any, plan: Plan, keys: list[bytes]) -> list[Row]:
    """Run all threads until the time is up, each a few times at least, and return what each did."""
    until, rows, locks = time.monotonic() + plan.seconds, list[Row](), threading.Lock()
    kinds = [_write] * plan.num_writers + [_read] * plan.num_readers + [_drop] * plan.num_droppers

    def work(number: int) -> None:
        rng = np.random.default_rng([plan.seed, number])
        own: list[Row] = []
        for count in range(plan.num_ops):
            if count >= TIMES_MIN and time.monotonic() >= until:
                break
            picked = rng.choice(plan.num_keys, plan.batch, replace=False).tolist()
            version = plan.base + number * 1_000_000 + count * plan.batch
            own += kinds[number](target, plan, keys, picked, version)
        with locks:
            rows.extend(own)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(kinds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rows


def _write(target: Any, plan: Plan, keys: list[bytes], picked: list[int], version: int) -> list[Row]:
    values = [value_of(index, version + place, plan.value_bytes) for place, index in enumerate(picked)]
    begun = time.monotonic_ns()
    try:
        target.put([keys[index] for index in picked], values)
    except Exception:  # it may have taken effect or not: the same as a put that answers False
        time.sleep(0.001)
    ended = time.monotonic_ns()
    return [("put", index, version + place, begun, ended) for place, index in enumerate(picked)]


def _read(target: Any, plan: Plan, keys: list[bytes], picked: list[int], version: int) -> list[Row]:
    del version
    begun = time.monotonic_ns()
    try:
        got = target.get([keys[index] for index in picked])
    except Exception:  # no wrong bytes
        time.sleep(0.001)
        return [("get", index, RAISED, begun, time.monotonic_ns()) for index in picked]
    ended = time.monotonic_ns()
    rows = []
    for index, value in zip(picked, got, strict=True):
        found = MISS if value is None else version_of(bytes(value), index, plan.value_bytes)
        rows.append(("get", index, WRONG if found is None else found, begun, ended))
    return rows


def _drop(target: Any, plan: Plan, keys: list[bytes], picked: list[int], version: int) -> list[Row]:
    del plan
    time.sleep(0.02)  # so that others find something
    begun = time.monotonic_ns()
    try:
        target.drop([keys[index] for index in picked])
    except Exception:
        time.sleep(0.001)
    return [("drop", index, version + place, begun, time.monotonic_ns()) for place, index in enumerate(picked)]
