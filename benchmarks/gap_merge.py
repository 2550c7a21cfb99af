"""What do reads cost that lie near each other, and from which gap on is it cheaper to read over what lies between?

Fragments of 24 KiB (16 tokens of a layer of SmolLM2-135M in fp32) are read from one file, a random part of all of them,
joined over gaps of up to so many bytes. Cases are read in turn; the widest gap that a probe of the same drive advises
stands beside the fastest one measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from _bench import RESULTS, environment, parser, summary, warnings_of, write_result
from _tier import COLD, MIB, UNKNOWN_ACCESS
from kvtide import __version__
from kvtide.io.opening import open_engine
from kvtide.io.ops import OP, READ, WRITE, Engine, address_of, aligned_buffer
from kvtide.io.schedule import Merged, merge
from kvtide.probe.file import DEPTH, Probe, gap_bytes_max
from kvtide.probe.survey import ProbeOptions, probe_path
from kvtide.tiers.namespace import open_data
from kvtide.tiers.slotio import OP_BYTES_MAX

FRAGMENT_BYTES = 24 << 10
DENSITIES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9)
GAP_FRAGMENTS = (0, 1, 2, 4, 8, 16)  # gaps are whole fragments here: these limits are all that differ
SAME = 0.05  # of the time: medians closer than this are not told apart


@dataclass(frozen=True, slots=True)
class Place:
    """An open file of fragments, and memory for them in random order."""

    fd: int
    engine: Engine
    memory: npt.NDArray[np.uint8]
    order: npt.NDArray[np.int64]

    def batch(self, wanted: npt.NDArray[np.int64], kind: int) -> npt.NDArray[np.void]:
        """Return one operation a wanted fragment."""
        batch = np.zeros(len(wanted), OP)
        batch["fd"], batch["kind"], batch["length"] = self.fd, kind, FRAGMENT_BYTES
        batch["offset"] = wanted * FRAGMENT_BYTES
        batch["address"] = address_of(self.memory) + self.order[wanted] * FRAGMENT_BYTES
        return batch

    def do(self, merged: Merged) -> float:
        """Do all operations; return the seconds they took."""
        started = time.perf_counter_ns()
        self.engine.submit(merged.batch)
        done = self.engine.reap(len(merged.batch))
        assert not done["error"].any(), "an operation failed"
        return (time.perf_counter_ns() - started) / 1e9


def main() -> int:
    """Measure and report."""
    made = parser(__doc__ or "")
    made.add_argument("--file-mib", type=int, default=384, help="size of the file")
    made.add_argument("--engine", default="auto", help="auto, uring or threads")
    made.add_argument("--probe-seconds", type=float, default=15.0, help="time of the probe; 0 for none")
    args = made.parse_args()
    if args.smoke:
        args.file_mib, args.repeats, args.probe_seconds = 6, 2, 0.0
    payload = run(args)
    if args.json:
        print(json.dumps(payload, indent=1, default=str))
    else:
        show(payload)
    write_result("gap_merge", payload, args.out or (None if args.smoke else RESULTS / "gap_merge.json"))
    return 0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return the whole result."""
    args.dir.mkdir(parents=True, exist_ok=True)
    probe = probed(args) if args.probe_seconds else None
    path = args.dir / "gap_merge.kvt"
    fd, is_direct = open_data(path)
    engine = open_engine(args.engine, depth_max=DEPTH)
    try:
        rng = np.random.default_rng(args.seed)
        num = args.file_mib * MIB // FRAGMENT_BYTES
        memory = aligned_buffer(num * FRAGMENT_BYTES)
        memory[:] = np.frombuffer(rng.bytes(memory.size), np.uint8)
        place = Place(fd, engine, memory, rng.permutation(num))
        place.do(merge(place.batch(np.arange(num), WRITE), bytes_max=OP_BYTES_MAX))
        os.fsync(fd)
        cases = [case for density in DENSITIES for case in measure(place, density, args.repeats, rng)]
    finally:
        engine.close()
        os.close(fd)
        path.unlink()
    return {
        "label": "measured",
        "environment": environment(args.dir),
        "access": COLD if is_direct else UNKNOWN_ACCESS,
        "engine": type(engine).__name__,
        "depth_max": DEPTH,
        "fragment_bytes": FRAGMENT_BYTES,
        "num_fragments": num,
        "smoke": args.smoke,
        "seed": args.seed,
        "repeats": args.repeats,
        "probe": told_by(probe),
        "cases": cases,
        "best": best_of(cases),
        "warnings": [line for case in cases for line in case.pop("warnings")],
    }


def probed(args: argparse.Namespace) -> Probe:
    """Return a probe of the drive under the benchmark's directory."""
    options = ProbeOptions(seconds=args.probe_seconds, engine=args.engine, file_bytes_max=args.file_mib * MIB)
    return probe_path(args.dir, options, version=__version__)


