"""Segments of a memory: a merge changes nothing that can be asked, whenever it is killed; damage is named."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtide.errors import ConfigError, Corrupt, FormatError, KvtideError, UnsupportedError
from kvtide.recall import Memory
from kvtide.recall.manifest import Entry, Manifest
from kvtide.recall.merge import planned
from kvtide.trace.events import CAUSES
from kvtide.trace.record import Recorder

DIM, KEYS = 12, 1200
Truth = dict[int, tuple[np.ndarray, bytes]]


@pytest.fixture
def lance() -> None:
    pytest.importorskip("lance")


def opened(path: Path, **options: object) -> Memory:
    return Memory.open(path, DIM, **{"log_bytes": 64 << 10, "merge_rows": 300, **options})


def churn(memory: Memory, truth: Truth, rounds: int, seed: int = 0) -> None:
    """Add, replace and delete rows, in a memory and in a dict."""
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        ids, payloads = rng.integers(0, KEYS, 100), [rng.bytes(20) for _ in range(100)]
        rows = rng.standard_normal((100, DIM)).astype(np.float32)
        memory.add(ids, rows, payloads)
        truth.update(zip(ids.tolist(), zip(rows, payloads, strict=True), strict=True))
        gone = rng.integers(0, KEYS, 25)
        memory.delete(gone)
        for one in gone.tolist():
            truth.pop(one, None)
        memory.merger.wait()


def agree(memory: Memory, truth: Truth, metric: str = "cosine") -> None:
    """Compare everything that can be asked with a dict."""
    assert len(memory) == len(truth)
    assert memory.get(np.arange(KEYS)) == [truth[one][1] if one in truth else None for one in range(KEYS)]
    ids = np.array(sorted(truth))
    rows = np.stack([truth[one][0] for one in ids.tolist()]).astype(np.float64)
    queries = np.random.default_rng(9).standard_normal((4, DIM))
    if metric == "l2":
        scores = -((queries[:, None] - rows[None]) ** 2).sum(2)
    else:
        rows /= np.linalg.norm(rows, axis=1)[:, None]
        scores = queries / np.linalg.norm(queries, axis=1)[:, None] @ rows.T
    for keep in (None, ids[::3], ids[:5]):
        allowed = np.ones(len(ids), bool) if keep is None else np.isin(ids, keep)
        best = np.argsort(-np.where(allowed, scores, -np.inf), axis=1)[:, : min(10, int(allowed.sum()))]
        found, told = memory.search(queries.astype(np.float32), 10, keep)
        assert (found[:, : best.shape[1]] == ids[best]).all()
        assert (found[:, best.shape[1] :] == -1).all()
        np.testing.assert_allclose(told[:, : best.shape[1]], np.take_along_axis(scores, best, 1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("metric", ["cosine", "l2"])
@pytest.mark.usefixtures("lance")
def test_merged_rows_are_found_as_before_and_after_reopening(tmp_path: Path, metric: str) -> None:
    truth: Truth = {}
    with opened(tmp_path, metric=metric) as memory:
        churn(memory, truth, 50)
        agree(memory, truth, metric)
        assert memory.merger.num_merges > 4
    with opened(tmp_path, metric=metric) as memory:
        agree(memory, truth, metric)
        churn(memory, truth, 20, seed=1)
        agree(memory, truth, metric)
    for name in ("segment-*", "log-*"):
        assert 1 <= len(list(tmp_path.glob(name))) <= 8
    assert len(list(tmp_path.glob("manifest-*"))) == 2


@pytest.mark.usefixtures("lance")
def test_logs_that_were_merged_are_written_again(tmp_path: Path) -> None:
    truth: Truth = {}
    recorder = Recorder()
    with Memory.open(tmp_path / "m", DIM, log_bytes=64 << 10, merge_rows=300, recorder=recorder) as memory:
        churn(memory, truth, 40)
        assert memory.merger.num_merges > 2
        spares = list((tmp_path / "m").glob("spare-*"))
        files = {one.stat().st_ino for one in spares}
        assert 0 < len(spares) <= 8  # as many logs as a merge takes
        churn(memory, truth, 20, seed=1)
        assert files & {one.stat().st_ino for one in (tmp_path / "m").glob("log-*")}
        agree(memory, truth)
    with opened(tmp_path / "m") as memory:
        assert memory.num_bad == 0
        agree(memory, truth)
        churn(memory, truth, 40, seed=2)
        agree(memory, truth)
    ops = recorder.ops.rows()
    merged = ops[ops["cause"] == CAUSES.index("memory-segment")]
    assert merged["is_write"].all()
    assert int(merged["length"].sum()) > 0


@pytest.mark.usefixtures("lance")
def test_a_process_that_ends_in_a_merge_without_close_ends_well(tmp_path: Path) -> None:
    forgets = """if True:
        import sys, time
        from pathlib import Path
        import numpy as np
        from kvtide.recall import Memory
        from kvtide.recall import merge
        made, write = [], merge.write_segment
        def slowly(parts):
            for part in parts:
                made.append(1)
                time.sleep(0.01)
                yield part
        merge.write_segment = lambda path, parts, *more: write(path, slowly(parts), *more)
        memory = Memory.open(Path(sys.argv[1]), 64, log_bytes=64 << 10, merge_rows=3000, index_rows=3000)
        rows = np.random.default_rng(0).standard_normal((20000, 64)).astype(np.float32)
        memory.add(np.arange(20000), rows)
        while not made:
            memory.add([20001], rows[:1])
    """
    command = [sys.executable, "-c", forgets, tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    with Memory.open(tmp_path, 64) as memory:
        assert len(memory) >= 20000


@pytest.mark.usefixtures("lance")
def test_a_crash_after_a_spare_became_a_log_loses_nothing(tmp_path: Path) -> None:
    truth: Truth = {}
    with opened(tmp_path / "m") as memory:
        churn(memory, truth, 40)
    spare = min((tmp_path / "m").glob("spare-*"))
    newest = max(int(one.name[4:12]) for one in (tmp_path / "m").glob("log-*"))
    spare.rename(tmp_path / "m" / f"log-{newest + 1:08}.kvl")  # and it was not begun
    with opened(tmp_path / "m") as memory:
        assert memory.num_bad == 0
        agree(memory, truth)
        churn(memory, truth, 10, seed=1)
        agree(memory, truth)


@pytest.mark.parametrize("dim", [12, 48])  # the index of the one is of another kind than that of the other
@pytest.mark.usefixtures("lance")
def test_a_large_segment_has_an_index_that_misses_little(tmp_path: Path, dim: int) -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((4000, dim)).astype(np.float32)
    with Memory.open(tmp_path, dim, log_bytes=64 << 10, merge_rows=3000, index_rows=3000) as memory:
        for first in range(0, 4000, 500):
            memory.add(np.arange(first, first + 500), rows[first : first + 500])
        memory.merger.wait()
        memory.delete(np.arange(0, 4000, 2))
        assert memory._open_shelf().segments[0].entry.is_indexed
        assert len(list(tmp_path.glob("segment-*/rows.lance/data/*"))) == 1  # however many batches it was written in
        queries = rows[:40] + 0.1
        found, scores = memory.search(queries, 10)
        exact = (queries / np.linalg.norm(queries, axis=1)[:, None]) @ (rows / np.linalg.norm(rows, axis=1)[:, None]).T
        exact[:, ::2] = -np.inf
        best = np.argsort(-exact, axis=1)[:, :10]
        assert np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found.tolist(), best.tolist(), strict=True)]) >= 0.99
        assert (found % 2 == 1).all()
        assert (np.diff(scores, axis=1) <= 0).all()
        assert memory.search(rows[8], 1, [9])[0][0, 0] == 9


@pytest.mark.usefixtures("lance")
def test_a_merge_killed_at_any_step_loses_nothing(tmp_path: Path) -> None:
    script = Path(__file__).parent / "recall_merged.py"
    words = [sys.executable, "-W", "ignore", script, "--dir", tmp_path, "--every", "8"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("damage", [b"", None])
@pytest.mark.usefixtures("lance")
def test_an_unreadable_manifest_is_set_aside_and_told(tmp_path: Path, caplog, damage: bytes | None) -> None:
    truth: Truth = {}
    with opened(tmp_path) as memory:
        churn(memory, truth, 30)
    newest = max(tmp_path.glob("manifest-*.json"))
    newest.write_bytes(newest.read_bytes().replace(b"logs_to", b"logs_of") if damage is None else damage)
    with caplog.at_level(logging.WARNING, "kvtide.recall"), opened(tmp_path) as memory:
        agree(memory, truth)
        churn(memory, truth, 10, seed=2)
    assert caplog.text.count("set aside") == 1
    assert newest.with_name(newest.name + ".unreadable").exists()
    with opened(tmp_path) as memory:
        agree(memory, truth)


@pytest.mark.usefixtures("lance")
def test_damaged_segments_are_named(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((1500, DIM)).astype(np.float32)
    with opened(tmp_path) as memory:
        for first in range(0, 1500, 500):
            memory.add(np.arange(first, first + 500), rows[first : first + 500], [b"x"] * 500)
        memory.merger.wait()
    data = min(tmp_path.glob("segment-*/rows.lance/data/*.lance"))
    whole = data.read_bytes()
    assert whole.count(rows[3].tobytes()) == 1
    data.write_bytes(whole.replace(rows[3].tobytes(), rows[4].tobytes()))
    with opened(tmp_path) as memory, pytest.raises(Corrupt, match="row 3 is not as it was added"):
        memory.get([3])
    data.write_bytes(whole[:100])
    with pytest.raises(KvtideError, match="segment-"):
        opened(tmp_path)
    data.write_bytes(whole)
    min(tmp_path.glob("segment-*/deleted.ids")).write_bytes(b"\x01" * 8)
    with pytest.raises(FormatError, match="1, or another check"):
        opened(tmp_path)


def test_without_pylance_logs_are_kept_and_it_is_said_once(tmp_path: Path, caplog, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "lance", None)
    truth: Truth = {}
    with caplog.at_level(logging.WARNING, "kvtide.recall"), opened(tmp_path) as memory:
        churn(memory, truth, 30)
        agree(memory, truth)
    assert caplog.text.count("pip install 'kvtide[recall]'") == 1
    assert not list(tmp_path.glob("segment-*"))


@pytest.mark.usefixtures("lance")
def test_segments_cannot_be_opened_without_pylance(tmp_path: Path, monkeypatch) -> None:
    with opened(tmp_path) as memory:
        churn(memory, {}, 15)
    monkeypatch.setitem(sys.modules, "lance", None)
    with pytest.raises(UnsupportedError, match=r"kvtide\[recall\]"):
        opened(tmp_path)


def test_options_of_merges_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="merge_rows is 0"):
        opened(tmp_path, merge_rows=0)


def test_segments_merge_in_tiers_of_eight() -> None:
    def plan(have: list[int], rows: int, log_bytes: int = 0) -> int | None:
        return planned(have, rows, log_bytes, merge_rows=100)

    assert plan([], 99) is None
    assert plan([], 100) == 0
    assert plan([], 5, 1 << 30) == 0
    assert plan([100] * 6, 100) == 6
    assert plan([100] * 7, 100) == 0
    assert plan([900, *[100] * 7], 100) == 1
    assert plan([*[900] * 7, *[100] * 7], 100) == 0
    kept: list[int] = []
    written = 0
    for _ in range(512):
        first = plan(kept, 100)
        assert first is not None
        kept[first:] = [sum(kept[first:]) + 100]
        written += kept[-1]
    assert len(kept) <= 15
    assert written / 51200 <= 4  # tiers


def test_a_manifest_puts_a_segment_where_those_it_replaces_were() -> None:
    def entry(number: int, *replaces: int) -> Entry:
        return Entry(number, 1, 0, "", replaces, number, is_indexed=False)

    manifest = Manifest(4, (entry(1), entry(2), entry(3)), 3).after(entry(4, 2, 3))
    assert [one.number for one in manifest.entries] == [1, 4]
    assert (manifest.number, manifest.logs_to) == (5, 4)
