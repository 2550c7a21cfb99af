"""What the scripts share that is of no project: damage to files, reads under way, writers killed, files a directory."""

from __future__ import annotations

import collections
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

SIZE = 65536
READ_CALLS = {"0", "17", "19", "295"}  # read, pread64, readv and preadv of x86-64
DAMAGE: dict[str, Callable[[bytes, bytes], bytes]] = {
    "flipped": lambda one, _: one[: SIZE // 2] + bytes([one[SIZE // 2] ^ 1]) + one[SIZE // 2 + 1 :],
    "torn": lambda one, _: one[: len(one) // 2] + bytes(len(one) - len(one) // 2),
    "swapped": lambda one, other: one[: len(one) // 2] + other[len(other) // 2 :],
    "senseless": lambda one, _: os.urandom(len(one)),
}


def files_of(folder: str) -> list[Path]:
    """Return the plain files under a folder, the oldest first."""
    return sorted(
        (path for path in Path(folder).rglob("*") if path.is_file()), key=lambda path: path.stat().st_mtime_ns
    )


def told_bytes(value: bytes) -> dict[str, int]:
    """Return how often the four commonest bytes are there."""
    return {hex(byte): num for byte, num in collections.Counter(value).most_common(4)}


def exit_code(faults: dict[str, bool]) -> int:
    """Print them; return 1 if every fault is there, 0 if none is, 2 for some."""
    print(", ".join(f"{name}: {'fault' if is_there else 'right'}" for name, is_there in faults.items()))
    if len(set(faults.values())) > 1:
        return 2
    return int(all(faults.values()))


def leave(code: int) -> NoReturn:
    """End at once, with no folder removed: reads that never return, and threads of libraries, are not waited for."""
    sys.stdout.flush()
    os._exit(code)


def _cannot_tell(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    """End with 2: what nobody caught says nothing of the fault, and Python's own code for it is 1."""
    sys.__excepthook__(kind, error, at)
    leave(2)


sys.excepthook = _cannot_tell


def depth_code(most: int) -> int:
    """Return 1 if one file was read after the other, 0 if several at once, 2 if none was."""
    return int(most == 1) if most else 2


def most_read_at_once(files: list[Path], read: Callable[[], object], seconds: float = 2.0) -> int:
    """Return how many of the files `read` has open at once. Each is made a pipe, which holds up whoever reads it.

    `read` never returns: `leave` afterwards.
    """
    for path in files:
        path.rename(path.with_name(path.name + ".away"))
        os.mkfifo(path)
    threading.Thread(target=read, daemon=True).start()
    held: dict[Path, int] = {}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for path in files:
            if path not in held:
                with contextlib.suppress(OSError):  # ENXIO: nobody reads it
                    held[path] = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        time.sleep(0.05)
    return len(held)


def most_in_reads(read: Callable[[], object]) -> int:
    """Return how many other threads of this process are in a read at once, at most, while `read` runs."""
    reading = threading.Thread(target=read)
    reading.start()
    most, own = 0, str(threading.get_native_id())
    while reading.is_alive():
        calls = [_call_of(task) for task in Path("/proc/self/task").iterdir() if task.name != own]
        most = max(most, sum(call in READ_CALLS for call in calls))
    return most


def _call_of(task: Path) -> str:
    """Return the number of the system call a thread waits in."""
    try:
        return (task / "syscall").read_text().partition(" ")[0]
    except OSError:  # it ended
        return ""


def kill_writers(script: str, folder: str, kills: int = 3) -> None:
    """Run `script write FOLDER NUMBER` and kill it while it writes, again and again."""
    for kill in range(kills):
        child = subprocess.Popen([sys.executable, script, "write", folder, str(kill)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline(), "it did not begin to write"
        time.sleep(0.3 + 0.1 * kill)
        child.kill()
        child.communicate()


def most_in_one_directory(folder: str) -> int:
    """Return the number of files of the fullest directory."""
    return max(collections.Counter(path.parent for path in files_of(folder)).values(), default=0)
