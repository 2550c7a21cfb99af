"""What the bytes of a vLLM chunk depend on: chunks of other facts must never be found. Next: tier.

vLLM's own disk tier knows a chunk by the model's name, dtype and ranks. Here also count: the weights (sampled from
their files), the model's configuration (RoPE scaling, quantisation, revision), the layout of the cache, and vLLM's
version.

*Theory.* vLLM shows a tier the model's name and dtype, but not its configuration, and its scheduler has no current one
to ask for. `KvtideConnector` is given it, and passes on vLLM's own hash of it. With vLLM's own connector two things
remain: the model's config.json, and what the user says of it in `model_facts`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from kvtide.integrations.vllm.versions import check_version
from kvtide.integrations.weights import digest_of_config

MODEL_HASH = "kvtide_model_hash"  # where KvtideConnector leaves vLLM's hash among its extra config
MODEL_REVISION = "kvtide_model_revision"
_log = logging.getLogger("kvtide.vllm")


def facts_of(spec: Any, folder: Path, salt: str, model_facts: str = "") -> dict[str, str]:
    """Return the facts of the chunks of an `OffloadingSpec`, whose model lies in `folder`.

    `salt` parts tenants that share a directory, `model_facts` what the user says of the model's configuration.
    """
    config = spec.config
    parallel = config.parallel
    ranks = {name: getattr(parallel, name, 1) for name in ("tp_size", "pp_size", "pcp_size", "dcp_size", "rank")}
    if parallel.is_parallelism_agnostic or config.replicated_layout:
        ranks = {"any": 1}  # the bytes are the same for all
    if getattr(parallel, "data_parallel_size", 1) > 1:
        ranks["data_parallel_index"] = parallel.data_parallel_index  # a store has one owner, so each its own
    groups = [(group.tokens_per_block, list(group.layer_names)) for group in config.groups]
    return {
        "engine": f"vllm {check_version()}",
        "dtype": str(config.model.dtype),
        "ranks": json.dumps(ranks, sort_keys=True),
        "cache": f"{config.cache.tokens_per_hash} tokens a hash, {spec.blocks_per_chunk} blocks a chunk",
        "groups": hashlib.sha256(json.dumps(groups).encode()).hexdigest(),
        "layout": f"{config.kv_cache_layout}, canonical {config.canonical_layout}, "
        f"replicated {config.replicated_layout}",
        "model config": _model_config(spec, told=bool(model_facts)),
        "config.json": digest_of_config(folder),
        "model facts": _digest(model_facts),
        "salt": _digest(salt),
    }


def revision_of(spec: Any) -> str | None:
    """Return the revision of the model, None where vLLM does not show it."""
    revision = spec.config.extra_config.get(MODEL_REVISION)
    return str(revision) if revision else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest() if text else ""


def _model_config(spec: Any, *, told: bool) -> str:
    """Return vLLM's own hash of what its model computes; empty, with a warning unless `told`, where it is not shown."""
    found = str(spec.config.extra_config.get(MODEL_HASH, ""))
    if not found and not told:
        _log.warning(
            "kvtide: vLLM does not show its model's configuration, so KV is told apart by config.json and weights, but "
            "not by --hf-overrides, --revision or --quantization; use kv_connector KvtideConnector with "
            'kv_connector_module_path kvtide.integrations.vllm.connector, or name them in "model_facts" of the tier'
        )
    return found
