"""Keys of blocks, the index of prefixes, the pool of units and the table of one sequence."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.blocks import KEY, BlockTable, PrefixIndex, UnitPool, chain_keys, chain_root, partial_keys
from kvtide.errors import ConfigError

ROOT = chain_root(bytes(range(32)), "tenant")
GOLDEN_TOKENS = [1, 2, 3, 4, 0, 2**32 - 1, 70_000, 256, 9]
GOLDEN_ROOT = "f0674ac5720ffd253477271412f7d6358e1acbf66009199b6120b61c2cdc428e"
GOLDEN_KEYS = [
    "7eebb96479012330f314533f0a6591c177ffb9ba30481705e2b63cb5277702a9",
    "4edfa872547f7932a9f7e3fac1ad79d635b22c0ed0c650e98fb084dde2e19623",
]
ZERO_TOKEN, ZERO_KEY = 40, "438cf375ef29cce7fbdae0f1f853cbb1c0b9b2c5df6339d113848c9f49cec500"
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def oracle(tokens, block_tokens, parent):
    """The definition, in words of the standard library only."""
    keys = []
    for i in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = hashlib.sha256(parent + struct.pack(f"<{block_tokens}I", *tokens[i : i + block_tokens])).digest()
        keys.append(parent)
    return keys


def key_array(names):
    return np.frombuffer(b"".join(names), KEY)


def ids(*values):
    return np.array(values, np.int64)


# Keys


def test_golden_keys():
    assert ROOT.hex() == GOLDEN_ROOT
    keys = chain_keys(GOLDEN_TOKENS, block_tokens=4, parent=ROOT)
    assert [key.tobytes().hex() for key in keys] == GOLDEN_KEYS
    assert [key.hex() for key in oracle(GOLDEN_TOKENS, 4, ROOT)] == GOLDEN_KEYS


@given(TOKENS, st.integers(1, 9), st.sampled_from([np.uint32, np.int64, np.uint64, ">i8"]))
@settings(deadline=None)
def test_keys_are_those_of_the_oracle(tokens, block_tokens, dtype):
    expected = oracle(tokens, block_tokens, ROOT)
    assert chain_keys(tokens, block_tokens=block_tokens, parent=ROOT).tolist() == expected
    strided = np.repeat(np.array(tokens, dtype), 2)[::2]
    assert chain_keys(strided, block_tokens=block_tokens, parent=ROOT).tolist() == expected


@given(TOKENS, st.integers(0, 40))
@settings(deadline=None)
def test_a_chain_can_be_continued_from_any_key(tokens, cut):
    whole = chain_keys(tokens, block_tokens=4, parent=ROOT).tolist()
    cut = min(cut, len(whole))
    parent = whole[cut - 1] if cut else ROOT
    assert chain_keys(tokens[4 * cut :], block_tokens=4, parent=parent).tolist() == whole[cut:]


def test_one_token_changes_every_key_after_it():
    tokens = np.arange(32)
    changed = np.where(tokens == 9, 100, tokens)
    same = chain_keys(tokens, block_tokens=4, parent=ROOT) == chain_keys(changed, block_tokens=4, parent=ROOT)
    assert same.tolist() == [True, True, False, False, False, False, False, False]


def test_tenants_and_identities_share_no_key():
    roots = [chain_root(digest, salt) for digest in (bytes(32), bytes(31) + b"\1") for salt in ("", "a", "b")]
    assert len(set(roots)) == 6
    assert {len(root) for root in roots} == {32}
    assert len({chain_keys([1, 2], block_tokens=2, parent=root).tobytes() for root in roots}) == 6


def test_a_key_may_end_in_zero_bytes():
    keys = chain_keys([ZERO_TOKEN], block_tokens=1, parent=ROOT)
    assert keys[0].tobytes().hex() == ZERO_KEY
    kept = np.zeros(3, KEY)
    kept[1:2] = keys
    assert kept[1].tobytes() == keys.tolist()[0] == bytes.fromhex(ZERO_KEY)
    index = PrefixIndex()
    index.add(kept[1:2], unit=4, tokens=ids(1))
    assert index.get(keys)[0].tolist() == [4]
    cut = np.frombuffer(bytes.fromhex(ZERO_KEY)[:-1] + b"\1", KEY)
    assert index.get(cut)[0].tolist() == [-1]


def test_digest_and_salt_cannot_be_cut_elsewhere():
    with pytest.raises(AssertionError, match="SHA-256"):
        chain_root(bytes(31), "a")


@given(TOKENS)
@settings(deadline=None)
def test_partial_keys_are_those_of_shorter_blocks(tokens):
    expected = [oracle(tokens, num, ROOT)[0] for num in range(1, len(tokens) + 1)]
    assert partial_keys(tokens, parent=ROOT).tolist() == expected


def test_a_block_filled_up_has_the_key_of_a_full_one():
    tokens = GOLDEN_TOKENS[:4]
    assert partial_keys(tokens, parent=ROOT)[-1] == chain_keys(tokens, block_tokens=4, parent=ROOT)[0]


def test_without_a_full_block_there_is_no_key():
    assert chain_keys([], block_tokens=4, parent=ROOT).shape == (0,)
    assert chain_keys([1, 2, 3], block_tokens=4, parent=ROOT).shape == (0,)
    assert partial_keys([], parent=ROOT).shape == (0,)
    assert chain_keys([1], block_tokens=4, parent=ROOT).dtype == KEY


@pytest.mark.parametrize(
    "tokens", [[-1], [0, 2**32], [1.0], [True], ["1"], [[1, 2]], 7, [2**70], [2**63, -1], [None]], ids=repr
)
def test_what_is_no_token_id_is_refused(tokens):
    with pytest.raises(ConfigError, match="token ids must be"):
        chain_keys(tokens, block_tokens=1, parent=ROOT)
    with pytest.raises(ConfigError, match="token ids must be"):
        partial_keys(tokens, parent=ROOT)


@pytest.mark.parametrize("block_tokens", [0, -4])
def test_blocks_hold_at_least_one_token(block_tokens):
    with pytest.raises(ConfigError, match="at least 1"):
        chain_keys([1, 2], block_tokens=block_tokens, parent=ROOT)


# PrefixIndex


def test_a_duplicate_takes_over_when_the_first_is_discarded():
    keys = key_array(oracle(list(range(8)), 4, ROOT))
    index = PrefixIndex()
    index.add(keys, unit=7, tokens=ids(4, 8))
    index.add(keys[:1], unit=2, tokens=ids(4))
    index.add(keys, unit=5, tokens=ids(12, 16))
    assert [found.tolist() for found in index.get(keys)] == [[7, 7], [4, 8]]
    index.discard(7)
    assert [found.tolist() for found in index.get(keys)] == [[2, 5], [4, 16]]
    index.discard(5)
    assert [found.tolist() for found in index.get(keys)] == [[2, -1], [4, -1]]
    index.add(keys[:1], unit=2, tokens=ids(4))  # said twice, noted once
    assert index._keys_of == {2: keys[:1].tolist()}
    index.discard(5)  # an unknown unit is no error
    index.discard(2)
    assert len(index) == 0
    assert not index._others
    assert not index._keys_of


def test_units_and_tokens_of_any_size_come_back():
    keys = key_array(NAMES[:2])
    index = PrefixIndex()
    index.add(keys[:1], unit=0, tokens=ids(2**31 - 1).astype(np.int32))
    index.add(keys[1:], unit=2**31 - 1, tokens=ids(0))
    units, tokens = index.get(keys)
    assert (units.dtype, tokens.dtype) == (np.int64, np.int32)
    assert (units.tolist(), tokens.tolist()) == ([0, 2**31 - 1], [2**31 - 1, 0])


def test_an_empty_question_has_an_empty_answer():
    index = PrefixIndex()
    index.add(key_array([]), unit=1, tokens=ids())
    assert [found.shape for found in index.get(key_array([]))] == [(0,), (0,)]
    assert len(index) == 0


NAMES = [hashlib.sha256(bytes([i])).digest() for i in range(6)]
ADDED = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=5)
STEPS = st.lists(st.tuples(st.sampled_from(["add", "add", "discard"]), st.integers(0, 4), ADDED), max_size=30)


@given(STEPS)
@settings(deadline=None)
def test_the_index_is_a_dict_of_lists(steps):
    index, entries = PrefixIndex(), {name: [] for name in NAMES}
    for kind, unit, added in steps:
        if kind == "add":
            index.add(key_array([NAMES[i] for i, _ in added]), unit=unit, tokens=ids(*[num for _, num in added]))
            for i, num in added:
                entries[NAMES[i]].append((unit, num))
        else:
            index.discard(unit)
            entries = {name: [entry for entry in kept if entry[0] != unit] for name, kept in entries.items()}
        expected = [(entries[name] or [(-1, -1)])[0] for name in NAMES]
        units, tokens = index.get(key_array(NAMES))
        assert list(zip(units.tolist(), tokens.tolist(), strict=True)) == expected
        assert len(index) == sum(bool(kept) for kept in entries.values())


# UnitPool


def test_units_go_round():
    pool = UnitPool(4)
    assert pool.take(0).tolist() == []
    units = pool.take(3)
    assert len(set(units.tolist())) == 3
    assert (pool.num_free, pool.num_held, pool.num_idle) == (1, 3, 0)
    pool.share(units[:1])
    assert pool.release(units).tolist() == sorted(units[1:].tolist())
    assert (pool.num_free, pool.num_held, pool.num_idle) == (1, 1, 2)
    pool.share(units[1:2])  # an idle unit can be held again
    assert pool.counts()[units].tolist() == [1, 1, 0]
    pool.recycle(units[2:])
    assert (pool.num_free, pool.num_held, pool.num_idle) == (2, 2, 0)
    assert set(pool.take(2).tolist()).isdisjoint(units[:2].tolist())


def test_a_full_pool_grants_nothing():
    pool = UnitPool(3)
    assert pool.take(4).tolist() == []
    assert pool.num_free == 3
    assert sorted(pool.take(3).tolist()) == [0, 1, 2]
    assert pool.take(1).tolist() == []
    assert UnitPool(0).take(1).tolist() == []


def test_one_call_may_name_a_unit_twice():
    pool = UnitPool(2)
    unit = pool.take(1)
    twice = np.repeat(unit, 2)
    pool.share(twice)
    assert pool.counts()[unit].tolist() == [3]
    with pytest.raises(ValueError, match="read-only"):
        pool.counts()[unit] = 0
    assert pool.release(twice).tolist() == []
    assert pool.release(unit).tolist() == unit.tolist()


def test_misuse_is_caught():
    pool = UnitPool(3)
    unit = pool.take(1)
    with pytest.raises(AssertionError, match="held unit"):
        pool.recycle(unit)
    pool.release(unit)
    with pytest.raises(AssertionError, match="twice at once"):
        pool.recycle(np.repeat(unit, 2))
    pool.recycle(unit)
    with pytest.raises(AssertionError, match="recycled twice"):
        pool.recycle(unit)
    with pytest.raises(AssertionError, match="nothing to share"):
        pool.share(unit)
    with pytest.raises(AssertionError, match="negative"):
        pool.take(-1)
    assert pool.num_free == 3
    with pytest.raises(AssertionError, match="more often than held"):
        pool.release(unit)


# BlockTable


def test_appending_fills_the_tail_before_it_takes_units():
    pool, table = UnitPool(4), BlockTable(4)
    grown = table.append(pool, 6)
    assert grown is not None
    a, b = table.units
    assert grown.copy is None
    assert grown.new_units.tolist() == [a, b]
    assert grown.spans.tolist() == [[a, 0, 4], [b, 0, 2]]
    grown = table.append(pool, 3)
    assert grown is not None
    assert grown.spans.tolist() == [[b, 2, 4], [table.units[2], 0, 1]]
    grown = table.append(pool, 0)
    assert grown is not None
    assert (grown.copy, grown.new_units.tolist(), grown.spans.shape) == (None, [], (0, 3))
    assert table.num_tokens == 9


def test_a_shared_tail_is_copied_by_the_first_who_writes():
    pool, table = UnitPool(4), BlockTable(4)
    table.append(pool, 6)
    fork = table.fork(pool)
    first, tail = table.units
    grown = fork.append(pool, 1)
    assert grown is not None
    target = fork.units[1]
    assert grown.copy == (tail, target, 2)
    assert grown.new_units.tolist() == []
    assert grown.spans.tolist() == [[target, 2, 3]]
    assert (table.units, fork.units) == ([first, tail], [first, target])
    grown = table.append(pool, 1)  # now alone, so in place
    assert grown is not None
    assert (grown.copy, grown.spans.tolist()) == (None, [[tail, 2, 3]])
    assert pool.counts()[[first, tail, target]].tolist() == [2, 1, 1]


def test_a_full_shared_tail_needs_no_copy():
    pool, table = UnitPool(3), BlockTable(4)
    table.append(pool, 4)
    fork = table.fork(pool)
    grown = fork.append(pool, 1)
    assert grown is not None
    assert grown.copy is None
    assert fork.units[0] == table.units[0]


def test_too_few_units_change_nothing():
    pool, table = UnitPool(2), BlockTable(4)
    table.append(pool, 6)
    fork = table.fork(pool)
    assert fork.append(pool, 1) is None  # the copy has no place
    assert table.append(pool, 7) is None
    assert fork.units == table.units
    assert fork.num_tokens == table.num_tokens == 6
    assert pool.counts().tolist() == [2, 2]
    fork.release(pool)
    assert table.append(pool, 2) is not None  # in place


def test_truncating_gives_back_what_no_other_table_holds():
    pool, table = UnitPool(4), BlockTable(4)
    table.append(pool, 8)
    fork = table.fork(pool)
    fork.append(pool, 4)
    a, b, c = fork.units
    assert fork.truncate(pool, 5).tolist() == [c]
    assert fork.units == [a, b]
    assert fork.truncate(pool, 4).tolist() == []
    assert fork.truncate(pool, 4).tolist() == []
    assert sorted(table.release(pool).tolist()) == [b]
    assert fork.release(pool).tolist() == [a]
    assert (fork.units, fork.num_tokens, pool.num_idle) == ([], 0, 3)
    with pytest.raises(AssertionError, match="not grown by truncating"):
        fork.truncate(pool, 1)
    with pytest.raises(AssertionError, match="not truncated by appending"):
        fork.append(pool, -1)


def test_a_table_has_as_many_units_as_its_tokens_need():
    assert BlockTable(4, [3, 1], 5).units == [3, 1]
    with pytest.raises(AssertionError, match="as many units"):
        BlockTable(4, [3, 1], 4)
