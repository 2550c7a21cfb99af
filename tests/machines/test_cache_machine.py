"""The cache against the rule that attention sees right bytes, whatever sequences are opened, forked, cut or evicted."""

from __future__ import annotations

import errno

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvhelp import Walker, small_cache, small_layout
from kvtide.cache import LostKv, TieredCache
from kvtide.cache.sequence import Sequence
from kvtide.errors import IoError
from kvtide.io.drive import SimDrive
from kvtide.io.sim import NO_FAULTS, Faults
from kvtide.spec import SPLITS, Split
from simkv import MODEL, check_cache, sim_tier

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=10)  # few kinds, so that prefixes are often shared
PICK = st.integers(0, 1 << 16)
LIVE_MAX, TOKENS_MAX = 4, 60


class CacheMachine(RuleBasedStateMachine):
    faults = NO_FAULTS

    def __init__(self) -> None:
        super().__init__()
        self.drive = SimDrive(MODEL)
        self.live: list[Sequence] = []
        self.known: list[list[int]] = [[]]
        self.num_opened = 0
        self.cache: TieredCache | None = None

    @initialize(
        num_slots=st.integers(1, 6),
        dram_groups=st.integers(2, 5),
        windows=st.integers(1, 3),
        policy=st.sampled_from(["through", "back"]),
        evictor=st.sampled_from(["lip", "lru", "fifo"]),
        has_tier=st.sampled_from([True, True, True, False]),
        split=st.sampled_from(SPLITS),
    )
    def begin(
        self, num_slots: int, dram_groups: int, windows: int, policy: str, evictor: str, *, has_tier: bool, split: Split
    ) -> None:
        self.num_slots, self.has_tier, self.layout = num_slots, has_tier, small_layout(split=split)
        self.knobs = {"dram_groups": dram_groups, "windows": windows, "policy": policy, "evictor": evictor}
        self._open_cache()

    def _open_cache(self) -> None:
        tier = None
        if self.has_tier:
            tier = sim_tier(self.drive, self.layout, self.num_slots, self.faults, seed=self.num_opened)
        self.num_opened += 1
        self.cache = small_cache(self.layout, tier, tokens=2 * TOKENS_MAX, **self.knobs)
        self.walker = Walker(self.cache)

    def _pick(self, pick: int) -> Sequence:
        return self.live[pick % len(self.live)]

    @precondition(lambda self: len(self.live) < LIVE_MAX)
    @rule(pick=PICK, cut=PICK, tail=st.lists(st.integers(0, 2), max_size=4))
    def open(self, pick: int, cut: int, tail: list[int]) -> None:
        before = self.known[pick % len(self.known)]
        tokens = [*before[: cut % (len(before) + 1)], *tail]
        sequence = self.cache.open(tokens)
        assert sequence.num_tokens <= max(0, len(tokens) - 1)
        assert sequence.tokens == tokens[: sequence.num_tokens]
        self.live.append(sequence)

    @precondition(lambda self: self.live)
    @rule(pick=PICK, tokens=TOKENS)
    def step(self, pick: int, tokens: list[int]) -> None:
        self._step([self._pick(pick)], [tokens])

    @precondition(lambda self: len(self.live) > 1)
    @rule(pick=PICK, tokens=TOKENS, others=TOKENS)
    def step_two_rows(self, pick: int, tokens: list[int], others: list[int]) -> None:
        first = self._pick(pick)
        second = next((s for s in self.live if s is not first and s.num_tokens == first.num_tokens), None)
        if second is None:
            second = self._pick(pick + 1)
            length = min(first.num_tokens, second.num_tokens)
            self.cache.truncate(first, length)
            self.cache.truncate(second, length)
        num = min(len(tokens), len(others))
        self._step([first, second], [tokens[:num], others[:num]])

    def _step(self, sequences: list[Sequence], tokens: list[list[int]]) -> None:
        if sequences[0].num_tokens + len(tokens[0]) > TOKENS_MAX:
            return
        wanted = [sequence.tokens + new for sequence, new in zip(sequences, tokens, strict=True)]
        try:
            self.walker.step(sequences, tokens)
        except LostKv:
            assert self.faults != NO_FAULTS, "nothing can be lost without a fault"
            for sequence in self.live:
                self.cache.heal(sequence)
        except IoError as error:
            self._check_full(error)
            for sequence in sequences:
                self.cache.abort_step(sequence)
        else:
            assert [sequence.tokens for sequence in sequences] == wanted
            self.known.extend(wanted)

    def _check_full(self, error: IoError) -> None:
        """Only what sequences hold, or what a fault keeps from the tier, may stand in the way of a step."""
        assert error.errno == errno.ENOSPC
        self.cache.drain()
        ledger = self.cache.ledger
        assert not self.has_tier or not ledger.storable().any()
        assert not (ledger.disposable() & ~ledger.is_clean() & (ledger.frames >= 0).any(axis=1)).any()

    @precondition(lambda self: self.live and len(self.live) < LIVE_MAX)
    @rule(pick=PICK)
    def fork(self, pick: int) -> None:
        parent = self._pick(pick)
        child = self.cache.fork(parent)
        assert child.tokens == parent.tokens
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(pick=PICK, cut=PICK)
    def truncate(self, pick: int, cut: int) -> None:
        sequence = self._pick(pick)
        self.cache.truncate(sequence, cut % (sequence.num_tokens + 1))

    @precondition(lambda self: self.live)
    @rule(pick=PICK, num=st.integers(1, 10))
    def begin_and_abort(self, pick: int, num: int) -> None:
        sequence = self._pick(pick)
        try:
            self.cache.begin_step(sequence, num)
        except LostKv:
            assert self.faults != NO_FAULTS
            self.cache.heal(sequence)
            return
        except IoError as error:
            self._check_full(error)
        self.cache.abort_step(sequence)

    @precondition(lambda self: self.live)
    @rule(pick=PICK)
    def pause(self, pick: int) -> None:
        self.cache.pause(self._pick(pick))

    @precondition(lambda self: self.live)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        sequence = self._pick(pick)
        self.live.remove(sequence)
        self.cache.release(sequence)

    @rule()
    def flush(self) -> None:
        self.cache.flush()
        assert not self.has_tier or not self.cache.ledger.storable().any()

    @rule()
    def reopen(self) -> None:
        self.cache.close()
        self.live.clear()
        self._open_cache()

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if self.cache is not None:
            check_cache(self.cache, self.live)

    def teardown(self) -> None:
        if self.cache is not None:
            self.cache.close()


class FaultyCacheMachine(CacheMachine):
    faults = Faults(short=0.02, eio=0.03, enospc=0.02, torn=0.02, flipped=0.03, reordered=0.3)


SETTINGS = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = SETTINGS
TestFaultyCacheMachine = FaultyCacheMachine.TestCase
TestFaultyCacheMachine.settings = settings(SETTINGS, max_examples=40)
