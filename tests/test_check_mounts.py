"""A check that is killed leaves no mount and no loop device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtide.check.runner import machine_has
from loops import await_loop, await_no_loop


@pytest.mark.skipif("loop" not in machine_has(), reason="needs root and loop devices")
@pytest.mark.root
def test_a_killed_check_leaves_no_loop_device(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvtide", "check", "file", "--only", "inodes", "--dir", str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    await_loop(child, tmp_path)
    os.kill(child.pid, signal.SIGKILL)
    child.wait(60)
    await_no_loop(tmp_path)
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
