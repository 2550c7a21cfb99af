"""The table of deliberate defects, by file. `mutants` makes and tries them."""

from __future__ import annotations

from dataclasses import dataclass

from _paths import ROOT

TIER = "tests/test_file_tier.py"
CRASH = "tests/test_crash_states.py"
CHUNKS = "tests/test_chunks.py"
RAISING = "tests/test_raising_engine.py"
STREAM = "tests/test_streaming.py"
LIVES = "tests/test_reliability.py"
MACHINE = "tests/machines/test_file_machine.py"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One defect: `old` in `file` becomes `new`, and one of `tests` must fail."""

    name: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def text(self) -> str:
        """Return the source as it is."""
        return (ROOT / self.file).read_text()


def _tiers(name: str) -> str:
    return f"src/kvtide/tiers/{name}.py"


MUTANTS = (
    Mutant(
        "verify-nothing",
        "a read is believed without its checksum",
        _tiers("file"),
        'bad = found != self.table.checksums[slots, requests["fragment"]]',
        "bad = found != found",
        (TIER,),
    ),
    Mutant(
        "keep-corrupt",
        "a corrupt group stays visible",
        _tiers("file"),
        'self._drop_slots(reading.slots[reading.statuses == CORRUPT], "corrupt")',
        'self._drop_slots(reading.slots[:0], "corrupt")',
        (TIER,),
    ),
    Mutant(
        "no-wipe",
        "the old header of a slot is not wiped before new fragments go there",
        _tiers("slotwriter"),
        "stale = np.flatnonzero(self._table.has_header[slots])",
        "stale = np.flatnonzero(self._table.has_header[slots] & False)",
        (CRASH, MACHINE),
    ),
    Mutant(
        "header-first",
        "headers are written with their fragments where they must come after them",
        _tiers("slotwriter"),
        "write = self._begin_packed if self.is_packed else self._write_in_steps",
        "write = self._begin_packed",
        (CRASH,),
    ),
    Mutant(
        "failed-is-visible",
        "a write that failed is found by look-up",
        _tiers("file"),
        "rows = np.flatnonzero(good)\n        self.table.fill(",
        "rows = np.arange(len(good))\n        self.table.fill(",
        (LIVES,),
    ),
    Mutant(
        "failed-leaks-slot",
        "the slot of a write that failed is never free again",
        _tiers("file"),
        "self._free[slots[~good]] = True",
        "self._free[slots[~good]] = False",
        (TIER,),
    ),
    Mutant(
        "older-wins",
        "of two slots with one key the older one is taken",
        _tiers("file"),
        "self.table.sequences[rival] > sequences[index]",
        "self.table.sequences[rival] < sequences[index]",
        (TIER, CRASH),
    ),
    Mutant(
        "old-number-again",
        "numbers of writes begin anew after a clean close",
        _tiers("checkpoint"),
        '    tier.write_after(int(head["sequence"]))\n',
        "",
        (TIER,),
    ),
    Mutant(
        "unread-header-forgotten",
        "a slot whose header could not be read counts as empty",
        _tiers("file"),
        "self.table.has_header[slots[~good]] = True",
        "self.table.has_header[slots[~good]] = False",
        (TIER,),
    ),
    Mutant(
        "older-copy-leaks",
        "the slot of an older copy is never free again",
        _tiers("file"),
        "            self._release(old)\n        self._slot_of[key] = slot",
        "            pass\n        self._slot_of[key] = slot",
        (TIER, MACHINE),
    ),
    Mutant(
        "over-capacity",
        "a slot that was found to be used stays free",
        _tiers("file"),
        "        self._slot_of[key] = slot\n        self._free[slot] = False\n",
        "        self._slot_of[key] = slot\n",
        (TIER, LIVES),
    ),
    Mutant(
        "full-uncounted",
        "groups refused for want of room are not counted",
        _tiers("file"),
        "self._stats.num_full += len(records) - len(slots)",
        "self._stats.num_full += 0",
        ("tests/contracts/test_tier_contract.py", TIER),
    ),
    Mutant(
        "interrupt-leaks",
        "after an interrupt slots have no owner",
        _tiers("file"),
        "            self._free = ~self.table.used\n            for begun",
        "            for begun",
        (LIVES,),
    ),
    Mutant(
        "interrupt-flies",
        "an interrupt leaves operations under way in memory that is given back",
        _tiers("file"),
        "            self._io.settle()\n",
        "",
        (LIVES,),
    ),
    Mutant(
        "short-is-whole",
        "an operation that moved fewer bytes counts as whole",
        _tiers("slotio"),
        'whole = (completions["error"] == 0) & (completions["length"] == merged.batch["length"][tags])',
        'whole = completions["error"] == 0',
        (RAISING,),
    ),
    Mutant(
        "wrong-place",
        "slots begin where the superblock lies",
        _tiers("slotio"),
        "return (PAGE_BYTES + slots * self.layout.slot_bytes).astype(np.uint64)",
        "return (slots * self.layout.slot_bytes).astype(np.uint64)",
        (TIER,),
    ),
    Mutant(
        "any-identity",
        "a header of another identity is taken",
        _tiers("header"),
        '(rows["num_fragments"] == self._num_fragments) & (rows["identity"] == self._identity)',
        '(rows["num_fragments"] == self._num_fragments)',
        (TIER,),
    ),
    Mutant(
        "torn-header",
        "a header is believed without its checksum",
        _tiers("header"),
        "for index in np.flatnonzero(valid).tolist():",
        "for index in []:",
        (TIER,),
    ),
    Mutant(
        "checkpoint-stays",
        "a checkpoint is used again after a kill",
        _tiers("checkpoint"),
        "    file.unlink()\n    sync_directory(path)",
        "    sync_directory(path)",
        (TIER,),
    ),
    Mutant(
        "any-checkpoint",
        "a checkpoint is believed without its checksum",
        _tiers("checkpoint"),
        "if len(body) < start + 16 or xxhash.xxh3_64_digest(body[:-8]) != body[-8:]:",
        "if len(body) < start + 16:",
        (TIER,),
    ),
    Mutant(
        "checkpoint-forgets-headers",
        "a checkpoint does not say which free slots must be wiped",
        _tiers("checkpoint"),
        "    tier.table.has_header[:num_slots] = flags[:num_slots]\n",
        "",
        (TIER,),
    ),
    Mutant(
        "partial-visible",
        "a small file appears before it is whole",
        _tiers("guard"),
        'return path.with_name(path.name + ".partial")',
        "return path",
        (TIER, LIVES),
    ),
    Mutant(
        "readable-by-all",
        "others may read the data file",
        _tiers("guard"),
        "FILE_MODE, DIRECTORY_MODE = 0o600, 0o700",
        "FILE_MODE, DIRECTORY_MODE = 0o644, 0o700",
        (TIER,),
    ),
    Mutant(
        "identity-unchecked",
        "a namespace that states another identity is opened",
        _tiers("namespace"),
        "elif read_identity(path).digest() != identity.digest():",
        "elif False:",
        (TIER,),
    ),
    Mutant(
        "two-owners",
        "a second process may open what another owns",
        _tiers("owner"),
        "(pause_s)\n    return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "(pause_s)\n    return None\n",
        (TIER,),
    ),
    Mutant(
        "child-keeps-lock",
        "a forked child keeps the lock of its parent",
        _tiers("owner"),
        "os.register_at_fork(after_in_child=_give_up)",
        "os.register_at_fork(after_in_child=lambda: None)",
        (LIVES,),
    ),
    Mutant(
        "child-checkpoints",
        "a forked child that closes leaves a checkpoint in its parent's store",
        _tiers("namespace"),
        "            if self.opener.is_here:\n                self.departures.close()",
        "            if True:\n                self.departures.close()",
        (LIVES,),
    ),
    Mutant(
        "verify-says-fine",
        "store verify does not look at checksums",
        _tiers("verify"),
        "corrupt = (statuses == CORRUPT) | (bad_headers & (statuses != FAILED))",
        "corrupt = bad_headers & (statuses != FAILED)",
        ("tests/test_store_command.py",),
    ),
    Mutant(
        "departures-torn",
        "a torn record of the journal is taken",
        _tiers("departures"),
        'whole = (rows["checksum"] == _checksums(raw)) & (',
        'whole = (rows["checksum"] == rows["checksum"]) & (',
        ("tests/test_why.py",),
    ),
    Mutant(
        "evict-pinned",
        "a pinned chunk gives way to others",
        "src/kvtide/chunks/store.py",
        "            evictable[slots[slots >= 0]] = False\n",
        "",
        (CHUNKS,),
    ),
    Mutant(
        "evict-nothing",
        "a chunk store that is full makes no room",
        "src/kvtide/chunks/store.py",
        "if num <= num_free:",
        "if True:",
        (CHUNKS,),
    ),
    Mutant(
        "gone-untold",
        "the engine is not told which chunks gave way",
        "src/kvtide/chunks/store.py",
        "        self.counts.evicted += len(keys)\n        self._tell_gone(keys)",
        "        self.counts.evicted += len(keys)",
        (CHUNKS,),
    ),
    Mutant(
        "unread-is-data",
        "a chunk that could not be loaded is handed over",
        "src/kvtide/chunks/store.py",
        ".reshape(len(keys), -1).max(axis=1)",
        ".reshape(len(keys), -1).min(axis=1) * 0",
        (CHUNKS,),
    ),
    Mutant(
        "store-while-loading",
        "what must wait until nothing is read does not",
        "src/kvtide/chunks/store.py",
        "        if move.kind != begun.kind:\n            return False",
        "        if move.kind != begun.kind:\n            return True",
        (CHUNKS,),
    ),
    Mutant(
        "store-twice",
        "a chunk is written again while it is being written",
        "src/kvtide/chunks/store.py",
        "return has_room and set(move.keys.tolist()).isdisjoint(begun.keys.tolist())",
        "return has_room",
        (CHUNKS,),
    ),
    Mutant(
        "store-without-room",
        "chunks that could give way do not, while others are being written",
        "src/kvtide/chunks/store.py",
        "return has_room and set(",
        "return set(",
        (CHUNKS,),
    ),
    Mutant(
        "shrunk-checkpoint",
        "the checkpoint of a larger file is not believed, so what was dropped is back",
        _tiers("checkpoint"),
        "max(tier.num_slots, num_before, ",
        "max(tier.num_slots, ",
        (CHUNKS,),
    ),
    Mutant(
        "plain-stream",
        "pieces that were to be encrypted go out layer by layer as they are",
        _tiers("remote"),
        "return self._encrypted is None\n",
        "return True\n",
        (STREAM,),
    ),
)
