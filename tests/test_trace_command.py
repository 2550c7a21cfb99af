"""`kvtide trace` and `kvtide top` as people type them: what they refuse, and what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from inprocess import kvtide
from kvtide.errors import UnsupportedError
from kvtide.trace.file import TraceFile
from kvtide.trace.kernel import find_tracefs, tracefs
from kvtide.trace.live import family, start_stopped

KVTIDE = [sys.executable, "-m", "kvtide"]
PATIENCE_S = 300  # a machine that others use, too


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def can_trace() -> bool:
    try:
        find_tracefs()
    except UnsupportedError:
        return False
    return True


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.02)


def commands_of(pids: set[int]) -> set[str]:
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            found.add(Path(f"/proc/{pid}/comm").read_text().strip())
    return found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing says when to stop"),
        (["--pid", "999999999"], "no such process"),
        (["--pid", "1", "--", "true"], "one of them"),
        (["--seconds", "1", "--calls"], "--calls needs to know whose"),
        (["--seconds", "1", "--device", "/nowhere"], "does not exist"),
        (["--seconds", "1", "-o", "/nowhere/x"], "is no directory"),
        (["--seconds", "1", "--buffer", "much"], "not a size"),
        (["--", "no-such-command-here"], "no such command"),
    ],
)
def test_what_cannot_be_traced_is_explained(words: list[str], message: str, tmp_path: Path) -> None:
    done = kvtide("trace", *words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_exit_code_of_the_command_is_kept(tmp_path: Path) -> None:
    command = [*KVTIDE, "trace", "--json", "--", "sh", "-c", "exit 7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout)["exit_code"] == 7
    assert [path.name for path in tmp_path.iterdir()] == ["trace.kvtrace"]


def test_without_the_kernel_the_rest_is_still_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracefs, "TRACEFS", (Path("/nowhere"),))
    done = kvtide("trace", "--json", "--", "sh", "-c", "sleep 0.6")
    assert done.returncode == 0, done.stderr
    assert "instead" in done.stderr
    trace = TraceFile(tmp_path / "trace.kvtrace")
    assert trace.about.source == "proc"
    assert "cpu_share" in trace.frame("sample")["name"].to_list()
    shown = kvtide("report", str(tmp_path / "trace.kvtrace"), "--json")
    assert json.loads(shown.stdout)["traces"][0]["indicators"]["level"] == "sample"


@pytest.mark.root
@pytest.mark.skipif(not can_trace(), reason="the kernel may not be traced here")
def test_ctrl_c_keeps_what_was_recorded_and_leaves_no_instance(tmp_path: Path) -> None:
    command = [*KVTIDE, "trace", "--json", "--", "sleep", "30"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    name = f"{tracefs.PREFIX}{running.pid}-"
    instances = find_tracefs() / "instances"
    wait_until(lambda: "sleep" in commands_of(family({running.pid})))  # what is recorded runs
    assert any(path.name.startswith(name) for path in instances.iterdir())
    time.sleep(0.5)  # a few samples
    running.send_signal(signal.SIGINT)
    told, _ = running.communicate(timeout=PATIENCE_S)
    assert any("Interrupted" in note for note in json.loads(told)["notes"])
    assert not any(path.name.startswith(name) for path in instances.iterdir())
    assert TraceFile(tmp_path / "trace.kvtrace").about.rows["sample"] > 0


@pytest.mark.root
@pytest.mark.skipif(not can_trace(), reason="the kernel may not be traced here")
def test_an_instance_of_a_killed_process_is_taken_away() -> None:
    instances = find_tracefs() / "instances"
    running = subprocess.Popen([*KVTIDE, "trace", "--seconds", "30"])
    name = f"{tracefs.PREFIX}{running.pid}-"
    wait_until(lambda: any(path.name.startswith(name) for path in instances.iterdir()))
    running.kill()
    running.wait()
    assert kvtide("trace", "--seconds", "0.2").returncode == 0
    assert not any(path.name.startswith(name) for path in instances.iterdir())


@pytest.mark.parametrize("words", [[], ["--pid", str(os.getpid())]])
def test_top_tells_one_view(words: list[str]) -> None:
    done = kvtide("top", "--count", "1", "--interval", "0.3", "--json", *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["seconds"] >= 0.3
    shown = kvtide("top", "--count", "1", "--interval", "0.3", *words)
    assert "ops/s" in shown.stdout


def test_a_command_is_stopped_before_it_is_told_to_go_on(tmp_path: Path) -> None:
    made = tmp_path / "made"
    child = start_stopped(["touch", str(made)])
    assert Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    assert not made.exists()
    child.send_signal(signal.SIGCONT)
    assert child.wait(30) == 0
    assert made.exists()
