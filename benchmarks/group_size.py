"""What do small fragments cost when one layer is read back, and what do groups of blocks cure?

One layer of a prefix is read through `FileTier.read`, checksums on, from files written with 1, 4 and 16 blocks a group:
the same bytes in fewer, larger operations. A layer's fragments lie a slot apart, so they never merge.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np

from _bench import RESULTS, environment, parser, summary, warnings_of, write_result
from _tier import Prefix, Run, timed

GROUP_BLOCKS = (1, 4, 16)


def main() -> int:
    """Measure and report."""
    made = parser(__doc__ or "")
    made.add_argument("--model", default="smollm2-135m", help="whose KV geometry, in bf16: a name of `kvtide size`")
    made.add_argument("--tokens", type=int, default=32768, help="length of the prefix")
    made.add_argument("--layers", type=int, default=4, help="layers read, one a run, drawn at random")
    made.add_argument("--engine", default="auto", help="auto, uring or threads")
    args = made.parse_args()
    if args.smoke:
        args.tokens, args.layers, args.repeats = min(args.tokens, 1024), 1, 2
    payload = measure(args)
    if args.json:
        print(json.dumps(payload, indent=1, default=str))
    else:
        show(payload)
    write_result("group_size", payload, args.out or (None if args.smoke else RESULTS / "group_size.json"))
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the whole result."""
    args.dir.mkdir(parents=True, exist_ok=True)
    prefixes: dict[int, Prefix] = {}
    try:
        for group in GROUP_BLOCKS:
            root = args.dir / f"group_size.{group}"
            prefixes[group] = Prefix(
                root, args.model, num_tokens=args.tokens, group_blocks=group, engine=args.engine, seed=args.seed
            )
        access, engine = prefixes[1].access, prefixes[1].namespace
        if not engine.is_direct:
            print(access, file=sys.stderr)
        rng = np.random.default_rng(args.seed)
        layers = rng.permutation(prefixes[1].layout.num_layers)[: args.layers].tolist()
        runs = in_turns(prefixes, layers, args.repeats)
        cases = [case_of(prefixes[group], found) for group, found in runs.items()]
    finally:
        for prefix in prefixes.values():
            prefix.close()
    return {
        "label": "measured",
        "environment": environment(args.dir),
        "access": access,
        "model": args.model,
        "num_tokens": args.tokens,
        "layers": layers,
        "engine": engine.engine_name,
        "depth_max": engine.engine.depth_max,
        "smoke": args.smoke,
        "seed": args.seed,
        "repeats": args.repeats,
        "cases": cases,
        "time_1_over_16": cases[0]["milliseconds"]["median"] / cases[-1]["milliseconds"]["median"],
        "warnings": [line for case in cases for line in case.pop("warnings")],
    }


def in_turns(prefixes: dict[int, Prefix], layers: list[int], repeats: int) -> dict[int, list[tuple[Run, int]]]:
    """Return runs and their number of operations for each group size, all sizes in turn on each layer."""
    found: dict[int, list[tuple[Run, int]]] = {group: [] for group in prefixes}
    for prefix in prefixes.values():
        prefix.read(prefix.requests([layers[0]]))
    for repeat in range(repeats):
        for layer in layers:
            for group in list(prefixes) if repeat % 2 == 0 else list(prefixes)[::-1]:
                found[group].append(read_layer(prefixes[group], layer))
    return found


def read_layer(prefix: Prefix, layer: int) -> tuple[Run, int]:
    """Read one layer of the whole prefix."""
    requests = prefix.requests([layer])
    num_before = prefix.tier.stats().num_reads
    run = timed(lambda: prefix.read(requests), prefix.num_groups * prefix.layout.layer_padded_bytes(layer))
    return run, prefix.tier.stats().num_reads - num_before


def case_of(prefix: Prefix, found: list[tuple[Run, int]]) -> dict[str, Any]:
    """Return one group size of the result."""
    runs, num_ops = [run for run, _ in found], found[0][1]
    times = [run.seconds * 1e3 for run in runs]
    return {
        "group_blocks": prefix.layout.group_blocks,
        "num_ops": num_ops,
        "op_bytes_mean": runs[0].num_bytes / num_ops,
        "num_bytes": runs[0].num_bytes,
        "milliseconds": summary(times),
        "mib_per_s": summary([run.mib_per_s for run in runs]),
        "iops": summary([num_ops / run.seconds for run in runs]),
        "cpu_s_per_gib": summary([run.cpu_s_per_gib for run in runs]),
        "milliseconds_runs": times,
        "warnings": warnings_of(f"group of {prefix.layout.group_blocks}", times),
    }


def show(payload: dict[str, Any]) -> None:
    """Print one line a group size."""
    print(
        f"measured: one layer of {payload['num_tokens']} tokens of {payload['model']}, {payload['access']}, "
        f"{payload['engine']}, depth {payload['depth_max']}"
    )
    names = ("blocks", "ops", "op KiB", "ms", "p99 ms", "spread", "MiB/s", "IOPS", "CPU s/GiB")
    print("".join(f"{name:>10}" for name in names))
    for case in payload["cases"]:
        time_ms = case["milliseconds"]
        print(
            f"{case['group_blocks']:10}{case['num_ops']:10}{case['op_bytes_mean'] / 1024:10.0f}"
            f"{time_ms['median']:10.1f}{time_ms['p99']:10.1f}{time_ms['spread']:10.0%}"
            f"{case['mib_per_s']['median']:10.0f}{case['iops']['median']:10.0f}{case['cpu_s_per_gib']['median']:10.2f}"
        )
    print(f"groups of 1 take {payload['time_1_over_16']:.1f} x the time of groups of 16")
    for line in payload["warnings"]:
        print(f"warning: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
