"""The parts of a model as its config.json tells them: sizes, experts, and what each layer keeps. Next: params, model.

Nothing here guesses a size of KV: a field that is needed and missing is an error, and so is one that changes what a
token keeps in a way this package does not model.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtide.errors import ConfigError
from kvtide.spec.families import LAYER_TYPE_KIND, NO_ATTENTION_TYPES, NOT_MODELLED, ROUTER_BIAS_TYPES, Family
from kvtide.spec.fields import Fields
from kvtide.spec.geometry import HEAD_DIM_MAX, HEADS_MAX, NO_KV, POSITIONS_MAX, LayerKV, shown

# Bounds between any model published so far and nonsense in a file.
LAYERS_MAX = 4096
HIDDEN_MAX = 1 << 20
INNER_MAX = 1 << 24
VOCAB_MAX = 1 << 26
EXPERTS_MAX = 1 << 14


@dataclass(frozen=True, slots=True)
class Mla:
    """Head sizes of multi-head latent attention. The cache keeps `kv_rank + rope_dim` numbers a token and layer."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: `per_token` of `num` run for each token, `shared_inner` runs always."""

    num: int
    per_token: int
    inner: int
    shared_inner: int
    shared_gate: bool
    bias: bool
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Sizes of one model. `inner` is the width of its dense feed-forward layers."""

    num_layers: int
    hidden: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    max_positions: int
    embed_dim: int
    mla: Mla | None
    experts: Experts | None


def read_anatomy(fields: Fields, family: Family, model_type: str) -> Anatomy:
    """Sizes from `fields`, each within bounds.

    Raises: ConfigError naming every missing field at once, or the first value that cannot be.
    """
    _refuse_unmodelled(fields, model_type)
    attention_free = model_type in NO_ATTENTION_TYPES
    num_layers = _num_layers(fields)
    hidden = fields.need("hidden_size", "n_embd", "d_model", most=HIDDEN_MAX)
    if attention_free:
        num_q_heads = fields.count("num_attention_heads", default=1, most=HEADS_MAX)
    else:
        num_q_heads = fields.need("num_attention_heads", "n_head", "num_heads", "n_heads", most=HEADS_MAX)
    num_kv_heads = 1 if attention_free else _num_kv_heads(fields, family, model_type, num_q_heads)
    inner = _inner(fields, family, model_type, hidden)
    vocab = fields.need("vocab_size", most=VOCAB_MAX)
    positions = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
    if attention_free:
        max_positions = fields.count(*positions, default=1 << 20, most=POSITIONS_MAX)
    else:
        max_positions = fields.need(*positions, most=POSITIONS_MAX)
    mla = _mla(fields)
    fields.check_complete(model_type)
    anatomy = Anatomy(
        num_layers=num_layers,
        hidden=hidden,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=0 if mla or attention_free else _head_dim(fields, hidden, num_q_heads),
        inner=inner,
        vocab=vocab,
        max_positions=max_positions,
        embed_dim=fields.count("word_embed_proj_dim", default=hidden, most=HIDDEN_MAX),
        mla=mla,
        experts=_experts(fields, num_layers, inner, model_type),
    )
    fields.check_complete(model_type)
    return anatomy


def read_layers(fields: Fields, family: Family, anatomy: Anatomy, model_type: str) -> tuple[LayerKV, ...]:
    """What each layer keeps, in the model's order.

    Raises: ConfigError where layer types and the number of layers disagree, or a window is missing.
    """
    kinds = _layer_kinds(fields, family, anatomy.num_layers, model_type)
    window = fields.count("sliding_window", "attention_chunk_size", default=0, most=POSITIONS_MAX, least=0)
    if "sliding" in kinds and not window:
        raise ConfigError("some layers slide, but the config has no sliding_window; add it")
    layers = []
    for kind in kinds:
        if kind == "none":
            layers.append(NO_KV)
        elif anatomy.mla is not None:
            layers.append(LayerKV("mla", 1, anatomy.mla.kv_rank + anatomy.mla.rope_dim, 0))
        elif kind == "sliding" and window < anatomy.max_positions:
            layers.append(LayerKV("sliding", anatomy.num_kv_heads, anatomy.head_dim, anatomy.head_dim, window))
        else:  # a window as long as the longest sequence hides nothing
            layers.append(LayerKV("full", anatomy.num_kv_heads, anatomy.head_dim, anatomy.head_dim))
    return tuple(layers)


def _refuse_unmodelled(fields: Fields, model_type: str) -> None:
    for name, meaning in NOT_MODELLED.items():
        if fields.get(name):
            raise ConfigError(f"model_type {model_type} has {name}: {meaning}; kvtide does not model it")
    if fields.flag("is_encoder_decoder", default=False):
        raise ConfigError(f"model_type {model_type} is an encoder-decoder; kvtide models decoder-only ones")


def _num_layers(fields: Fields) -> int:
    pattern = fields.get("hybrid_override_pattern")
    if isinstance(pattern, str) and 0 < len(pattern) <= LAYERS_MAX:
        return fields.count("num_hidden_layers", default=len(pattern), most=LAYERS_MAX)
    return fields.need("num_hidden_layers", "n_layer", "num_layers", "n_layers", most=LAYERS_MAX)


def _num_kv_heads(fields: Fields, family: Family, model_type: str, num_q_heads: int) -> int:
    if model_type == "falcon":
        if fields.flag("new_decoder_architecture", default=False):
            return fields.count("num_kv_heads", "n_head_kv", default=num_q_heads, most=HEADS_MAX)
        return 1 if fields.flag("multi_query", default=True) else num_q_heads
    if model_type == "gpt_bigcode":
        return 1 if fields.flag("multi_query", default=True) else num_q_heads
    names = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
    if fields.get("kv_lora_rank") is not None:
        return num_q_heads  # every head reads the one shared row
    if family.heads_default_to_all:
        num_kv_heads = fields.count(*names, default=num_q_heads, most=HEADS_MAX)
    else:
        num_kv_heads = fields.need(*names, most=HEADS_MAX)
    if num_q_heads % num_kv_heads and fields.get("num_attention_heads", "n_head", "num_heads", "n_heads") is not None:
        raise ConfigError(f"{num_q_heads} query heads are no multiple of {num_kv_heads} key-value heads")
    return num_kv_heads


def _inner(fields: Fields, family: Family, model_type: str, hidden: int) -> int:
    names = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    if model_type in NO_ATTENTION_TYPES:
        return 0  # the mixer is all there is
    if not family.gated:
        return fields.count(*names, default=4 * hidden, most=INNER_MAX)
    return fields.need(*names, most=INNER_MAX)


def _head_dim(fields: Fields, hidden: int, num_q_heads: int) -> int:
    given = fields.optional("head_dim", "attention_head_dim", "kv_channels", most=HEAD_DIM_MAX)
    if given is not None:
        return given
    if hidden % num_q_heads:
        raise ConfigError(f"hidden size {hidden} does not divide by {num_q_heads} query heads; add head_dim")
    if hidden // num_q_heads > HEAD_DIM_MAX:
        raise ConfigError(f"a head of {hidden // num_q_heads} numbers is above {HEAD_DIM_MAX}; add head_dim")
    return hidden // num_q_heads


def _mla(fields: Fields) -> Mla | None:
    if fields.get("kv_lora_rank") is None:
        return None
    return Mla(
        q_rank=fields.optional("q_lora_rank", most=HIDDEN_MAX),
        kv_rank=fields.need("kv_lora_rank", most=HEAD_DIM_MAX // 2),
        rope_dim=fields.need("qk_rope_head_dim", most=HEAD_DIM_MAX // 2),
        nope_dim=fields.need("qk_nope_head_dim", most=HEAD_DIM_MAX // 2),
        v_dim=fields.need("v_head_dim", most=HEAD_DIM_MAX // 2),
    )


def _experts(fields: Fields, num_layers: int, inner: int, model_type: str) -> Experts | None:
    num = fields.count("num_local_experts", "num_experts", "n_routed_experts", default=1, most=EXPERTS_MAX, least=0)
    if num < 2:
        return None
    per_token = fields.need("num_experts_per_tok", "num_experts_per_token", most=num)
    expert_inner = fields.count("moe_intermediate_size", default=inner, most=INNER_MAX)
    num_shared = fields.count("n_shared_experts", "num_shared_experts", default=0, most=EXPERTS_MAX, least=0)
    gated_shared = fields.count("shared_expert_intermediate_size", default=0, most=INNER_MAX, least=0)
    return Experts(
        num=num,
        per_token=per_token,
        inner=expert_inner,
        shared_inner=gated_shared or num_shared * expert_inner,
        shared_gate=gated_shared > 0,
        bias=model_type in ROUTER_BIAS_TYPES,
        layers=_expert_layers(fields, num_layers),
    )


def _expert_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Layers whose feed-forward is a mixture. Families place them by first dense layers, a period, or a list."""
    first = fields.count("first_k_dense_replace", default=0, most=num_layers, least=0)
    step = fields.count("decoder_sparse_step", "moe_layer_freq", default=1, most=LAYERS_MAX)
    period = fields.optional("expert_layer_period", most=LAYERS_MAX)
    offset = fields.count("expert_layer_offset", default=0, most=LAYERS_MAX, least=0)
    dense = fields.indices("mlp_only_layers", most=num_layers)
    counted_from_one = fields.get("decoder_sparse_step") is not None
    chosen = set()
    for index in range(first, num_layers):
        if index in dense or (index + counted_from_one) % step:
            continue
        if period is None or index % period == offset % period:
            chosen.add(index)
    return frozenset(chosen)


