"""Checks of time and of honesty: look-ups while others compute, reads in flight, what is reported, the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

from kvtide.check import damage
from kvtide.check.bench import Bench, cannot_tell, fail, passed, smallest
from kvtide.check.contract import Check, FaultRule, Verdict

LOOKUPS, LOOKUP_S = 3600, 2.0  # vLLM PR#45765: 3,600 keys took up to 10 s
DELAY_S, DEPTH_LEAST = 0.05, 2.0
_libc = ctypes.CDLL(None, use_errno=True)


def lookup(bench: Bench) -> Verdict:
    """Look many keys up while other threads keep the interpreter busy."""
    size = bench.fitting(512)
    setup = bench.setup(value_bytes=size, room=400)
    child = bench.open(setup, fresh=True)
    keys = child.keys(bench.chains(LOOKUPS))
    child.put(keys[:256], bench.values(range(256), size=size))

    def took(num: int) -> float:
        child.has(keys[:num])
        return child.seconds

    idle = min(took(LOOKUPS) for _ in range(2))
    child.spin(4)
    busy = min(took(LOOKUPS) for _ in range(1 if bench.is_quick else 3))  # the machine may have been busy as well
    if busy > LOOKUP_S:
        least = smallest(lambda num: took(num) > LOOKUP_S, LOOKUPS)
        child.spin(0)
        fail(
            f"{LOOKUPS} keys are looked up in {busy:.1f} s beside 4 busy threads, {1000 * idle:.0f} ms alone",
            f"{least}",
        )
    child.spin(0)
    return passed(f"{LOOKUPS} keys: {1000 * idle:.1f} ms alone, {1000 * busy:.1f} ms beside 4 busy threads")


def depth(bench: Bench) -> Verdict:
    """Slow every read down by the same time, and see how many are under way at once."""
    num = 16 if bench.is_quick else 32
    mount = bench.fault_mount()
    setup = bench.setup(room=2 * num, directory=mount.path / "store", direct=bench.traits.can_be_direct)
    child = bench.open(setup, fresh=True)
    keys = bench.filled(child, num)
    if bench.traits.is_durable:  # or values may be in memory
        child = bench.reopen(child, setup)
    picked = [keys[index] for index in _apart(num)]
    mount.set([FaultRule("read", "slow", delay_s=DELAY_S)])
    got, _ = bench.get_or_raise(child, picked)
    num_reads, took = mount.counts().get("faults", 0), child.seconds
    mount.set([])
    if not num_reads or any(value is None for value in got):
        cannot_tell(f"{num_reads} reads came to the file system")
    found = num_reads * DELAY_S / took
    words = f"{num} values in random order, {num_reads} reads of {1000 * DELAY_S:.0f} ms each in {took:.2f} s"
    if found < DEPTH_LEAST and num_reads > 2:
        fail(f"{words}: {found:.1f} in flight; an SSD needs tens", f"{num} values")
    return passed(f"{words}: {found:.1f} in flight")


def _apart(num: int) -> list[int]:
    """Return 0..num in an order without neighbours."""
    return sorted(range(num), key=lambda index: (index * 7 + 3) % num)


def honest_bytes(bench: Bench) -> Verdict:
    """Compare what the store says it moved with what the process had the disk move."""
    num, size = 32, bench.fitting(1 << 18)
    setup = bench.setup(room=2 * num, value_bytes=size, direct=bench.traits.can_be_direct)
    child = bench.open(setup, fresh=True)
    before, moved = child.reported(), child.moved_bytes()
    keys = bench.filled(child, num, size=size)
    put_s = child.seconds
    for path in damage.files_of(setup.directory):
        _drop_pages(path)
    got, _ = bench.get_or_raise(child, keys)
    get_s = child.seconds
    came = bench.check_values(got, range(num), "read", size=size)
    after, now = child.reported(), child.moved_bytes()
    told = []
    for what, one, other, disk, wanted in (
        ("read", before.read_bytes, after.read_bytes, now[0] - moved[0], came * size),
        ("written", before.written_bytes, after.written_bytes, now[1] - moved[1], num * size),
    ):
        if one is None or other is None:
            continue
        said = other - one
        told.append(f"{what} {said}, disk {disk}")
        if said < wanted:
            fail(f"it moved {wanted} bytes of values and says it has {what} {said}", f"{num} values")
        if bench.traits.is_on_disk and disk > said * 1.25 + (1 << 20):
            fail(f"it says it has {what} {said} bytes; the disk counts {disk}", f"{num} values")
        if said > max(disk, wanted) * 1.25 + (1 << 20):
            fail(f"it says it has {what} {said} bytes; values are {wanted}, the disk counts {disk}", f"{num} values")
    for what, rate, seconds in (("read", after.read_bytes_per_s, get_s), ("written", after.written_bytes_per_s, put_s)):
        if rate is not None and seconds and rate > 3 * num * size / seconds:
            fail(f"it says {rate / 1e9:.1f} GB/s {what}, measured {num * size / seconds / 1e9:.1f}", f"{num} values")
    if not told:
        cannot_tell("it reports no bytes")
    used = after.num_values
    if used is not None and used != sum(child.has(keys)):
        fail(f"it says it holds {used} values; {sum(child.has(keys))} are there", f"{num} values")
    return passed("; ".join(told))


def _drop_pages(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def page_cache(bench: Bench) -> Verdict:
    """Count the pages of the store's files in the page cache after direct I/O."""
    num, size = 32, bench.fitting(1 << 20)
    setup = bench.setup(room=2 * num, value_bytes=size, direct=True)
    child = bench.open(setup)
    keys = bench.filled(child, num, size=size)
    bench.get_or_raise(child, keys)
    cached = sum(_cached_bytes(path) for path in damage.files_of(setup.directory))
    total = num * size
    if cached > 0.1 * total + (1 << 20):
        fail(f"with direct I/O {cached} of {total} bytes of values are in the page cache", f"{num} values")
    return passed(f"{cached} bytes in the page cache after {total} were written and read with direct I/O")


