"""Vector stores side by side: the rules of counting, and one real run of each kind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import polars as pl
import psutil
import pytest
from typer.testing import CliRunner

from kvtide.cli import app
from kvtide.errors import ConfigError, KvtideError, UnsupportedError
from kvtide.stores import corpus
from kvtide.stores.causes import Held, cause_of, owners
from kvtide.stores.device import Counts, parse_stat, why_not
from kvtide.stores.engines.contract import EngineOptions, brute_force
from kvtide.stores.engines.names import ENGINES, chosen, is_installed, opened
from kvtide.stores.explain import bursts, explain
from kvtide.stores.rocksdb import Tables, levels_of, tables_of, tickers
from kvtide.stores.rounds import queries_of, rounds_of
from kvtide.stores.traced import reads_of
from kvtide.trace.events import META, READ, WRITE, shaped
from kvtide.trace.file import Extent
from loops import await_loop, await_no_loop, loops

needs_loop = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def rounds(*reads: tuple[int, int]) -> int:
    start, end = (ints(*column) for column in zip(*reads, strict=True))
    return int(rounds_of(np.zeros(len(reads), np.int64), start, end, num_queries=1)[0])


def test_reads_that_overlap_are_one_round_and_reads_that_wait_are_more() -> None:
    assert rounds((0, 10), (0, 12), (1, 9)) == 1
    assert rounds((0, 10), (10, 20), (20, 30)) == 3
    assert rounds((0, 10), (0, 12), (1, 9), (12, 20), (12, 22), (12, 19)) == 2
    assert rounds((0, 100), (5, 10), (11, 20), (21, 30)) == 3  # the long read hides no chain beside it
    assert rounds((20, 30), (0, 10), (10, 20)) == 3  # in whatever order they are given


def test_rounds_are_the_longest_chain_of_each_query() -> None:
    rng = np.random.default_rng(5)
    query = rng.integers(-1, 7, 300)
    start = rng.integers(0, 1000, 300)
    end = start + rng.integers(1, 60, 300)
    found = rounds_of(query, start, end, num_queries=8)
    for which in range(8):
        best: dict[int, int] = {}
        for at in sorted(np.flatnonzero(query == which), key=lambda index: (end[index], start[index])):
            before = [num for other, num in best.items() if end[other] <= start[at]]
            best[int(at)] = 1 + max(before, default=0)
        chain = max(best.values(), default=0)
        assert found[which] == chain


def test_a_read_without_an_end_or_a_query_counts_for_nothing() -> None:
    assert rounds((0, -1), (5, 10)) == 1
    assert rounds((5, 5), (5, 5)) == 1
    assert rounds_of(ints(-1, -1), ints(0, 1), ints(1, 2), num_queries=2).tolist() == [0, 0]
    assert rounds_of(ints(), ints(), ints(), num_queries=3).tolist() == [0, 0, 0]


def test_reads_belong_to_the_query_in_whose_time_they_were_issued() -> None:
    assert queries_of(ints(0, 5, 15, 25, 31), ints(5, 20), ints(10, 30)).tolist() == [-1, 0, -1, 1, -1]


def block(rows: list[tuple[int, int, int, int, int, str]]) -> pl.DataFrame:
    names = ("time_ns", "complete_ns", "offset", "length", "flags", "comm")
    return shaped("block", pl.DataFrame(rows, schema=names, orient="row"))


def test_reads_of_queries_come_from_block_commands() -> None:
    frame = block([(10, 20, 0, 4096, READ, "q"), (20, 30, 0, 8192, READ, "q"), (10, 20, 0, 512, WRITE, "q")])
    found = reads_of(frame, ints(5, 50), ints(40, 60))
    assert found.reads.tolist() == [2, 0]
    assert found.bytes.tolist() == [12288, 0]
    assert found.rounds.tolist() == [2, 0]


def test_the_block_layers_counters_are_read_and_subtracted() -> None:
    line = "57 0 2154 8 19 74 49952 13 0 12 24 2 0 1048584 0 4 2"
    counts = parse_stat(line)
    assert counts == Counts(57, 2154 * 512, 19, 49952 * 512, 4)
    assert counts - counts == Counts()
    with pytest.raises(UnsupportedError, match="11 numbers"):
        parse_stat("1 2 \x1b[31m")


def test_rocksdb_tells_flushes_from_compactions() -> None:
    lines = (
        'x EVENT_LOG_v1 {"job": 3, "event": "flush_started"}',
        'x EVENT_LOG_v1 {"job": 3, "event": "table_file_creation", "file_number": 7, "file_size": 100}',
        'x EVENT_LOG_v1 {"job": 4, "event": "table_file_creation", "file_number": 9, "file_size": 250}',
        'x EVENT_LOG_v1 {"job": 4, "event": "compaction_finished", "output_level": 2, "total_output_size": 250}',
        "x EVENT_LOG_v1 {broken", "x EVENT_LOG_v1 [1]", 'x EVENT_LOG_v1 {"job": "4"}',
    )  # fmt: skip
    log = "\n".join(lines)
    tables = tables_of(log)
    assert (tables.flush_bytes, tables.compaction_bytes) == (100, 250)
    assert levels_of(log) == {2: 250}
    assert tickers("rocksdb.wal.bytes COUNT : 12\nrocksdb.x COUNT : no") == {"wal.bytes": 12}
    assert cause_of("db/000007.sst", tables) == ("rocksdb", "flush")
    assert cause_of("db/000009.sst", tables) == ("rocksdb", "compaction")
    assert cause_of("db/000011.sst", Tables()) == ("rocksdb", "table")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("rocks/000012.log", ("rocksdb", "log")),
        ("rocks/MANIFEST-000005", ("rocksdb", "manifest")),
        ("rows.db-wal", ("sqlite", "log")),
        ("lance/rows.lance/_versions/7.manifest", ("lance", "manifest")),
        ("lance/rows.lance/data/x.lance", ("lance", "flush")),
        ("what\x00ever", ("any", "unknown")),
    ],
)
def test_a_files_name_says_what_it_is_for(name: str, found: tuple[str, str]) -> None:
    assert cause_of(name) == found


def test_space_that_is_used_again_belongs_to_the_file_of_that_time() -> None:
    second = 10**9
    files = [
        Held("new.log", [Extent(0, 4096, 4096)], first_ns=20 * second, last_ns=40 * second),
        Held("old.sst", [Extent(0, 4096, 8192)], first_ns=1 * second, last_ns=10 * second),
    ]
    at = ints(4096, 4096, 8192, 0)
    assert owners(files, at, ints(5, 25, 5, 5) * second).tolist() == [1, 0, 1, -1]


def test_writes_are_explained_by_cause_and_a_remedy_is_named() -> None:
    rows = [(at, at + 5, 4096, 4096, WRITE, "kworker") for at in range(0, 90, 10)]
    rows += [(100, 105, 1 << 20, 1 << 20, WRITE, "db"), (110, 111, 0, 4096, WRITE | META, "jbd2/loop0-8")]
    rows += [(120, 121, 64, 4096, WRITE | META, "db")]
    rows += [(10**7 * at, 10**7 * at + 1000, 0, 4096, READ, "db") for at in range(1, 5)]
    files = [Held("x.log", [Extent(0, 4096, 8192)]), Held("9.sst", [Extent(0, 1 << 20, 1 << 20)])]
    found = explain(block(rows), files, user_bytes=1 << 20)
    told = {each.name: each.num_bytes for each in found.causes}
    assert told == {"table": 1 << 20, "log": 9 * 4096, "journal": 4096, "metadata": 4096}
    assert found.store == "rocksdb"
    assert found.num_bursts == 4
    assert any(line.startswith("table") for line in found.remedies)
    assert found.small_share == pytest.approx(11 / 12)


def test_bursts_of_reads_are_parted_by_silence() -> None:
    assert bursts(ints(0, 10, 50_000_000), ints(5, 20, 50_000_005)).tolist() == [0, 0, 1]


def test_any_part_of_the_corpus_is_the_same_and_exact_search_finds_it() -> None:
    whole = corpus.vectors_of(0, 5000, 24, seed=3)
    assert np.array_equal(corpus.vectors_of(4000, 500, 24, seed=3), whole[4000:4500])
    assert np.allclose(np.linalg.norm(whole, axis=1), 1, atol=1e-5)
    queries = corpus.queries_of(4, 24, seed=3)
    true = corpus.exact(queries, 5000, 10, seed=3)
    assert np.array_equal(true, brute_force(queries, np.arange(5000), whole, 10))
    assert corpus.recall_of(true[:, ::-1], true) == 1.0
    assert corpus.recall_of(true + 5000, true) == 0.0


HERE = [name for name in ENGINES if is_installed(ENGINES[name]) and not name.startswith(("lance", "milvus", "diskann"))]


@pytest.mark.parametrize("name", HERE)
def test_an_engine_keeps_rows_and_finds_neighbours_after_reopening(name: str, tmp_path: Path) -> None:
    options = EngineOptions(tmp_path, 16, is_durable=True)
    rows = corpus.vectors_of(0, 200, 16, seed=1)
    engine = opened(name, options)
    try:
        engine.insert(np.arange(199), rows[:199])
        engine.insert(np.arange(199, 200), rows[199:])
        engine.finish()
    finally:
        engine.close()
    engine = opened(name, options)
    try:
        assert sorted(engine.ids().tolist()) == list(range(200))
        queries = corpus.queries_of(5, 16, seed=1)
        found = engine.search(queries, 10)
        assert found.shape == (5, 10)
        assert corpus.recall_of(found, corpus.exact(queries, 200, 10, seed=1)) > 0.6
    finally:
        engine.close()


def test_engines_are_chosen_by_name_and_a_missing_one_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each.name for each in chosen("sqlite,sqlite")] == ["sqlite"]
    with pytest.raises(ConfigError, match="type all, or some of kvtide"):
        chosen("nonsense\x1b[2J")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UnsupportedError, match="pip install hnswlib"):
        chosen("hnswlib")


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "--engines", "none-such"],
        ["bench", "--rows", "1"],
        ["bench", "--batch", "0"],
        ["bench", "--cuts", "soon"],
        ["bench", "--python", "sqlite=/none"],
        ["explain"],
        ["explain", "--run", "--", "true"],
    ],
)
def test_the_command_refuses_what_cannot_be(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left = CliRunner().invoke(app, ["recall", *words])
    assert isinstance(left.exception, KvtideError), left.output
    assert "type" in str(left.exception)


def test_the_engines_are_listed() -> None:
    shown = CliRunner().invoke(app, ["recall", "engines", "--json"])
    assert {each["name"] for each in json.loads(shown.stdout)} == set(ENGINES)


@needs_loop
@pytest.mark.root
def test_a_store_is_measured_on_a_device_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "kvtide", "recall", "bench", "--engines", "sqlite", "--rows", "60", "--dim", "16"]
    command += ["--batch", "1", "--queries", "4", "--disk", "128MiB", "--dir", str(tmp_path / "w"), "-o", str(out)]
    done = subprocess.run(
        [*command, "--html", str(tmp_path / "x.html")], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(out.read_text())["engines"]
    assert found["source"] == "own loop device, ext4"
    assert found["device_x"] > 1
    assert found["recall"] == 1.0
    assert found["kills"][0]["kept"] == found["kills"][0]["acked"]
    assert found["cuts"][0]["opens"]
    assert "sqlite" in done.stdout
    assert not loops(tmp_path)


def await_inserts(child: subprocess.Popen[bytes], num: int, seconds: float = 60) -> None:
    """Return once the worker of `child` has written so often; fails where that takes longer."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for one in psutil.Process(child.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended
                if "kvtide.stores.worker" in one.cmdline() and one.io_counters().write_count >= num:
                    return
        time.sleep(0.02)
    pytest.fail(f"no worker of {child.pid} has written {num} times in {seconds:g} s")