def _layer_kinds(fields: Fields, family: Family, num_layers: int, model_type: str) -> list[str]:
    if model_type in NO_ATTENTION_TYPES:
        return ["none"] * num_layers
    listed = _listed_kinds(fields, num_layers)
    if listed is not None:
        return listed
    period = fields.optional("attn_layer_period", "full_attention_interval", most=LAYERS_MAX)
    if period is not None:
        last = fields.get("attn_layer_period") is None  # an interval puts attention at the end of each period
        offset = fields.count("attn_layer_offset", default=period - 1 if last else 0, most=LAYERS_MAX, least=0)
        return ["full" if index % period == offset % period else "none" for index in range(num_layers)]
    only = fields.indices("attn_layer_indices", most=num_layers)
    if only:
        return ["full" if index in only else "none" for index in range(num_layers)]
    return _sliding_kinds(fields, family, num_layers)


def _listed_kinds(fields: Fields, num_layers: int) -> list[str] | None:
    """Kinds spelled out layer by layer, as a list of words, a repeating one, or a string of letters."""
    pattern = fields.get("hybrid_override_pattern")
    if pattern is not None:
        if not isinstance(pattern, str) or len(pattern) != num_layers or set(pattern) - set("M*-E"):
            raise ConfigError(
                f"hybrid_override_pattern must be {num_layers} letters of M, *, -, E, got {shown(pattern)}"
            )
        return ["full" if letter == "*" else "none" for letter in pattern]
    for name in ("layer_types", "layers_block_type", "block_types"):
        entries = fields.items(name, most=LAYERS_MAX)
        if not entries:
            continue
        if name == "block_types":  # repeats, and its attention is local
            entries = [entries[index % len(entries)] for index in range(num_layers)]
        if len(entries) != num_layers:
            raise ConfigError(f"{name} has {len(entries)} entries for {num_layers} layers")
        kinds = [LAYER_TYPE_KIND.get(entry) if isinstance(entry, str) else None for entry in entries]
        if None in kinds:
            strange = shown(entries[kinds.index(None)])
            raise ConfigError(f"{name} holds {strange}; known are {', '.join(sorted(LAYER_TYPE_KIND))}")
        return [kind for kind in kinds if kind is not None]
    return None


def _sliding_kinds(fields: Fields, family: Family, num_layers: int) -> list[str]:
    switched = fields.get("use_sliding_window") is not None
    slides = fields.flag("use_sliding_window", default=family.window_from_field or family.window_pattern is not None)
    if not slides or not fields.get("sliding_window"):
        return ["full"] * num_layers
    if switched:
        first = fields.count("max_window_layers", default=0, most=LAYERS_MAX, least=0)
        return ["sliding" if index >= first else "full" for index in range(num_layers)]
    pattern = fields.count("sliding_window_pattern", "_sliding_window_pattern", default=family.window_pattern or 0,
                           most=LAYERS_MAX, least=0)  # fmt: skip
    if not pattern:
        return ["sliding"] * num_layers
    return ["full" if (index + 1) % pattern == 0 else "sliding" for index in range(num_layers)]
