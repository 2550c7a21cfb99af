"""Checks that nothing waits for ever: values that leave, values that never come, disks that fail or hang."""

from __future__ import annotations

from kvtide.check import damage
from kvtide.check.bench import Bench, cannot_tell, fail, not_applicable, passed
from kvtide.check.contract import Check, Fault, FaultRule, Operation, Verdict
from kvtide.check.driver import Child, Hung, Raised

NUM, ROUNDS = 16, 4
DEADLINE_S = 5.0


def evicted_between(bench: Bench) -> Verdict:
    """Let values leave between look-up and read."""
    setup = bench.setup(room=2 * NUM)
    child = bench.open(setup)
    keys = bench.filled(child, NUM)
    there = child.has(keys)
    if "drops" in bench.powers:
        child.drop(keys[4:8])
    else:
        for index in range(4, 8):
            damage.remove(damage.places_of(setup.directory, bench.values([index])[0]))
    got, _ = bench.get_or_raise(child, keys)
    bench.check_values(got, range(NUM), "values left between look-up and read")
    rounds = _engine(bench, child, keys)
    child.put(keys[4:8], bench.values(range(4, 8)))
    again, _ = bench.get_or_raise(child, keys[4:8])
    if bench.check_values(again, range(4, 8), "stored again") < 4:
        fail("values that left between look-up and read cannot be stored again", "4 values")
    return passed(f"{sum(there)} were there, 4 left, {rounds} of {ROUNDS} rounds of look-up and read until they agreed")


def _engine(bench: Bench, child: Child, keys: list[bytes]) -> int:
    """Do what an engine does: look up, read what is there, until what was there came. Return the rounds it took."""
    for count in range(1, ROUNDS + 1):
        there = child.has(keys)
        wanted = [index for index, is_there in enumerate(there) if is_there]
        got, _ = bench.get_or_raise(child, [keys[index] for index in wanted])
        bench.check_values(got, wanted, "read after a look-up")
        if all(value is not None for value in got):
            return count
    missing = sum(value is None for value in got)
    return fail(f"after {ROUNDS} rounds of look-up and read {missing} values are still listed and not given", "1 value")


