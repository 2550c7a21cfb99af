"""What the bytes of a vLLM chunk depend on: chunks of other facts must never be found. Next: tier.

vLLM's own disk tier knows a chunk by the model's name, dtype and ranks. Here also count: the weights (sampled from
their files), everything vLLM hashes of its model's configuration (RoPE scaling, quantisation, revision), the layout
of the cache, and vLLM's version.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from kvtide.errors import ConfigError
from kvtide.integrations.vllm.versions import check_version
from kvtide.modelfiles import weights_digest

_log = logging.getLogger("kvtide.vllm")


def facts_of(spec: Any, salt: str) -> dict[str, str]:
    """Return the facts of the chunks of an `OffloadingSpec`. `salt` parts tenants that share a directory."""
    config = spec.config
    parallel = config.parallel
    ranks = {name: getattr(parallel, name, 1) for name in ("tp_size", "pp_size", "pcp_size", "dcp_size", "rank")}
    if parallel.is_parallelism_agnostic or config.replicated_layout:
        ranks = {"any": 1}  # the bytes are the same for all
    groups = [(group.tokens_per_block, list(group.layer_names)) for group in config.groups]
    return {
        "engine": f"vllm {check_version()}",
        "dtype": str(config.model.dtype),
        "ranks": json.dumps(ranks, sort_keys=True),
        "cache": f"{config.cache.tokens_per_hash} tokens a hash, {spec.blocks_per_chunk} blocks a chunk",
        "groups": hashlib.sha256(json.dumps(groups).encode()).hexdigest(),
        "layout": f"{config.kv_cache_layout}, canonical {config.canonical_layout}, one copy {config.replicated_layout}",
        "model config": _model_config(),
        "salt": hashlib.sha256(salt.encode()).hexdigest() if salt else "",
    }


def digest_of_weights(name: str) -> str:
    """Return the digest of the weights of model `name`; of its name alone, with a warning, where they are not found."""
    folder = Path(name)
    if not folder.exists():
        folder = _downloaded(name)
    try:
        return weights_digest(folder)
    except ConfigError as error:
        _log.warning("kvtide: weights of %s are told apart by name alone: %s", name, error)
        return hashlib.sha256(name.encode()).hexdigest()


def _model_config() -> str:
    """Return vLLM's own hash of what its model computes; empty outside an engine."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return "" if config is None else str(config.model_config.compute_hash())


def _downloaded(name: str) -> Path:
    """Return where the hub's library keeps model `name` here."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # not downloaded, or no such library: weights_digest says that there are none
        return Path(name)
