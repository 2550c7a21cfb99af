"""What the benchmarks that run a language model share: the embedded model, a text, budgets as `kvtide run` sets them.

Knows no question and no report.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
import transformers

from _bench import RESULTS, write_result
from kvtide.cache.steps import PREFILL_TOKENS
from kvtide.errors import UnsupportedError
from kvtide.integrations.transformers import LoadedModel, StoreOptions, load
from kvtide.spec import KVShape


def embedded(dtype: str) -> LoadedModel:
    """Load the embedded model."""
    root = os.environ.get("XDG_CACHE_HOME")
    cache_dir = (Path(root) if root else Path.home() / ".cache") / "kvtide" / "models"
    return load(None, dtype=dtype, cache_dir=cache_dir)


def add_dtype(made: argparse.ArgumentParser) -> None:
    """Add the switch for the dtype."""
    made.add_argument("--dtype", default="fp32", help="bf16, fp16 or fp32, which is fastest on most CPUs")


def run_on_model(
    name: str,
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace, LoadedModel], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
) -> int:
    """Load the model, measure, print and keep the result; return the exit code."""
    try:
        loaded = embedded(args.dtype)
    except UnsupportedError as refused:
        print(f"{name}: skipped, {refused}", file=sys.stderr)
        return 1
    payload = measure(args, loaded)
    if args.json:
        print(json.dumps(payload, indent=1, default=str))
    else:
        show(payload)
    write_result(name, payload, args.out or (None if args.smoke else RESULTS / f"{name}.json"))
    return 0


def text_of(loaded: LoadedModel, num_tokens: int) -> str:
    """Return `num_tokens` tokens of the reference texts that ship with Python."""
    return str(loaded.tokenizer.decode(_first_ids(loaded, num_tokens)))


def tokens_of(loaded: LoadedModel, num_tokens: int) -> list[int]:
    """Return exactly `num_tokens` token ids of the same texts."""
    ids = _first_ids(loaded, num_tokens)
    assert len(ids) == num_tokens, "the texts are shorter than the prompt"
    return ids


def _first_ids(loaded: LoadedModel, num_tokens: int) -> list[int]:
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids: list[int] = loaded.tokenizer(text[: num_tokens * 8], add_special_tokens=False).input_ids[:num_tokens]
    return ids


def options_of(
    loaded: LoadedModel,
    directory: Path,
    *,
    num_tokens: int,
    dram_bytes: int | None = None,
    write_policy: Any = "through",
) -> StoreOptions:
    """Return budgets for `num_tokens` tokens: a tenth of their KV on the device, half in DRAM, all in the file."""
    shape = KVShape.of(loaded.spec, loaded.dtype)
    whole_bytes = num_tokens * shape.bytes_per_token
    layer_bytes = max(layer.token_bytes for layer in shape.layers) * (num_tokens + 1024)
    return StoreOptions(
        device_bytes=max(whole_bytes // 10, 2 * layer_bytes),
        dram_bytes=dram_bytes or max(whole_bytes // 2, (2 * PREFILL_TOKENS + 2048) * shape.bytes_per_token),
        disk_bytes=2 * whole_bytes + (64 << 20),
        directory=directory,
        write_policy=write_policy,
    )


def versions() -> dict[str, Any]:
    """Return what else a reader must know of the machine: libraries and threads."""
    return {"torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads()}