def one_missing(bench: Bench) -> Verdict:
    """Take one value of a long request away in the files."""
    setup = bench.setup(room=2 * NUM)
    child = bench.open(setup)
    keys = bench.filled(child, NUM)
    if bench.traits.is_on_disk:
        places = damage.places_of(setup.directory, bench.values([NUM // 2])[0])
        for place in places:
            damage.overwrite(place, damage.zero)
        if not places:
            cannot_tell("the bytes of a stored value are in none of its files")
    elif "drops" in bench.powers:
        child.drop(keys[NUM // 2 : NUM // 2 + 1])
    else:
        cannot_tell("no value can be taken away: it has no files and is not told to forget")
    rounds = _engine(bench, child, keys)
    rest = keys[: NUM // 2]
    got, raised = bench.get_or_raise(child, rest)
    if bench.check_values(got, range(len(rest)), "before the missing one") < len(rest):
        fail(f"one value of {NUM} is damaged, and those before it do not come either: {raised or 'misses'}", "1 value")
    return passed(f"one of {NUM} values was damaged: settled after {rounds} rounds, those before it came")


def disk_fault(bench: Bench, operation: Operation, fault: Fault) -> Verdict:
    """Let operations of the disk fail from the k-th on, for a while."""
    words = f"{fault} on {operation}"
    mount = bench.fault_mount()

    def shows(after: int) -> str:
        setup = bench.setup(room=4 * NUM, directory=mount.path / f"s{after}")
        mount.set([])
        child = bench.open(setup, fresh=True)
        keys = child.keys(bench.chains(NUM))
        child.put(keys[:4], bench.values(range(4)))
        mount.set([FaultRule(operation, fault, after=after)])
        good, _ = _put(child, keys[4:], bench.values(range(4, NUM)))
        during, _ = bench.get_or_raise(child, keys)
        num_faults = mount.counts().get("faults", 0)
        mount.set([])
        found = _after_fault(bench, child, keys, good if operation in {"write", "fsync"} else [], during, words)
        bench.end_child(child)
        return found or ("" if num_faults else "none")

    outcomes = []
    for after in (0,) if bench.is_quick else (0, 1, 5):
        found = shows(after)
        outcomes.append(found)
        if found and found != "none":
            fail(f"{words} from operation {after} on: {found}", f"operation {after}")
    if all(found == "none" for found in outcomes):
        if operation in {"open", "fsync"}:
            not_applicable(f"it does no {operation} while it stores and reads")
        cannot_tell(f"no {operation} came to the file system: {words} was never tried")
    return passed(f"{words} from the first on, and later: nothing wrong, nothing listed in vain, it goes on afterwards")


def _put(child: Child, keys: list[bytes], values: list[bytes]) -> tuple[list[bool], str]:
    try:
        return child.put(keys, values), ""
    except Raised as error:
        return [False] * len(keys), str(error)


def _after_fault(
    bench: Bench, child: Child, keys: list[bytes], good: list[bool], during: list[bytes | None], words: str
) -> str:
    """Return what is wrong after faults: a promise not kept, a value listed in vain, a store that stays broken."""
    bench.check_values(during, range(NUM), words)
    got, _ = bench.get_or_raise(child, keys)
    bench.check_values(got, range(NUM), f"after {words}")
    for index, value in enumerate(got):
        if value is None and index >= 4 and any(good[index - 4 : index - 3]):
            return f"value {index} was reported as stored and is not there"
        if value is None and child.has([keys[index]])[0]:
            again, _ = bench.get_or_raise(child, [keys[index]])
            if again[0] is None and child.has([keys[index]])[0]:
                return f"value {index} is listed and not given"
    new = child.keys(bench.chains(2, seed=4))
    _put(child, new, bench.values(range(2)))
    again, raised = bench.get_or_raise(child, new)
    bench.check_values(again, range(2), f"after {words}")
    if not all(value is not None for value in again):
        return f"when the disk is well again it stores nothing: {raised or 'misses'}"
    return ""


def lost_writes(bench: Bench) -> Verdict:
    """Let the disk take half of what is written and say that it took all."""
    mount = bench.fault_mount()
    setup = bench.setup(room=4 * NUM, directory=mount.path / "store")
    child = bench.open(setup, fresh=True)
    keys = child.keys(bench.chains(NUM))
    mount.set([FaultRule("write", "torn", times=3)])
    _put(child, keys, bench.values(range(NUM)))
    num = mount.counts().get("faults", 0)
    mount.set([])
    got, _ = bench.get_or_raise(child, keys)
    came = bench.check_values(got, range(NUM), "the disk wrote half and said it wrote all")
    if not num:
        cannot_tell("no write came to the file system")
    return passed(f"{num} writes of which half was lost in silence: {came} of {NUM} values came, none wrong")


def flipped_reads(bench: Bench) -> Verdict:
    """Let the disk flip a bit of what is read."""
    mount = bench.fault_mount()
    setup = bench.setup(room=4 * NUM, directory=mount.path / "store")
    child = bench.open(setup, fresh=True)
    keys = bench.filled(child, NUM)
    mount.set([FaultRule("read", "flip")])
    got, _ = bench.get_or_raise(child, keys)
    num = mount.counts().get("faults", 0)
    mount.set([])
    came = bench.check_values(got, range(NUM), "the disk flipped a bit of every read")
    if not num:
        cannot_tell("no read came to the file system: values are in memory")
    return passed(f"a bit flipped in each of {num} reads: {came} of {NUM} values came, none wrong")


def unfinished_store(bench: Bench) -> Verdict:
    """Let the writes of a store hang, and ask for its values and for others meanwhile."""
    mount = bench.fault_mount()
    setup = bench.setup(room=4 * NUM, directory=mount.path / "store")
    child = bench.open(setup, fresh=True)
    child.call_s = DEADLINE_S
    keys = child.keys(bench.chains(8))
    child.put(keys[:4], bench.values(range(4)))
    mount.set([FaultRule("write", "hang")])
    number = child.behind("put", keys[4:], bench.values(range(4, 8)))
    for _ in range(20):
        if mount.counts().get("faults", 0):
            break
        if child.behind_end(number, 0.1) is not None:
            cannot_tell("the store ended without a write")
    try:
        there = child.has(keys)
    except Hung:
        fail(f"while the writes of a store hang, a look-up has no answer for {DEADLINE_S:.0f} s", "1 store")
    listed = sum(there[4:])
    if listed:
        reading = child.behind("get", keys[4:])
        if child.behind_end(reading, DEADLINE_S) is None:
            fail(f"{listed} values of a store that hangs are listed, and to read them hangs", "1 store")
    mount.set([])
    if child.behind_end(number, child.call_s) is None:
        fail("the disk goes on, and the store that hung never ends", "1 store")
    got, _ = bench.get_or_raise(child, keys)
    came = bench.check_values(got, range(8), "after the disk went on")
    return passed(f"while writes hung look-ups were answered, {listed} of 4 listed; then {came} of 8 values came")


def _disk(operation: Operation, fault: Fault, report: str) -> Check:
    return Check(
        f"{fault.lower()}-{operation}",
        f"{fault} on {operation}",
        "an error of the disk is a failed store or a miss; nothing is wrong or listed in vain, and it goes on later",
        f"each {operation} fails with {fault} from the 1st, 2nd, 6th on (FUSE), then none does",
        report,
        lambda bench: disk_fault(bench, operation, fault),
        ("disk", "faultfs"),
    )


CHECKS = (
    Check(
        "evicted-between",
        "Evicted between look-up and read",
        "a value that leaves after the look-up is a miss at once, and is not listed for ever",
        "look up 16 values, drop or delete 4, read; then look up and read as an engine does",
        "vLLM#49176, SGLang#30057",
        evicted_between,
    ),
    Check(
        "one-missing",
        "One damaged value of many",
        "one damaged value does not wedge a request, nor the values before it",
        "one of 16 values is overwritten with zeros; look up and read as an engine does",
        "vLLM#49176",
        one_missing,
    ),
    _disk("write", "ENOSPC", "LMCache#4991, SGLang#28653"),
    _disk("write", "EIO", "LMCache#4991"),
    _disk("write", "short", "LMCache#4991"),
    _disk("read", "EIO", "vLLM#49176, LMCache#3855"),
    _disk("read", "short", "vLLM#49176"),
    _disk("open", "EIO", "vLLM#49176"),
    _disk("fsync", "EIO", ""),
    Check(
        "lost-writes",
        "Writes that are lost in silence",
        "a write of which the disk kept half is found out",
        "three writes keep half of their bytes and report all (FUSE)",
        "LMCache#4533",
        lost_writes,
        ("disk", "faultfs"),
    ),
    Check(
        "flipped-reads",
        "Reads with a flipped bit",
        "a bit that the disk flips on its way is found out",
        "one bit of every read is flipped (FUSE)",
        "LMCache#4533",
        flipped_reads,
        ("disk", "faultfs"),
    ),
    Check(
        "unfinished-store",
        "A store that never finishes",
        "while a store hangs look-ups are answered, and reads of its values do not wait for it",
        "writes hang (FUSE) while others are looked up; then they go on",
        "vLLM#49829",
        unfinished_store,
        ("disk", "faultfs", "threads"),
    ),
)