def measure(place: Place, density: float, repeats: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Read so large a part of the fragments, drawn anew for each run, with every gap in turn."""
    times: dict[int, list[float]] = {gap: [] for gap in GAP_FRAGMENTS}
    moved: dict[int, list[tuple[int, int, int]]] = {gap: [] for gap in GAP_FRAGMENTS}
    total = len(place.order)
    for repeat in range(repeats + 1):  # the first warms up
        for gap in GAP_FRAGMENTS if repeat % 2 else GAP_FRAGMENTS[::-1]:
            wanted = np.sort(rng.permutation(total)[: max(2, round(density * total))])
            batch = place.batch(wanted, READ)
            merged = merge(batch, bytes_max=OP_BYTES_MAX, gap_bytes_max=gap * FRAGMENT_BYTES)
            seconds = place.do(merged)
            if repeat:
                times[gap].append(seconds * 1e3)
                counts = (len(merged.batch), int(merged.batch["length"].sum()), int(merged.gap_bytes.sum()))
                moved[gap].append(counts)
    return [case_of(density, gap, times[gap], moved[gap]) for gap in GAP_FRAGMENTS]


def case_of(density: float, gap: int, times: list[float], moved: list[tuple[int, int, int]]) -> dict[str, Any]:
    """Return one density and gap of the result."""
    ops, num_bytes, gap_bytes = (float(np.mean(column)) for column in zip(*moved, strict=True))
    return {
        "density": density,
        "gap_bytes_max": gap * FRAGMENT_BYTES,
        "num_ops": ops,
        "op_bytes_mean": num_bytes / ops,
        "num_bytes": num_bytes,
        "amplification": num_bytes / (num_bytes - gap_bytes),
        "milliseconds": summary(times),
        "milliseconds_runs": times,
        "warnings": warnings_of(f"density {density}, gap {gap * FRAGMENT_BYTES}", times),
    }


def best_of(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each density the fastest gap, what it gains over none, and the widest that is no slower than none."""
    found = []
    for density in DENSITIES:
        mine = [case for case in cases if case["density"] == density]
        none = mine[0]["milliseconds"]["median"]
        fastest = min(mine, key=lambda case: case["milliseconds"]["median"])
        as_fast = [case["gap_bytes_max"] for case in mine if case["milliseconds"]["median"] <= none * (1 + SAME)]
        found.append(
            {
                "density": density,
                "fastest_gap_bytes": fastest["gap_bytes_max"],
                "gain": none / fastest["milliseconds"]["median"],
                "widest_no_slower_bytes": max(as_fast),
            }
        )
    return found


def told_by(probe: Probe | None) -> dict[str, Any] | None:
    """Return what a probe of the drive says of such fragments."""
    if probe is None:
        return None
    roof = probe.read.roof
    return {
        "seconds": probe.seconds,
        "iops_max": roof.iops_max,
        "bytes_per_s_max": roof.bytes_per_s_max,
        "latency_ns": roof.latency_ns,
        "channel_bytes_per_s": roof.channel_bytes_per_s,
        "host_ns": roof.host_ns,
        "fit_error_median": probe.read.error_median,
        "gap_bytes": roof.gap_bytes(FRAGMENT_BYTES, DEPTH),
        "gap_bytes_max": gap_bytes_max(probe, fragment_bytes=FRAGMENT_BYTES),
    }


def show(payload: dict[str, Any]) -> None:
    """Print one line a density and gap, then what was best and what the probe says."""
    print(
        f"measured: {payload['num_fragments']} fragments of 24 KiB, {payload['access']}, {payload['engine']}, "
        f"depth {payload['depth_max']}"
    )
    names = ("density", "gap KiB", "ops", "op KiB", "moved/wanted", "ms", "p99 ms", "spread")
    print("".join(f"{name:>13}" for name in names))
    for case in payload["cases"]:
        time_ms = case["milliseconds"]
        print(
            f"{case['density']:13}{case['gap_bytes_max'] >> 10:13}{case['num_ops']:13.0f}"
            f"{case['op_bytes_mean'] / 1024:13.0f}{case['amplification']:13.2f}"
            f"{time_ms['median']:13.1f}{time_ms['p99']:13.1f}{time_ms['spread']:13.0%}"
        )
    for row in payload["best"]:
        print(
            f"density {row['density']}: fastest over gaps of {row['fastest_gap_bytes'] >> 10} KiB, {row['gain']:.2f} x "
            f"no gaps; up to {row['widest_no_slower_bytes'] >> 10} KiB no slower than none"
        )
    told = payload["probe"]
    print(f"the probe advises {told['gap_bytes'] / 1024:.1f} KiB" if told else "no probe was made")
    for line in payload["warnings"]:
        print(f"warning: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
