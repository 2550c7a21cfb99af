"""Replaying request logs: hits by tier and policy, bytes, time saved, and the command."""

from __future__ import annotations

import json
import subprocess
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inprocess import kvtide
from kvtide.hardware import load
from kvtide.planner.options import PlanOptions, build
from kvtide.planner.replay import Case, replay
from kvtide.workload import Workload, make, make_workload

MIB = 1 << 20
REAL_LOG = Path(__file__).parents[2] / "shared/data/requests/mooncake_conversation.jsonl"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return kvtide("replay", *words)


def small(seed: int = 0, block_tokens: int = 16) -> Workload:
    """Conversations that grow, many at a time, some of which begin alike."""
    rng = np.random.default_rng(seed)
    rows, grown = [], {}
    for _ in range(400):
        talk = int(rng.integers(0, 30))
        told = grown.setdefault(talk, [talk % 3])
        told.append(100 + len(rows))
        rows.append(list(told))
    ids: dict[int, int] = {}
    dense = [[ids.setdefault(name, len(ids)) for name in row] for row in rows]
    num = np.array([len(row) for row in dense])
    return make_workload(
        name="small", source="test", block_tokens=block_tokens, arrival_ns=np.arange(len(rows)) * 10**9,
        input_tokens=num * block_tokens, output_tokens=np.full(len(rows), 4), block_start=np.append(0, np.cumsum(num)),
        block_ids=np.concatenate(dense), session=np.full(len(rows), -1),
    )  # fmt: skip


def brute_force(workload: Workload, capacity: int) -> int:
    """Hits of one LRU tier, written plainly."""
    tier: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in range(workload.num_requests):
        blocks = workload.blocks_of(request).tolist()
        for block in blocks:
            if block not in tier:
                break
            hits += 1
        kept = blocks[:capacity]
        for block in reversed(kept):
            tier[block] = None
            tier.move_to_end(block)
        while len(tier) > capacity:
            tier.popitem(last=False)
    return hits


def test_lru_hits_are_those_of_a_plain_lru_and_of_the_curve() -> None:
    workload = small()
    job, machine = build(PlanOptions("llama-3-8b"), load())
    block = 16 * job.shape().bytes_per_token
    cases = [Case(size * block, 0) for size in (1, 7, 50, 200, 1000)]
    found = replay(workload, job, machine, cases)
    assert found.block_bytes == block
    for case, result in zip(cases, found.results, strict=True):
        capacity = case.dram_bytes // block
        assert result.dram_hits == brute_force(workload, capacity) == int(found.curve.hits(capacity))
        assert result.disk_hits == result.read_bytes == result.written_bytes == 0
        assert 0 <= result.saved_ns <= result.compute_ns
    assert found.results[-1].dram_hits == found.ideal_blocks


def test_a_disk_under_dram_hits_as_one_lru_of_its_size() -> None:
    workload = small(1)
    job, machine = build(PlanOptions("llama-3-8b"), load())
    block = 16 * job.shape().bytes_per_token
    result = replay(workload, job, machine, [Case(5 * block, 60 * block)]).results[0]
    assert result.dram_hits == brute_force(workload, 5)
    assert result.dram_hits + result.disk_hits == brute_force(workload, 60)
    assert result.written_bytes >= result.reread_bytes
    assert result.read_bytes == result.disk_hits * block


def test_slow_drives_save_less_and_never_cost() -> None:
    workload = small(2, block_tokens=512)
    saved = {}
    for ssd in ("sata", "nvme-gen5"):
        job, machine = build(PlanOptions("llama-3-8b", gpu="b200", ssd=ssd), load())
        block = 512 * job.shape().bytes_per_token
        saved[ssd] = replay(workload, job, machine, [Case(block, 10_000 * block)]).results[0].saved_ns
    assert 0 <= saved["sata"] < saved["nvme-gen5"]


def test_admission_writes_less() -> None:
    workload = small(3)
    job, machine = build(PlanOptions("llama-3-8b"), load())
    block = 16 * job.shape().bytes_per_token
    case = Case(5 * block, 100 * block)
    always, second, worn = replay(
        workload,
        job,
        machine,
        [case, replace(case, admission="second-touch"), replace(case, admission="endurance", writes_per_day=0.01)],
    ).results
    assert second.written_bytes < always.written_bytes
    assert worn.written_bytes <= 0.02 * case.disk_bytes + always.written_bytes * 0.1


