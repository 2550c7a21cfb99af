"""What a model's KV weighs and what its two phases cost, from geometry alone. Pure. Next: cli_size.

*Theory.* For B sequences of T tokens. P: weights one token is multiplied with (active weights without look-up tables
and without the output head), V: weights of the head, h: query heads, d_k and d_v: sizes of one head's key and value.

    prefill FLOP   2 P B T  +  2 V B  +  sum over layers of 2 h (d_k + d_v) B pairs,  pairs = T (T + 1) / 2
    decode FLOP    2 P B    +  2 V B  +  sum over layers of 2 h (d_k + d_v) B (T + 1)
    prefill bytes  weights touched + KV written once + KV read once
    decode bytes   weights touched + KV of T tokens read + KV of one token written

A multiply and an add are two FLOP. A sliding window W cuts pairs to sum of min(i, W). The head runs for the last token
of a prompt only. MLA prefills with its expanded heads and decodes on the compressed row. Experts touched by n tokens,
routed evenly and independently: 1 - (1 - k/E)^n of them. Activations are left out: fused kernels keep them on chip.
So the bytes are a lower bound and the intensity an upper one.

Source: two FLOP a weight and token, arXiv:2001.08361 section 2.1; causal attention and one pass over K and V,
arXiv:2205.14135; decoding MLA on the compressed row, arXiv:2405.04434 section 2.1; contiguous reservation against
paging, arXiv:2309.06180.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtide.spec import (
    Access,
    Dtype,
    Fragments,
    KVShape,
    LayerKV,
    Layout,
    ModelSpec,
    auto_group_blocks,
    fragments,
    why_not_split,
)
from kvtide.spec.geometry import POSITIONS_MAX, whole_number

LARGE_IO_BYTES = 128 << 10  # from here on an access counts as large; also the knee assumed without a measured drive
BATCH_MAX = 1 << 20
_SELECTED_PART = 100  # sparse attention that keeps one part in a hundred


@dataclass(frozen=True, slots=True)
class Phase:
    """Work of one prefill of the whole batch, or of one decode step, on the whole model."""

    flop: int
    weight_flop: int
    attention_flop: int
    bytes_moved: int
    weight_bytes: int
    kv_read_bytes: int
    kv_written_bytes: int

    @property
    def intensity(self) -> float:
        """FLOP for each byte moved: below a device's own ratio, memory bounds the phase; above it, arithmetic."""
        return self.flop / self.bytes_moved


@dataclass(frozen=True, slots=True)
class Reservation:
    """What an allocator sets aside for the batch, and how much of it holds KV."""

    reserved_bytes: int
    used_bytes: int
    reserved_tokens: int

    @property
    def wasted_bytes(self) -> int:
        """Reserved and never used: internal fragmentation in bytes."""
        return self.reserved_bytes - self.used_bytes

    @property
    def utilisation(self) -> float:
        """Used part of what is reserved."""
        return self.used_bytes / self.reserved_bytes

    @property
    def internal_fragmentation(self) -> float:
        """Wasted part of what is reserved."""
        return self.wasted_bytes / self.reserved_bytes


@dataclass(frozen=True, slots=True)
class FragmentRow:
    """Runs of one access in one layout, for one sequence. `k` blocks or tokens are read where the access is sparse."""

    layout: Layout
    access: Access
    k: int | None
    found: Fragments


@dataclass(frozen=True, slots=True)
class SizeReport:
    """All of it. Byte figures are of one rank unless they say otherwise; `windowed_bytes` drops what windows hide."""

    model: ModelSpec
    shape: KVShape
    num_tokens: int
    batch: int
    block_tokens: int
    group_blocks: int
    bytes_per_token: int
    block_bytes: int
    total_bytes: int
    windowed_bytes: int
    total_bytes_all_ranks: int
    prefill: Phase
    decode: Phase
    contiguous: Reservation
    paged: Reservation
    fragments: tuple[FragmentRow, ...]


