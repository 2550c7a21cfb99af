"""What a tier lets in: each rule against a plain one, and a memory that does not grow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.errors import ConfigError
from kvtide.evict.admission import DAY_NS, Endurance, SecondTouch, TinyLfu, make_admission

KEYS = st.lists(st.lists(st.integers(0, 30), max_size=8), max_size=30)


def admitted(admission, keys, *, num_bytes=1, now_ns=0):
    return admission.admits(np.array(keys, np.uint64), num_bytes=num_bytes, now_ns=now_ns).tolist()


@given(calls=KEYS, num_keys=st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_second_touch_remembers_the_last_keys_and_no_more(calls, num_keys):
    admission, seen = SecondTouch(num_keys), []
    for keys in calls:
        expected = []
        for key in keys:
            expected.append(key in seen)
            seen = [*(k for k in seen if k != key), key][-num_keys:]
        assert admitted(admission, keys) == expected
    assert len(admission._seen) <= num_keys


@given(calls=KEYS)
@settings(max_examples=50, deadline=None)
def test_tinylfu_never_estimates_too_low_and_lets_in_the_second_time(calls):
    admission, counts = TinyLfu(1000), dict.fromkeys(range(31), 0)
    for keys in calls:
        for key in keys:
            counts[key] += 1
        is_in = admitted(admission, keys)
        estimates = admission.estimate(np.array(keys, np.uint64)).tolist()
        assert all(estimate >= min(counts[key], 15) for key, estimate in zip(keys, estimates, strict=True))
        assert is_in == [estimate > 1 for estimate in estimates]


def test_tinylfu_forgets_and_does_not_grow():
    admission, seven = TinyLfu(1000), np.array([7], np.uint64)
    size = admission._counts.nbytes
    assert admitted(admission, [7] * 8) == [True] * 8
    assert admission.estimate(seven) == 8
    assert not admission.admits(seven + 1, num_bytes=1, now_ns=0, victim_count=8).any()
    let_in = [admitted(admission, [key]) for key in range(100, 3100)]
    assert np.mean(let_in) < 0.03  # all of them are new
    assert admission.estimate(seven) < 8
    assert admission._counts.nbytes == size


@given(calls=KEYS)
@settings(max_examples=50, deadline=None)
def test_tinylfu_of_any_size_bounds_its_counts(calls):
    admission = TinyLfu(1)
    for keys in calls:
        assert admission.estimate(np.array(keys, np.uint64)).max(initial=0) <= 15
        admitted(admission, keys)


@given(
    calls=st.lists(st.tuples(st.integers(0, DAY_NS // 50), st.lists(st.integers(1, 400), max_size=6)), max_size=40),
    rate=st.integers(1, 20_000),
)
@settings(max_examples=50, deadline=None)
def test_endurance_spends_no_more_than_its_budget_and_the_first_come_first(calls, rate):
    admission, now, spent = Endurance(bytes_per_day=rate, burst_bytes=500), 0, 0
    for pause, sizes in calls:
        now += pause
        mask = admitted(admission, [0] * len(sizes), num_bytes=np.array(sizes, np.int64), now_ns=now)
        assert mask == sorted(mask, reverse=True)
        spent += sum(size for size, is_in in zip(sizes, mask, strict=True) if is_in)
        assert spent * DAY_NS <= 500 * DAY_NS + now * rate
    if calls and not spent:
        assert all(not sizes or sizes[0] > 500 for _, sizes in calls)


def test_endurance_fills_up_again_and_time_does_not_run_back():
    admission = make_admission("endurance", num_keys=0, bytes_per_day=2400)
    assert admitted(admission, [1, 2], num_bytes=60, now_ns=5) == [True, False]
    assert admitted(admission, [2], num_bytes=60, now_ns=0) == [False]
    assert admitted(admission, [2], num_bytes=60, now_ns=5 + DAY_NS // 24) == [True]
    with pytest.raises(ConfigError, match="0 bytes a day"):
        make_admission("endurance", num_keys=1)


def test_always_lets_everything_in():
    assert admitted(make_admission("always", num_keys=1), [1, 1, 2]) == [True] * 3
    assert admitted(make_admission("second-touch", num_keys=1), [1, 1, 2]) == [False, True, False]
    assert admitted(make_admission("tinylfu", num_keys=9), [1, 2]) == [False, False]


def test_unknown_names_are_answered_with_all():
    with pytest.raises(ConfigError, match=r"'never'.*always, second-touch, tinylfu, endurance"):
        make_admission("never", num_keys=4)
