"""What does tracing cost, and how fast is a capture decoded?

fio reads 4 KiB at random at depth 128, by turns without and with a capture of its device running beside it; with the
moment a command was queued (three events a command) and without it (two). The yardstick is the load untraced.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import _bench as bench
from kvtide.errors import UnsupportedError
from kvtide.probe.caps import caps_of
from kvtide.trace.kernel import Capture, CaptureOptions

MODES = {"untraced": None, "issue, complete": False, "queue, issue, complete": True}


def fio_iops(file: Path, size: str, seconds: float) -> float:
    """Return the read IOPS of one run."""
    words = ["fio", "--name=cost", f"--filename={file}", f"--size={size}", "--rw=randread", "--bs=4k", "--direct=1"]
    words += ["--ioengine=io_uring", "--iodepth=128", "--time_based", "--output-format=json"]
    words += [f"--runtime={round(seconds * 1000)}ms"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["iops"])


def run_one(has_queue: bool | None, file: Path, size: str, seconds: float, device: int) -> dict[str, float]:
    """Run the load once, captured unless `has_queue` is None."""
    if has_queue is None:
        return {"iops": fio_iops(file, size, seconds)}
    options = CaptureOptions(device=device, has_queue=has_queue, has_uring=False, folder=file.parent)
    capture = Capture(options)
    try:
        cpu = time.process_time()
        capture.start()
        iops = fio_iops(file, size, seconds)
        capture.stop()
        cpu = time.process_time() - cpu
        begun, rows = time.perf_counter(), 0
        for _, frame in capture.frames():
            rows += len(frame)
        took = time.perf_counter() - begun
        num_events = rows * (3 if has_queue else 2)
        return {
            "iops": iops,
            "num_lost": float(capture.num_lost),
            "num_rows": float(rows),
            "capture_bytes": float(capture.num_bytes),
            "reader_cpu_share": cpu / seconds,
            "decode_events_per_s": num_events / took,
        }
    finally:
        capture.close()


def main() -> int:
    """Measure and tell."""
    words = bench.parser(__doc__ or "").parse_args()
    seconds, size = (0.3, "32M") if words.smoke else (5.0, "1G")
    repeats, num_dropped = (1, 0) if words.smoke else (words.repeats, 1)
    words.dir.mkdir(parents=True, exist_ok=True)
    file = words.dir / "trace_cost.data"
    caps = caps_of(words.dir)
    try:
        Capture(CaptureOptions(device=caps.number)).close()
    except UnsupportedError as refused:
        print(f"skipped: {refused}", file=sys.stderr)
        bench.write_result("trace_cost", {"result": "skipped", "reason": str(refused)}, words.out)
        return 0
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in MODES}
    try:
        for turn in range(num_dropped + repeats):  # the first turn lays the file out, and is dropped
            for name, has_queue in MODES.items():
                found = run_one(has_queue, file, size, seconds, caps.number)
                if turn >= num_dropped:
                    samples[name].append(found)
    finally:
        file.unlink(missing_ok=True)
    result = {
        "question": "what does tracing cost, and how fast is a capture decoded?",
        "environment": bench.environment(words.dir),
        "seed": words.seed,
        "repeats": repeats,
        "seconds": seconds,
        "modes": told(samples),
    }
    if words.json:
        print(json.dumps(result, indent=1))
    else:
        for name, row in result["modes"].items():
            print(f"{name:24} {json.dumps(row)}")
    out = words.out or (None if words.smoke else bench.RESULTS / "trace_cost.json")
    bench.write_result("trace_cost", result, out)
    return 0


def told(samples: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, object]]:
    """Return figures a mode, and the IOPS of each turn against the untraced run of that turn."""
    base = [row["iops"] for row in samples["untraced"]]
    modes: dict[str, dict[str, object]] = {}
    for name, rows in samples.items():
        figures: dict[str, object] = {"label": "measured"}
        figures |= {key: bench.summary([row[key] for row in rows]) for key in rows[0] if key != "num_lost"}
        figures["iops_ratio"] = bench.summary([row["iops"] / plain for row, plain in zip(rows, base, strict=True)])
        if "num_lost" in rows[0]:
            figures["num_lost"] = sum(row["num_lost"] for row in rows)
        modes[name] = figures
    return modes


if __name__ == "__main__":
    os.environ.setdefault("LC_ALL", "C")
    sys.exit(main())
