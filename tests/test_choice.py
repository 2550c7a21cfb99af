"""Load or compute again: from measured figures, never much slower than the better of both."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.cache.choice import Choice, Pace, choose, tokens_in_memory
from kvtide.errors import ConfigError
from kvtide.io.drive import DeviceModel
from kvtide.planner.virtual import Budgets, reopened, virtual_cache
from kvtide.spec import Dtype, KVShape, LayerShape, SlotLayout
from kvtide.trace.record import Recorder

MIB = 1 << 20


class Steady:
    """A model that computes a token in the same time always."""

    def __init__(self, token_ns: float, num_layers: int) -> None:
        self._layer_ns = token_ns / num_layers

    def layer_ns(self, num_new: int, num_old: int, rows: int) -> tuple[float, float]:
        del num_old
        return 0.0, self._layer_ns * num_new * rows

    def step_ns(self, num_new: int, num_old: int, rows: int) -> float:
        del num_new, num_old, rows
        return 0.0

    def turn_ns(self) -> float:
        return 0.0


def layout_of(num_layers: int = 8) -> SlotLayout:
    layer = LayerShape(k_bytes=2048, v_bytes=2048, num_heads=8)
    shape = KVShape(dtype=Dtype.BF16, layers=(layer,) * num_layers, layer_index=tuple(range(num_layers)))
    return SlotLayout(shape, 16, 4)


def times_of(reuse: str, token_ns: float, bytes_per_s: int) -> list[float]:
    """Time to first token of the same prompt, again and again, each after a restart, the pace carried over."""
    layout, context = layout_of(), 2048
    drive = DeviceModel(100_000, 50_000, 0, 100_000, bytes_per_s, bytes_per_s, 32)
    whole = context * layout.shape.bytes_per_token
    budgets = Budgets(whole // 2, whole // 2 + 40 * MIB, 4 * whole)
    virtual = virtual_cache(layout, budgets, drive, reuse=reuse)
    times = []
    for _ in range(5):
        driver = virtual.driver(Steady(token_ns, layout.num_layers))
        times.append(driver.turn(np.arange(context).tolist(), [1, 2]).ttft_ns)
        pace = virtual.cache.pace
        virtual = reopened(virtual, pace=pace)
    return times


@pytest.mark.parametrize("token_ns", [1_000, 10_000, 100_000, 1_000_000])
@pytest.mark.parametrize("bytes_per_s", [50_000_000, 500_000_000, 5_000_000_000])
def test_the_choice_is_never_much_slower_than_the_better_way(token_ns: float, bytes_per_s: int) -> None:
    loaded, computed = times_of("always", token_ns, bytes_per_s), times_of("never", token_ns, bytes_per_s)
    chosen = times_of("auto", token_ns, bytes_per_s)
    assert chosen[0] == pytest.approx(computed[0])  # nothing is kept yet
    # One load must be measured; from then on the better way is taken.
    assert np.mean(chosen[2:]) <= 1.1 * min(np.mean(loaded[2:]), np.mean(computed[2:]))


def test_what_is_in_memory_is_used_and_what_is_not_measured_is_loaded() -> None:
    slow = Pace(token_ns=10.0, byte_ns=1.0)
    assert choose(1000, 1_000_000, 256, slow, "auto") == Choice(1000, 256, "computing is faster", 1_000_000, 7440)
    assert choose(1000, 1_000, 256, slow, "auto").used_tokens == 1000
    assert choose(1000, 0, 1000, slow, "auto").used_tokens == 1000
    assert choose(1000, 1_000_000, 0, Pace(token_ns=10.0), "auto").used_tokens == 1000
    assert choose(1000, 1_000_000, 0, slow, "always").used_tokens == 1000
    assert choose(1000, 1_000_000, 1000, slow, "never").used_tokens == 0
    assert choose(0, 0, 0, slow, "auto").recomputed_tokens == 0
    assert tokens_in_memory([True, True, False, True], 64, 250) == 128
    assert tokens_in_memory([True, True], 64, 100) == 100


def test_the_decision_is_in_the_trace() -> None:
    layout, recorder = layout_of(), Recorder()
    drive = DeviceModel(100_000, 50_000, 0, 100_000, 10_000_000, 1_000_000_000, 32)
    virtual = virtual_cache(layout, Budgets(64 * MIB, 64 * MIB, 256 * MIB), drive, recorder=recorder)
    prompt = np.arange(1024).tolist()
    for _ in range(3):
        driver = virtual.driver(Steady(1000, 8))
        driver.turn(prompt, [1, 2])
        virtual = reopened(virtual, pace=virtual.cache.pace)
    figures = [figures for _, _, figures in recorder.choices]
    assert figures[0] == {"prefix_reused_tokens": 1008.0, "prefix_recomputed_tokens": 0.0}  # not measured yet
    assert figures[1]["prefix_recomputed_tokens"] == 1008.0
    assert figures[1]["prefix_load_ns"] > figures[1]["prefix_compute_ns"] > 0


def test_computing_again_writes_nothing_twice() -> None:
    layout, recorder = layout_of(), Recorder()
    drive = DeviceModel(100_000, 50_000, 0, 100_000, 10_000_000, 1_000_000_000, 32)
    virtual = virtual_cache(layout, Budgets(64 * MIB, 64 * MIB, 256 * MIB), drive, recorder=recorder, reuse="never")
    for _ in range(2):
        driver = virtual.driver(Steady(1000, 8))
        driver.turn(np.arange(1024).tolist(), [1, 2])
        virtual.cache.flush()
        written = recorder.ops_between(0, recorder.counts()[1])["is_write"].sum()
        virtual = reopened(virtual)
    ops = recorder.ops_between(0, recorder.counts()[1])
    assert ops["is_write"].sum() == written


@given(st.text(max_size=200) | st.builds(json.dumps, st.dictionaries(st.text(max_size=9), st.floats() | st.text())))
def test_a_note_that_cannot_be_is_no_pace(text: str) -> None:
    found = Pace.parse(text)
    assert 0 <= found.token_ns < 1e12
    assert 0 <= found.byte_ns < 1e12


def test_a_pace_survives_as_text() -> None:
    pace = Pace()
    pace.note_step(15, 1e9)
    pace.note_load(1000, 1e9)
    assert pace == Pace()  # too little to tell
    pace.note_step(100, 1e6)
    pace.note_load(MIB, 1e6)
    pace.note_step(100, 2e6)
    assert pace.token_ns == pytest.approx(0.7 * 1e4 + 0.3 * 2e4)
    assert Pace.parse(pace.text()) == pace


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ConfigError, match="auto, always, never"):
        virtual_cache(layout_of(), Budgets(64 * MIB, 64 * MIB), None, reuse="sometimes")


def test_what_was_computed_again_is_found_in_memory_next_time() -> None:
    layout = layout_of()
    drive = DeviceModel(100_000, 50_000, 0, 100_000, 10_000_000, 1_000_000_000, 32)
    virtual = virtual_cache(layout, Budgets(64 * MIB, 64 * MIB, 256 * MIB), drive)
    prompt = np.arange(1024).tolist()
    for turn in range(4):
        if turn == 1:
            virtual = reopened(virtual, pace=Pace(token_ns=1000, byte_ns=100))  # a slow drive
        driver = virtual.driver(Steady(1000, 8))
        times = driver.turn(prompt, [1, 2])
        used = virtual.cache.usage()["dram"].used_bytes
        if turn == 1:
            assert times.matched.num_tokens == 0
            once = used
        elif turn > 1:
            assert times.matched.num_tokens == 1008
            assert times.matched.file_bytes == 0
            assert used <= once + (turn - 1) * 4 * MIB  # a tail is copied to be appended to; 34 MiB are not


def test_a_step_of_several_rows_counts_once() -> None:
    layout = layout_of()
    virtual = virtual_cache(layout, Budgets(64 * MIB, 64 * MIB), None)
    model = Steady(1000, 8)
    driver = virtual.driver(model)
    sequences = [virtual.cache.open() for _ in range(4)]
    driver.step(sequences, [list(range(row * 100, row * 100 + 64)) for row in range(4)], 128)
    assert virtual.cache.pace.token_ns == pytest.approx(1000, rel=0.01)
