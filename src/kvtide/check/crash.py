"""Checks of ends, orderly and not: what is found again, how much is counted, what stays behind."""

from __future__ import annotations

import time
from pathlib import Path

from kvtide.check import damage
from kvtide.check.bench import Bench, cannot_tell, fail, passed, smallest
from kvtide.check.contract import Check, Verdict
from kvtide.check.driver import Child, Hung, Raised
from kvtide.check.race import Plan
from kvtide.check.values import version_of

NUM, KILLS = 16, 6
SHM = "/dev/shm"  # noqa: S108  # looked at, not written


def restart(bench: Bench) -> Verdict:
    """Close a store with values, and look for them from another process."""
    setup = bench.setup(room=2 * NUM)
    child = bench.open(setup)
    keys = bench.filled(child, NUM)
    before = child.reported() if "reports" in bench.powers else None
    child = bench.reopen(child, setup)
    _all_there(bench, child, keys, "after a restart")
    if before is not None:
        after = child.reported()
        told = [(before.num_values, after.num_values, "values"), (before.used_bytes, after.used_bytes, "bytes")]
        for one, other, what in told:
            if one is not None and other is not None and one != other:
                fail(f"before the restart it reported {one} {what} in use, after it {other}", f"{NUM} values")
    return passed(f"{NUM} of {NUM} values are hits after a restart{', and usage is the same' if before else ''}")


def _all_there(bench: Bench, child: Child, keys: list[bytes], where: str) -> None:
    there = child.has(keys)
    got, _ = bench.get_or_raise(child, keys)
    num = bench.check_values(got, range(len(keys)), where)
    if num < len(keys) or not all(there):
        fail(f"{where} {min(num, sum(there))} of {len(keys)} values are hits", "1 value" if not num else f"{num}")


def bound_after_restart(bench: Bench) -> Verdict:
    """Fill a bounded store, open it anew, and write as much again."""
    room, size = 8, bench.fitting(1 << 18)
    setup = bench.setup(room=room, value_bytes=size)
    child = bench.open(setup)
    child.put(child.keys(bench.chains(room)), bench.values(range(room), size=size))
    child = bench.reopen(child, setup)
    keys = child.keys(bench.chains(4 * room, seed=1))
    for start in range(0, 4 * room, 4):
        child.put(keys[start : start + 4], bench.values(range(start, start + 4), size=size))
    used, most = damage.used_bytes(setup.directory), (setup.capacity_bytes or 0) + 3 * size
    if used > most:
        fail(f"a store bounded to {setup.capacity_bytes} bytes, full when it was opened, takes {used}", f"{room}")
    return passed(f"{used} bytes on disk after a restart and {4 * room} more values, bounded to {setup.capacity_bytes}")


def killed(bench: Bench) -> Verdict:
    """Kill the process when all puts were answered, and look for them."""
    setup = bench.setup(room=2 * NUM)
    child = bench.open(setup, fresh=True)
    keys = bench.filled(child, NUM)
    child.kill()
    _all_there(bench, bench.open(setup), keys, "after SIGKILL")
    return passed(f"{NUM} of {NUM} values that were reported as stored are hits after SIGKILL")


