"""What the bytes of a vLLM chunk depend on: chunks of other facts must never be found. Next: tier.

vLLM's own disk tier knows a chunk by the model's name, dtype and ranks. Here also count: the weights (sampled from
their files), everything vLLM hashes of its model's configuration (RoPE scaling, quantisation, revision), the layout
of the cache, and vLLM's version.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kvtide.integrations.vllm.versions import check_version


def facts_of(spec: Any, salt: str) -> dict[str, str]:
    """Return the facts of the chunks of an `OffloadingSpec`. `salt` parts tenants that share a directory."""
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
        "model config": _model_config(),
        "salt": hashlib.sha256(salt.encode()).hexdigest() if salt else "",
    }


def _model_config() -> str:
    """Return vLLM's own hash of what its model computes; empty outside an engine."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return "" if config is None else str(config.model_config.compute_hash())
