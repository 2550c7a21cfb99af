"""What does writing KV through to the file at once cost decode, against writing it back when it is evicted?

One conversation of a few turns over a document, with a DRAM tier too small for its KV, so that groups are evicted and
read back. Both policies run in turns, on one loaded model, each time from an empty directory. Bytes written count all
operations of the file tier, up to the last turn's end and after closing; lost on a crash is what was not stored then.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

from _bench import environment, parser, summary, warnings_of
from _model import add_dtype, options_of, run_on_model, text_of, versions
from kvtide.integrations.transformers import KvStore, LoadedModel
from kvtide.integrations.transformers.turns import Conversation, Turn, TurnOptions, TurnRunner
from kvtide.trace.record import Recorder
from kvtide.units import parse_bytes

QUESTIONS = ("What is this text about?", "Give one line of code for it.", "What must one take care of?")
Policy = Literal["through", "back"]
POLICIES: tuple[Policy, ...] = ("through", "back")


def main() -> int:
    """Measure and report."""
    made = parser(__doc__ or "")
    made.set_defaults(repeats=3)
    made.add_argument("--tokens", type=int, default=900, help="length of the document")
    made.add_argument("--new-tokens", type=int, default=48, help="length of an answer")
    made.add_argument("--dram", default="36MiB", help="budget of the DRAM tier: less than the KV")
    add_dtype(made)
    args = made.parse_args()
    if args.smoke:
        args.tokens, args.new_tokens, args.repeats, args.dram = min(args.tokens, 40), 3, 1, "24MiB"
    return run_on_model("write_policy", args, measure, show)


def measure(args: argparse.Namespace, loaded: LoadedModel) -> dict[str, Any]:
    """Return the whole result."""
    args.dir.mkdir(parents=True, exist_ok=True)
    root = args.dir / "write_policy"
    runs: dict[Policy, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    try:
        if not args.smoke:
            run(loaded, root, "through", args)  # the first run warms the model up
        for repeat in range(args.repeats):
            for policy in POLICIES if repeat % 2 == 0 else POLICIES[::-1]:
                runs[policy].append(run(loaded, root, policy, args))
            print(f"round {repeat + 1} of {args.repeats}", file=sys.stderr)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    answers = {tuple(one["answers"]) for found in runs.values() for one in found}
    return {
        "label": "measured",
        "environment": environment(args.dir) | versions(),
        "access": "O_DIRECT" if runs["through"][0]["is_direct"] else "NO O_DIRECT: the page cache takes part",
        "model": loaded.name,
        "dtype": loaded.dtype.value,
        "document_tokens": args.tokens,
        "kv_bytes": runs["through"][0]["kv_bytes"],
        "dram_bytes": parse_bytes(args.dram),
        "smoke": args.smoke,
        "seed": args.seed,
        "repeats": args.repeats,
        "policies": {policy: figures(found) for policy, found in runs.items()},
        "same_answers": len(answers) == 1,
        "warnings": [
            line
            for policy, found in runs.items()
            for line in warnings_of(f"{policy} ITL p50", [turn.itl_ns_p50 for one in found for turn in one["turns"]])
        ],
    }


def run(loaded: LoadedModel, root: Path, policy: Policy, args: argparse.Namespace) -> dict[str, Any]:
    """Run the conversation once from an empty directory."""
    shutil.rmtree(root, ignore_errors=True)
    num_tokens = args.tokens + len(QUESTIONS) * (args.new_tokens + 64)
    options = options_of(loaded, root, num_tokens=num_tokens, dram_bytes=parse_bytes(args.dram), write_policy=policy)
    recorder = Recorder()
    with KvStore(loaded, options, recorder=recorder) as store:
        assert store.namespace is not None
        tier, is_direct = store.namespace.tier, store.namespace.is_direct
        turn_options = TurnOptions(max_new_tokens=args.new_tokens)
        runner = TurnRunner(store, recorder, turn_options, on_text=lambda _: None, on_prefill=lambda _a, _b: None)
        conversation = Conversation(loaded, text_of(loaded, args.tokens))
        turns: list[Turn] = [runner.run(conversation, question, index=0) for question in QUESTIONS]
        stored_tokens, turns_bytes = int(tier.inventory().num_tokens.sum()), tier.stats().written_bytes
        kv_bytes = len(conversation.tokens) * store.layout.shape.bytes_per_token
    return {
        "turns": turns,
        "answers": [turn.answer for turn in turns],
        "is_direct": is_direct,
        "kv_bytes": kv_bytes,
        "turns_bytes": turns_bytes,
        "all_bytes": tier.stats().written_bytes,
        "read_bytes": tier.stats().read_bytes,
        "lost_tokens": max(0, len(conversation.tokens) - stored_tokens),
    }


def figures(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what one policy cost; a latency is summed up over all turns of all repeats."""
    turns: list[Turn] = [turn for one in found for turn in one["turns"]]
    return {
        "itl_ms_p50": summary([turn.itl_ns_p50 / 1e6 for turn in turns]),
        "itl_ms_p99": summary([turn.itl_ns_p99 / 1e6 for turn in turns]),
        "ttft_ms": summary([turn.ttft_ns / 1e6 for turn in turns]),
        "decode_wait_ms": summary([turn.decode.wait_ns / 1e6 for turn in turns]),
        "written_bytes_in_turns": summary([one["turns_bytes"] for one in found]),
        "written_bytes_in_all": summary([one["all_bytes"] for one in found]),
        "write_amplification": summary([one["all_bytes"] / one["kv_bytes"] for one in found]),
        "read_bytes": summary([one["read_bytes"] for one in found]),
        "tokens_not_stored_at_end": summary([one["lost_tokens"] for one in found]),
        "itl_ms_p50_runs": [turn.itl_ns_p50 / 1e6 for turn in turns],
        "itl_ms_p99_runs": [turn.itl_ns_p99 / 1e6 for turn in turns],
    }


def show(payload: dict[str, Any]) -> None:
    """Print one line a measure, a column for each policy."""
    print(
        f"measured: {payload['model']} in {payload['dtype']}, {payload['kv_bytes'] / 2**20:.0f} MiB of KV, "
        f"DRAM {payload['dram_bytes'] / 2**20:.0f} MiB, {payload['access']}"
    )
    print(f"{'median of':28}" + "".join(f"{policy:>12}" for policy in payload["policies"]))
    for name, value in payload["policies"]["through"].items():
        if not name.endswith("_runs"):
            scale = 2**20 if "bytes" in name else 1
            label = name.replace("bytes", "MiB") if isinstance(value, dict) else name
            cells = (payload["policies"][policy][name]["median"] / scale for policy in payload["policies"])
            print(f"{label:28}" + "".join(f"{cell:12.2f}" for cell in cells))
    print(f"answers the same every time: {payload['same_answers']}")
    for line in payload["warnings"]:
        print(f"warning: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
