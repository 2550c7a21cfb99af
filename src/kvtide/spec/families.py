"""What each model family leaves unsaid in its config.json: defaults, biases, norms, feed-forward form. Next: anatomy.

Source: the configuration and modelling classes of Hugging Face transformers; the names of fields are theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Family:
    """How weights are counted for one family, and the values its configs may omit.

    `norm_width` is 1 for RMS norm (a scale) and 2 for layer norm (scale and shift). `positions_extra` is the number
    of learned position rows beyond max_positions, None where positions are rotary or relative.
    """

    gated: bool = True
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    norms: int = 2
    norm_width: int = 1
    qk_norm: bool = False
    positions_extra: int | None = None
    heads_default_to_all: bool = True  # without num_key_value_heads every query head has its own K and V
    window_pattern: int | None = None  # every n-th layer is global, the others slide
    window_from_field: bool = True  # sliding_window alone makes layers slide
    defaults: Mapping[str, object] = field(default_factory=dict)


_LLAMA = Family()
_QWEN3 = Family(qk_norm=True, window_from_field=False)
_LEARNED = Family(  # learned positions, layer norm with shift, biases on every matrix
    gated=False,
    tied=True,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    norm_width=2,
    positions_extra=0,
    window_from_field=False,
)
_GEMMA2 = Family(
    tied=True, norms=4, window_pattern=2, defaults={"sliding_window": 4096, "head_dim": 256, "vocab_size": 256000}
)
_GEMMA3 = Family(
    tied=True,
    norms=4,
    qk_norm=True,
    window_pattern=6,
    defaults={
        "sliding_window": 4096,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
)
_DEEPSEEK = Family(window_from_field=False)

UNKNOWN = Family(heads_default_to_all=False)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": _LLAMA,
        "ministral": _LLAMA,
        "mixtral": _LLAMA,
        "smollm3": _LLAMA,
        "granite": _LLAMA,
        "qwen2": Family(qkv_bias=True, window_from_field=False),
        "qwen2_moe": Family(qkv_bias=True, window_from_field=False),
        "qwen3": _QWEN3,
        "qwen3_moe": _QWEN3,
        "gemma": Family(tied=True, defaults={"head_dim": 256}),
        "gemma2": _GEMMA2,
        "gemma3": _GEMMA3,
        "gemma3_text": _GEMMA3,
        "phi3": _LLAMA,
        "phi": replace(_LEARNED, tied=False, positions_extra=None, head_bias=True, norms=1),
        "opt": replace(_LEARNED, positions_extra=2),
        "gpt2": _LEARNED,
        "gpt_bigcode": _LEARNED,
        "gpt_neox": replace(_LEARNED, tied=False, positions_extra=None),
        "falcon": Family(
            gated=False, tied=True, norm_width=2, window_from_field=False, defaults={"max_position_embeddings": 2048}
        ),
        "deepseek_v2": _DEEPSEEK,
        "deepseek_v3": _DEEPSEEK,
        "kimi_k2": _DEEPSEEK,
        "jamba": Family(window_from_field=False, defaults={"attn_layer_period": 8, "attn_layer_offset": 4}),
        "mamba": Family(tied=True, norms=1, window_from_field=False),
        "mamba2": Family(norms=1, window_from_field=False),
        "falcon_mamba": Family(tied=True, norms=1, window_from_field=False),
    }
)

# Fields that change what is kept for a token in a way `LayerKV` cannot say: refusing beats a wrong size.
NOT_MODELLED: Mapping[str, str] = MappingProxyType(
    {
        "index_head_dim": "the keys of a sparse-attention indexer",
        "attention_k_eq_v": "K and V that share one tensor",
        "global_head_dim": "head sizes that differ between global and local layers",
        "cross_attention_layers": "cross-attention layers",
        "num_kv_shared_layers": "layers that share another layer's K and V",
        "multi_query_group_num": "multi_query_group_num (write it as num_key_value_heads)",
        "block_configs": "per-layer block configurations",
    }
)

# Names of layers in layer_types and its kin, and the kind each means here.
LAYER_TYPE_KIND: Mapping[str, str] = MappingProxyType(
    {
        "full_attention": "full",
        "attention": "full",
        "global_attention": "full",
        "hybrid": "full",
        "sliding_attention": "sliding",
        "local_attention": "sliding",
        "chunked_attention": "sliding",
        "linear_attention": "none",
        "mamba": "none",
        "mamba2": "none",
        "ssm": "none",
        "conv": "none",
        "recurrent": "none",
        "rwkv": "none",
        "mlp": "none",
        "moe": "none",
    }
)
NO_ATTENTION_TYPES = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv"})
ROUTER_BIAS_TYPES = frozenset({"deepseek_v3", "kimi_k2"})  # routers that balance load with a bias an expert
