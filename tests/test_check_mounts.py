"""A check that is killed leaves no mount and no loop device."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtide.check.runner import machine_has


def loops(under: Path) -> list[str]:
    """Return backing files of loop devices that lie under a folder."""
    found = []
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # cleared meanwhile
            found.append(file.read_text())
    return [text for text in found if str(under) in text]


@pytest.mark.skipif("loop" not in machine_has(), reason="needs root and loop devices")
@pytest.mark.root
def test_a_killed_check_leaves_no_loop_device(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvtide", "check", "file", "--only", "inodes", "--dir", str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not loops(tmp_path) and child.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    assert loops(tmp_path)
    os.kill(child.pid, signal.SIGKILL)
    child.wait(60)
    until = time.monotonic() + 60
    while loops(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    assert not loops(tmp_path)
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
