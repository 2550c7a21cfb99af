"""What the bytes of a SGLang page depend on: pages of other facts must never be found. Next: storage.

SGLang's own file backend knows a page by the model's name and ranks. Here also count: dtype, memory layout and form of
the pool, its page size and layers, the weights (sampled from their files), what the server was told of the model
(overrides of its configuration such as RoPE scaling, quantisation, revision), and SGLang's version.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kvtide.chunks.several import Kind
from kvtide.integrations.sglang.pages import Pages
from kvtide.integrations.sglang.versions import check_version

_RANKS = ("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dp_rank", "dcp_rank", "dcp_size")
_TOLD = (
    "revision",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "json_model_override_args",
    "rope_scaling",
    "load_format",
    "quantization_param_path",
)


def facts_of(config: Any, salt: str) -> dict[str, str]:
    """Return the facts of all pools of a `HiCacheStorageConfig`. `salt` parts tenants that share a directory."""
    ranks = {name: getattr(config, name, None) for name in _RANKS}
    heads = {name: getattr(config, name, None) for name in ("tp_lcm_size", "should_split_heads")}
    return {
        "engine": f"sglang {check_version()}",
        "ranks": json.dumps(ranks, sort_keys=True),
        "heads": json.dumps(heads, sort_keys=True),
        "mla": str(config.is_mla_model),
        "server": _server(),
        "salt": hashlib.sha256(salt.encode()).hexdigest() if salt else "",
    }


def kind_of(name: str, pool: Any, pages: Pages) -> Kind:
    """Return what pages of the pool `name` are, with the facts that are its own."""
    told = {
        "dtype": str(getattr(pool, "dtype", "")),
        "layout": str(getattr(pool, "layout", "")),
        "form": pages.form,
        "page": f"{getattr(pool, 'page_size', '')} tokens, format {getattr(pool, 'storage_format_tag', None)}",
        "layers": f"{getattr(pool, 'start_layer', '')} to {getattr(pool, 'end_layer', '')}",
    }
    return Kind(name, pages.piece_bytes, tuple(told.items()))


def _server() -> str:
    """Return a digest of what SGLang's server was told of its model; empty outside a server."""
    try:
        from sglang.srt.runtime_context import get_server_args

        args = get_server_args()
    except Exception:  # no server in this process
        return ""
    told = {name: str(getattr(args, name, None)) for name in _TOLD}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
