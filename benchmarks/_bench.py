"""What every benchmark shares: its switches, the machine it ran on, its figures in short, its result file.

Decides what a result file says about where it came from; knows no benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
SPREAD_MAX = 0.2  # runs that differ by more than this are called noisy
OUTLIER_RATIO = 1.5  # a first run this far from the median of the others was not warm


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the switches all benchmarks have; add your own to it."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--smoke", action="store_true", help="run in about two seconds; the figures mean nothing")
    made.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    made.add_argument("-o", "--out", type=Path, default=None, help="write the result as JSON to this file")
    made.add_argument("--dir", type=Path, default=Path(".kvtide/bench"), help="where the benchmark keeps its files")
    made.add_argument("--repeats", type=int, default=5, help="runs of each case; the median is shown")
    made.add_argument("--seed", type=int, default=1, help="of everything drawn at random")
    return made


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Return median, p99 and spread of `samples`; spread is (maximum - minimum) / median, without a unit."""
    values = np.asarray(samples, dtype=np.float64)
    median = float(np.median(values))
    spread = float(values.max() - values.min()) / abs(median) if median else 0.0
    return {"median": median, "p99": float(np.percentile(values, 99)), "spread": spread}


def warnings_of(name: str, samples: Sequence[float]) -> list[str]:
    """Return what is doubtful about `samples`: runs that disagree, or a first run unlike the others."""
    found = []
    spread = summary(samples)["spread"]
    if spread > SPREAD_MAX:
        found.append(f"{name}: runs differ by {spread:.0%} of their median")
    if len(samples) >= 3:
        rest = float(np.median(np.asarray(samples[1:])))
        low, high = sorted((abs(samples[0]), abs(rest)))
        if high > OUTLIER_RATIO * low:
            found.append(f"{name}: the first run is {samples[0]:.4g}, the others {rest:.4g}")
    return found


def environment(path: Path) -> dict[str, Any]:
    """Return what a reader must know to compare: machine, kernel, drive and file system under `path`, commit."""
    return {
        "machine": _machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        **_mount(path),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_result(name: str, payload: Mapping[str, Any], out: Path | None) -> None:
    """Write `payload` as JSON to `out`, with the benchmark's name first; nothing where `out` is None."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"benchmark": name, **payload}, indent=1, default=_plain) + "\n")
    print(f"wrote {out}", file=sys.stderr)


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)


def _machine() -> dict[str, Any]:
    info: dict[str, Any] = {"arch": platform.machine(), "cores": os.cpu_count(), "cpu": "unknown"}
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            info["cpu"] = line.split(":", 1)[1].strip()
            break
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemTotal"):
            info["memory_bytes"] = int(line.split()[1]) * 1024
    return info


def _mount(path: Path) -> dict[str, Any]:
    """Return file system, its options and the drive of the longest mount point that holds `path`."""
    best = ("", "unknown", "unknown", "")
    target = str(path.resolve())
    for line in _read("/proc/self/mounts").splitlines():
        device, point, kind, options = line.split()[:4]
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, device, kind, options)
    name = Path(best[1]).resolve().name if best[1].startswith("/dev/") else ""
    queue = Path("/sys/class/block") / name
    queue = (queue if (queue / "queue").exists() else queue.resolve().parent) / "queue"
    drive = {
        "device": best[1],
        "model": _read(str(queue.parent / "device" / "model")).strip() or "unknown",
        "rotational": _read(str(queue / "rotational")).strip() == "1",
        "scheduler": _read(str(queue / "scheduler")).strip(),
    }
    return {"filesystem": best[2], "mount_options": best[3], "drive": drive}


def _commit() -> str:
    """Return the commit measured; `-dirty` where the tree under `src` differs from it."""
    here = Path(__file__).parent.parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    return commit + ("-dirty" if git("status", "--porcelain", "--", "src") else "")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
