"""What a model is, as far as its KV and the work around it depend on it. Knows no file. Next: presets, layout.

A `ModelSpec` is made from the contents of a config.json, which nobody vouches for: every value is judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvtide.errors import ConfigError
from kvtide.spec.anatomy import (
    EXPERTS_MAX,
    HIDDEN_MAX,
    INNER_MAX,
    LAYERS_MAX,
    VOCAB_MAX,
    Anatomy,
    Mla,
    read_anatomy,
    read_layers,
)
from kvtide.spec.families import FAMILIES, UNKNOWN, Family
from kvtide.spec.fields import TEXT_MAX, Fields, Frozen, freeze
from kvtide.spec.geometry import HEADS_MAX, POSITIONS_MAX, Dtype, LayerKV, shown, whole_number
from kvtide.spec.params import Params, count_params

__all__ = ["Dtype", "LayerKV", "ModelSpec"]

RopeParameters = tuple[tuple[str, Frozen], ...]

_NESTED = ("text_config", "language_config", "llm_config")  # where multimodal configs keep the language model
_ROPE_FIELDS = (
    "rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "rope_type", "rotary_emb_base",
    "rotary_pct", "rotary_dim", "partial_rotary_factor", "original_max_position_embeddings", "alibi",
)  # fmt: skip
_PARAMS_MAX = 1 << 60


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only model. `layers` has an entry for each layer, those without KV included.

    Units: `num_params` and its kin count weights. `active_params` is what one token runs through, `routed_params`
    those of experts only some tokens use, `lookup_params` tables that are read but not multiplied, `head_params` the
    matrix of the output head. `dtype` is the format the model computes in, `weight_dtype` the one weights are kept in.
    """

    name: str
    source: str
    num_layers: int
    hidden: int
    num_q_heads: int
    layers: tuple[LayerKV, ...]
    ffn_inner: int
    num_params: int
    active_params: int
    vocab: int
    max_positions: int
    rope: RopeParameters = ()
    dtype: Dtype = Dtype.BF16
    weight_dtype: Dtype = Dtype.BF16
    mla: Mla | None = None
    num_experts: int = 1
    experts_per_token: int = 1
    expert_inner: int = 0
    routed_params: int = 0
    lookup_params: int = 0
    head_params: int = 0

    def __post_init__(self) -> None:
        for label, text in (("name", self.name), ("source", self.source)):
            if not isinstance(text, str) or not 0 < len(text) <= TEXT_MAX:
                raise ConfigError(f"{label} of a model must be a text of 1..{TEXT_MAX} characters, got {shown(text)}")
        whole_number("num_layers", self.num_layers, least=1, most=LAYERS_MAX)
        whole_number("hidden", self.hidden, least=1, most=HIDDEN_MAX)
        whole_number("num_q_heads", self.num_q_heads, least=1, most=HEADS_MAX)
        whole_number("ffn_inner", self.ffn_inner, least=0, most=INNER_MAX)
        whole_number("vocab", self.vocab, least=1, most=VOCAB_MAX)
        whole_number("max_positions", self.max_positions, least=1, most=POSITIONS_MAX)
        whole_number("num_params", self.num_params, least=1, most=_PARAMS_MAX)
        whole_number("active_params", self.active_params, least=1, most=self.num_params)
        if min(self.routed_params, self.lookup_params, self.head_params) < 0:
            raise ConfigError("counts of weights must not be negative")
        if self.lookup_params + self.head_params > self.active_params or self.routed_params > self.num_params:
            raise ConfigError("tables, head and experts hold more weights than the model")
        whole_number("num_experts", self.num_experts, least=1, most=EXPERTS_MAX)
        whole_number("experts_per_token", self.experts_per_token, least=1, most=self.num_experts)
        if len(self.layers) != self.num_layers:
            raise ConfigError(f"{len(self.layers)} layers described, but num_layers is {self.num_layers}")
        for layer in self.layers:
            if layer.kind in {"full", "sliding"} and self.num_q_heads % layer.num_kv_heads:
                raise ConfigError(
                    f"{self.num_q_heads} query heads are no multiple of {layer.num_kv_heads} key-value heads"
                )

    @classmethod
    def from_config(cls, config: Mapping[str, object], name: str = "", source: str = "config.json") -> ModelSpec:
        """Model described by the contents of a Hugging Face config.json.

        A model_type this package does not know is taken if every needed field is there under its usual name;
        num_key_value_heads must then be spelled out.

        Raises: ConfigError naming what is missing, what cannot be, or what is not modelled.
        """
        inner = _language_model(config)
        model_type = _model_type(inner, config)
        family = FAMILIES.get(model_type, UNKNOWN)
        fields = Fields(inner, family.defaults)
        anatomy = read_anatomy(fields, family, model_type)
        layers = read_layers(fields, family, anatomy, model_type)
        tied = fields.flag("tie_word_embeddings", default=_flag_of(config, "tie_word_embeddings", default=family.tied))
        biased = any(fields.flag(field, default=False) for field in ("attention_bias", "bias"))
        params = count_params(anatomy, _variant(fields, family, model_type), layers, tied=tied, attention_bias=biased)
        dtype = Dtype.parse(_first(inner, config, "dtype", "torch_dtype") or "bf16")
        return _assemble(
            name or model_type,
            source if model_type in FAMILIES else f"{source} (generic)",
            anatomy,
            layers,
            params,
            rope=_rope(inner),
            dtype=dtype,
            weight_dtype=_weight_dtype(config, dtype),
        )


