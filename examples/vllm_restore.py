"""A prompt that one vLLM process computed is restored by another, through kvtide's tier.

Three processes answer the same prompt: one without any tier, one that computes and stores, one that restores. Their
tokens must be equal, and the third must take every full chunk from the tier. Runs on vLLM's CPU build.

    python examples/vllm_restore.py --model FOLDER [--tokens 4096] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NEW_TOKENS = 8
SPARE_TOKENS = 512  # beside the prompt: the warm-up's and the answer's


def main() -> int:
    """Run the three processes, or be one of them."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", required=True, help="folder of a model in Hugging Face's format")
    made.add_argument("--tokens", type=int, default=4096, help="tokens of the prompt")
    made.add_argument("--directory", help="where chunks are kept; default: a temporary one")
    made.add_argument("--json", action="store_true")
    made.add_argument("--one", choices=["plain", "store", "restore"], help=argparse.SUPPRESS)
    made.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.one:
        args.answer.write_text(json.dumps(answer(args)))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        directory = args.directory or str(Path(scratch, "kv"))
        found = {one: run(args, directory, one, Path(scratch, one)) for one in ("plain", "store", "restore")}
    found["block_tokens"] = found["store"].pop("block_tokens")
    found["is_right"] = is_right(found, args.tokens)
    print(json.dumps(found, indent=1) if args.json else told(found))
    return 0 if found["is_right"] else 1


def run(args: argparse.Namespace, directory: str, one: str, file: Path) -> dict[str, Any]:
    """Run one process, and return what it wrote to `file`."""
    command = [sys.executable, __file__, "--model", args.model, "--tokens", str(args.tokens), "--directory", directory]
    subprocess.run([*command, "--one", one, "--answer", str(file)], stdout=sys.stderr, check=True)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def answer(args: argparse.Namespace) -> dict[str, Any]:
    """Answer the prompt in this process."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "3600")  # a busy CPU may take more than its 5 minutes
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    tier = {
        "type": "KvtideTier",
        "module_path": "kvtide.integrations.vllm",
        "directory": args.directory,
        "capacity": "1GiB",
    }
    extra = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "kvtide.integrations.vllm",
        "cpu_bytes_to_use": 1 << 29,
        "secondary_tiers": [tier],
    }
    connector = KVTransferConfig(
        kv_connector="KvtideConnector",
        kv_connector_module_path="kvtide.integrations.vllm.connector",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )
    llm = LLM(
        args.model,
        dtype="bfloat16",
        max_model_len=args.tokens + SPARE_TOKENS,
        max_num_batched_tokens=args.tokens + SPARE_TOKENS,
        enforce_eager=True,
        kv_transfer_config=None if args.one == "plain" else connector,
    )
    greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    warm_up = [7 + time.time_ns() % 1000 + index for index in range(200)]  # never the same, so never restored
    llm.generate([{"prompt_token_ids": warm_up}], greedy, use_tqdm=False)
    draw = random.Random(1)
    prompt = [draw.randrange(100, 40_000) for _ in range(args.tokens)]
    began = time.perf_counter()
    out = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)[0]
    return {
        "seconds": round(time.perf_counter() - began, 3),
        "tokens": list(out.outputs[0].token_ids),
        "restored_tokens": out.num_cached_tokens or 0,
        "block_tokens": llm.llm_engine.vllm_config.cache_config.block_size,
    }


def is_right(found: dict[str, Any], num_tokens: int) -> bool:
    """Say whether all answers agree and every full chunk was restored; the last token is always computed."""
    block = found["block_tokens"]
    full = (num_tokens - 1) // block * block
    same = found["plain"]["tokens"] == found["store"]["tokens"] == found["restore"]["tokens"]
    return bool(same and found["restore"]["restored_tokens"] >= full)


def told(found: dict[str, Any]) -> str:
    """Return the findings as text."""
    rows = [
        f"{one:8} {found[one]['seconds']:7.2f} s, {found[one]['restored_tokens']:5} tokens restored"
        for one in ("plain", "store", "restore")
    ]
    verdict = "tokens are equal, all full chunks were restored" if found["is_right"] else "WRONG: see --json"
    return "\n".join([*rows, verdict])


if __name__ == "__main__":
    sys.exit(main())
