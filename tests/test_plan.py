"""Plans in closed form: the worked cases, what bounds a phase, and what cannot be."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from inprocess import kvtide
from kvtide.errors import ConfigError
from kvtide.hardware import Catalogue, load
from kvtide.planner.closed import overlap, plan, read_pattern
from kvtide.planner.examples import article, article_job, article_machine, study
from kvtide.planner.inputs import Job, Machine
from kvtide.planner.options import PlanOptions, build, sweep
from kvtide.planner.placement import place
from kvtide.planner.simulate import simulate
from kvtide.planner.whatif import break_even, changes, endurance
from kvtide.spec import Layout
from kvtide.spec.presets import preset


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load()


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return kvtide("plan", *words)


def test_the_worked_case_has_its_figures() -> None:
    done = run("--example", "article", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    full, sparse = told["full"], told["top_1_percent"]
    assert full["kv_bytes"] == 32 * 32_000 * 327_680 == 335_544_320_000
    assert full["spill_ns"] / 1e9 == pytest.approx(5.243, abs=0.001)  # 335.5 GB at 64 GB/s
    assert full["reload_ns"] / 1e9 == pytest.approx(5.243, abs=0.001)
    assert full["steps_per_s"] == pytest.approx(0.19, abs=0.005)
    assert full["phases"]["decode"]["bound"] == "copy-bound"
    assert full["phases"]["prefill"]["bound"] == "compute-bound"
    reads = sparse["phases"]["decode"]["uses"]["ssd"]
    assert reads["num_bytes"] == pytest.approx(3.355e9, rel=0.001)
    assert reads["num_ops"] >= 25_600
    assert reads["op_bytes"] <= 128 << 10


def test_the_pace_of_the_worked_case_rises_with_depth_and_drives(catalogue: Catalogue) -> None:
    rows = article(catalogue).sweep
    by = {(row.ssd, row.num_ssds, row.depth, row.fragment_bytes): row for row in rows}
    depths = sorted({row.depth for row in rows})
    for ssd, num in {(row.ssd, row.num_ssds) for row in rows}:
        for size in {row.fragment_bytes for row in rows}:
            for shallow, deep in pairwise(depths):
                assert by[ssd, num, deep, size].itl_ns <= by[ssd, num, shallow, size].itl_ns
    for depth in depths:
        for size in {row.fragment_bytes for row in rows}:
            drives = [("nvme-gen3", 1), ("nvme-gen4", 1), ("nvme-gen5", 1), ("nvme-gen5", 4), ("nvme-gen5", 8)]
            times = [by[ssd, num, depth, size].itl_ns for ssd, num in drives]
            assert times == sorted(times, reverse=True)
    bound = {key: row.bound for key, row in by.items()}
    assert bound["nvme-gen5", 1, 1, 65536] == "depth-starved"
    assert bound["nvme-gen4", 1, 128, 4096] == "iops-bound"
    assert bound["nvme-gen5", 1, 512, 4096] == "host-bound"
    assert bound["nvme-gen5", 1, 128, 131072] == "bandwidth-bound"
    assert bound["nvme-gen5", 8, 128, 131072] == "copy-bound"


def test_the_published_study_is_reproduced() -> None:
    found = study()
    assert found.read_bytes / 2**30 == pytest.approx(3060, abs=0.5)
    assert found.written_bytes / 2**30 == pytest.approx(16.0, abs=0.01)
    over_decode, over_all = (rate / 2**30 for rate in found.read_bytes_per_s)
    assert over_decode == pytest.approx(2.09, abs=0.005)
    assert over_all == pytest.approx(2.06, abs=0.005)
    prefill, decode, all_of_it = (rate / 2**20 for rate in found.written_bytes_per_s)
    assert (round(prefill), round(decode, 1), round(all_of_it, 2)) == (374, 5.6, 11.03)


def test_time_of_a_phase_is_that_of_its_slowest_resource(catalogue: Catalogue) -> None:
    job = replace(article_job(), is_overlapped=False)
    machine = article_machine(catalogue)
    found = plan(job, machine).phases["decode"]
    assert found.total_ns == pytest.approx(sum(use.time_ns for use in found.uses.values()))
    assert overlap(found.uses, 80, is_overlapped=True) < found.total_ns
    assert found.limit == "link"


def test_reads_are_those_of_the_layout() -> None:
    job = Job(preset("llama-3-70b"), batch=2, context=4096, output=1)
    ops, size, together = read_pattern(job, 4096)  # groups of 32 tokens: 128 KiB a layer
    assert (ops, size, together) == (2 * 80 * 128, 128 << 10, 2 * 128)
    ops, size, _ = read_pattern(replace(job, layout=Layout.BLOCK_FIRST, select=0.5), 4096)
    assert (ops, size) == (2 * 80 * 128, 64 << 10)
    ops, size, _ = read_pattern(replace(job, fragment_bytes=1 << 20), 4096)
    assert ops * size == 2 * 4096 * 327_680


def test_more_of_anything_never_slows_the_plan(catalogue: Catalogue) -> None:
    found = plan(replace(article_job(), select=0.01, layout=Layout.BLOCK_FIRST), article_machine(catalogue))
    for change in changes(found, catalogue):
        assert change.reason or "CXL" in change.name or min(change.itl_gain, change.ttft_gain) > 0.999, change


def test_loading_beats_computing_from_some_length_on(catalogue: Catalogue) -> None:
    job, machine = build(PlanOptions("llama-3-8b", context=8000, gpu="b200", ssd="sata", any_context=True), catalogue)
    rows = {row.tier: row for row in break_even(job, machine)}
    assert rows["dram"].load_ns < rows["ssd"].load_ns
    assert rows["ssd"].load_ns > rows["ssd"].compute_ns
    assert rows["ssd"].tokens is None  # 524 MB/s against a B200
    assert rows["dram"].tokens is not None


def test_wear_is_what_is_written(catalogue: Catalogue) -> None:
    found = plan(article_job(), article_machine(catalogue))
    wear = endurance(found)
    assert wear is not None
    batch_s = (found.ttft_ns + found.itl_ns) / 1e9
    assert wear.bytes_per_day == pytest.approx(32 * 32_001 * 327_680 / batch_s * 86_400)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["llama-3-70b"], "--gpus 2"),
        (["llama-3-8b", "--gpus", "3"], "do not divide"),
        (["llama-3-8b", "--context", "9000"], "--any-context"),
        (["lama-3-8b"], "llama-3-8b"),
        (["llama-3-8b", "--gpu", "h10"], "h100"),
        (["llama-3-8b", "--ssd", "nvme"], "nvme-gen4"),
        (["llama-3-8b", "--select", "lots"], "full"),
        (["llama-3-8b", "--select", "0"], "above 0"),
        (["llama-3-8b", "--layout", "spiral"], "layer_major"),
        (["llama-3-8b", "--batch", "4096", "--ssd", "none", "--dram", "0"], "more are needed"),
        (["llama-3-8b", "--sweep", "dept=1,2"], "depth"),
        (["llama-3-8b", "--sweep", "depth=a"], "whole number"),
        (["llama-3-8b", "--dram", "lots"], "--dram"),
        (["llama-3-8b", "--probe", "/nowhere.json"], "/nowhere.json"),
        ([], "no model named"),
        (["--example", "poem"], "article"),
    ],
)
def test_what_cannot_be_is_explained(words: list[str], told: str) -> None:
    done = run(*words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_sweep_keeps_its_order_and_says_what_cannot_be() -> None:
    rows = sweep(PlanOptions("llama-3-8b"), ["gpus=1,3", "depth=1,64"])
    assert [values for values, _ in rows] == [
        {"gpus": gpus, "depth": depth} for gpus in ("1", "3") for depth in ("1", "64")
    ]
    assert [(options.gpus, options.depth) for _, options in rows] == [(1, 1), (1, 64), (3, 1), (3, 64)]
    told = json.loads(run("llama-3-8b", "--sweep", "gpus=1,3", "--json").stdout)
    assert "itl_ns" in told["sweep"][0]
    assert "do not divide" in told["sweep"][1]["reason"]
    with pytest.raises(ConfigError, match="combinations"):
        sweep(PlanOptions("llama-3-8b"), [f"batch={','.join(map(str, range(1, 201)))}"] * 2)


def test_the_page_holds_the_plan_and_no_markup_of_others(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    done = run("llama-3-8b", "--batch", "64", "--dram", "1GiB", "--html", str(page), "--gpu-hour", "2.5")
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert "llama-3-8b" in text
    assert "<script src" not in text
    assert "million output tokens" in done.stdout


def test_disaggregation_hands_kv_over(catalogue: Catalogue) -> None:
    options = PlanOptions("llama-3-8b", batch=8, disaggregate=True, network="tcp-10g")
    found = plan(*build(options, catalogue))
    handed = found.phases["hand-over"]
    assert handed.bound == "network-bound"
    sending_ns = found.placement.total_bytes / 1.25e9 * 1e9
    assert handed.uses["network"].time_ns == pytest.approx(sending_ns, rel=0.01)
    assert found.ttft_ns > found.phases["prefill"].total_ns
    assert isinstance(found.machine, Machine)


@pytest.mark.parametrize(
    "changed",
    [
        {"dram": "64GiB", "kv_on_device": "0"},  # every byte over the link
        {"dram": "600MiB", "kv_on_device": "1GiB", "batch": 1},  # every byte on the device
        {
            "dram": "160MiB",
            "kv_on_device": "0",
            "ssd": "sata",
            "context": 3000,
            "batch": 1,
        },  # nearly every byte over a slow drive
    ],
    ids=["link", "device", "drive"],
)
def test_both_forms_agree_where_one_resource_sets_the_pace(catalogue: Catalogue, changed: dict[str, Any]) -> None:
    options = replace(PlanOptions("llama-3-8b", batch=2, context=4000, output=1, disk="100GiB"), **changed)
    job, machine = build(replace(options, any_context=True), catalogue)
    closed, simulated = plan(job, machine), simulate(job, machine)
    assert simulated.is_steady
    assert simulated.itl_ns == pytest.approx(closed.itl_ns, rel=0.1)


def test_a_simulation_says_what_it_found() -> None:
    done = run("llama-3-8b", "--batch", "1", "--context", "1024", "--dram", "4GiB", "--simulate", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["simulated"]
    assert found["is_steady"]
    assert found["written_bytes"] >= 1024 * 131_072  # written through: every token's KV
    refused = run("llama-3-8b", "--select", "0.1", "--simulate")
    assert refused.returncode == 2


def test_odd_inputs_are_planned() -> None:
    latent = ["deepseek-v3", "--gpus", "16", "--gpu", "h200", "--weights", "fp8_e4m3", "--context", "64"]
    assert run(*latent, "--kv-on-device", "0", "--simulate").returncode == 0  # K and V in one row
    assert run("llama-3-8b", "--depth", "20000").returncode == 0  # four times as many are refused, not the plan
    assert run("llama-3-8b", "--context", "1", "--output", "1", "--batch", "40", "--simulate").returncode == 0
    told = run("llama-3-8b", "--kv-on-device", "10TiB")
    assert told.returncode == 2
    assert "--kv-on-device" in told.stderr
    told = run("llama-3-8b", "--simulate", "--sweep", "depth=1,8")
    assert told.returncode == 2
    assert "--simulate" in told.stderr
    told = run("llama-3-8b", "--context", "1500", "--dram", "20MiB", "--ssd", "none", "--simulate")
    assert told.returncode == 2
    assert "room" in told.stderr


def test_kv_that_ranks_copy_takes_room_in_each(catalogue: Catalogue) -> None:
    options = PlanOptions("llama-3-8b", gpus=16, batch=512, context=8000, any_context=True, dram="10TiB")
    placement = place(*build(options, catalogue))
    room = 16 * 80e9 * 0.9 - placement.weight_bytes
    assert placement.room_bytes["device"] == pytest.approx(room / 2, rel=0.01)  # 8 heads on 16 GPUs


def test_break_even_of_each_tier_is_its_own(catalogue: Catalogue) -> None:
    options = PlanOptions("llama-3-8b", context=7000, cxl="1TiB")
    rows = {row.tier: row for row in break_even(*build(options, catalogue))}
    assert rows["dram"].load_ns < rows["cxl"].load_ns
