"""How long does a replay of a day's log take, and how much memory?

A generated log as large as a published one (12,000 requests, some 290,000 blocks of 512 tokens): four policies over
DRAM and disk, and the curve of every size. With --log FILE that log is replayed instead.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from _bench import RESULTS, environment, parser, summary, write_result
from kvtide.hardware import load
from kvtide.planner.curve import lru_curve
from kvtide.planner.options import PlanOptions, build
from kvtide.planner.replay import POLICIES, Case, replay
from kvtide.workload import load_workload, multi_turn

GOAL = "under 30 s and 1 GiB"
DRAM_BYTES, DISK_BYTES = 64 << 30, 1 << 40


def main() -> int:
    """Measure and report."""
    made = parser(__doc__ or "")
    made.set_defaults(repeats=3)
    made.add_argument("--log", type=Path, default=None, help="a log of requests instead of the generated one")
    args = made.parse_args()
    if args.smoke:
        args.repeats = 1
    sessions = 20 if args.smoke else 2400
    log = (
        load_workload(args.log)
        if args.log
        else multi_turn(
            num_sessions=sessions,
            turns=5.0,
            system_tokens=1024,
            message_tokens=3000.0,
            block_tokens=512,
            seed=args.seed,
        )
    )
    job, machine = build(PlanOptions("llama-3-8b"), load())
    seconds: dict[str, list[float]] = {name: [] for name in ("curve", *POLICIES)}
    hits: dict[str, int] = {}
    for _ in range(args.repeats):
        started = time.perf_counter()
        curve = lru_curve(log.block_start, log.block_ids)
        seconds["curve"].append(time.perf_counter() - started)
        for policy in POLICIES:
            started = time.perf_counter()
            found = replay(log, job, machine, [Case(DRAM_BYTES, DISK_BYTES, policy)]).results[0]
            seconds[policy].append(time.perf_counter() - started)
            hits[policy] = found.dram_hits + found.disk_hits
    medians = {name: summary(samples) for name, samples in seconds.items()}
    payload: dict[str, Any] = {
        "benchmark": "replay_hits",
        "question": "how long does a replay take, and how much memory?",
        "label": "measured",
        "environment": environment(args.dir if args.dir.exists() else Path()),
        "seed": args.seed,
        "repeats": args.repeats,
        "smoke": args.smoke,
        "goal": GOAL,
        "num_requests": log.num_requests,
        "num_blocks": log.num_blocks,
        "num_unique": log.num_unique,
        "ideal_hits": len(curve.needed),
        "hits": hits,
        "seconds": medians,
        "seconds_all": sum(each["median"] for each in medians.values()),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if args.json:
        print(json.dumps(payload, indent=1, default=str))
    else:
        for name, each in medians.items():
            print(f"{name:8} {each['median']:6.2f} s")
        print(
            f"{log.num_requests:,} requests, {log.num_blocks:,} blocks: {payload['seconds_all']:.1f} s in all, "
            f"peak {payload['peak_bytes'] / 2**20:.0f} MiB ({GOAL})"
        )
    write_result("replay_hits", payload, args.out or (None if args.smoke else RESULTS / "replay_hits.json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