@needs_loop
@pytest.mark.root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ending_it_leaves_no_loop_device(tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-m", "kvtide", "recall", "bench", "--engines", "sqlite", "--rows", "100000", "--rate"]
    command += ["100", "--disk", "64MiB", "--dim", "8", "--dir", str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    await_loop(child, tmp_path)
    await_inserts(child, 100)  # nothing is imported, or set up, any more
    os.kill(child.pid, number)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == (130 if number == signal.SIGINT else -number), errors.decode()
    await_no_loop(tmp_path, seconds=20)


@needs_loop
@pytest.mark.root
def test_killing_it_before_the_mount_leaves_no_loop_device(tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "mkfs.ext4"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    command = [sys.executable, "-m", "kvtide", "recall", "bench", "--engines", "sqlite", "--rows", "60", "--dim", "8"]
    paths = {**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}"}
    child = subprocess.Popen(
        [*command, "--disk", "64MiB", "--dir", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=paths,
        start_new_session=True,
    )
    try:
        await_loop(child, tmp_path)
        os.kill(child.pid, signal.SIGKILL)
        child.wait(60)
        await_no_loop(tmp_path, seconds=20)
    finally:
        os.killpg(child.pid, signal.SIGKILL)  # the tool


FILL = """
import sqlite3, sys
base = sqlite3.connect(sys.argv[1] + "/rows.db", isolation_level=None)
base.execute("pragma journal_mode=wal")
base.execute("create table rows(id integer primary key, vector blob)")
for one in range(50):
    base.execute("insert into rows values (?, zeroblob(1024))", (one,))
base.close()
"""


@needs_loop
@pytest.mark.root
def test_a_command_is_run_and_its_writes_are_explained(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvtide", "recall", "explain", "--store", str(tmp_path / "s"), "--user-bytes"]
    command += ["51200", "--json", "-o", str(tmp_path / "t.kvtrace"), "--run", "--"]
    command += [sys.executable, "-c", FILL, str(tmp_path / "s")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "no block device" in done.stderr or "tracefs" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["store"] == "sqlite"
    assert {"log", "table"} & {each["name"] for each in told["causes"]}
    command = [sys.executable, "-m", "kvtide", "recall", "explain", str(tmp_path / "t.kvtrace"), "--store"]
    again = subprocess.run([*command, str(tmp_path / "s")], capture_output=True, text=True, timeout=120, check=False)
    assert "sqlite" in again.stdout, again.stderr
