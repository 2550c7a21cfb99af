"""What trees, logs and graphs write and read, against figures that were counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtide.cli import app
from kvtide.errors import ConfigError
from kvtide.planner.memory import ENGINES, MemoryCase, plan_memory
from kvtide.recall.model import Tree, b_tree, graph, leveled, segment_log, tiered

RESULT = Path(__file__).parent.parent / "benchmarks" / "results" / "lsm_model.json"
MIB = 1 << 20


def test_rocksdb_wrote_what_the_model_says() -> None:
    cases = [case for case in json.loads(RESULT.read_text())["cases"] if case["name"].startswith("leveled, random")]
    assert len(cases) == 3
    for case in cases:
        model = leveled(Tree(**case["tree"]), case["user_bytes"]).total
        assert model == pytest.approx(case["amplification"]["median"], rel=0.25)
    counted = [case["amplification"]["median"] for case in cases]
    assert counted == sorted(counted)
    assert counted[-1] >= 10
    assert cases[-1]["device_amplification"] >= 10


def test_amplification_of_a_leveled_tree_rises_with_the_data() -> None:
    tree = Tree(memtable_bytes=MIB, base_bytes=4 * MIB, file_bytes=MIB, row_bytes=108)
    totals = [leveled(tree, size * MIB).total for size in (1, 10, 100, 1000, 10_000)]
    assert totals == sorted(totals)
    assert totals[0] == pytest.approx(2.15, abs=0.01)  # nothing to merge yet: log and flush
    assert leveled(tree, 1000 * MIB, is_random=False).compaction == ()
    assert tiered(tree, 1000 * MIB).total < leveled(tree, 1000 * MIB).total


def test_first_files_of_a_level_are_moved_and_not_written() -> None:
    tree = Tree(memtable_bytes=MIB, base_bytes=4 * MIB, file_bytes=MIB, row_bytes=1000)
    written = leveled(tree, 12 * MIB)
    assert written.compaction[-1] == 0


def test_a_memory_writes_and_reads_what_was_counted_at_the_device() -> None:
    """Of 256 float32, 1,000 rows a second: benchmarks/results/recall_bench.json."""
    tables = json.loads((RESULT.parent / "recall_bench.json").read_text())["tables"]
    for name, is_durable, rows in (("one by one", False, 5000), ("durable", True, 5000), ("merged", False, 160_000)):
        (counted,) = [one for one in tables[name]["engines"] if one["engine"] == "kvtide"]
        planned = plan_memory("kvtide", MemoryCase(rows, 1000, 256, is_durable=is_durable))
        assert planned.written.total == pytest.approx(counted["device_finished_x"], rel=0.05)
        if rows > 5000:  # fewer are read ahead when the memory opens
            assert planned.reads == pytest.approx(counted["reads_per_query"], rel=0.1)
            assert planned.rounds == pytest.approx(counted["rounds_per_query"], rel=0.1)
            assert planned.read_bytes == pytest.approx(counted["read_bytes_per_query"], rel=0.1)


def test_a_memory_merges_in_tiers_and_writes_over_what_it_merged() -> None:
    young, none = segment_log(row_bytes=1024, rows_per_commit=10, rows=60_000)
    old, segments = segment_log(row_bytes=1024, rows_per_commit=10, rows=80_000 * 18)
    assert (young.compaction, none) == ((), ())
    assert old.compaction == pytest.approx((1.0, 1.0), abs=0.15)
    tiers = [9, 9, 1, 1]  # whole logs, 5 at a time: two segments of tier 1, two of tier 0
    assert [rows // 65_536 for rows in segments] == tiers
    assert old.log < young.log
    assert segment_log(row_bytes=1024, rows_per_commit=64, rows=1000)[0].log < 1.3  # at once, with a journal write


def test_segments_of_large_rows_are_small_and_read_whole() -> None:
    planned = plan_memory("kvtide", MemoryCase(rows=20_000, rate=1000, dim=1 << 15))
    assert planned.written.compaction
    assert planned.written.index == 0
    assert planned.read_bytes > 1e9


def test_a_b_tree_logs_a_page_a_row() -> None:
    synced, lazy = b_tree(row_bytes=1032), b_tree(row_bytes=1032, is_synced=False)
    assert synced.total == pytest.approx(12.1, rel=0.25)  # SQLite FULL by write_bytes, 256 float32
    assert lazy.total < synced.total
    assert b_tree(row_bytes=1032, is_random=True).total > synced.total
    assert b_tree(row_bytes=1032, rows_per_commit=64).total < lazy.total


def test_a_graph_search_reads_its_list_in_beams() -> None:
    one, four = (graph(search_list=64, beam=beam, node_bytes=1156, degree=32, rows=50_000) for beam in (1, 4))
    assert one.reads == pytest.approx(76, rel=0.25)  # counted at the device, beam 1 and 4
    assert four.reads == pytest.approx(82, rel=0.25)
    assert four.rounds < one.rounds / 3
    half = graph(search_list=64, beam=4, node_bytes=1156, degree=32, rows=50_000, cached_share=0.5)
    assert half.reads == pytest.approx(four.reads / 2)
    assert graph(search_list=64, node_bytes=5000, rows=10).bytes == 10 * 8192


@pytest.mark.parametrize("engine", list(ENGINES))
def test_every_engine_can_be_planned(engine: str) -> None:
    for is_durable in (False, True):
        found = plan_memory(engine, MemoryCase(rows=100_000, rate=1000, dim=256, is_durable=is_durable))
        assert found.written.total >= 1
        assert found.reads >= found.rounds >= 0


def test_the_command_plans_a_memory() -> None:
    words = ["plan", "--memory", "all", "--rows", "1000", "--rate", "1000", "--dim", "256"]
    shown = CliRunner().invoke(app, [*words, "--json"])
    told = json.loads(shown.stdout)
    assert told["label"] == "modelled"
    assert {each["engine"] for each in told["engines"]} == set(ENGINES)
    assert "rocksdb" in CliRunner().invoke(app, words).stdout


def test_shapes_that_cannot_be_are_refused() -> None:
    for refused in (
        lambda: leveled(Tree(l0_files=0), 1e6),
        lambda: segment_log(row_bytes=0, rows_per_commit=1, rows=1),
        lambda: b_tree(row_bytes=0),
        lambda: graph(search_list=0, node_bytes=1),
        lambda: plan_memory("none", MemoryCase()),
        lambda: plan_memory("kvtide", MemoryCase(rows=0)),
    ):
        with pytest.raises(ConfigError):
            refused()
