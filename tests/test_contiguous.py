"""The contiguous baseline: how much it reserves in vain, how it breaks memory up, what growth copies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.contiguous import ContiguousAllocator
from kvtide.errors import ConfigError

LENGTHS = (161, 338, 2048, 97, 640, 1210, 55, 480)  # tokens of eight chats that may each grow to 2048


def test_reserving_the_maximum_uses_a_fifth_to_two_fifths():
    allocator = ContiguousAllocator(9 * 2048)
    for sequence_id, length in enumerate(LENGTHS):
        assert allocator.reserve(sequence_id, 2048)
        assert allocator.append(sequence_id, length)
    usage = allocator.usage()
    assert (usage.capacity_tokens, usage.reserved_tokens, usage.used_tokens) == (18_432, 16_384, 5029)
    assert usage.utilisation == 5029 / 16_384
    assert 0.2 <= usage.utilisation <= 0.4
    assert usage.utilisation + usage.internal_fragmentation == pytest.approx(1)
    assert usage.external_fragmentation == 0


def test_holes_add_up_but_do_not_fit():
    allocator = ContiguousAllocator(100)
    for sequence_id in range(5):
        assert allocator.reserve(sequence_id, 20)
    assert allocator.usage().external_fragmentation == 0  # nothing free, nothing broken up
    allocator.free(1)
    allocator.free(3)
    assert allocator.usage().external_fragmentation == 0.5
    assert not allocator.reserve(9, 21)
    assert allocator.reserve(9, 15)
    assert allocator.usage().external_fragmentation == pytest.approx(0.2)  # 5 and 20 free
    allocator.free(4)
    assert allocator.usage().external_fragmentation == pytest.approx(1 - 40 / 45)


def test_growth_copies_what_is_used_unless_the_next_run_is_free():
    allocator = ContiguousAllocator(100)
    assert allocator.reserve(0, 20)
    assert allocator.reserve(1, 20)
    assert allocator.append(0, 7)
    assert allocator.append(1, 9)
    assert allocator.grow(1, 30) == 0  # room behind it
    assert allocator.grow(0, 30) == 7  # 1 is in the way
    assert allocator.grow(1, 31) == 9  # now 0 is; it moves to the front
    assert allocator.usage().reserved_tokens == 61
    assert allocator.grow(1, 50) == 0  # up to 0, which begins at 50
    assert allocator.grow(1, 51) is None
    assert allocator.usage().reserved_tokens == 80


def test_growth_stays_in_place_even_where_a_hole_comes_first():
    allocator = ContiguousAllocator(100)
    assert allocator.reserve(0, 40)
    assert allocator.reserve(1, 20)
    assert allocator.append(1, 20)
    allocator.free(0)
    assert allocator.grow(1, 40) == 0
    assert allocator.grow(1, 70) == 20  # only over its own old place


def test_a_reservation_too_short_changes_nothing():
    allocator = ContiguousAllocator(30)
    assert allocator.usage().utilisation == 1
    assert allocator.reserve(0, 10)
    assert allocator.append(0, 10)
    before = allocator.usage()
    assert not allocator.append(0, 1)
    assert allocator.grow(0, 31) is None
    assert allocator.grow(0, 9) is None
    assert allocator.usage() == before
    assert allocator.grow(0, 30) == 0


@pytest.mark.parametrize(("sequence_id", "max_tokens"), [(0, 5), (1, 0), (1, -1)])
def test_bad_reservations_are_refused(sequence_id, max_tokens):
    allocator = ContiguousAllocator(30)
    assert allocator.reserve(0, 10)
    with pytest.raises(ConfigError):
        allocator.reserve(sequence_id, max_tokens)
    with pytest.raises(ConfigError):
        ContiguousAllocator(0)
    assert allocator.append(0, 0)
    assert ContiguousAllocator(3).reserve(0, 3)


STEPS = st.lists(
    st.tuples(st.sampled_from(["reserve", "grow", "free", "append"]), st.integers(0, 5), st.integers(1, 20)),
    max_size=40,
)


@given(STEPS)
@settings(deadline=None)
def test_runs_never_overlap_and_a_refusal_means_there_is_no_run(steps):
    allocator = ContiguousAllocator(40)
    used: dict[int, int] = {}
    for name, sequence_id, tokens in steps:
        room = max((length for _, length in allocator._free_runs()), default=0)
        if name == "reserve" and sequence_id not in used:
            done = allocator.reserve(sequence_id, tokens)
            assert done == (tokens <= room)
            if done:
                used[sequence_id] = 0
        elif sequence_id in used and name == "grow":
            before = allocator._runs[sequence_id]
            copied = allocator.grow(sequence_id, tokens)
            after = allocator._runs[sequence_id]
            assert copied in {None, 0, used[sequence_id]}
            assert copied is not None or (before == after and (tokens > room or tokens < used[sequence_id]))
        elif sequence_id in used and name == "append":
            used[sequence_id] += tokens * allocator.append(sequence_id, tokens)
        elif sequence_id in used and name == "free":
            allocator.free(sequence_id)
            del used[sequence_id]
        cells = [cell for first, length in allocator._runs.values() for cell in range(first, first + length)]
        free = [cell for first, length in allocator._free_runs() for cell in range(first, first + length)]
        assert sorted(cells + free) == list(range(40))
        assert allocator.usage().used_tokens == sum(used.values())
