"""Models known by name: the fields of their published config.json that matter here, with the address of each.

They go through the same checks as a file. Next: layout.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from kvtide.errors import ConfigError
from kvtide.spec.geometry import shown
from kvtide.spec.model import ModelSpec


def preset(name: str) -> ModelSpec:
    """The model called `name`.

    Raises: ConfigError that lists names near `name`.
    """
    key = name.strip().lower() if isinstance(name, str) else ""
    if key not in _CONFIGS:
        near = difflib.get_close_matches(key[:64], _CONFIGS, n=3, cutoff=0.4)
        meant = f"near it: {', '.join(near)}; all" if near else "known"
        raise ConfigError(f"no model is called {shown(name)}; {meant}: {', '.join(PRESET_NAMES)}")
    source, config = _CONFIGS[key]
    return ModelSpec.from_config(config, name=key, source=source)


def _dense(
    model_type: str,
    *,
    layers: int,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    positions: int,
    **more: object,
) -> Mapping[str, object]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "torch_dtype": "bfloat16",
    } | more


def _opt(*, layers: int, hidden: int, heads: int) -> Mapping[str, object]:
    return {
        "model_type": "opt",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "ffn_dim": 4 * hidden,
        "num_attention_heads": heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "torch_dtype": "float16",
    }


_LLAMA_31_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_DEEPSEEK_ROPE = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}

_CONFIGS: Mapping[str, tuple[str, Mapping[str, object]]] = MappingProxyType(
    {
        "llama-3-8b": (
            "https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json",
            _dense("llama", layers=32, hidden=4096, inner=14336, heads=32, kv_heads=8, vocab=128256, positions=8192,
                   rope_theta=500000.0),
        ),
        "llama-3-70b": (
            "https://huggingface.co/meta-llama/Meta-Llama-3-70B/blob/main/config.json",
            _dense("llama", layers=80, hidden=8192, inner=28672, heads=64, kv_heads=8, vocab=128256, positions=8192,
                   rope_theta=500000.0),
        ),
        "llama-3.1-405b": (
            "https://huggingface.co/meta-llama/Llama-3.1-405B/blob/main/config.json",
            _dense("llama", layers=126, hidden=16384, inner=53248, heads=128, kv_heads=8, vocab=128256,
                   positions=131072, rope_theta=500000.0, rope_scaling=_LLAMA_31_ROPE),
        ),
        "qwen2.5-7b": (
            "https://huggingface.co/Qwen/Qwen2.5-7B/blob/main/config.json",
            _dense("qwen2", layers=28, hidden=3584, inner=18944, heads=28, kv_heads=4, vocab=152064, positions=131072,
                   rope_theta=1000000.0, use_sliding_window=False),
        ),
        "qwen3-32b": (
            "https://huggingface.co/Qwen/Qwen3-32B/blob/main/config.json",
            _dense("qwen3", layers=64, hidden=5120, inner=25600, heads=64, kv_heads=8, vocab=151936, positions=40960,
                   head_dim=128, rope_theta=1000000, use_sliding_window=False),
        ),
        "mistral-7b": (
            "https://huggingface.co/mistralai/Mistral-7B-v0.3/blob/main/config.json",
            _dense("mistral", layers=32, hidden=4096, inner=14336, heads=32, kv_heads=8, vocab=32768, positions=32768,
                   rope_theta=1000000.0),
        ),
        "gemma-3-27b": (
            "https://huggingface.co/google/gemma-3-27b-it/blob/main/config.json (text_config)",
            _dense("gemma3_text", layers=62, hidden=5376, inner=21504, heads=32, kv_heads=16, vocab=262208,
                   positions=131072, head_dim=128, sliding_window=1024, rope_theta=1000000.0,
                   rope_local_base_freq=10000.0, rope_scaling={"factor": 8.0, "rope_type": "linear"}),
        ),
        "deepseek-v3": (
            "https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json",
            _dense("deepseek_v3", layers=61, hidden=7168, inner=18432, heads=128, kv_heads=128, vocab=129280,
                   positions=163840, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
                   v_head_dim=128, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
                   moe_intermediate_size=2048, first_k_dense_replace=3, moe_layer_freq=1, topk_method="noaux_tc",
                   rope_theta=10000, rope_scaling=_DEEPSEEK_ROPE, quantization_config={"quant_method": "fp8"}),
        ),
        "opt-6.7b": (
            "https://huggingface.co/facebook/opt-6.7b/blob/main/config.json (arXiv:2205.01068)",
            _opt(layers=32, hidden=4096, heads=32),
        ),
        "opt-30b": (
            "https://huggingface.co/facebook/opt-30b/blob/main/config.json (arXiv:2205.01068)",
            _opt(layers=48, hidden=7168, heads=56),
        ),
        "phi-3-mini": (
            "https://huggingface.co/microsoft/Phi-3-mini-4k-instruct/blob/main/config.json",
            _dense("phi3", layers=32, hidden=3072, inner=8192, heads=32, kv_heads=32, vocab=32064, positions=4096,
                   sliding_window=2047, rope_theta=10000.0),
        ),
        "smollm2-135m": (
            "https://huggingface.co/HuggingFaceTB/SmolLM2-135M/blob/main/config.json",
            _dense("llama", layers=30, hidden=576, inner=1536, heads=9, kv_heads=3, vocab=49152, positions=8192,
                   rope_theta=100000, tie_word_embeddings=True),
        ),
    }
)  # fmt: skip

PRESET_NAMES: tuple[str, ...] = tuple(_CONFIGS)
