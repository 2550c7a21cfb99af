"""Loop devices whose files lie under a folder, for tests of what must not be left behind."""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path


def loops(under: Path) -> list[str]:
    """Return backing files of loop devices that lie under a folder; deleted ones keep their path."""
    found = []
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # cleared meanwhile
            found.append(file.read_text())
    return [text for text in found if str(under) in text]


def await_loop(child: subprocess.Popen[bytes], under: Path, seconds: float = 60) -> None:
    """Return once `child` has a loop device under a folder; fails where it ends first, or takes longer."""
    until = time.monotonic() + seconds
    while not loops(under) and child.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    assert loops(under)


def await_no_loop(under: Path, seconds: float = 60) -> None:
    """Return once there is no loop device under a folder; fails where that takes longer."""
    until = time.monotonic() + seconds
    while loops(under) and time.monotonic() < until:
        time.sleep(0.05)
    assert not loops(under)
