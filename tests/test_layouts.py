"""Layouts compared: cases counted by hand, how the best one turns with the drive, and what the commands tell of it."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide import cli
from kvtide.cli_layout import lay_out
from kvtide.errors import ConfigError
from kvtide.planner.layouts import Candidate, Case, Pattern, choose, layout_for, predict, read_time
from kvtide.roofline import Roof
from kvtide.select.contract import Budget
from kvtide.spec import KVShape, Layout, page_up
from kvtide.spec.presets import preset

NVME = Roof(latency_ns=80_000, channel_bytes_per_s=3.4e9, iops_max=1e6, bytes_per_s_max=6.8e9)  # 6,800 bytes an op
SLOW_IOPS = Roof(latency_ns=100_000, channel_bytes_per_s=5e8, iops_max=2000, bytes_per_s_max=5e8)  # 250,000 an op
SMOL = KVShape.of(preset("smollm2-135m"), "fp32")  # 30 layers, 3 heads of 64: 1,536 bytes a token, 24 KiB of 16 tokens
LLAMA = KVShape.of(preset("llama-3-8b"), "bf16")  # 32 layers, 8 heads of 128: 4,096 bytes a token
CONTEXT = 32_768
SPARSE = Pattern(budget_tokens=1024, unit_tokens=16)


def case(pattern: Pattern, roof: Roof = NVME, shape: KVShape = SMOL, **rest: object) -> Case:
    return Case(shape, 16, CONTEXT, pattern, read_time(roof, 64), **rest)


def found(of: Case, layout: Layout, group_blocks: int) -> Candidate:
    return next(one for one in predict(of) if (one.layout, one.group_blocks) == (layout, group_blocks))


def test_every_layout_and_group_is_a_candidate() -> None:
    names = [(one.name, one.group_blocks) for one in predict(case(SPARSE))]
    powers = [1, 2, 4, 8, 16, 32, 64]
    assert names == [
        ("block-first", 1), *(("groups", size) for size in powers[1:]),
        *(("kv-apart", size) for size in powers), *(("head-major", size) for size in powers)
    ]  # fmt: skip
    mla = KVShape.of(preset("deepseek-v3"), "bf16")
    assert {one.name for one in predict(case(SPARSE, shape=mla))} == {"block-first", "groups"}
    assert [(one.name, one.group_blocks) for one in predict(case(SPARSE, group_blocks=3))] == [
        ("groups", 3), ("kv-apart", 3), ("head-major", 3)
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="no layout has groups"):
        predict(Case(SMOL, 1 << 16, 100, SPARSE, read_time(NVME, 64), group_blocks=64))


def test_reading_everything_is_counted_by_hand() -> None:
    dense = case(Pattern())
    first, large = found(dense, Layout.BLOCK_FIRST, 1), found(dense, Layout.LAYER_MAJOR, 64)
    layer = CONTEXT * 1536
    assert (first.num_ops, first.num_bytes) == (30 * 2048, 30 * layer)
    assert (large.num_ops, large.num_bytes) == (30 * 32, 30 * layer)
    assert first.slack_bytes == 2048 * 4096  # a header a block, and no padding: 24 KiB are six pages
    assert first.time_ns == pytest.approx(30 * layer / 6.8e9 * 1e9)  # 24 KiB are above the knee
    assert found(case(Pattern(), SLOW_IOPS), Layout.BLOCK_FIRST, 1).time_ns == pytest.approx(30 * 2048 / 2000 * 1e9)


def test_reading_everything_prefers_larger_groups() -> None:
    for roof in (NVME, SLOW_IOPS):
        best = choose(case(Pattern(), roof)).best
        assert (best.layout, best.group_blocks >= 16) == (Layout.LAYER_MAJOR, True)


def test_scattered_units_of_24_kib_prefer_blocks_where_reads_are_cheap() -> None:
    of = case(SPARSE)
    choice = choose(of)
    assert choice.best.layout is Layout.BLOCK_FIRST
    assert choice.best.num_ops == pytest.approx(30 * 64)
    assert choice.best.num_bytes == pytest.approx(30 * 64 * 24 * 1024)
    assert choice.best.time_ns == pytest.approx(30 * 64 * 24 * 1024 / 6.8e9 * 1e9)
    pairs = found(of, Layout.LAYER_MAJOR, 2)
    missed = (1984 / 2048) * (1983 / 2047)  # both of a group's units are among the 1,984 left
    assert pairs.num_ops == pytest.approx(30 * 1024 * (1 - missed))
    assert pairs.num_bytes == pytest.approx(30 * 1024 * (1 - missed) * 48 * 1024)


def test_the_choice_turns_with_the_drive() -> None:
    """64 of 2,048 units. Groups of 8 touch 57.4 of 256: 28.7 ms at 2,000 reads a second, and 22.6 ms of bytes."""
    assert choose(case(SPARSE)).best.group_blocks == 1
    best = choose(case(SPARSE, SLOW_IOPS)).best
    assert (best.layout, best.group_blocks) == (Layout.LAYER_MAJOR, 8)
    assert best.time_ns == pytest.approx(30 * 57.4 / 2000 * 1e9, rel=0.01)


@pytest.mark.parametrize("shape", [SMOL, LLAMA], ids=["8 KiB a head", "8 KiB of 8 heads"])
def test_heads_that_choose_alone_prefer_to_lie_apart(shape: KVShape) -> None:
    of = case(Pattern(1024, 16, is_per_head=True), shape=shape)
    best, heads = choose(of).best, shape.layers[0].num_heads
    assert (best.layout, best.group_blocks) == (Layout.HEAD_MAJOR, 1)
    part = 64 / 2048
    assert best.num_bytes == pytest.approx(shape.num_layers * heads * 64 * 8192)
    assert best.num_ops == pytest.approx(shape.num_layers * 2048 * (part + (heads - 1) * part * (1 - part)))
    whole = found(of, Layout.BLOCK_FIRST, 1)
    assert whole.num_ops == pytest.approx(shape.num_layers * 2048 * (1 - (1 - part) ** heads))


def test_values_alone_prefer_to_lie_apart() -> None:
    best = choose(case(Pattern(1024, 16, is_values_only=True))).best
    assert (best.layout, best.group_blocks) == (Layout.KV_APART, 1)
    assert best.num_bytes == pytest.approx(30 * 64 * 12 * 1024)
    assert choose(case(Pattern(is_values_only=True))).best.layout is Layout.KV_APART


@given(
    st.integers(1, 200), st.integers(1, 64), st.integers(1, 4000), st.integers(1, 256),
    st.none() | st.floats(1, 50),
)  # fmt: skip
def test_touched_groups_are_between_what_units_fill_and_all(
    budget: int, unit: int, num_tokens: int, group: int, run: float | None
) -> None:
    pattern = Pattern(budget, unit, run_units=run)
    touched, num_groups = pattern.touched(num_tokens, group), -(-num_tokens // group)
    part = pattern.num_chosen(num_tokens) / -(-num_tokens // unit)  # a group is wanted at least as often as one unit
    assert num_groups * part * (1 - 1e-9) <= touched <= num_groups * (1 + 1e-9)
    assert touched <= pattern.num_chosen(num_tokens) * (1 + -(-unit // group)) * (1 + 1e-9) or run is not None


@pytest.mark.parametrize("run", [None, 4.0])
def test_touched_groups_are_those_of_a_draw(run: float | None) -> None:
    num_units, chosen, in_group = 2048, 256, 8
    rng, counts = np.random.default_rng(1), []
    for _ in range(300):
        if run is None:
            taken = np.zeros(num_units, np.bool_)
            taken[rng.permutation(num_units)[:chosen]] = True
        else:  # runs of 1 / (1 - stay) chosen units, between gaps that leave the part chosen
            begin = (chosen / num_units) / (run * (1 - chosen / num_units))
            draws, taken = rng.random(num_units), np.zeros(num_units, np.bool_)
            taken[0] = draws[0] < chosen / num_units
            for index in range(1, num_units):
                taken[index] = draws[index] < (1 - 1 / run if taken[index - 1] else begin)
        counts.append(taken.reshape(-1, in_group).any(axis=1).sum())
    expected = Pattern(chosen * 16, 16, run_units=run).touched(num_units * 16, in_group * 16)
    assert np.mean(counts) == pytest.approx(expected, rel=0.02)


def test_clustered_units_make_larger_groups_cheaper() -> None:
    alone, clustered = (found(case(Pattern(1024, 16, run_units=run)), Layout.LAYER_MAJOR, 8) for run in (None, 8.0))
    assert clustered.num_bytes < alone.num_bytes / 3


def test_fast_memory_takes_its_share() -> None:
    layer_bytes = CONTEXT * 1536 * 30
    half = found(case(Pattern(), fast_bytes=layer_bytes // 2), Layout.BLOCK_FIRST, 1)
    assert half.num_ops == pytest.approx(30 * 1024)
    kept = Pattern(1024, 16, reuse=0.75)
    step_bytes = 30 * 64 * 24 * 1024
    assert found(case(kept), Layout.BLOCK_FIRST, 1).num_ops == pytest.approx(30 * 64)  # nowhere to keep them
    assert found(case(kept, fast_bytes=step_bytes), Layout.BLOCK_FIRST, 1).num_ops == pytest.approx(30 * 16)
    choice = choose(case(SPARSE, fast_bytes=1 << 40))
    assert "whole prefix" in choice.reasons[0]
    assert choice.best.group_blocks >= 16


def test_sequences_are_read_together() -> None:
    one, many = (found(case(SPARSE, num_sequences=num), Layout.BLOCK_FIRST, 1) for num in (1, 4))
    assert many.num_ops == pytest.approx(4 * one.num_ops)
    assert many.time_ns <= 4 * one.time_ns


def test_the_reasons_have_the_numbers() -> None:
    reasons = " ".join(choose(case(SPARSE)).reasons)
    for text in ("1,024 of 32,768 tokens", "64 units of 16", "Block-first", "1,920 reads of 24 KiB", "x as long"):
        assert text in reasons


def test_a_store_gets_groups_by_the_knee_unless_something_is_selected() -> None:
    assert layout_for("auto").layout is Layout.LAYER_MAJOR
    assert layout_for("auto", case(Pattern())).group_blocks is None
    assert layout_for("auto", case(SPARSE)).name == "block-first"
    assert layout_for("head-major", case(SPARSE)).layout is Layout.HEAD_MAJOR
    assert layout_for("block-first").group_blocks == 1
    with pytest.raises(ConfigError, match="--layout is 'ring'"):
        layout_for("ring")


@pytest.mark.parametrize("wrong", [{"reuse": 1.5}, {"run_units": 0.5}, {"unit_tokens": 0}, {"budget_tokens": 0}])
def test_patterns_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Pattern(**wrong)


@dataclass(frozen=True)
class Options:
    """What `lay_out` reads of a store's options, without the library of models."""

    directory: Path
    select: object = None
    block_tokens: int = 16
    group_blocks: int | None = None
    knee_bytes: int = 128 << 10
    disk_bytes: int = 1 << 30
    split: str = "none"
    gap_bytes_max: int = 0


