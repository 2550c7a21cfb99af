"""How many weights a model has, and how many one token runs through. Pure counting. Next: model.

Exact for the families in `families`; for layers without attention and for unknown families it is an estimate that
serves arithmetic intensity, never the size of KV.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtide.spec.anatomy import Anatomy
from kvtide.spec.families import Family
from kvtide.spec.geometry import LayerKV


@dataclass(frozen=True, slots=True)
class Params:
    """Weights by role. `routed` are those of experts that only some tokens use; `lookup` are read, not multiplied."""

    total: int
    active: int
    routed: int
    lookup: int
    head: int


def count_params(
    anatomy: Anatomy, family: Family, layers: tuple[LayerKV, ...], *, tied: bool, attention_bias: bool
) -> Params:
    """Weights of the model, biases and norms included, vision towers and extra prediction heads excluded."""
    a = anatomy
    total = routed = active_routed = 0
    for index, layer in enumerate(layers):
        total += _mixer(a, family, layer, attention_bias=attention_bias)
        total += family.norms * family.norm_width * a.hidden
        if a.experts is not None and index in a.experts.layers:
            one = _feed_forward(a.hidden, a.experts.inner, family)
            routed += a.experts.num * one
            active_routed += a.experts.per_token * one
            total += _around_experts(a, family)
        elif a.inner:
            total += _feed_forward(a.hidden, a.inner, family)
    positions = 0 if family.positions_extra is None else (a.max_positions + family.positions_extra) * a.hidden
    table = a.vocab * a.embed_dim
    projections = 2 * a.embed_dim * a.hidden if a.embed_dim != a.hidden else 0
    total += family.norm_width * a.hidden + positions + table + projections
    total += 0 if tied else table + (a.vocab if family.head_bias else 0)
    return Params(
        total=total + routed,
        active=total + active_routed,
        routed=routed,
        lookup=positions + (0 if tied else table),
        head=table,
    )


def _mixer(a: Anatomy, family: Family, layer: LayerKV, *, attention_bias: bool) -> int:
    if layer.kind == "none":
        return _state_space(a)
    if a.mla is not None:
        return _latent_attention(a)
    q_width, kv_width = a.num_q_heads * a.head_dim, layer.num_kv_heads * a.head_dim
    weights = a.hidden * (2 * q_width + 2 * kv_width)
    if family.qkv_bias or attention_bias:
        weights += q_width + 2 * kv_width
    if family.out_bias or attention_bias:
        weights += a.hidden
    return weights + (2 * a.head_dim if family.qk_norm else 0)


def _latent_attention(a: Anatomy) -> int:
    assert a.mla is not None
    m, heads = a.mla, a.num_q_heads
    q_out = heads * (m.nope_dim + m.rope_dim)
    q = a.hidden * q_out if m.q_rank is None else m.q_rank * (a.hidden + 1 + q_out)
    kv = a.hidden * (m.kv_rank + m.rope_dim) + m.kv_rank * (1 + heads * (m.nope_dim + m.v_dim))
    return q + kv + heads * m.v_dim * a.hidden


def _state_space(a: Anatomy) -> int:
    """Estimate: Mamba with expansion 2, 16 states, rank hidden/16 (arXiv:2312.00752), convolution of 4."""
    inner, states, rank = 2 * a.hidden, 16, -(-a.hidden // 16)
    return 3 * inner * a.hidden + inner * (5 + rank + 2 * states) + inner * (rank + 1 + states + 1) + rank + 2 * states


def _feed_forward(hidden: int, inner: int, family: Family) -> int:
    inward = 2 if family.gated else 1
    return (inward + 1) * hidden * inner + (inward * inner + hidden if family.mlp_bias else 0)


def _around_experts(a: Anatomy, family: Family) -> int:
    """The router and the experts every token uses."""
    assert a.experts is not None
    e = a.experts
    router = a.hidden * e.num + (e.num if e.bias else 0)
    shared = _feed_forward(a.hidden, e.shared_inner, family) if e.shared_inner else 0
    return router + shared + (a.hidden if e.shared_gate else 0)
