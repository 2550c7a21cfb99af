"""Models from configs and presets: right geometry for known families, a named error for everything else."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtide.errors import ConfigError
from kvtide.spec import PRESET_NAMES, Dtype, KVShape, LayerKV, ModelSpec, preset

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MLA = {
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}


@dataclass(frozen=True)
class Preset:
    id: str
    bytes_per_token: int
    num_params: int


# Parameters as counted from the config; vision towers and extra prediction layers are left out.
PRESETS = (
    Preset("llama-3-8b", 131072, 8_030_261_248),
    Preset("llama-3-70b", 327680, 70_553_706_496),
    Preset("llama-3.1-405b", 516096, 405_853_388_800),
    Preset("qwen2.5-7b", 57344, 7_615_616_512),
    Preset("qwen3-32b", 262144, 32_762_123_264),
    Preset("mistral-7b", 131072, 7_248_023_552),
    Preset("gemma-3-27b", 507904, 27_009_346_304),
    Preset("deepseek-v3", 70272, 671_026_419_200),
    Preset("opt-6.7b", 524288, 6_658_473_984),
    Preset("opt-30b", 1376256, 29_974_540_288),
    Preset("phi-3-mini", 393216, 3_821_079_552),
    Preset("smollm2-135m", 23040, 134_515_008),
)


@dataclass(frozen=True)
class Family:
    id: str
    config: dict[str, object]
    num_params: int  # counted by transformers 5.24 on a model built from the same config
    kinds: str  # f, s, m, n: full, sliding, mla, none


FAMILIES = (
    Family("llama", LLAMA, 3_857_664, "ffffff"),
    Family("llama-biases", LLAMA | {"attention_bias": True, "mlp_bias": True}, 3_869_184, "ffffff"),
    Family("mixtral", LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}, 20_385_024,
           "ffffff"),
    Family("qwen2_moe", LLAMA | EXPERTS | {"model_type": "qwen2_moe", "decoder_sparse_step": 2, "mlp_only_layers": [3],
                                           "shared_expert_intermediate_size": 128}, 3_863_552, "ffffff"),
    Family("qwen3_moe", LLAMA | EXPERTS | {"model_type": "qwen3_moe", "head_dim": 32}, 3_277_440, "ffffff"),
    Family("qwen3", LLAMA | {"model_type": "qwen3", "head_dim": 64}, 4_841_472, "ffffff"),
    Family("gemma", LLAMA | {"model_type": "gemma"}, 10_482_944, "ffffff"),
    Family("gemma2", LLAMA | {"model_type": "gemma2", "sliding_window": 512}, 10_486_016, "sfsfsf"),
    Family("gemma3", {"model_type": "gemma3", "text_config": LLAMA | {"model_type": "gemma3_text",
                                                                      "sliding_window": 512}}, 10_489_088, "sssssf"),
    Family("phi", {key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"} | {"model_type": "phi"}, 3_673_064,
           "ffffff"),
    Family("phi3", LLAMA | {"model_type": "phi3", "sliding_window": 512}, 3_857_664, "ssssss"),
    Family("gpt_neox", LLAMA | {"model_type": "gpt_neox", "num_key_value_heads": None}, 3_675_136, "ffffff"),
    Family("opt", LLAMA | {"model_type": "opt", "intermediate_size": None, "ffn_dim": 512, "num_key_value_heads": None},
           3_943_936, "ffffff"),
    Family("gpt2", {"model_type": "gpt2", "n_embd": 256, "n_layer": 6, "n_head": 8, "vocab_size": 1000,
                    "n_positions": 1024, "n_inner": None}, 5_257_216, "ffffff"),
    Family("falcon", {"model_type": "falcon", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8,
                      "vocab_size": 1000}, 4_290_048, "ffffff"),
    Family("falcon-new", {"model_type": "falcon", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8,
                          "vocab_size": 1000, "new_decoder_architecture": True, "num_kv_heads": 2}, 4_391_424,
           "ffffff"),
    Family("falcon-bias", {"model_type": "falcon", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8,
                           "vocab_size": 1000, "bias": True, "parallel_attn": False, "multi_query": False}, 4_995_072,
           "ffffff"),
    Family("deepseek_v2", LLAMA | MLA | {"model_type": "deepseek_v2", "num_key_value_heads": 8}, 4_531_648, "mmmmmm"),
    Family("deepseek_v3", LLAMA | MLA | {"model_type": "deepseek_v3", "num_key_value_heads": 8, "q_lora_rank": 64},
           4_188_008, "mmmmmm"),
    Family("jamba", LLAMA | {"model_type": "jamba", "num_hidden_layers": 8, "num_experts": 4, "num_experts_per_tok": 2,
                             "expert_layer_period": 2, "expert_layer_offset": 1}, 11_613_264, "nnnnfnnn"),
)  # fmt: skip


@pytest.mark.parametrize("case", PRESETS, ids=lambda case: case.id)
def test_presets_keep_their_size(case):
    model = preset(case.id)
    assert KVShape.of(model, model.dtype).bytes_per_token == case.bytes_per_token
    assert model.num_params == case.num_params
    assert "huggingface.co" in model.source


def test_every_preset_is_pinned():
    assert {case.id for case in PRESETS} == set(PRESET_NAMES)


def test_deepseek_runs_a_part_of_its_weights():
    assert preset("deepseek-v3").active_params == 37_552_297_472
    assert preset("deepseek-v3").weight_dtype is Dtype.FP8_E4M3


@pytest.mark.parametrize("name", ["llama-3-70", "Llama3", "", "x" * 10_000, "qwen"])
def test_unknown_preset_names_what_is_known(name):
    with pytest.raises(ConfigError, match="llama-3-70b"):
        preset(name)


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.id)
def test_families_match_their_reference(case):
    model = ModelSpec.from_config(case.config, name=case.id)
    assert model.num_params == case.num_params
    assert "".join(layer.kind[0] for layer in model.layers) == case.kinds


def test_multi_query_falcon_keeps_one_head():
    falcon = next(case for case in FAMILIES if case.id == "falcon")
    assert ModelSpec.from_config(falcon.config).layers[0] == LayerKV("full", 1, 32, 32)


@pytest.mark.parametrize(
    ("more", "kinds"),
    [
        ({"sliding_window": 100}, "ssssss"),
        ({"sliding_window": 4096}, "ffffff"),  # longer than any sequence
        ({"sliding_window": None}, "ffffff"),
        ({"model_type": "qwen2", "sliding_window": 100, "use_sliding_window": False}, "ffffff"),
        ({"model_type": "qwen2", "sliding_window": 100, "use_sliding_window": True, "max_window_layers": 4}, "ffffss"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 3, "sliding_window": 100}, "fsfsfs"),
        ({"layer_types": ["linear_attention"] * 5 + ["full_attention"]}, "nnnnnf"),
        ({"model_type": "qwen3_next", "full_attention_interval": 3}, "nnfnnf"),
        ({"attn_layer_indices": [1, 4]}, "nfnnfn"),
        ({"block_types": ["recurrent", "recurrent", "attention"]}, "nnfnnf"),
        ({"hybrid_override_pattern": "M*M-M*"}, "nfnnnf"),
        ({"model_type": "gemma3_text", "sliding_window": 9, "sliding_window_pattern": 3}, "ssfssf"),
        ({"model_type": "mamba"}, "nnnnnn"),
    ],
)
def test_layers_that_slide_or_keep_nothing(more, kinds):
    model = ModelSpec.from_config(LLAMA | more)
    assert "".join(layer.kind[0] for layer in model.layers) == kinds


def test_unknown_family_is_taken_when_all_is_there():
    model = ModelSpec.from_config(LLAMA | {"model_type": "newcomer"})
    assert model.layers == ModelSpec.from_config(LLAMA).layers
    assert "generic" in model.source


def test_unknown_family_names_every_missing_field():
    with pytest.raises(ConfigError) as caught:
        ModelSpec.from_config({"model_type": "newcomer", "hidden_size": 64, "num_attention_heads": 4})
    for field in ("num_hidden_layers", "num_key_value_heads", "intermediate_size", "vocab_size", "hidden_size"):
        assert field in str(caught.value)


BAD = (
    [{key: value} for key in LLAMA if key != "model_type"
     for value in (0, -1, True, "8", 1.5, 1 << 70, [], {}, float("nan"))]
    + [{key: None} for key in ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads")]
    + [
        {"model_type": 3}, {"model_type": ""}, {"num_key_value_heads": 3}, {"hidden_size": 257}, {"head_dim": 0},
        {"layer_types": ["full_attention"] * 5}, {"layer_types": "full"}, {"layer_types": ["warp"] * 6},
        {"layer_types": ["sliding_attention"] * 6}, {"layer_types": [["full_attention"]] * 6}, {"torch_dtype": "int3"},
        {"torch_dtype": 16}, {"sliding_window": -1}, {"tie_word_embeddings": "yes"}, {"kv_lora_rank": 512},
        {"kv_lora_rank": -1}, {"num_experts": 4}, {"num_experts": 4, "num_experts_per_tok": 5}, {"index_head_dim": 128},
        {"is_encoder_decoder": True}, {"num_kv_shared_layers": 3}, {"hybrid_override_pattern": "M*"},
        {"rope_scaling": {"factor": float("inf")}}, {"rope_scaling": object()}, {"rope_theta": 1 << 80},
        {"mlp_only_layers": [9], "num_experts": 4, "num_experts_per_tok": 1}, {"attn_layer_indices": [-1]},
        {"block_configs": [1]}, {"rope_parameters": {"a": {"b": {"c": {"d": {"e": {"f": {}}}}}}}},
    ]
)  # fmt: skip


@pytest.mark.parametrize("change", BAD, ids=lambda change: str(change).split(" at 0x")[0])
def test_what_cannot_be_is_refused(change):
    with pytest.raises(ConfigError):
        ModelSpec.from_config(LLAMA | change)


@pytest.mark.parametrize("config", [{}, [], None, "llama", {"text_config": {}}, {"text_config": [1]}])
def test_what_is_no_config_is_refused(config):
    with pytest.raises(ConfigError):
        ModelSpec.from_config(config)


HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["full_attention", "sliding_attention", "mamba", "bfloat16"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
FIELD_NAMES = sorted({key for case in FAMILIES for key in case.config} | {
    "model_type", "rope_scaling", "rope_theta", "layer_types", "layers_block_type", "block_types", "sliding_window",
    "sliding_window_pattern", "use_sliding_window", "max_window_layers", "attn_layer_period", "attn_layer_offset",
    "attn_layer_indices", "head_dim", "dtype", "torch_dtype", "quantization_config", "text_config", "moe_layer_freq",
    "word_embed_proj_dim", "num_ln_in_parallel_attn", "hybrid_override_pattern", "tie_word_embeddings",
})  # fmt: skip


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    base=st.sampled_from([case.config for case in FAMILIES]),
    changes=st.dictionaries(st.sampled_from(FIELD_NAMES), HOSTILE, min_size=1, max_size=3),
)
def test_hostile_configs_raise_nothing_but_config_errors(base, changes):
    with contextlib.suppress(ConfigError):
        model = ModelSpec.from_config({**base, **changes})
        assert len(model.layers) == model.num_layers
        assert 0 < model.active_params <= model.num_params
        hash(model)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bf16", Dtype.BF16), ("torch.float16", Dtype.FP16), ("float8_e4m3fn", Dtype.FP8_E4M3), ("FP32", Dtype.FP32)],
)
def test_dtypes_are_found_by_all_their_names(name, dtype):
    assert Dtype.parse(name) is dtype


def test_itemsizes():
    assert [dtype.itemsize for dtype in Dtype] == [4, 2, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "odd"}, "kind"),
        ({"kind": "none"}, "none"),
        ({"kind": "mla"}, "mla"),
        ({"kind": "sliding"}, "window_tokens"),
        ({"window_tokens": 5}, "window_tokens"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"head_dim_k": True}, "head_dim_k"),
    ],
)
def test_impossible_layers_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        replace(LayerKV("full", 2, 64, 64), **change)


def test_a_model_with_a_wrong_number_of_layers_is_refused():
    model = preset("llama-3-8b")
    with pytest.raises(ConfigError, match="num_layers"):
        replace(model, layers=model.layers[:-1])
    with pytest.raises(ConfigError, match="multiple"):
        replace(model, num_q_heads=9)