def size_report(
    model: ModelSpec,
    *,
    num_tokens: int,
    batch: int = 1,
    dtype: Dtype | None = None,
    tp_size: int = 1,
    block_tokens: int = 16,
) -> SizeReport:
    """Sizes and costs of `batch` sequences of `num_tokens` tokens. Without `dtype`, KV is kept in the model's own.

    Raises: ConfigError if a number is out of range or the heads do not divide among `tp_size` ranks.
    """
    whole_number("tokens", num_tokens, least=1, most=POSITIONS_MAX)
    whole_number("batch", batch, least=1, most=BATCH_MAX)
    shape = KVShape.of(model, dtype or model.dtype, tp_size)
    per_token = shape.bytes_per_token
    block_bytes = shape.block_bytes(block_tokens)
    group_blocks = auto_group_blocks(shape, block_tokens, LARGE_IO_BYTES)
    total = batch * num_tokens * per_token
    return SizeReport(
        model=model,
        shape=shape,
        num_tokens=num_tokens,
        batch=batch,
        block_tokens=block_tokens,
        group_blocks=group_blocks,
        bytes_per_token=per_token,
        block_bytes=block_bytes,
        total_bytes=total,
        windowed_bytes=batch * _windowed_bytes(shape, num_tokens),
        total_bytes_all_ranks=total * tp_size,
        prefill=step_work(model, shape, num_new=num_tokens, num_old=0, batch=batch),
        decode=step_work(model, shape, num_new=1, num_old=num_tokens, batch=batch),
        contiguous=_reserved(batch, max(model.max_positions, num_tokens), num_tokens, per_token),
        paged=_reserved(batch, -(-num_tokens // block_tokens) * block_tokens, num_tokens, per_token),
        fragments=_fragment_rows(shape, num_tokens, block_tokens, group_blocks),
    )


def _windowed_bytes(shape: KVShape, num_tokens: int) -> int:
    """Bytes of one sequence that attention can still reach: a sliding layer reaches its window."""
    return sum(min(num_tokens, one.window_tokens or num_tokens) * one.token_bytes for one in shape.layers)


def _reserved(batch: int, tokens: int, used_tokens: int, bytes_per_token: int) -> Reservation:
    return Reservation(batch * tokens * bytes_per_token, batch * used_tokens * bytes_per_token, tokens)


def step_work(model: ModelSpec, shape: KVShape, *, num_new: int, num_old: int, batch: int) -> Phase:
    """Work of one step of `num_new` tokens of each of `batch` sequences that have the KV of `num_old` already.

    A step of one token decodes: MLA works on the compressed row. A longer one reads the KV it makes once.
    """
    is_decode = num_new == 1 and num_old > 0
    weight_flop = 2 * batch * (_multiplied(model) * num_new + model.head_params)
    attention_flop = batch * sum(
        _pair_flop(model, layer, compressed=is_decode)
        * (_causal_pairs(num_old + num_new, layer.window_tokens) - _causal_pairs(num_old, layer.window_tokens))
        for layer in model.layers
    )
    made = num_new * shape.bytes_per_token
    read = _windowed_bytes(shape, num_old) + (0 if is_decode else made)
    weights = _weight_bytes(model, batch * num_new)
    return _phase(weight_flop, attention_flop, weights, batch * read * shape.tp_size, batch * made * shape.tp_size)


def _phase(weight_flop: int, attention_flop: int, weights: int, read: int, written: int) -> Phase:
    return Phase(
        flop=weight_flop + attention_flop,
        weight_flop=weight_flop,
        attention_flop=attention_flop,
        bytes_moved=weights + read + written,
        weight_bytes=weights,
        kv_read_bytes=read,
        kv_written_bytes=written,
    )


def _multiplied(model: ModelSpec) -> int:
    return model.active_params - model.lookup_params - model.head_params


def _pair_flop(model: ModelSpec, layer: LayerKV, *, compressed: bool) -> int:
    """FLOP all query heads of one layer spend on one query and one key."""
    if layer.kind == "none":
        return 0
    if layer.kind == "mla" and model.mla is not None:
        mla = model.mla
        width = 2 * mla.kv_rank + mla.rope_dim if compressed else mla.nope_dim + mla.rope_dim + mla.v_dim
    else:
        width = layer.head_dim_k + layer.head_dim_v
    return 2 * model.num_q_heads * width


def _causal_pairs(num_tokens: int, window: int | None) -> int:
    """Pairs of a query and a key it may see, itself included."""
    seen = min(num_tokens, window or num_tokens)
    return seen * (seen + 1) // 2 + (num_tokens - seen) * seen


def _weight_bytes(model: ModelSpec, num_tokens: int) -> int:
    """Bytes of the weights `num_tokens` tokens touch together; look-up tables give only a few rows."""
    always = model.num_params - model.routed_params - model.lookup_params
    missed = (1 - model.experts_per_token / model.num_experts) ** num_tokens
    return (always + round(model.routed_params * (1 - missed))) * model.weight_dtype.itemsize


def _fragment_rows(shape: KVShape, num_tokens: int, block_tokens: int, group_blocks: int) -> tuple[FragmentRow, ...]:
    """Rows of every layout that the layers can have: MLA's are not split."""
    num_blocks = -(-num_tokens // block_tokens)
    k_of_access = {
        Access.READ_BLOCKS: max(1, num_blocks // _SELECTED_PART),
        Access.READ_VALUES: max(1, num_blocks // _SELECTED_PART),
        Access.READ_HEAD_BLOCKS: max(1, num_blocks // _SELECTED_PART),
        Access.READ_HEAD_TOKENS: max(1, num_tokens // _SELECTED_PART),
    }
    rows = []
    for layout in (one for one in Layout if not why_not_split(shape, one.split)):
        for access in Access:
            found = fragments(
                shape,
                layout,
                access,
                num_tokens=num_tokens,
                block_tokens=block_tokens,
                group_blocks=group_blocks,
                k=k_of_access.get(access, 1),
            )
            rows.append(FragmentRow(layout, access, k_of_access.get(access), found))
    return tuple(rows)
