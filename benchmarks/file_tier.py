"""Does the file tier read a long prefix as fast as the disk gives it, every byte verified?

All layers of a prefix are read through `FileTier.read` into preallocated frames, in turns with fio's sequential reads
of 1 MiB of the same file (depth 8 and 32, io_uring, O_DIRECT, plain and fixed buffers) and with our engine alone. fio
and the engine alone verify nothing. Then the same for writing, in calls of a few groups as the cache makes them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import xxhash

from _bench import RESULTS, environment, parser, summary, warnings_of, write_result
from _tier import Prefix, Run, can_pin, fio_version, has_fio, run_fio, timed
from kvtide.spec import KVShape, auto_group_blocks
from kvtide.spec.presets import preset

KNEE_BYTES = 128 << 10  # as kvtide run: see benchmarks/group_size.py
DEPTHS = (8, 32)
GOAL = 0.9


def main() -> int:
    """Measure and report."""
    made = parser(__doc__ or "")
    made.set_defaults(repeats=4)
    made.add_argument("--model", default="smollm2-135m", help="whose KV geometry, in bf16: a name of `kvtide size`")
    made.add_argument("--tokens", type=int, default=32768, help="length of the prefix")
    made.add_argument("--group-blocks", type=int, default=None, help="blocks of 16 tokens stored together")
    made.add_argument("--engine", default="auto", help="auto, uring or threads")
    args = made.parse_args()
    if args.smoke:
        args.tokens, args.repeats = min(args.tokens, 512), 1
    payload = measure(args)
    if args.json:
        print(json.dumps(payload, indent=1, default=str))
    else:
        show(payload)
    write_result("file_tier", payload, args.out or (None if args.smoke else RESULTS / "file_tier.json"))
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the whole result."""
    shape = KVShape.of(preset(args.model), "bf16")
    group = args.group_blocks or auto_group_blocks(shape, 16, KNEE_BYTES)
    args.dir.mkdir(parents=True, exist_ok=True)
    root, scratch = args.dir / "file_tier", args.dir / "file_tier.scratch"
    prefix = Prefix(root, args.model, num_tokens=args.tokens, group_blocks=group, engine=args.engine, seed=args.seed)
    try:
        check(prefix)
        depths = (DEPTHS[:1] if args.smoke else DEPTHS) if has_fio() else ()
        if not prefix.namespace.is_direct:
            print(prefix.access, file=sys.stderr)
        runs = {
            "read": in_turns(ways_of(prefix, "read", scratch, depths), args.repeats),
            "write": in_turns(ways_of(prefix, "write", scratch, depths), args.repeats),
        }
        parts = [parts_of(prefix) for _ in range(min(args.repeats, 3))]
        stats = prefix.tier.stats()
        assert stats.num_corrupt + stats.num_failed == 0
        return {
            "label": "measured",
            "environment": environment(args.dir),
            "access": prefix.access,
            "model": args.model,
            "num_tokens": prefix.num_groups * prefix.layout.tokens_per_group,
            "num_bytes": sum(prefix.layout.fragment_padded_bytes) * prefix.num_groups,
            "fragment_bytes": prefix.layout.fragment_padded_bytes[0],
            "group_blocks": group,
            "engine": prefix.namespace.engine_name,
            "depth_max": prefix.namespace.engine.depth_max,
            "fio": fio_version() if depths else "absent",
            "smoke": args.smoke,
            "seed": args.seed,
            "repeats": args.repeats,
            "goal": f"read >= {GOAL} of the better fio figure",
            "read": figures(runs["read"]),
            "write": figures(runs["write"]),
            "read_parts_ns": {name: summary([one[name] for one in parts]) for name in parts[0]},
            "warnings": [
                line
                for kind, ways in runs.items()
                for name, found in ways.items()
                for line in warnings_of(f"{kind} {name}", [run.mib_per_s for run in found])
            ],
        }
    finally:
        scratch.unlink(missing_ok=True)
        prefix.close()


def check(prefix: Prefix) -> None:
    """See that what is read is what was written; this warms up, too."""
    buffer = prefix.pool.arena.buffer
    wanted = xxhash.xxh3_128_digest(buffer.data)
    buffer[:] = 0
    prefix.read(prefix.requests(list(range(prefix.layout.num_layers))))
    assert xxhash.xxh3_128_digest(buffer.data) == wanted, "other bytes were read than written"


