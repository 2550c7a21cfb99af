"""Checks of many at once: readers, writers, droppers, processes and jobs. Every read must have a place in one order."""

from __future__ import annotations

import numpy as np

from kvtide.check.bench import Bench, cannot_tell, fail, passed, smallest
from kvtide.check.contract import Check, Verdict
from kvtide.check.driver import Child
from kvtide.check.linear import what_breaks
from kvtide.check.race import MISS, RAISED, Plan, Row

RACE_S = 2.0


def read_while_written(bench: Bench) -> Verdict:
    """Read one key while it is written and dropped, over and over."""
    drops = 1 if "drops" in bench.powers else 0
    plan = Plan(1, bench.fitting(1 << 20), _seconds(bench), num_readers=2, num_writers=1, num_droppers=drops, batch=1)
    return _race(bench, plan, "one key read while it is written")


def linearizable(bench: Bench) -> Verdict:
    """Readers, writers and droppers of a few keys in one process, in a store too small for all of them."""
    drops = 1 if "drops" in bench.powers else 0
    plan = Plan(8, bench.fitting(16384), _seconds(bench), num_readers=3, num_writers=2, num_droppers=drops, batch=2)
    return _race(bench, plan, "readers, writers and eviction", room=6)


def several_processes(bench: Bench) -> Verdict:
    """Readers and writers in several processes over one directory."""
    plan = Plan(6, bench.size, _seconds(bench), num_readers=1, num_writers=1, batch=2)
    setup = bench.setup(room=64)
    children = [bench.open(setup, fresh=True) for _ in range(3)]
    keys = children[0].keys(bench.chains(plan.num_keys))
    for number, child in enumerate(children):
        told = {**_told(plan), "base": number * 1_000_000_000, "seed": number}
        child.race_begin(Plan(**told), keys)
    rows = [row for child in children for row in child.race_end(plan)]
    return _judge(bench, rows, "3 processes over one directory")


def _told(plan: Plan) -> dict[str, int]:
    return {name: getattr(plan, name) for name in Plan.__dataclass_fields__}


def _seconds(bench: Bench) -> float:
    return 0.5 if bench.is_quick else RACE_S


def _race(bench: Bench, plan: Plan, words: str, *, room: int = 64) -> Verdict:
    def rows_of(num_keys: int) -> list[Row]:
        smaller = Plan(**{**_told(plan), "num_keys": num_keys, "batch": min(plan.batch, num_keys)})
        child = bench.open(bench.setup(room=room, value_bytes=plan.value_bytes))
        child.race_begin(smaller, child.keys(bench.chains(num_keys)))
        rows = child.race_end(smaller)
        child.close()
        return rows

    rows = rows_of(plan.num_keys)
    found, _ = what_breaks(rows, can_overwrite=bench.traits.can_overwrite)
    if found:
        least = smallest(
            lambda num: bool(what_breaks(rows_of(num), can_overwrite=bench.traits.can_overwrite)[0]), plan.num_keys
        )
        fail(f"{words}: {found}", f"{least} keys, {plan.num_readers} readers, {plan.num_writers} writers")
    return _judge(bench, rows, words)


def _judge(bench: Bench, rows: list[Row], words: str) -> Verdict:
    found, key = what_breaks(rows, can_overwrite=bench.traits.can_overwrite)
    if found:
        fail(f"{words}: {found}", f"key {key}")
    gets = [row[2] for row in rows if row[0] == "get"]
    came, raised = sum(version >= 0 for version in gets), gets.count(RAISED)
    if not came:
        cannot_tell(f"{words}: of {len(gets)} reads none gave a value, {raised} raised")
    puts = sum(row[0] == "put" for row in rows)
    misses = f"{gets.count(MISS)} misses" + (f", {raised} raised" if raised else "")
    return passed(f"{words}: {len(gets)} reads ({misses}), {puts} writes, all in one order")


def jobs(bench: Bench) -> Verdict:
    """Begin many jobs of stores and loads, and match their answers."""
    num = 40 if bench.is_quick else 200
    setup = bench.setup(room=2 * num, value_bytes=bench.fitting(16384))
    child = bench.open(setup)
    rng = np.random.default_rng(bench.seed)
    keys = child.keys(bench.chains(num))
    values = bench.values(range(num), size=setup.value_bytes)
    wanted: dict[int, list[int]] = {}
    kinds: dict[int, str] = {}
    for _ in range(num):
        kind = "put" if rng.random() < 0.5 else "get"
        picked = rng.choice(num, 3, replace=False).tolist()
        own = [keys[index] for index in picked]
        job = child.begin("put", own, [values[index] for index in picked]) if kind == "put" else child.begin("get", own)
        if job in wanted:
            fail(f"two jobs have the number {job}", "2 jobs")
        wanted[job], kinds[job] = picked, kind
    came = _collect(bench, child, wanted, kinds, setup.value_bytes)
    return passed(f"{num} jobs of 3 values each, begun at once: all ended once, {came} values came, each its key's own")


def _collect(bench: Bench, child: Child, wanted: dict[int, list[int]], kinds: dict[int, str], size: int) -> int:
    left, came = set(wanted), 0
    while left:
        ended = child.finish(min(10.0, child.call_s / 2))
        if not ended:
            fail(f"{len(left)} of {len(wanted)} jobs never end", f"{len(wanted)} jobs")
        for job, found in ended.items():
            if job not in left:
                fail(f"job {job} ended twice, or was never begun", f"{len(wanted)} jobs")
            left.discard(job)
            if kinds[job] == "get":
                got = [None if one is None or isinstance(one, bool) else one for one in found]
                came += bench.check_values(got, wanted[job], f"job {job} of {len(wanted)}", size=size)
    return came


CHECKS = (
    Check(
        "read-while-written",
        "Read while it is written",
        "a value that is read while it is written is the old one, the new one or a miss",
        "one key of 1 MiB written and dropped over and over, read by two threads; the history is put in order",
        "LMCache#207",
        read_while_written,
        ("threads",),
    ),
    Check(
        "linearizable",
        "Readers, writers and eviction",
        "every read gives the value of some write that was not replaced before the read began",
        "threads read, write and drop 8 keys in a store for 6; the history is put in order (Gibbons and Korach)",
        "LMCache#207, LMCache#4385",
        linearizable,
        ("threads",),
    ),
    Check(
        "several-processes",
        "Several processes",
        "the same of processes that have one directory open at once",
        "3 processes read and write 6 keys; their histories are joined",
        "LMCache#207",
        several_processes,
        ("shared",),
    ),
    Check(
        "jobs",
        "Order of many jobs",
        "every job ends once, with the answers to its own keys",
        "200 stores and loads are begun at once",
        "SGLang#32724",
        jobs,
        ("begins",),
    ),
)
