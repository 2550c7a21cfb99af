"""What every evictor promises, and in which order each of them drops."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.errors import ConfigError
from kvtide.evict import EVICTOR_NAMES, make_evictor

ORDERED = ("lru", "fifo", "lip")
CAPACITY = 9
ALL = np.ones(CAPACITY, np.bool_)
IDS = st.lists(st.integers(0, CAPACITY - 1), max_size=CAPACITY, unique=True)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["admit", "touch", "forget"]), IDS),
        st.tuples(st.just("victims"), IDS, st.integers(-1, CAPACITY + 2)),
    ),
    max_size=40,
)


def array(ids):
    return np.array(ids, np.int64)


@pytest.mark.parametrize("name", EVICTOR_NAMES)
@given(steps=STEPS)
@settings(max_examples=50, deadline=None)
def test_victims_are_in_evictable_and_named_once(name, steps):
    evictor, inside = make_evictor(name, CAPACITY), set()
    for kind, ids, *num in steps:
        if kind == "admit":
            new = [i for i in ids if i not in inside]
            evictor.admit(array(new))
            inside.update(new)
        elif kind == "touch":
            evictor.touch(array(ids))  # those that are not in stay out
        elif kind == "forget":
            evictor.forget(array(ids))
            inside.difference_update(ids)
        else:
            evictable = np.isin(np.arange(CAPACITY), ids)
            victims = evictor.victims(num[0], evictable).tolist()
            allowed = inside & set(ids)
            assert set(victims) <= allowed
            assert len(victims) == len(set(victims)) == min(max(num[0], 0), len(allowed))
            again = evictor.victims(num[0], evictable).tolist()  # asking drops nothing
            assert len(again) == len(victims)
            assert again == victims or name == "s3-fifo"  # which moves on what it passes


@pytest.mark.parametrize("name", ORDERED)
@given(steps=STEPS)
@settings(max_examples=50, deadline=None)
def test_the_order_is_that_of_an_ordered_dict(name, steps):
    """First in the dict goes first."""
    evictor, order = make_evictor(name, CAPACITY), OrderedDict()
    for kind, ids, *num in steps:
        if kind == "admit":
            new = [i for i in ids if i not in order]
            evictor.admit(array(new))
            for i in new:
                order[i] = None
                order.move_to_end(i, last=name != "lip")
        elif kind == "touch":
            used = [i for i in ids if i in order]
            evictor.touch(array(ids))
            for i in used if name != "fifo" else ():
                order.move_to_end(i)
        elif kind == "forget":
            evictor.forget(array(ids))
            for i in ids:
                order.pop(i, None)
        else:
            expected = [i for i in order if i in ids][: max(num[0], 0)]
            assert evictor.victims(num[0], np.isin(np.arange(CAPACITY), ids)).tolist() == expected
    assert evictor.victims(CAPACITY, ALL).tolist() == list(order)


@pytest.mark.parametrize("name", ORDERED)
def test_an_id_that_comes_back_is_new(name):
    evictor = make_evictor(name, CAPACITY)
    evictor.admit(array([4, 5]))
    evictor.touch(array([4, 5]))
    evictor.forget(array([4]))
    assert evictor.victims(9, ALL).tolist() == [5]
    evictor.admit(array([4]))
    assert evictor.victims(9, ALL).tolist() == ([4, 5] if name == "lip" else [5, 4])


def hits_of_scans(name: str, *, capacity: int, num_entries: int, num_scans: int) -> list[int]:
    """Read entries in a circle through `capacity` frames; return the hits of each round."""
    evictor, frame_of, entry_in = make_evictor(name, capacity), {}, {}
    hits = []
    for _ in range(num_scans):
        hits.append(0)
        for entry in range(num_entries):
            if entry in frame_of:
                hits[-1] += 1
                evictor.touch(array([frame_of[entry]]))
                continue
            frame = len(entry_in)
            if frame == capacity:
                frame = int(evictor.victims(1, np.ones(capacity, np.bool_))[0])
                evictor.forget(array([frame]))
                del frame_of[entry_in[frame]]
            frame_of[entry], entry_in[frame] = frame, entry
            evictor.admit(array([frame]))
    return hits


def test_a_circle_larger_than_the_tier_defeats_lru_and_not_lip():
    circle = {"capacity": 30, "num_entries": 32, "num_scans": 4}
    assert hits_of_scans("lru", **circle) == [0, 0, 0, 0]
    assert hits_of_scans("fifo", **circle) == [0, 0, 0, 0]
    assert hits_of_scans("lip", **circle) == [0, 29, 29, 29]


@pytest.mark.parametrize("name", EVICTOR_NAMES)
def test_a_circle_that_fits_always_hits(name):
    assert hits_of_scans(name, capacity=8, num_entries=8, num_scans=3) == [0, 8, 8]


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'oldest'.*lru, fifo, lip"):
        make_evictor("oldest", 4)