def ways_of(prefix: Prefix, kind: str, scratch: Any, depths: Sequence[int]) -> dict[str, Callable[[], Run]]:
    """Return what is compared: our tier, our engine without checksums, and fio at each depth."""
    num_bytes = sum(prefix.layout.fragment_padded_bytes) * prefix.num_groups
    requests = prefix.requests(list(range(prefix.layout.num_layers)))
    is_read, is_direct = kind == "read", prefix.namespace.is_direct
    ways: dict[str, Callable[[], Run]] = {
        "ours": lambda: timed(lambda: prefix.read(requests) if is_read else prefix.write(), num_bytes)
    }
    if is_read:
        ways["engine alone"] = lambda: timed(prefix.read_unverified, num_bytes)
    path = prefix.data_path if is_read else scratch
    has_fixed = bool(depths) and can_pin(prefix.data_path, depth=max(depths), is_direct=is_direct)
    for depth in depths:
        for is_fixed in (False, True) if has_fixed else (False,):
            ways[f"fio depth {depth}{' fixed' if is_fixed else ''}"] = partial(
                run_fio, path, kind, num_bytes=num_bytes, depth=depth, is_direct=is_direct, is_fixed=is_fixed
            )
    return ways


def in_turns(ways: dict[str, Callable[[], Run]], repeats: int) -> dict[str, list[Run]]:
    """Run each way once unmeasured, then all of them `repeats` times, every other round backwards."""
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for repeat in range(repeats):
        for name in list(ways) if repeat % 2 == 0 else list(ways)[::-1]:
            runs[name].append(ways[name]())
    return runs


def parts_of(prefix: Prefix) -> dict[str, float]:
    """Return what two parts of a read take on their own; in a read checksums run while the drive is busy."""
    merge_s = timed(prefix.joined, 1).seconds
    rows = [row.data for row in prefix.pool.rows]
    checksum_s = timed(lambda: list(map(xxhash.xxh3_64_intdigest, rows)), 1).seconds
    return {"merge": merge_s * 1e9, "checksums": checksum_s * 1e9}


def figures(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Return rate and CPU of each way, and ours over the better of fio's."""
    ways: dict[str, Any] = {}
    for name, found in runs.items():
        rates, cpu = [run.mib_per_s for run in found], [run.cpu_s_per_gib for run in found]
        ways[name] = {"mib_per_s": summary(rates), "cpu_s_per_gib": summary(cpu), "mib_per_s_runs": rates}
    ours, others = ways["ours"], {name: way for name, way in ways.items() if name.startswith("fio")}
    alone = ways.get("engine alone", ours)["mib_per_s"]["median"]
    base = {"ways": ways, "ratio_to_engine": ours["mib_per_s"]["median"] / alone}
    if not others:
        return base
    best = max(others, key=lambda name: others[name]["mib_per_s"]["median"])
    return base | {
        "best_fio": best,
        "ratio": ours["mib_per_s"]["median"] / others[best]["mib_per_s"]["median"],
        "cpu_ratio": ours["cpu_s_per_gib"]["median"] / max(others[best]["cpu_s_per_gib"]["median"], 1e-9),
    }


def show(payload: dict[str, Any]) -> None:
    """Print the medians and ratios."""
    print(f"measured: {payload['num_tokens']} tokens of {payload['model']}, {payload['access']}, {payload['engine']}")
    print(f"{'':6}{'way':20}{'MiB/s':>8}{'lowest':>8}{'spread':>8}{'CPU s/GiB':>11}")
    for kind in ("read", "write"):
        for name, way in payload[kind]["ways"].items():
            rate = way["mib_per_s"]
            print(
                f"{kind:6}{name:20}{rate['median']:8.0f}{min(way['mib_per_s_runs']):8.0f}{rate['spread']:8.0%}"
                f"{way['cpu_s_per_gib']['median']:11.2f}"
            )
        if "ratio" in payload[kind]:
            print(f"{kind:6}ours / {payload[kind]['best_fio']}: {payload[kind]['ratio']:.2f}")
    parts = ", ".join(f"{name} {part['median'] / 1e6:.0f} ms" for name, part in payload["read_parts_ns"].items())
    print(f"parts of a read on their own: {parts}")
    for line in payload["warnings"]:
        print(f"warning: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
