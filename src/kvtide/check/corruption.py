"""Checks of damaged bytes: a value that is torn, cut, flipped, swapped, emptied or gone is a miss, never wrong bytes.

Each also asks whether the damage heals: a store that still says "there" of what it cannot give wedges its engine.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from functools import partial

from kvtide.check import damage
from kvtide.check.bench import Bench, cannot_tell, fail, passed, smallest
from kvtide.check.contract import Check, Setup, Verdict
from kvtide.check.damage import Place
from kvtide.check.driver import Child, Raised

NUM = 6
Damage = Callable[[Sequence[Place]], None]


def _places(bench: Bench, setup: Setup, index: int) -> list[Place]:
    places = damage.places_of(setup.directory, bench.values([index], size=setup.value_bytes)[0])
    if not places:
        cannot_tell("the bytes of a stored value are in none of its files: they are compressed, encrypted or in memory")
    return places


def _each(change: Callable[[bytes], bytes]) -> Damage:
    def harm(places: Sequence[Place]) -> None:
        for place in places:
            damage.overwrite(place, change)

    return harm


def damaged(bench: Bench, harm: Damage, words: str) -> Verdict:
    """Damage one of several values between a put and a get, in the open store, then in one that was opened anew."""
    evidence = []
    for is_open in (True, False):
        if not is_open and not bench.traits.is_durable:
            continue
        setup = bench.setup(room=4 * NUM)
        child = bench.open(setup)
        keys = bench.filled(child, NUM)
        if not is_open:
            child.close()
        harm(_places(bench, setup, 2))
        where = f"{words}, {'while the store was open' if is_open else 'before it was opened'}"
        if not is_open and not _opened(child, setup):
            evidence.append("would not open it")
            continue
        evidence.append(_judge(bench, child, keys, where))
    return passed(f"{words}: {'; '.join(dict.fromkeys(evidence))}; no wrong bytes, and it can be stored again")


def _opened(child: Child, setup: Setup) -> bool:
    """Open a store whose files were damaged; a refusal that says why is right."""
    try:
        child.open(setup)
    except Raised as error:
        if "Corrupt" in str(error) or "Error" in error.kind:
            return False
        raise
    return True


def _judge(bench: Bench, child: Child, keys: list[bytes], where: str) -> str:
    """Ask for all values, one of which is damaged; then store it anew."""
    got, raised = bench.get_or_raise(child, keys)
    bench.check_values(got, range(NUM), where)
    alone, _ = bench.get_or_raise(child, keys[2:3])
    bench.check_values(alone, [2], where)
    if alone[0] is None and child.has(keys[2:3])[0]:
        again, _ = bench.get_or_raise(child, keys[2:3])
        if again[0] is None and child.has(keys[2:3])[0]:
            fail(f"{where}: the store says it is there and never gives it: an engine asks for ever", "1 value")
    child.put(keys[2:3], bench.values([2]))
    healed, _ = bench.get_or_raise(child, keys[2:3])
    bench.check_values(healed, [2], f"{where}, stored again")
    if healed[0] is None:
        fail(f"{where}: stored again, it still cannot be read", "1 value")
    kept = sum(value is not None for place, value in enumerate(got) if place != 2)
    return f"raised {raised.split(':')[0]}" if raised else f"a miss, {kept} of {NUM - 1} others came"


def swapped(bench: Bench) -> Verdict:
    """Exchange the bytes of two values on disk."""
    setup = bench.setup(room=4 * NUM)
    child = bench.open(setup)
    keys = bench.filled(child, NUM)
    for first, second in zip(_places(bench, setup, 1), _places(bench, setup, 4), strict=False):
        damage.swap(first, second)
    got, _ = bench.get_or_raise(child, keys)
    num = bench.check_values(got, range(NUM), "the second halves of two values were exchanged on disk")
    return passed(f"values with exchanged halves were misses; {num} of {NUM} came, all right")


def failed_store(bench: Bench) -> Verdict:
    """Let writes fail in the middle of a value, by a limit of the size of files."""

    def shows(num: int) -> str:
        setup = bench.setup(room=4 * NUM)
        child = bench.open(setup, fresh=True)
        keys = child.keys(bench.chains(2 + num))
        child.put(keys[:2], bench.values(range(2)))
        sizes = [path.stat().st_size for path in damage.files_of(setup.directory)]
        child.limit(resource.RLIMIT_FSIZE, min([bench.size // 2, *(size // 2 for size in sizes if size)]))
        try:
            good = child.put(keys[2:], bench.values(range(2, 2 + num)))
        except Raised:
            good = [False] * num
        child.unlimit(resource.RLIMIT_FSIZE)
        return _visible(bench, child, keys[2:], list(range(2, 2 + num)), good)

    if found := shows(NUM):
        least = smallest(lambda num: bool(shows(num)), NUM)
        fail(f"writes failed in the middle of a value (file size limit): {found}", f"{least} values")
    return passed(f"{NUM} stores whose writes failed are not visible, and none is wrong")


def _visible(bench: Bench, child: Child, keys: list[bytes], indices: list[int], good: list[bool]) -> str:
    """Return what is wrong with stores that failed: wrong bytes, or a promise that is not kept."""
    there = child.has(keys)
    got, _ = bench.get_or_raise(child, keys)
    bench.check_values(got, indices, "a store failed half way")
    for place, value in enumerate(got):
        if value is None and there[place] and child.has(keys[place : place + 1])[0]:
            return "a value that was never written whole is listed as there, and cannot be read"
        if value is None and good[place]:
            return "a store that failed was reported as done"
    return ""


def no_wrong_file(bench: Bench) -> Verdict:
    """Put files of no sense where the store keeps its own."""
    setup = bench.setup(room=4 * NUM)
    child = bench.open(setup)
    keys = bench.filled(child, NUM)
    child.close()
    for path in damage.files_of(setup.directory):
        path.write_bytes(bytes(range(256)) * (path.stat().st_size // 256))
    if not _opened(child, setup):
        return passed("it would not open files of no sense, and said so")
    got, _ = bench.get_or_raise(child, keys)
    num = bench.check_values(got, range(NUM), "all files were replaced by others of the same size")
    if num:
        cannot_tell("values came right although every file was replaced: they are in memory")
    return passed("all files replaced by others of the same size: nothing but misses")


def _check(name: str, title: str, harm: Damage, how: str, report: str) -> Check:
    proves = f"a value that is {title} is a miss, is not listed for ever, and can be stored again"
    return Check(
        f"damage-{name}",
        f"A value that is {title}",
        proves,
        how,
        report,
        partial(damaged, harm=harm, words=f"a value was {title}"),
        ("disk",),
    )


CHECKS = (
    Check(
        "failed-store",
        "A store that fails half way",
        "a value whose writing failed is not found, and not reported as stored",
        "writes beyond half a value fail with EFBIG (RLIMIT_FSIZE); then look-up and read",
        "LMCache#4991",
        failed_store,
        ("disk",),
    ),
    _check(
        "flipped",
        "flipped in one bit",
        _each(damage.flip),
        "one bit of the stored bytes is turned in the file",
        "LMCache#4533, LMCache#4558",
    ),
    _check(
        "torn",
        "torn",
        _each(damage.zero),
        "the second half of the stored bytes is replaced by zeros",
        "LMCache#4385, LMCache#4533",
    ),
    _check("truncated", "cut off", damage.truncate, "the file is cut off in the middle of the value", "vLLM#49176"),
    _check("emptied", "emptied", damage.empty, "the file is cut to no bytes", "Mooncake#3465"),
    _check("missing", "deleted", damage.remove, "the file is deleted between look-up and read", "vLLM#49176"),
    Check(
        "damage-swapped",
        "Values exchanged",
        "bytes of another key are never given",
        "the second halves of two stored values are exchanged in the files",
        "LMCache#4385",
        swapped,
        ("disk",),
    ),
    Check(
        "damage-senseless",
        "Files of no sense",
        "files that are not the store's own are refused or passed over",
        "the store is closed, every file is replaced by other bytes of the same size, and it is opened",
        "rtx6kpro#55",
        no_wrong_file,
        ("disk", "durable"),
    ),
)
