"""Tables over a pool do to units what lists of tokens do to themselves, and no unit is lost or shared by mistake."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtide.blocks import BlockTable, UnitPool

NUM_UNITS, UNIT_TOKENS = 11, 4
NOTHING = -1


@dataclass
class Pair:
    """A table, and the tokens it should hold."""

    table: BlockTable
    tokens: list[int]


class PoolMachine(RuleBasedStateMachine):
    """Every appended token is a number never used before, so a wrong overwrite cannot go unseen."""

    def __init__(self):
        super().__init__()
        self.pool = UnitPool(NUM_UNITS)
        self.store = np.full((NUM_UNITS, UNIT_TOKENS), NOTHING, np.int64)
        self.pairs: list[Pair] = []
        self.idle: dict[int, list[int]] = {}  # unit: tokens it must keep
        self.next_token = 0

    def held(self) -> Counter[int]:
        return Counter(unit for pair in self.pairs for unit in pair.table.units)

    @rule()
    def begin(self):
        self.pairs.append(Pair(BlockTable(UNIT_TOKENS), []))

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), num=st.integers(0, 11))
    def append(self, data, num):
        pair = data.draw(st.sampled_from(self.pairs))
        held, free, units = self.held(), self.pool.num_free, list(pair.table.units)
        filled = len(pair.tokens) % UNIT_TOKENS
        is_copied = bool(filled and num and held[units[-1]] > 1)
        needed = -(-(len(pair.tokens) + num) // UNIT_TOKENS) - len(units) + is_copied
        grown = pair.table.append(self.pool, num)
        if needed > free:
            assert grown is None
            assert (pair.table.units, self.pool.num_free) == (units, free)
            return
        assert grown is not None
        assert (grown.copy is not None) == is_copied
        assert free - self.pool.num_free == needed == len(grown.new_units) + is_copied
        if grown.copy is not None:
            source, target, num_tokens = grown.copy
            assert (source, num_tokens) == (units[-1], filled)
            self.store[target, :num_tokens] = self.store[source, :num_tokens]
        new = list(range(self.next_token, self.next_token + num))
        self.next_token += num
        pair.tokens += new
        for unit, first, end in grown.spans.tolist():
            assert 0 <= first < end <= UNIT_TOKENS
            assert self.held()[unit] == 1, "written while another table reads it"
            self.store[unit, first:end], new = new[: end - first], new[end - first :]
        assert not new, "spans are as long as what was appended"

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def fork(self, data):
        pair = data.draw(st.sampled_from(self.pairs))
        self.pairs.append(Pair(pair.table.fork(self.pool), list(pair.tokens)))

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def truncate(self, data):
        pair = data.draw(st.sampled_from(self.pairs))
        self.shorten(pair, data.draw(st.integers(0, len(pair.tokens))), release=False)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def release(self, data):
        pair = data.draw(st.sampled_from(self.pairs))
        self.shorten(pair, 0, release=True)
        self.pairs.remove(pair)

    def shorten(self, pair: Pair, num: int, *, release: bool) -> None:
        before = self.held()
        gone = pair.table.units[-(-num // UNIT_TOKENS) :]
        tokens = {unit: pair.tokens[i * UNIT_TOKENS :][:UNIT_TOKENS] for i, unit in enumerate(pair.table.units)}
        idle = pair.table.release(self.pool) if release else pair.table.truncate(self.pool, num)
        assert sorted(idle.tolist()) == sorted(unit for unit in gone if before[unit] == 1)
        self.idle |= {unit: tokens[unit] for unit in idle.tolist()}
        del pair.tokens[num:]

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def recycle(self, data):
        units = data.draw(st.lists(st.sampled_from(sorted(self.idle)), unique=True, min_size=1))
        self.pool.recycle(np.array(units, np.int64))
        for unit in units:
            del self.idle[unit]
            self.store[unit] = NOTHING

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def revive(self, data):
        """A prefix finds an idle unit; a table begins with it."""
        unit = data.draw(st.sampled_from(sorted(self.idle)))
        tokens = self.idle.pop(unit)
        self.pool.share(np.array([unit]))
        self.pairs.append(Pair(BlockTable(UNIT_TOKENS, [unit], len(tokens)), tokens))

    @invariant()
    def every_unit_is_free_or_idle_or_held(self):
        held = self.held()
        assert self.pool.counts().tolist() == [held[unit] for unit in range(NUM_UNITS)]
        assert (self.pool.num_held, self.pool.num_idle) == (len(held), len(self.idle))
        assert self.pool.num_free == NUM_UNITS - len(held) - len(self.idle)
        free = self.pool._free[: self.pool.num_free].tolist()
        assert sorted([*free, *held, *self.idle]) == list(range(NUM_UNITS))

    @invariant()
    def tables_hold_their_tokens(self):
        for pair in self.pairs:
            assert pair.table.num_tokens == len(pair.tokens)
            assert self.store[pair.table.units].ravel()[: len(pair.tokens)].tolist() == pair.tokens

    @invariant()
    def idle_units_keep_their_tokens(self):
        for unit, tokens in self.idle.items():
            assert self.store[unit, : len(tokens)].tolist() == tokens


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
