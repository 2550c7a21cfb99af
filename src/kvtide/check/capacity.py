"""Checks of bounds: of the store, the disk, its inodes, and the memory that values pass through."""

from __future__ import annotations

import collections
import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

from kvtide.check import damage
from kvtide.check.bench import Bench, cannot_tell, fail, passed
from kvtide.check.contract import Check, Setup, Verdict
from kvtide.check.driver import Child, Died, Raised
from kvtide.check.loops import SmallDisk
from kvtide.check.race import WRONG, Plan

MIB = 1 << 20


def quota(bench: Bench) -> Verdict:
    """Bound a store to 10 values and write many."""
    room, num = 10, 200 if bench.is_quick else 1000
    size = bench.fitting(8192)
    setup = bench.setup(room=room, value_bytes=size)
    child = bench.open(setup)
    keys = child.keys(bench.chains(num))
    most, late = 0, 0
    for start in range(0, num, 20):
        part = range(start, min(num, start + 20))
        good = child.put([keys[index] for index in part], bench.values(part, size=size))
        late += sum(good) if start >= num // 2 else 0
        most = max(most, damage.used_bytes(setup.directory))
    bound = (setup.capacity_bytes or 0) + 2 * size + MIB
    if most > bound and bench.traits.is_on_disk:
        fail(f"bounded to {setup.capacity_bytes} bytes, {num} writes of {size} take {most} on disk", f"{room + 1}")
    got = [value for start in range(0, num, 100) for value in child.get(keys[start : start + 100])]
    held = bench.check_values(got, range(num), f"after {num} writes", size=size)
    if held * size > (setup.capacity_bytes or 0):
        fail(f"bounded to {setup.capacity_bytes} bytes, it holds {held} values of {size}", f"{room + 1} values")
    if not late:
        fail("once it was full it took no value any more, and gave none up", f"{room + 1} values")
    return passed(f"{num} writes: {held} values held, at most {most} bytes on disk of {setup.capacity_bytes}")


def flat_directory(bench: Bench) -> Verdict:
    """Store many small values and count the files of each directory."""
    num, size = 400 if bench.is_quick else 2000, bench.fitting(512)
    setup = bench.setup(value_bytes=size, capacity_bytes=(num + 10) * (size + 16384))
    child = bench.open(setup)
    keys = child.keys(bench.chains(num))
    for start in range(0, num, 250):
        part = range(start, min(num, start + 250))
        child.put([keys[index] for index in part], bench.values(part, size=size))
    folders = collections.Counter(path.parent for path in damage.files_of(setup.directory))
    most = max(folders.values(), default=0)
    got = [value for start in range(0, num, 250) for value in child.get(keys[start : start + 250])]
    held = bench.check_values(got, range(num), f"{num} small values", size=size)
    if held < num:
        fail(f"{held} of {num} values of {size} bytes can be read, in a store with room for them", f"{held + 1}")
    if most > num // 2:
        fail(f"{num} values are {most} files of one directory: ext4 refuses some millions, with space left", f"{num}")
    return passed(f"{num} values of {size} bytes: {sum(folders.values())} files, at most {most} in a directory")


def inodes(bench: Bench) -> Verdict:
    """Store more values than the file system has inodes."""
    disk = _disk(bench, 64 * MIB, 128)
    num, size = 400, bench.fitting(4096)
    setup = bench.setup(room=num + 10, value_bytes=size, directory=disk.path / "store")
    child, keys, good = _store_until(bench, setup=setup, num=num, size=size)
    return _after_full(bench, child, keys, good, size, "with 128 inodes")


def full_disk(bench: Bench) -> Verdict:
    """Store more than the disk holds, then make room and store again."""
    disk = _disk(bench, 24 * MIB, None)
    size = bench.fitting(262144)
    num = 2 * 24 * MIB // size
    ballast = disk.path / "ballast"
    setup = bench.setup(value_bytes=size, directory=disk.path / "store", capacity_bytes=12 * MIB)
    _fill(ballast, 4 * MIB)
    child, keys, good = _store_until(bench, setup=setup, num=num, size=size, on_half=lambda: _fill(ballast, 1 << 40))
    verdict = _after_full(bench, child, keys, good, size, "on a full disk")
    ballast.unlink()
    if "drops" in bench.powers and not bench.traits.is_bounded and damage.is_reserved(setup.directory, 12 * MIB):
        child.drop(keys)  # its own space is full, too, and nobody but its caller makes room there
    again = child.keys(bench.chains(4, seed=5))
    stored = any(child.put(again, bench.values(range(4), size=size)))
    got, _ = bench.get_or_raise(child, again)
    bench.check_values(got, range(4), "after there was room again", size=size)
    if not stored or not any(value is not None for value in got):
        fail("with room on the disk again, it still stores nothing", "1 value")
    return passed(f"{verdict.evidence}; with room again, it stores again")


