"""Does drafted decoding (pmr) give the tokens of plain greedy decoding, and what does it save?

Questions about passages of the reference texts that ship with Python, answered by the embedded model over the same
selection, with drafts and without, by turns. Tokens are compared one by one.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from typing import Any

from _bench import environment, parser, summary
from _model import add_dtype, run_on_model, tokens_of, versions
from kvtide.integrations.transformers import KvStore, LoadedModel, StoreOptions
from kvtide.integrations.transformers.store import SelectOptions
from kvtide.select.contract import Budget
from kvtide.spec import KVShape

BUDGET = 256
PASSAGE = 600  # tokens
QUESTIONS = ("Repeat the first sentence.", "What is this about?", "List the names in it.", "Explain it in other words.")


def main() -> int:
    """Measure and tell."""
    made = parser(__doc__ or "")
    add_dtype(made)
    made.add_argument("--prompts", type=int, default=20)
    made.add_argument("--new", type=int, default=32, help="tokens of an answer")
    return run_on_model("drafts", made.parse_args(), measure, show)


def measure(args: argparse.Namespace, loaded: LoadedModel) -> dict[str, Any]:
    """Return the whole result."""
    num, new = (1, 4) if args.smoke else (args.prompts, args.new)
    prompts = prompts_of(loaded, num)
    plain, drafted = (answer(loaded, method, prompts, new) for method in ("lowrank", "pmr+lowrank"))
    pairs = zip(plain["ns"], drafted["ns"], strict=True)
    return {
        "question": "does drafted decoding give the tokens of plain greedy decoding, and what does it save?",
        "label": "measured",
        "environment": environment(args.dir) | versions(),
        "seed": args.seed,
        "repeats": 1,
        "dtype": loaded.dtype.value,
        "budget_tokens": BUDGET,
        "num_prompts": num,
        "num_equal": sum(a == b for a, b in zip(plain["tokens"], drafted["tokens"], strict=True)),
        "num_tokens": sum(map(len, plain["tokens"])),
        "drafts": drafted["drafts"],
        "time_ratio": summary([with_drafts / without for without, with_drafts in pairs]),
    }


def prompts_of(loaded: LoadedModel, num: int) -> list[list[int]]:
    """Return questions, each about a passage of its own."""
    text = tokens_of(loaded, num * PASSAGE)
    prompts = []
    for index in range(num):
        passage = loaded.tokenizer.decode(text[index * PASSAGE : (index + 1) * PASSAGE])
        said = [{"role": "user", "content": f"{passage}\n\n{QUESTIONS[index % len(QUESTIONS)]}"}]
        made = loaded.tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        prompts.append(loaded.tokenizer(made, add_special_tokens=False).input_ids)
    return prompts


def answer(loaded: LoadedModel, method: str, prompts: list[list[int]], num_new: int) -> dict[str, Any]:
    """Answer each prompt over a selection; return tokens, times of generating, and how drafts fared."""
    whole = (max(map(len, prompts)) + num_new + 64) * KVShape.of(loaded.spec, loaded.dtype).bytes_per_token
    select = SelectOptions(method, Budget(tokens=BUDGET))
    options = StoreOptions(device_bytes=whole, dram_bytes=4 * whole, group_blocks=1, select=select)
    tokens, times = [], []
    with KvStore(loaded, options) as store:
        for prompt in prompts:
            session = store.session(prompt)
            session.prefill(reserve_tokens=num_new)
            started = time.perf_counter_ns()
            found = session.generate(max_new_tokens=num_new, do_sample=False)
            times.append(time.perf_counter_ns() - started)
            tokens.append(found[0, len(prompt) :].tolist())
            session.release()
        drafts = asdict(store.drafter.counts) if store.drafter else None
    return {"tokens": tokens, "ns": times, "drafts": drafts}


def show(payload: dict[str, Any]) -> None:
    """Print the figures."""
    drafts = payload["drafts"]
    print(f"{payload['num_equal']} of {payload['num_prompts']} answers equal, {payload['num_tokens']} tokens")
    print(f"{drafts['num_accepted']} of {drafts['num_drafted']} drafted tokens right, in {drafts['num_steps']} steps")
    print(f"time of an answer with drafts: {payload['time_ratio']['median']:.2f} of that without")


if __name__ == "__main__":
    sys.exit(main())