def laid(tmp_path: Path, name: str, method: str = "", **typed: object) -> tuple[str, str, int | None]:
    select = SimpleNamespace(name=method, budget=Budget(tokens=512)) if method else None
    options, told = lay_out(Options(tmp_path, select, **typed), name, SMOL, 8192, cache_dir=tmp_path)
    assert (options.gap_bytes_max, told.gap.num_bytes) == (0, 0)  # no probe
    assert told.lines()[0].startswith(f"layout {told.picked.name}: ")
    return told.picked.name, options.split, options.group_blocks


def test_a_run_lays_out_what_its_method_reads(tmp_path: Path) -> None:
    assert laid(tmp_path, "auto") == ("groups", "none", None)
    assert laid(tmp_path, "auto", group_blocks=4) == ("groups", "none", 4)
    assert laid(tmp_path, "kv-apart", "quest", group_blocks=2) == ("kv-apart", "kv", 2)
    assert laid(tmp_path, "block-first") == ("block-first", "none", 1)
    for method in ("lowrank", "clo", "pmr"):  # they choose the store's groups: small ones
        assert laid(tmp_path, "auto", method) == ("block-first", "none", 1)
    for method in ("quest", "clo+quest", "infinigen"):  # each head its own
        assert laid(tmp_path, "auto", method)[:2] == ("head-major", "head")
    assert laid(tmp_path, "auto", "quest", group_blocks=8) == ("head-major", "head", 8)


