"""One memory's contract, kept by a directory of this machine and by Milvus Lite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtide.errors import ConfigError, UnsupportedError
from kvtide.recall import open_memory

DIM = 16


@pytest.mark.parametrize("metric", ["cosine", "l2"])
@pytest.mark.parametrize("prefix", ["", "milvus:"])
@pytest.mark.filterwarnings("ignore")
def test_rows_are_kept_replaced_deleted_and_found(tmp_path: Path, prefix: str, metric: str) -> None:
    if prefix:
        for name in ("pymilvus", "milvus_lite"):
            pytest.importorskip(name)
    rows = np.random.default_rng(0).standard_normal((300, DIM)).astype(np.float32)
    where = f"{prefix}{tmp_path / 'memory.db'}"
    for opening in range(2):
        memory = open_memory(where, DIM, metric=metric)
        if not opening:
            memory.add(np.arange(300), rows, [b"\xff%d" % one for one in range(300)])
            memory.delete(np.array([5]))
            memory.add(np.array([6]), rows[7:8] * 2, [b"new"])
        ids, scores = memory.search(rows[10:12], 5)
        assert ids[:, 0].tolist() == [10, 11]
        np.testing.assert_allclose(scores[:, 0], 1 if metric == "cosine" else 0, atol=1e-4)
        assert (np.diff(scores, axis=1) <= 0).all()
        assert memory.get(np.array([4, 5, 6, 400])) == [b"\xff4", None, b"new", None]
        assert sorted(memory.search(rows[10:11], 3, [3, 5, 9])[0][0].tolist()) == [-1, 3, 9]
        assert (memory.search(rows[10:11], 3, lambda found: found % 2 == 1)[0] % 2 == 1).all()
        with pytest.raises(ConfigError, match="NaN"):
            memory.add(np.array([1]), np.full((1, DIM), np.nan, np.float32))
        memory.close()
    with pytest.raises(ConfigError, match="16 dimensions"):
        open_memory(where, DIM + 1, metric=metric)
    with pytest.raises(ConfigError, match=metric):
        open_memory(where, DIM, metric="dot")


def test_milvus_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pymilvus", None)
    with pytest.raises(UnsupportedError, match=r"kvtide\[milvus\]"):
        open_memory("milvus:nowhere.db", DIM)