def _cached_bytes(path: Path) -> int:
    """Return the bytes of a file that are in the page cache."""
    size = path.stat().st_size
    if not size:
        return 0
    page = mmap.PAGESIZE
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as whole:
        view = np.frombuffer(whole, np.uint8)
        pages = np.zeros(-(-size // page), np.uint8)
        code = _libc.mincore(
            ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), pages.ctypes.data_as(ctypes.c_void_p)
        )
        del view
        if code:
            cannot_tell(f"mincore says {os.strerror(ctypes.get_errno())}")
        return int((pages & 1).sum()) * page


CHECKS = (
    Check(
        "lookup",
        "Look-ups beside a busy interpreter",
        "3,600 keys are looked up within 2 s while other threads compute",
        "a look-up of 3,600 keys with 4 threads that hold the interpreter lock",
        "vLLM#45765, vLLM#46559, vLLM#46713",
        lookup,
    ),
    Check(
        "depth",
        "Reads in flight",
        "reads of one request overlap: at least 2 are under way in the mean",
        "every read takes 50 ms longer (FUSE); in flight are reads times 50 ms over the time taken",
        "LMCache#4697, Mooncake#2806, SGLang#21880, vLLM#49152",
        depth,
        ("disk", "faultfs"),
    ),
    Check(
        "honest-bytes",
        "Bytes and rates as reported",
        "what it says it moved is what values are, and what the kernel counted",
        "32 values of 256 KiB; its own figures against /proc/PID/io and the clock",
        "LMCache#1755",
        honest_bytes,
        ("reports",),
    ),
    Check(
        "page-cache",
        "Page cache under direct I/O",
        "direct I/O leaves the page cache alone",
        "32 MiB written and read with direct I/O; mincore on every file",
        "LMCache#1522",
        page_cache,
        ("disk", "direct"),
    ),
)
