"""How much sooner does the first token come when a prompt's KV is restored from the file tier?

Three ways in turns, on one loaded model: `recomputed` runs the prompt on an empty directory and leaves its KV there;
`restored` opens a new store on that directory, as after a restart; `transformers` is the library's own DynamicCache.
Time to first token runs from the prompt to its first token; opening the store is counted apart.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from typing import Any

from _bench import environment, parser, summary, warnings_of
from _model import add_dtype, options_of, run_on_model, tokens_of, versions
from kvtide.integrations.transformers import KvStore, LoadedModel, StoreOptions
from kvtide.integrations.transformers.turns import Reference, TurnOptions

GOAL = 10.0
RESTORED_NUM = 3  # of them a round: they are short
WARM_TOKENS = 100  # of a first run that warms the model up


def main() -> int:
    """Measure and report."""
    made = parser(__doc__ or "")
    made.set_defaults(repeats=3)
    made.add_argument("--tokens", type=int, default=4096, help="length of the prompt")
    add_dtype(made)
    args = made.parse_args()
    if args.smoke:
        args.tokens, args.repeats = min(args.tokens, 300), 1
    return run_on_model("restore", args, measure, show)


def measure(args: argparse.Namespace, loaded: LoadedModel) -> dict[str, Any]:
    """Return the whole result."""
    args.dir.mkdir(parents=True, exist_ok=True)
    root = args.dir / "restore"
    tokens = tokens_of(loaded, args.tokens)
    options = options_of(loaded, root, num_tokens=args.tokens)
    runs: dict[str, list[dict[str, Any]]] = {"recomputed": [], "restored": [], "transformers": []}
    try:
        shutil.rmtree(root, ignore_errors=True)
        run_store(loaded, options, tokens[:WARM_TOKENS])
        for repeat in range(args.repeats):
            reference = [run_reference(loaded, tokens)] if repeat % 2 else []
            shutil.rmtree(root)
            runs["recomputed"].append(run_store(loaded, options, tokens))  # and fills the directory
            runs["restored"] += [run_store(loaded, options, tokens) for _ in range(1 if args.smoke else RESTORED_NUM)]
            runs["transformers"] += reference or [run_reference(loaded, tokens)]
            print(f"round {repeat + 1} of {args.repeats}", file=sys.stderr)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    one = runs["restored"][0]
    least = args.tokens - 1 - options.block_tokens  # an unfilled last block is found only if it ends where it did
    assert all(run["matched_tokens"] > least for run in runs["restored"]), "not all KV was restored"
    assert not any(run["matched_tokens"] for run in runs["recomputed"]), "some KV was not computed again"
    ways = {name: figures(found) for name, found in runs.items()}
    ttft = {name: way["ttft_ms"]["median"] for name, way in ways.items()}
    return {
        "label": "measured",
        "environment": environment(args.dir) | versions(),
        "access": "cold: O_DIRECT" if one["is_direct"] else "NO O_DIRECT: the page cache takes part",
        "model": loaded.name,
        "dtype": loaded.dtype.value,
        "num_tokens": args.tokens,
        "matched_tokens": one["matched_tokens"],
        "restored_bytes": one["file_bytes"],
        "device_bytes": options.device_bytes,
        "dram_bytes": options.dram_bytes,
        "smoke": args.smoke,
        "seed": args.seed,
        "repeats": args.repeats,
        "goal": f"recomputed / restored >= {GOAL:g} at 4096 tokens",
        "ways": ways,
        "recomputed_over_restored": ttft["recomputed"] / ttft["restored"],
        "transformers_over_restored": ttft["transformers"] / ttft["restored"],
        "same_first_token": len({run["token"] for found in runs.values() for run in found}) == 1,
        "warnings": [
            line for name, found in runs.items() for line in warnings_of(name, [run["ttft_ms"] for run in found])
        ],
    }


def run_store(loaded: LoadedModel, options: StoreOptions, tokens: list[int]) -> dict[str, Any]:
    """Open a store, run the prompt up to its first token, close the store."""
    started = time.perf_counter_ns()
    with KvStore(loaded, options) as store:
        opened = time.perf_counter_ns()
        assert store.namespace is not None
        before = store.namespace.tier.stats().read_bytes
        session = store.session(tokens)
        try:
            session.prefill(reserve_tokens=1)
            output = session.generate(max_new_tokens=1, do_sample=False)
            ended = time.perf_counter_ns()
            store.cache.drain()
            return {
                "ttft_ms": (ended - opened) / 1e6,
                "open_ms": (opened - started) / 1e6,
                "wait_ms": store.cache.wait_ns / 1e6,
                "token": int(output[0, -1]),
                "matched_tokens": session.matched.num_tokens,
                "file_bytes": store.namespace.tier.stats().read_bytes - before,
                "is_direct": store.namespace.is_direct,
            }
        finally:
            session.release()


def run_reference(loaded: LoadedModel, tokens: list[int]) -> dict[str, Any]:
    """Run the prompt on transformers' own cache, in the same steps of prefill."""
    started = time.perf_counter_ns()
    output = Reference().generate(loaded.model, tokens, TurnOptions(max_new_tokens=1), matched_tokens=0)[0]
    return {"ttft_ms": (time.perf_counter_ns() - started) / 1e6, "token": int(output.sequences[0, -1])}


def figures(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the times of one way."""
    names = [name for name in ("ttft_ms", "open_ms", "wait_ms") if name in found[0]]
    samples = {name: [run[name] for run in found] for name in names}
    return {name: summary(values) for name, values in samples.items()} | {"ttft_ms_runs": samples["ttft_ms"]}


def show(payload: dict[str, Any]) -> None:
    """Print one line a way, and the ratios."""
    print(
        f"measured: {payload['num_tokens']} tokens, {payload['model']} in {payload['dtype']}, "
        f"{payload['restored_bytes'] / 2**20:.0f} MiB restored, {payload['access']}"
    )
    print(f"{'way':14}{'TTFT ms':>9}{'p99':>9}{'spread':>8}{'waiting ms':>12}{'opening ms':>12}")
    for name, way in payload["ways"].items():
        rest = "".join(f"{way[part]['median']:12.1f}" for part in ("wait_ms", "open_ms") if part in way)
        ttft = way["ttft_ms"]
        print(f"{name:14}{ttft['median']:9.1f}{ttft['p99']:9.1f}{ttft['spread']:8.0%}{rest}")
    print(f"restored is {payload['recomputed_over_restored']:.1f} x as fast as recomputed (goal {GOAL:g} at 4096)")
    print(f"and {payload['transformers_over_restored']:.1f} x as fast as transformers' own cache")
    print(f"first token the same every time: {payload['same_first_token']}")
    for line in payload["warnings"]:
        print(f"warning: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
