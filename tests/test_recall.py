"""The long-term memory: rows are durable when added, found by a search, replaced, deleted, there after reopening."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kvtide.errors import ConfigError, FormatError, IoError
from kvtide.recall import Memory

DIM = 24


def vectors(num: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num, DIM)).astype(np.float32)


@pytest.mark.parametrize("metric", ["cosine", "dot", "l2"])
def test_search_is_exact_across_logs_and_after_reopening(tmp_path: Path, metric: str) -> None:
    rows, queries = vectors(2000), vectors(5, 1)
    if metric == "cosine":
        truth = (queries / np.linalg.norm(queries, axis=1)[:, None]) @ (rows / np.linalg.norm(rows, axis=1)[:, None]).T
    elif metric == "dot":
        truth = queries @ rows.T
    else:
        truth = -((queries[:, None] - rows[None]) ** 2).sum(2)
    expected = np.argsort(-truth, axis=1)[:, :10]
    for opening in range(2):
        with Memory.open(tmp_path / "m", DIM, metric=metric, log_bytes=64 << 10) as memory:
            if not opening:
                for first in range(0, 2000, 100):
                    memory.add(np.arange(first, first + 100), rows[first : first + 100], [b"x"] * 100)
            ids, scores = memory.search(queries, 10)
            assert (ids == expected).all()
            np.testing.assert_allclose(scores, np.take_along_axis(truth, expected, 1), rtol=1e-3, atol=1e-3)
            assert len(list((tmp_path / "m").glob("log-*.kvl"))) > 1
            assert len(memory) == 2000


def test_the_last_write_of_an_id_wins_also_across_logs(tmp_path: Path) -> None:
    rows = vectors(300)
    with Memory.open(tmp_path, DIM, log_bytes=64 << 10) as memory:
        for version in range(5):
            memory.add(np.arange(300), rows * (version + 1), [f"{version} {one}".encode() for one in range(300)])
        memory.add([7, 7, 8], rows[:3], [b"first", b"second", b"third"])
        memory.delete([9, 1000])
        memory.delete([10])
        memory.add([10], rows[10:11], [b"again"])
    with Memory.open(tmp_path, DIM, log_bytes=64 << 10) as memory:
        assert len(memory) == 299
        assert memory.get([7, 8, 9, 10, 11]) == [b"second", b"third", None, b"again", b"4 11"]
        ids, _ = memory.search(rows[9], 300)
        assert sorted(ids[0].tolist()) == [-1, *[one for one in range(300) if one != 9]]


def test_streamed_rows_share_commits_and_are_there_after_a_flush(tmp_path: Path) -> None:
    rows = vectors(200)
    with Memory.open(tmp_path, DIM, commit_ms=1000) as memory:
        tickets = [memory.add([one], rows[one : one + 1], wait=False) for one in range(200)]
        memory.flush()
        assert all(ticket.is_done for ticket in tickets)
        assert memory.write_io.num_syncs < 20
        assert len(memory) == 200


def test_threads_that_add_share_commits(tmp_path: Path) -> None:
    rows = vectors(160)
    with Memory.open(tmp_path, DIM) as memory:

        def work(first: int) -> None:
            for one in range(first, first + 20):
                memory.add([one], rows[one : one + 1], [b"%d" % one])

        threads = [threading.Thread(target=work, args=(first,)) for first in range(0, 160, 20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert memory.get(np.arange(160)) == [b"%d" % one for one in range(160)]


def test_a_filter_says_what_may_be_found(tmp_path: Path) -> None:
    rows = vectors(100)
    with Memory.open(tmp_path, DIM) as memory:
        memory.add(np.arange(100), rows)
        assert set(memory.search(rows[3], 100, [3, 5, 700])[0][0].tolist()) == {3, 5, -1}
        assert (memory.search(rows[3], 50, lambda ids: ids % 2 == 1)[0] % 2 == 1).all()


@pytest.mark.parametrize(
    ("ids", "rows", "payloads", "message"),
    [
        ([1], np.zeros((1, DIM + 1)), None, r"shape \[1, 25\].*shape \[1, 24\]"),
        ([1], np.zeros(DIM), None, "shape"),
        ([1, 2], np.zeros((1, DIM)), None, r"\[2, 24\]"),
        ([1], np.full((1, DIM), np.nan), None, "NaN or infinity"),
        ([1], np.full((1, DIM), 1e300), None, "NaN or infinity"),
        ([1], np.zeros((1, DIM), object), None, "object"),
        ([-1], np.zeros((1, DIM)), None, "from 0 to"),
        (np.array([1 << 63], np.uint64), np.zeros((1, DIM)), None, "from 0 to"),
        (["a"], np.zeros((1, DIM)), None, "whole numbers"),
        ([[1]], np.zeros((1, DIM)), None, "one dimension"),
        ([1], np.zeros((1, DIM)), [b"x" * (1 << 20) + b"y"], "payload_bytes_max"),
        ([1], np.zeros((1, DIM)), ["text"], "give bytes"),
        ([1], np.zeros((1, DIM)), [], "0 payloads"),
        ([1], np.zeros((1, DIM)), b"x", "one bytes object"),
    ],
)
def test_rows_that_are_none_are_refused_by_name(tmp_path: Path, ids, rows, payloads, message: str) -> None:
    with Memory.open(tmp_path, DIM) as memory:
        with pytest.raises(ConfigError, match=message):
            memory.add(ids, rows, payloads)
        assert len(memory) == 0


def test_what_is_no_memory_is_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "photo.jpg").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"photo\.jpg"):
        Memory.open(foreign, DIM)
    assert sorted(path.name for path in foreign.iterdir()) == ["photo.jpg"]
    with Memory.open(tmp_path / "m", DIM) as memory:
        with pytest.raises(IoError, match=r"owned by process [0-9]+"):
            Memory.open(tmp_path / "m", DIM)
        assert len(memory) == 0
    with Memory.open(tmp_path / "of", DIM, of="model a") as made:
        assert made.num_bad == 0
    with pytest.raises(ConfigError, match="vectors of model a, asked for those of model b"):
        Memory.open(tmp_path / "of", DIM, of="model b")
    Memory.open(tmp_path / "of", DIM).close()
    with pytest.raises(ConfigError, match="24 dimensions"):
        Memory.open(tmp_path / "m", DIM + 1)
    with pytest.raises(ConfigError, match="cosine"):
        Memory.open(tmp_path / "m", DIM, metric="l2")
    with pytest.raises(ConfigError, match="closed"):
        memory.add([1], vectors(1))
    for file in (tmp_path / "m").iterdir():
        assert file.stat().st_mode & 0o077 == 0


def test_what_others_may_change_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m").chmod(0o777)
    with pytest.raises(ConfigError, match="chmod go-w"):
        Memory.open(tmp_path / "m", DIM)
    Memory.open(tmp_path / "link", DIM).close()
    for name in ("memory.json", "ring.kvl", "log-00000001.kvl"):
        file = tmp_path / "link" / name
        file.rename(tmp_path / name)
        file.symlink_to(tmp_path / name)
        with pytest.raises((IoError, FormatError)):
            Memory.open(tmp_path / "link", DIM)
        file.unlink()
        (tmp_path / name).rename(file)
    Memory.open(tmp_path / "link", DIM).close()


def test_no_acknowledged_row_is_lost_when_the_process_is_killed(tmp_path: Path) -> None:
    script = Path(__file__).parent / "recall_killed.py"
    done = subprocess.run(
        [sys.executable, script, "--kills", "4", "--dir", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["rows_lost"] == 0


def test_a_full_disk_is_named_and_adding_works_again(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL_DISK, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


FULL_DISK = """
import resource, signal, sys
import numpy as np
from kvtide.errors import IoError
from kvtide.recall import Memory
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
rows = np.random.default_rng(0).standard_normal((2000, 24)).astype(np.float32)
with Memory.open(sys.argv[1] + "/m", 24) as memory:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, resource.RLIM_INFINITY))
    kept = []
    try:
        for one in range(2000):
            memory.add([one], rows[one : one + 1], [b"x" * 4000])
            kept.append(one)
    except IoError as error:
        assert error.errno in {27, 28} and "log-00000001.kvl" in str(error), error  # EFBIG stands for ENOSPC here
    assert 0 < len(kept) < 2000
    assert len(memory) == len(kept)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    memory.add([5000], rows[:1], [b"again"])
