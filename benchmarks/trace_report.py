"""How long does a report of a large trace take, and how much memory?

A trace of 10 million block commands is made up (4 to 512 KiB, six causes, 30 layers), then `kvtide report --html` runs
in a process of its own. The yardstick is polars adding up the lengths of the same file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import polars as pl

import _bench as bench
from kvtide.trace.events import CAUSES
from kvtide.trace.file import ROWS_MAX, About, Device, TraceWriter

DEVICE = 8 << 20


def make_trace(path: Path, num_rows: int, seed: int) -> None:
    """Write block rows of a device that is busy at a depth of about 8."""
    rng, at_ns = np.random.default_rng(seed), 0
    with TraceWriter(path) as writer:
        for start in range(0, num_rows, ROWS_MAX):
            num = min(ROWS_MAX, num_rows - start)
            time_ns = at_ns + np.cumsum(rng.integers(5_000, 20_000, num))
            at_ns = int(time_ns[-1])
            frame = pl.DataFrame(
                {
                    "time_ns": time_ns,
                    "queue_ns": time_ns - rng.integers(1, 3_000, num),
                    "complete_ns": time_ns + rng.integers(50_000, 150_000, num),
                    "device": np.full(num, DEVICE),
                    "offset": rng.integers(0, 1 << 26, num) * 4096,
                    "length": rng.choice([4096, 65536, 131_072, 524_288], num),
                    "flags": np.where(rng.random(num) < 0.8, 1, 2),
                    "layer": rng.integers(0, 30, num),
                    "cause": np.array(CAUSES, object)[rng.integers(0, len(CAUSES), num)].tolist(),
                }
            )
            writer.add("block", frame)
        about = About(source="kernel", end_ns=at_ns + 200_000, devices={str(DEVICE): Device(name="made-up")})
        writer.finish(about)


def timed(words: list[str]) -> tuple[float, int]:
    """Run a command; return seconds and its peak of resident memory in bytes, no less than that of this process."""
    begun = time.perf_counter()
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise RuntimeError(f"{words[:4]} failed")
    return time.perf_counter() - begun, usage.ru_maxrss * 1024


def main() -> int:
    """Measure and tell."""
    words = bench.parser(__doc__ or "").parse_args()
    num_rows = 50_000 if words.smoke else 10_000_000
    repeats = 1 if words.smoke else min(3, words.repeats)
    words.dir.mkdir(parents=True, exist_ok=True)
    trace, page = words.dir / "large.kvtrace", words.dir / "large.html"
    plain = f"import polars as pl; print(pl.scan_parquet({str(trace)!r}).select(pl.col('length').sum()).collect())"
    rows: dict[str, list[tuple[float, int]]] = {"report": [], "sum": []}
    try:
        begun = time.perf_counter()
        make_trace(trace, num_rows, words.seed)
        made_s, num_bytes = time.perf_counter() - begun, trace.stat().st_size
        for _ in range(repeats):
            rows["sum"].append(timed([sys.executable, "-c", plain]))
            rows["report"].append(timed([sys.executable, "-m", "kvtide", "report", str(trace), "--html", str(page)]))
        page_bytes = page.stat().st_size
    finally:
        trace.unlink(missing_ok=True)
        page.unlink(missing_ok=True)
    result = {
        "question": "how long does a report of a large trace take, and how much memory?",
        "environment": bench.environment(words.dir),
        "label": "measured",
        "seed": words.seed,
        "repeats": repeats,
        "num_rows": num_rows,
        "file_bytes": num_bytes,
        "page_bytes": page_bytes,
        "making_s": made_s,
        **{f"{name}_s": bench.summary([seconds for seconds, _ in found]) for name, found in rows.items()},
        **{f"{name}_peak_bytes": max(peak for _, peak in found) for name, found in rows.items()},
    }
    print(json.dumps(result, indent=1))
    out = words.out or (None if words.smoke else bench.RESULTS / "trace_report.json")
    bench.write_result("trace_report", result, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