def test_a_probed_drive_gives_the_gap_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = SimpleNamespace(read=SimpleNamespace(roof=SLOW_IOPS))
    monkeypatch.setattr("kvtide.probe.file.find_probe", lambda *_: (probe, "probe: p.json"))
    monkeypatch.setattr("kvtide.cli_layout.find_probe", lambda *_: (probe, "probe: p.json"))
    select = SimpleNamespace(name="quest", budget=Budget(tokens=512))
    options, told = lay_out(Options(tmp_path, select), "auto", SMOL, 8192, cache_dir=tmp_path)
    fragment = page_up(SMOL.layers[0].token_bytes // 3 * 16 * (options.group_blocks or 0))
    assert options.gap_bytes_max == max(0, int((250_000 - fragment) // 4096 * 4096))  # the knee less a fragment
    assert "this drive, as probed" in " ".join(told.picked.reasons)
    options, told = lay_out(Options(tmp_path, select, disk_bytes=0), "groups", SMOL, 8192, cache_dir=tmp_path)
    assert options.gap_bytes_max == 0
    options, told = lay_out(Options(tmp_path), "block-first", SMOL, 8192, cache_dir=tmp_path)
    assert options.gap_bytes_max == (250_000 - 24 * 1024) // 4096 * 4096
    assert "gaps of up to" in told.lines()[1]


def plan(*words: str) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["kvtide", "plan", "llama-3-8b", "--kv-on-device", "0", "--dram", "0", *words])
        code = cli._run()
    return code, out.getvalue() + err.getvalue()


def test_plan_compares_layouts_where_one_or_a_selection_is_asked_for() -> None:
    code, text = plan("--select", "3%", "--layout", "auto", "--json")
    told = json.loads(text)
    assert code == 0
    assert told["layouts"]["best"]["layout"] == "block-first"
    assert told["job"]["layout"] == "block_first"
    assert len(told["layouts"]["candidates"]) == 21
    assert json.loads(plan("--json")[1])["layouts"] is None
    assert json.loads(plan("--layout", "kv-apart", "--json")[1])["job"]["layout"] == "kv_apart"
    code, text = plan("--select", "3%")
    assert (code, "Layouts: what a step reads" in text, "best" in text) == (0, True, True)
    assert "Layouts:" not in plan()[1]
    code, text = plan("--layout", "auto", "--ssd", "none", "--dram", "64GiB")
    assert (code, "--ssd is none" in text) == (2, True)
    assert plan("--sweep", "layout=auto,groups")[0] == 0