with Memory.open(sys.argv[1] + "/m", 24) as memory:
    assert len(memory) == len(kept) + 1 and memory.num_bad == 0
    assert memory.get([*kept, 5000]) == [b"x" * 4000] * len(kept) + [b"again"]
"""


@pytest.mark.parametrize("is_garbled", [False, True])
@pytest.mark.parametrize("is_settled", [False, True])
def test_a_last_group_torn_at_any_sector_is_whole_or_absent(tmp_path: Path, is_garbled: bool, is_settled: bool) -> None:
    """In the log, as after `close`; or in the ring, as after a kill: then it has not reached the log."""
    rows, payload = vectors(12), b"payload " * 300
    with Memory.open(tmp_path / "m", DIM) as memory:
        memory.add(np.arange(8), rows[:8], [payload] * 8)
        memory.add([8, 9], rows[8:10], [payload] * 2)
        if not is_settled:
            shutil.copytree(tmp_path / "m", tmp_path / "killed")
    folder = tmp_path / ("m" if is_settled else "killed")
    name = "log-00000001.kvl" if is_settled else "ring.kvl"
    raw = (folder / name).read_bytes()
    end = len(raw.rstrip(bytes(1))) + 1
    tried = range((end - 1) // 512 * 512, max(4096, end - 6000) if is_settled else -1, -512)
    seen = set()
    for at in tried:
        torn = raw[:at] + (b"\xa5" * (len(raw) - at) if is_garbled else bytes(len(raw) - at))
        copy = tmp_path / f"{at}"
        shutil.copytree(folder, copy)
        (copy / "ring.kvl").unlink()  # it still has what the log lost
        (copy / name).write_bytes(torn)
        with Memory.open(copy, DIM) as memory:
            found = memory.get(np.arange(10))
            assert found[:8] == [payload] * 8 if not is_settled else len({*found[:8]}) == 1
            assert len({*found[8:]}) == 1, "whole or absent"
            seen.add(found[8])
            memory.add([10], rows[:1], [b"goes on"])
        with Memory.open(copy, DIM) as memory:
            assert memory.get([8, 9, 10]) == [*found[8:], b"goes on"]
        shutil.rmtree(copy)
    assert None in seen