def _fill(path: Path, most: int) -> None:
    """Write a file until it has `most` bytes or the disk is full."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    try:
        for step in (MIB, 4096):
            while os.fstat(fd).st_size < most:
                try:
                    if os.write(fd, bytes(step)) < step:
                        break
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    break
        os.fsync(fd)
    finally:
        os.close(fd)


def _disk(bench: Bench, num_bytes: int, num_inodes: int | None) -> SmallDisk:
    image, at = bench.directory() / "image", bench.directory()
    disk = SmallDisk(image, at, num_bytes, num_inodes)
    bench.on_end(disk)
    return disk


def _store_until(
    bench: Bench, *, setup: Setup, num: int, size: int, on_half: Callable[[], None] = lambda: None
) -> tuple[Child, list[bytes], list[bool]]:
    """Store `num` values, some at a time; a put that raises stored none."""
    child = bench.open(setup)
    keys, good = child.keys(bench.chains(num)), list[bool]()
    for start in range(0, num, 8):
        if start == num // 2 // 8 * 8:
            on_half()
        part = range(start, min(num, start + 8))
        try:
            good += child.put([keys[index] for index in part], bench.values(part, size=size))
        except Raised:
            good += [False] * len(part)
    return child, keys, good


def _after_full(bench: Bench, child: Child, keys: list[bytes], good: list[bool], size: int, where: str) -> Verdict:
    there = child.has(keys)
    got: list[bytes | None] = []
    for start in range(0, len(keys), 8):
        got += bench.get_or_raise(child, keys[start : start + 8])[0]
    bench.check_values(got, range(len(keys)), where, size=size)
    for index, value in enumerate(got):
        if there[index] and value is None and child.has([keys[index]])[0]:
            fail(f"{where}: a value is listed as there and cannot be read", f"value {index}, stored: {good[index]}")
    lost = sum(is_good and not is_there for is_good, is_there in zip(good, there, strict=True))
    if lost and not bench.traits.is_bounded:
        fail(f"{where}: {lost} values that were reported as stored are not there", f"value {good.index(True)}")
    return Verdict("pass", f"{where}: {sum(good)} of {len(good)} stores succeeded, no value wrong or listed in vain")


def small_memory(bench: Bench) -> Verdict:
    """Read more at once than the memory that values pass through holds, from several threads."""
    num, held = 24, 4
    setup = bench.setup(room=2 * num, memory_bytes=held * (bench.size + 8192))
    child = bench.open(setup)
    keys = child.keys(bench.chains(num))
    for start in range(0, num, 2):
        child.put(keys[start : start + 2], bench.values(range(start, start + 2)))
    got, raised = bench.get_or_raise(child, keys)
    came = bench.check_values(got, range(num), f"{num} values read through memory for {held}")
    if bench.traits.can_be_threaded:
        plan = Plan(num, bench.size, 1.0, num_readers=4, num_writers=0, batch=8, num_ops=20)
        child.race_begin(plan, keys)
        wrong = [row for row in child.race_end(plan) if row[2] == WRONG]
        if wrong:
            fail(f"4 threads reading 8 values each through memory for {held} got {len(wrong)} wrong ones", "8 values")
    few, why = bench.get_or_raise(child, keys[:1])
    if child.has(keys[:1])[0] and few[0] is None:
        fail(f"after a read beyond its memory not even one value can be read: {why or 'misses'}", f"{held + 1} values")
    return passed(f"memory for {held} values: {came} of {num} came{', it raised ' + raised[:40] if raised else ''}")


def no_memory(bench: Bench) -> Verdict:
    """Let the process have little memory left, and read more than that."""
    num, size = 16, bench.fitting((1 if bench.is_quick else 4) * MIB)
    setup = bench.setup(room=2 * num, value_bytes=size)
    child = bench.open(setup, fresh=True)
    keys = child.keys(bench.chains(num))
    for start in range(0, num, 2):
        child.put(keys[start : start + 2], bench.values(range(start, start + 2), size=size))
    if not all(child.has(keys)):
        cannot_tell("the target did not keep what it was given before memory was short")
    child.get(keys[:1])
    pages = int(Path(f"/proc/{child.pid}/statm").read_text().split()[0])
    child.limit(resource.RLIMIT_AS, pages * os.sysconf("SC_PAGE_SIZE") + 6 * size)
    try:
        got, raised = bench.get_or_raise(child, keys)
    except Died as error:
        fail(f"an allocation failed while {num} values were read, and the process ended: {error}", f"{num} values")
    came = bench.check_values(got, range(num), "an allocation failed while values were read", size=size)
    child.unlimit(resource.RLIMIT_AS)
    again, why = bench.get_or_raise(child, keys[:2])
    if bench.check_values(again, range(2), "after an allocation failed", size=size) < 2:
        fail(f"an allocation failed once; with memory again values are not read: {why or 'misses'}", "2 values")
    return passed(f"memory ran out while {num} values were read: {came} came, {raised[:60] or 'nothing raised'}")


def long_requests(bench: Bench) -> Verdict:
    """Let 50 long requests read at once through little memory."""
    num, batch = 64, 32
    setup = bench.setup(room=2 * num, memory_bytes=16 * (bench.size + 8192))
    child = bench.open(setup, fresh=True)
    keys = child.keys(bench.chains(num))
    for start in range(0, num, 8):
        child.put(keys[start : start + 8], bench.values(range(start, start + 8)))
    plan = Plan(num, bench.size, 60.0, num_readers=10 if bench.is_quick else 50, num_writers=0, batch=batch, num_ops=1)
    child.race_begin(plan, keys)
    rows = child.race_end(plan)
    if wrong := sum(row[2] == WRONG for row in rows):
        fail(f"{plan.num_readers} requests of {batch} values at once: {wrong} values are wrong", f"{batch} values")
    if len(rows) < plan.num_readers * batch:
        fail(f"{len(rows)} of {plan.num_readers * batch} reads were answered", f"{plan.num_readers} requests")
    came = sum(row[2] >= 0 for row in rows)
    if not came:
        fail(f"{plan.num_readers} requests at once through memory for 16 values: no value came", f"{batch} values")
    few, why = bench.get_or_raise(child, keys[:2])
    if not all(value is not None for value in few):
        fail(f"after {plan.num_readers} requests at once two values are not read: {why or 'misses'}", "50 requests")
    return passed(f"{plan.num_readers} requests of {batch} values through memory for 16: {came} of {len(rows)} came")


CHECKS = (
    Check(
        "quota",
        "A bound of 10 values and 1,000 writes",
        "a bounded store keeps to its bound, and goes on taking new values",
        "1,000 writes into a store bounded to 10 values; its files are measured after each 20",
        "vLLM#54779, vLLM#54327, LMCache#4664",
        quota,
        ("bounded",),
    ),
    Check(
        "flat-directory",
        "Many small values",
        "small values can all be read, and do not fill one directory",
        "2,000 values of 512 bytes; files of each directory are counted",
        "SGLang#28653",
        flat_directory,
        ("disk",),
    ),
    Check(
        "inodes",
        "No inode is left",
        "stores that find no inode are told as failed, and no value is wrong or listed in vain",
        "400 values on a small file system with 128 inodes",
        "SGLang#28653",
        inodes,
        ("disk", "loop"),
    ),
    Check(
        "full-disk",
        "A full disk, and room again",
        "stores that find no room fail and say so, no value is wrong, and with room they succeed again",
        "a small file system is filled while values are stored, then freed",
        "LMCache#4991, SGLang#28653",
        full_disk,
        ("disk", "loop"),
    ),
    Check(
        "small-memory",
        "Memory smaller than a request",
        "a read through less memory than it needs gives right values or misses, and leaves nothing locked",
        "24 values through memory for 4, from one thread and from four",
        "LMCache#4385, LMCache#3855, LMCache#1330",
        small_memory,
        ("memory",),
    ),
    Check(
        "no-memory",
        "Allocation fails on the k-th of n",
        "buffers that could not be had are not given as data, and reads go on when memory is there again",
        "the process may have 24 MiB more (RLIMIT_AS) while 64 MiB are read",
        "LMCache#3855, LMCache#2942, LMCache#3022, LMCache#1330",
        no_memory,
    ),
    Check(
        "long-requests",
        "50 long requests with little memory",
        "many requests at once get right values or misses, and none waits for ever",
        "50 threads read 32 values each through memory for 16",
        "vLLM#49902, LMCache#2502",
        long_requests,
        ("threads",),
    ),
)