def killed_at_random(bench: Bench) -> Verdict:
    """Kill the process while it writes, open the store anew, read everything, again and again."""
    num_keys, kills, found = 24, 2 if bench.is_quick else KILLS, 0
    setup = bench.setup(room=num_keys // 2)
    for kill in range(kills):
        child = bench.open(setup, fresh=True)
        keys = child.keys(bench.chains(num_keys))
        plan = Plan(num_keys, bench.size, 30.0, num_readers=0, base=(kill + 1) * 100_000_000, batch=3, seed=kill)
        child.race_begin(plan, keys)
        time.sleep(0.03 + 0.37 * ((kill * 0.618) % 1))
        child.kill()
        child = bench.open(setup)
        got, _ = bench.get_or_raise(child, keys)
        for index, value in enumerate(got):
            if value is not None and version_of(value, index, bench.size) is None:
                fail(
                    f"after SIGKILL number {kill + 1} in the middle of writing a value has wrong bytes", f"key {index}"
                )
        found += sum(value is not None for value in got)
        _usable(bench, child, kill + 1)
        child.close()
    return passed(f"{kills} SIGKILLs while it wrote: {found} values read after them, none wrong; it goes on each time")


def _usable(bench: Bench, child: Child, kill: int) -> None:
    key = child.keys(bench.chains(1, seed=3))
    child.put(key, bench.values([0], version=kill))
    got, _ = bench.get_or_raise(child, key)
    if got[0] is None:
        fail(f"after SIGKILL number {kill} it stores nothing any more", "1 value")


def orphans(bench: Bench) -> Verdict:
    """Kill the process while it writes large values, and measure what is left beside values that can be read."""
    size, num_keys, kills = bench.fitting(4 << 20), 4, 3 if bench.is_quick else 5
    setup = bench.setup(room=num_keys, value_bytes=size)
    for kill in range(kills):
        child = bench.open(setup, fresh=True)
        keys = child.keys(bench.chains(num_keys))
        writers = 3 if bench.traits.can_be_threaded else 1
        plan = Plan(num_keys, size, 30.0, 0, writers, base=(kill + 1) * 100_000_000, batch=1, seed=kill)
        child.race_begin(plan, keys)
        time.sleep(0.2 + 0.1 * kill)
        _stop_in_a_write(child, setup.directory)
        child.kill()
    child = bench.open(setup)
    got, _ = bench.get_or_raise(child, keys)
    held = sum(value is not None for value in got)
    used = damage.used_bytes(setup.directory)
    capacity = setup.capacity_bytes or 0
    is_reserved = damage.is_reserved(setup.directory, capacity)
    most = max(held * (size + 8192), capacity if is_reserved else 0) + size // 4
    if used > most:
        fail(f"after {kills} SIGKILLs {held} values of {size} bytes can be read, files take {used} bytes", f"{kills}")
    return passed(f"after {kills} SIGKILLs {held} values of {size} bytes can be read, files take {used} bytes")


def _stop_in_a_write(child: Child, directory: Path) -> None:
    """Stop a process that writes the same values again and again: with a file more than it needs, if it makes any."""
    least, until = 1 << 30, time.monotonic() + 2.0
    while time.monotonic() < until:
        child.stop()
        num = len(damage.files_of(directory))
        if num > least:
            return
        least = min(least, num)
        child.go_on()
        time.sleep(0.003)
    child.stop()


def locks(bench: Bench) -> Verdict:
    """Kill or stop the process that has the store open, and open it from another."""
    setup = bench.setup(room=8)
    child = bench.open(setup, fresh=True)
    bench.filled(child, 2)
    child.kill()
    other = bench.open(setup)
    other.close()
    owner = bench.open(setup, fresh=True)
    bench.filled(owner, 2)
    owner.stop()
    try:
        other.open(setup)
        said = "opened beside the stopped one"
        bench.filled(other, 2, seed=2)
        other.close()
    except Raised as error:
        said = f"refused: {str(error)[:80]}"
    except Hung:
        fail("the process that has the store open is stopped: to open it from another hangs", "1 value")
    finally:
        owner.go_on()
    return passed(f"opened at once after SIGKILL of its owner; with its owner stopped, {said}")


def shared_memory(bench: Bench) -> Verdict:
    """Kill a process and look for what it left in /dev/shm."""
    shm = Path(SHM)
    if not shm.is_dir():
        cannot_tell("there is no /dev/shm here")
    before = {path.name for path in shm.iterdir()}
    setup = bench.setup(room=16)
    child = bench.open(setup, fresh=True)
    bench.filled(child, 8)
    mine = _mapped(child.pid) - before
    child.kill()
    left = mine & {path.name for path in shm.iterdir()}
    if left:
        num = sum((shm / name).stat().st_size for name in left)
        for name in left:
            (shm / name).unlink()
        fail(f"SIGKILL left {len(left)} files of {num} bytes in /dev/shm: {min(left)}", "1 process")
    return passed("SIGKILL left nothing in /dev/shm")


def _mapped(pid: int) -> set[str]:
    """Return the names in /dev/shm that a process has mapped or open."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    found = {line.rpartition(f"{SHM}/")[2] for line in lines if f"{SHM}/" in line}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(fd.readlink())
        except OSError:  # it was closed in the meantime
            continue
        if target.startswith(f"{SHM}/"):
            found.add(target.removeprefix(f"{SHM}/"))
    return found


def leaks(bench: Bench) -> Verdict:
    """Open, use and close a store many times in one process."""
    rounds = 8 if bench.is_quick else 24

    def grown(num: int) -> str:
        setup = bench.setup(room=8)
        child = bench.process(fresh=True)
        counts = list[tuple[int, int]]()
        for index in range(num + 3):
            child.open(setup)
            keys = child.keys(bench.chains(2))
            child.put(keys, bench.values(range(2)))
            bench.get_or_raise(child, keys)
            child.close()
            if index >= 2:  # the first ones load libraries
                counts.append((child.num_files(), child.num_threads()))
        files, threads = (counts[-1][place] - counts[0][place] for place in (0, 1))
        least = max(1, num // 2)
        return f"{files} descriptors and {threads} threads" if max(files, threads) >= least else ""

    if found := grown(rounds):
        fail(f"after {rounds} opens and closes there are {found} more", f"{smallest(lambda n: bool(grown(n)), rounds)}")
    return passed(f"{rounds} opens and closes leave no descriptor and no thread")


CHECKS = (
    Check(
        "restart",
        "Found after a restart",
        "all values are hits in another process, and usage is reported as before",
        "put, close, open in a fresh process, look up and read",
        "LMCache#562, LMCache#1175, LMCache#1788, LMCache#2273, SGLang#39880, Mooncake#3052",
        restart,
        ("durable",),
    ),
    Check(
        "restart-bound",
        "The bound after a restart",
        "a store that was full when it was opened keeps to its bound",
        "fill to the bound, open in a fresh process, write four times as much, measure the files",
        "LMCache#4564",
        bound_after_restart,
        ("durable", "bounded", "disk"),
    ),
    Check(
        "killed",
        "Found after SIGKILL",
        "what was reported as stored is found when the process was killed",
        "put, SIGKILL, open in a fresh process",
        "LMCache#562, Mooncake#3052, Mooncake#3817",
        killed,
        ("durable",),
    ),
    Check(
        "killed-at-random",
        "SIGKILL at random moments",
        "a process killed while it writes leaves no wrong byte, and a store that goes on",
        "a writer is killed at several moments; all values are read and compared each time",
        "LMCache#2273, Mooncake#3052",
        killed_at_random,
        ("durable",),
    ),
    Check(
        "orphans",
        "Files of killed stores",
        "what was not written whole when the process was killed does not stay on the disk",
        "a writer of 4 MiB values is killed several times; files are measured against what can be read",
        "LMCache#2273, LMCache#1788",
        orphans,
        ("durable", "disk"),
    ),
    Check(
        "locks",
        "Locks of a dead or stopped owner",
        "an owner that was killed or stopped does not make the next one hang",
        "SIGKILL, then SIGSTOP of the process that has the store open; open it from another",
        "LMCache#3855, LMCache#2942",
        locks,
        ("durable",),
    ),
    Check(
        "shared-memory",
        "Shared memory after SIGKILL",
        "a killed process leaves nothing in /dev/shm",
        "SIGKILL, then what it had mapped in /dev/shm",
        "vLLM#57303",
        shared_memory,
    ),
    Check(
        "leaks",
        "Nothing leaks",
        "opening and closing leaves no descriptor and no thread",
        "open, use and close many times in one process; count /proc/PID/fd and threads",
        "LMCache#3022",
        leaks,
    ),
)