def log_file(path: Path) -> Path:
    rows = [{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]},
            {"timestamp": 10, "input_length": 1500, "output_length": 5, "hash_ids": [1, 2, 3]},
            {"timestamp": 20, "input_length": 500, "output_length": 5, "hash_ids": [9]}]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    return path


def test_the_command_counts_and_shows_what_is_malformed(tmp_path: Path) -> None:
    path = log_file(tmp_path / "log.jsonl")
    told = json.loads(run(str(path), "--json", "--dram", "1GiB", "--disk", "0", "--evict", "lru,arc").stdout)
    assert told["workload"]["requests"] == 3
    assert told["workload"]["malformed"] == 1
    assert told["ideal"] == {"hit_blocks": 1, "hit_tokens": 512}  # block 2 was not full the first time
    assert [case["policy"] for case in told["cases"]] == ["lru", "arc"]
    assert [case["dram_hits"] for case in told["cases"]] == [1, 1]
    assert told["curve"][-1]["hit_blocks"] == 1
    shown = run(str(path), "--dram", "1GiB").stdout
    assert "line 4" in shown
    assert "66.7" not in shown


def test_a_sweep_is_every_combination(tmp_path: Path) -> None:
    path = log_file(tmp_path / "log.jsonl")
    done = run(str(path), "--json", "--sweep", "dram=64MiB,1GiB", "--sweep", "evict=lru,fifo,belady")
    cases = json.loads(done.stdout)["cases"]
    assert [(case["dram_bytes"] // MIB, case["policy"]) for case in cases] == [
        (dram, policy) for dram in (64, 1024) for policy in ("lru", "fifo", "belady")
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing.jsonl"], "multi-turn"),
        (["multi-turn", "--limit", "5", "--evict", "lro"], "lru"),
        (["multi-turn", "--limit", "5", "--admit", "all"], "always"),
        (["multi-turn", "--limit", "5", "--dram", "1KiB", "--disk", "1KiB"], "larger"),
        (["multi-turn", "--limit", "5", "--sweep", "gpu=a"], "dram"),
        (["multi-turn", "--limit", "5", "--dram", "much"], "--dram"),
    ],
)
def test_what_cannot_be_is_explained(words: list[str], told: str) -> None:
    done = run(*words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert told in done.stderr


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    done = run(str(log_file(tmp_path / "log.jsonl")), "--format", "moncake")
    assert done.returncode == 2
    assert "mooncake" in done.stderr


def test_the_same_requests_on_real_and_virtual_tiers(tmp_path: Path) -> None:
    words = ["multi-turn", "--limit", "4", "--model", "smollm2-135m", "--dtype", "fp32", "--gpu", "cpu", "--json"]
    sizes = ["--dram", "64MiB", "--disk", "1GiB", "--device-memory", "16MiB", "--evict", "lru"]
    done = run(*words, *sizes, "--simulate", "--real", str(tmp_path / "store"))
    assert done.returncode == 0, done.stderr
    real, virtual = json.loads(done.stdout)["timed"]
    assert (real["label"], virtual["label"]) == ("measured", "simulated")
    assert real["num_requests"] == 4
    assert real["matched_tokens"] == virtual["matched_tokens"] > 0
    assert real["written_bytes"] == virtual["written_bytes"] > 0
    assert real["num_writes"] == virtual["num_writes"]


def test_the_published_log_hits_what_is_published() -> None:
    if not REAL_LOG.exists():
        pytest.skip("the log is not here")
    told = json.loads(run(str(REAL_LOG), "--json", "--evict", "lru", "--dram", "0", "--disk", "4TiB").stdout)
    assert told["workload"]["requests"] == 12_031
    assert told["workload"]["blocks"] == 288_500
    assert told["workload"]["unique_blocks"] == 182_790
    assert told["ideal"]["hit_blocks"] == 105_710
    assert told["ideal"]["hit_tokens"] / told["workload"]["input_tokens"] == pytest.approx(0.374, abs=0.0005)


def test_generators_replay(tmp_path: Path) -> None:
    del tmp_path
    for name in ("agentic", "rag", "batch"):
        made = make(name).take(20)
        job, machine = build(PlanOptions("llama-3-8b"), load())
        found = replay(made, job, machine, [Case(1 << 34, 1 << 36, "s3-fifo")])
        assert found.results[0].hit_tokens <= found.ideal_tokens + made.block_tokens * made.num_requests
