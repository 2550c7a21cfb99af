"""Every benchmark runs, in its smallest form, and says where its figures come from. No figure is judged here."""

from __future__ import annotations

import io
import json
import math
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

import inprocess

FOLDER = Path(__file__).parent.parent / "benchmarks"
PEERS = sorted(FOLDER.glob("peers_*.py"))  # need an engine, which may not be here
BENCHMARKS = sorted(set(FOLDER.glob("[a-z]*.py")) - set(PEERS))
ENVIRONMENT = {"machine", "kernel", "python", "numpy", "filesystem", "mount_options", "drive", "commit", "date"}
MODEL = "from _model import"
TIMEOUT_S = 300  # a machine that others use, too


def _params() -> list[object]:
    params = []
    for path in BENCHMARKS:
        text = path.read_text()
        marks = [pytest.mark.model] if MODEL in text else []
        if "fio" in text:
            absent = shutil.which("fio") is None
            marks.append(pytest.mark.skipif(absent, reason="fio is not installed (apt install fio)"))
        params.append(pytest.param(path, id=path.stem, marks=marks))
    return params


def in_process(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a benchmark of the model on a short form of it."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.syspath_prepend(str(BENCHMARKS[0].parent))
        patch.setattr(sys, "argv", command)
        import _model

        patch.setattr(_model, "load", inprocess.load_short)
        with pytest.raises(SystemExit) as left:
            runpy.run_path(command[0], run_name="__main__")
    return subprocess.CompletedProcess(command, left.value.code or 0, out.getvalue(), err.getvalue())


@pytest.mark.parametrize("path", _params())
def test_smoke(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "result.json"
    monkeypatch.chdir(tmp_path)
    command = [str(path), "--smoke", "--json", "-o", str(out), "--dir", str(tmp_path / "files")]
    if MODEL in path.read_text():
        done = in_process(command)
    else:
        command.insert(0, sys.executable)
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    if result.get("result") == "skipped":
        pytest.skip(result["reason"])
    assert result["benchmark"] == path.stem
    assert result["environment"].keys() >= ENVIRONMENT
    assert all(result["environment"][name] not in (None, "") for name in ENVIRONMENT)
    assert {"seed", "repeats"} <= result.keys()
    nodes = list(_dicts(result))
    assert any("measured" in (node.get("label"), node.get("result")) for node in nodes)
    medians = [node["median"] for node in nodes if {"median", "p99", "spread"} <= node.keys()]
    assert medians, "there are no figures"
    assert all(math.isfinite(value) for value in medians)
    assert any(value > 0 for value in medians)
    printed = json.loads(done.stdout)
    assert printed["environment"].keys() >= ENVIRONMENT
    left = [found for found in (tmp_path / "files").rglob("*") if found.is_file()]
    assert not left, "a benchmark takes its files away"


def test_there_are_benchmarks() -> None:
    assert BENCHMARKS


def _dicts(value: object) -> Iterator[dict[str, object]]:
    if isinstance(value, dict):
        yield value
        for part in value.values():
            yield from _dicts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _dicts(part)


@pytest.mark.parametrize("path", PEERS, ids=lambda path: path.stem)
def test_a_benchmark_of_peers_runs_or_says_what_it_lacks(path: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(path), "--smoke", "--repeats", "1", "--dir", str(tmp_path / "files")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    if not done.stdout:
        assert "skipped" in done.stderr
        return
    assert {line.split()[0] for line in done.stdout.splitlines()} >= {"kvtide", path.stem.removeprefix("peers_")}
    assert not [found for found in tmp_path.rglob("*") if found.is_file()]
