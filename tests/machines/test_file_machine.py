"""The file tier against a dict: right bytes of a known version or a miss, after any traffic, close, crash and fault."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvhelp import small_identity, small_layout
from kvtide.blocks import KEY
from kvtide.io.drive import SimDrive
from kvtide.io.ops import PAGE_BYTES
from kvtide.io.sim import NO_FAULTS, Faults, SimEngine, VirtualClock
from kvtide.spec import SPLITS, Split
from kvtide.tiers.contract import CORRUPT, FAILED, FULL, MISSING, OK
from kvtide.tiers.file import FileTier
from simkv import MODEL, Groups, check_slots, group_key, sim_tier

KEYS = st.lists(st.integers(0, 9), min_size=1, max_size=5)


class FileMachine(RuleBasedStateMachine):
    faults = NO_FAULTS

    def __init__(self) -> None:
        super().__init__()
        self.drive = SimDrive(MODEL)
        self.held: dict[bytes, int] = {}
        self.ever: dict[bytes, list[int]] = {}
        self.version = self.num_opened = 0
        self.tier: FileTier | None = None

    @initialize(num_slots=st.integers(1, 8), split=st.sampled_from(SPLITS), is_packed=st.booleans())
    def begin(self, num_slots: int, split: Split, is_packed: bool) -> None:
        self.num_slots, self.layout, self.is_packed = num_slots, small_layout(split=split), is_packed
        self.groups = Groups(self.layout)
        self._open()

    def _open(self) -> None:
        self.num_opened += 1
        self.tier = sim_tier(
            self.drive, self.layout, self.num_slots, self.faults, seed=self.num_opened, is_packed=self.is_packed
        )

    @rule(numbers=KEYS)
    def write(self, numbers: list[int]) -> None:
        keys = [group_key(number) for number in numbers]
        versions = list(range(self.version + 1, self.version + 1 + len(keys)))
        self.version += len(keys)
        for key, version in zip(keys, versions, strict=True):
            self.ever.setdefault(key, []).append(version)
        num_free = self.num_slots - len(self.held)
        statuses = self.groups.write(self.tier, keys, versions)
        assert set(statuses) <= {OK, FULL, FAILED}
        assert (np.array(statuses) == FULL).sum() == max(0, len(keys) - num_free)
        assert FAILED not in statuses or self.faults != NO_FAULTS
        for key, version, status in zip(keys, versions, statuses, strict=True):
            if status == OK:
                self.held[key] = version

    @rule(numbers=KEYS)
    def drop(self, numbers: list[int]) -> None:
        keys = [group_key(number) for number in numbers]
        self.tier.drop(np.frombuffer(b"".join(keys), KEY))
        for key in keys:
            self.held.pop(key, None)

    @rule(numbers=KEYS, data=st.data())
    def read(self, numbers: list[int], data: st.DataObject) -> None:
        key = group_key(data.draw(st.sampled_from(numbers)))
        statuses, parts = self.groups.read_group(self.tier, key)
        expected = self.held.get(key)
        if expected is None:
            assert statuses == [MISSING] * self.layout.num_fragments
        elif self.faults == NO_FAULTS or set(statuses) == {OK}:
            assert set(statuses) == {OK}
            assert self.groups.version_of(key, parts, [expected]) == expected
        else:
            assert set(statuses) <= {OK, CORRUPT, FAILED}
        if CORRUPT in statuses:
            del self.held[key]

    @rule(change=st.integers(-2, 2))
    def close_and_reopen(self, change: int) -> None:
        """Hand the headers over as a checkpoint does; the file may shrink or grow meanwhile."""
        slots, pages = self.tier.headers()
        flags, kept = self.tier.table.has_header, {key: self.tier._slot_of[key] for key in self.held}
        self.num_slots = max(1, self.num_slots + change)
        fd = self.drive.open("data", direct=True)
        file = self.drive.lookup(fd).file
        if change < 0:
            file.size_bytes = PAGE_BYTES + self.num_slots * self.layout.slot_bytes
            zeros = bytes(2 * self.layout.slot_bytes)
            size = file.size_bytes
            file.write(size, zeros)  # what a truncated file reads as when it grows again
            file.size_bytes = size
        fd = self.drive.open("data", size_bytes=PAGE_BYTES + self.num_slots * self.layout.slot_bytes, direct=True)
        self.num_opened += 1
        engine = SimEngine(self.drive, VirtualClock(), self.faults, seed=self.num_opened)
        digest = small_identity(self.layout).digest()
        self.tier = FileTier(engine, fd, self.layout, digest, self.num_slots, is_packed=self.is_packed)
        num = min(len(flags), self.num_slots)
        self.tier.table.has_header[:num] = flags[:num]
        decoded = self.tier._codec.decode(pages)
        assert decoded.valid.all()
        self.tier.adopt(slots, decoded, slots < self.num_slots)
        self.held = {key: version for key, version in self.held.items() if kept[key] < self.num_slots}
        assert set(self.tier._slot_of) == set(self.held)

    @rule()
    def crash_and_reopen(self) -> None:
        """Scan. What was there is there; what was dropped may be back, in a version that once was written."""
        self.drive.crash(self.num_opened)
        self._open()
        found = {}
        for key in self.tier._slot_of:
            calm = FileTier(
                SimEngine(self.drive, VirtualClock()), self.tier._io._fd, self.layout, b"\0" * 32, self.num_slots
            )
            calm.table, calm._slot_of = self.tier.table, dict(self.tier._slot_of)
            used = self.tier.table.used.copy()
            statuses, parts = self.groups.read_group(calm, key)
            self.tier.table.used[:] = used
            if set(statuses) == {OK}:
                allowed = self.ever[key] if self.faults != NO_FAULTS or key not in self.held else [self.held[key]]
                found[key] = self.groups.version_of(key, parts, allowed)
                assert found[key] is not None, "bytes that were never written"
            else:
                assert self.faults != NO_FAULTS
                found[key] = -1  # a header that survives its fragments: the read will say so
        assert self.faults != NO_FAULTS or set(found) >= set(self.held)
        self.held = found

    @invariant()
    def accounts_are_exact(self) -> None:
        if self.tier is not None:
            check_slots(self.tier)
            assert set(self.tier._slot_of) == set(self.held)


class FaultyFileMachine(FileMachine):
    faults = Faults(short=0.03, eio=0.03, enospc=0.03, torn=0.03, flipped=0.03, reordered=0.3, delayed=0.2)


SETTINGS = settings(
    max_examples=80,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestFileMachine = FileMachine.TestCase
TestFileMachine.settings = SETTINGS
TestFaultyFileMachine = FaultyFileMachine.TestCase
TestFaultyFileMachine.settings = SETTINGS
