"""What can be read of a device or a process at any moment, without root: /proc, /sys and nvidia-smi.

Decides which figures become `sample` rows, and turns counters into rates. Knows no trace file.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl

SECTOR_BYTES = 512  # unit of /sys/block/*/stat, whatever the device has
GPU_PERIOD_S = 1.0  # nvidia-smi takes a good part of a second
GPU_QUERY = "utilization.gpu,memory.used"


@dataclass(slots=True)
class Counters:
    """One reading. Values count up from boot, or from the start of a process."""

    time_ns: int
    device: dict[str, int] = field(default_factory=dict)
    process: dict[str, float] = field(default_factory=dict)
    num_in_flight: int = 0


class Gauges:
    """Reads a device and a set of processes again and again; each reading is compared with the one before.

    Figures: of source `diskstats` those of iostat -x by its names; of `process` CPU as a share of one core, and bytes
    that its reads and writes asked for and moved; of `psi` the share of time tasks waited for I/O; of `gpu` its use.
    """

    def __init__(
        self,
        device: str = "",
        pids: Callable[[], set[int]] = set,
        *,
        root: Path = Path("/"),
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._device, self._pids, self._root, self._clock_ns = device, pids, root, clock_ns
        self._has_gpu = shutil.which("nvidia-smi") is not None
        self._gpu_due_ns = 0
        self._ended: dict[str, float] = {}  # counters of processes that are gone
        self._of_pid: dict[int, dict[str, float]] = {}
        self._last = self._read()

    def sample(self) -> pl.DataFrame:
        """Return what happened since the last call, as sample rows."""
        from kvtide.tables import pl

        now, last = self._read(), self._last
        self._last = now
        seconds = max(1e-9, (now.time_ns - last.time_ns) / 1e9)
        rows = [("diskstats", self._device, name, value) for name, value in _disk_rates(last, now, seconds).items()]
        for name, value in now.process.items():
            rows.append(("process", "traced", name, max(0.0, value - last.process.get(name, 0.0)) / seconds))
        rows += [("psi", "system", name, value) for name, value in self._pressure().items()]
        if self._has_gpu and now.time_ns >= self._gpu_due_ns:
            self._gpu_due_ns = now.time_ns + int(GPU_PERIOD_S * 1e9)
            rows += [("gpu", index, name, value) for index, name, value in _gpu()]
        return pl.DataFrame(
            [(now.time_ns, *row) for row in rows],
            schema={
                "time_ns": pl.Int64,
                "source": pl.String,
                "subject": pl.String,
                "name": pl.String,
                "value": pl.Float64,
            },
            orient="row",
        )

    def _read(self) -> Counters:
        counters = Counters(self._clock_ns())
        words = _text(self._root / "sys/block" / self._device / "stat").split() if self._device else []
        if len(words) >= 11:  # Documentation/block/stat.rst
            names = ("r", "rmerge", "rsector", "rtick", "w", "wmerge", "wsector", "wtick", "flight", "iotick", "qtick")
            counters.device = dict(zip(names, map(int, words), strict=False))
            counters.num_in_flight = counters.device["flight"]
        seen = {pid: found for pid in self._pids() if (found := self._process(pid))}
        for pid in set(self._of_pid) - set(seen):
            for name, value in self._of_pid[pid].items():
                self._ended[name] = self._ended.get(name, 0.0) + value
        self._of_pid = seen
        totals = dict(self._ended)
        for found in seen.values():
            for name, value in found.items():
                totals[name] = totals.get(name, 0.0) + value
        counters.process = totals
        return counters

    def _process(self, pid: int) -> dict[str, float]:
        """Return counters of one process; nothing where it is gone."""
        stat = _text(self._root / f"proc/{pid}/stat").rpartition(")")[2].split()
        if len(stat) < 13:
            return {}
        found = {"cpu_share": (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")}
        text = _text(self._root / f"proc/{pid}/io")  # of other users: root only
        names = {"rchar": "asked_read_bytes_per_s", "wchar": "asked_write_bytes_per_s"}
        names |= {"read_bytes": "read_bytes_per_s", "write_bytes": "write_bytes_per_s"}
        for name, ours in names.items():
            value = re.search(rf"^{name}: (\d+)$", text, re.MULTILINE)
            if value:
                found[ours] = float(value[1])
        return found

    def _pressure(self) -> dict[str, float]:
        found = re.findall(r"^(some|full) avg10=([0-9.]+)", _text(self._root / "proc/pressure/io"), re.MULTILINE)
        return {f"io_{kind}_share": float(value) / 100 for kind, value in found}


def family(roots: set[int]) -> set[int]:
    """Return the processes `roots` and all their children."""
    found, waiting = set(), list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                waiting += [int(child) for child in _text(task).split()]
    return found


def _disk_rates(last: Counters, now: Counters, seconds: float) -> dict[str, float]:
    if not now.device or not last.device:
        return {}
    change = {name: max(0, value - last.device.get(name, 0)) for name, value in now.device.items()}
    rates: dict[str, float] = {}
    for letter in "rw":
        num = change[letter]
        rates[f"{letter}/s"] = num / seconds
        rates[f"{letter}kB/s"] = change[f"{letter}sector"] * SECTOR_BYTES / 1024 / seconds
        rates[f"{letter}_await"] = change[f"{letter}tick"] / num if num else 0.0
        rates[f"{letter}areq-sz"] = change[f"{letter}sector"] * SECTOR_BYTES / 1024 / num if num else 0.0
    rates["aqu-sz"] = change["qtick"] / 1000 / seconds
    return rates


def _gpu() -> list[tuple[str, str, float]]:
    """Return (GPU, figure, value); nothing where nvidia-smi does not answer."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu=index,{GPU_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = []
    for line in done.stdout.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 3 and all(re.fullmatch(r"[0-9.]+", word) for word in words):
            rows.append((words[0], "utilization_share", float(words[1]) / 100))
            rows.append((words[0], "memory_used_MiB", float(words[2])))
    return rows


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def start_stopped(command: Sequence[str], **more: Any) -> subprocess.Popen[bytes]:
    """Start a command that waits, stopped, for SIGCONT: nothing of it is missed. Returns once it is stopped, or ended.

    A shell stops itself, and becomes the command when it is told to go on. A SIGCONT sent before that would be lost.
    `more` is for `Popen`.
    """
    child = subprocess.Popen(["/bin/sh", "-c", 'kill -STOP $$; exec "$@"', "sh", *command], **more)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    return child