def _assemble(
    name: str,
    source: str,
    anatomy: Anatomy,
    layers: tuple[LayerKV, ...],
    params: Params,
    *,
    rope: RopeParameters,
    dtype: Dtype,
    weight_dtype: Dtype,
) -> ModelSpec:
    experts = anatomy.experts
    return ModelSpec(
        name=name,
        source=source,
        num_layers=anatomy.num_layers,
        hidden=anatomy.hidden,
        num_q_heads=anatomy.num_q_heads,
        layers=layers,
        ffn_inner=anatomy.inner,
        num_params=params.total,
        active_params=params.active,
        vocab=anatomy.vocab,
        max_positions=anatomy.max_positions,
        rope=rope,
        dtype=dtype,
        weight_dtype=weight_dtype,
        mla=anatomy.mla,
        num_experts=experts.num if experts else 1,
        experts_per_token=experts.per_token if experts else 1,
        expert_inner=experts.inner if experts else 0,
        routed_params=params.routed,
        lookup_params=params.lookup,
        head_params=params.head,
    )


def _language_model(config: Mapping[str, object]) -> Mapping[str, object]:
    """The part of `config` that describes the language model; multimodal configs nest it."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"a config must be a JSON object, got {shown(config)}")
    if not config:
        raise ConfigError("the config is empty; it needs at least model_type and the sizes of the model")
    for key in _NESTED:
        nested = config.get(key)
        if isinstance(nested, Mapping) and nested:
            return nested
    return config


def _model_type(inner: Mapping[str, object], outer: Mapping[str, object]) -> str:
    found = _first(inner, outer, "model_type")
    if found is None:
        return "unknown"
    if not isinstance(found, str) or not 0 < len(found) <= 64:
        raise ConfigError(f"model_type must be a text of 1..64 characters, got {shown(found)}")
    return found


def _first(inner: Mapping[str, object], outer: Mapping[str, object], *names: str) -> object:
    for source in (inner, outer):
        for name in names:
            if source.get(name) is not None:
                return source[name]
    return None


def _flag_of(config: Mapping[str, object], name: str, *, default: bool) -> bool:
    return Fields(config, {}).flag(name, default=default)


def _variant(fields: Fields, family: Family, model_type: str) -> Family:
    """`family` as switches in the config change it; only the count of weights depends on them."""
    mlp_bias = family.mlp_bias or fields.flag("mlp_bias", default=False)
    norms = family.norms
    if model_type == "falcon":
        mlp_bias = mlp_bias or fields.flag("bias", default=False)
        parallel = fields.flag("parallel_attn", default=True)
        new = fields.flag("new_decoder_architecture", default=False)
        norms = fields.count("num_ln_in_parallel_attn", default=2, most=2) if new else 1 if parallel else 2
    return replace(family, mlp_bias=mlp_bias, norms=norms)


def _rope(config: Mapping[str, object]) -> RopeParameters:
    """Every field that changes how positions turn K, as sorted pairs: KV of other values must never be mixed."""
    return tuple(sorted((name, freeze(config[name])) for name in _ROPE_FIELDS if config.get(name) is not None))


def _weight_dtype(config: Mapping[str, object], dtype: Dtype) -> Dtype:
    """Format of the stored weights: fp8 where the config says so (DeepSeek V3), else that of computation."""
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == "fp8":
        return Dtype.FP8_E4M3
    return dtype
