"""Contiguous runs one access needs, for each way of laying KV out: where small I/O is born. Pure. Next: identity.

*Theory.* L layers, B blocks of T tokens, H heads of D numbers; g blocks a group.

    BLOCK_FIRST   [B][L, each on a page][K,V][T, H, D]               a block lies together
    LAYER_MAJOR   [B/g][header][L, each on a page][K,V][g*T, H, D]   one layer of a group lies together: our slot
    TOKEN_FIRST   [T][L][K,V][H, D]                                  a token lies together; a sequence is a log
    LAYER_FIRST   [L][K,V][B][T, H, D]                               tensors of a layer; blocks are no neighbours

The first two are media with 4 KiB pages and places of fixed size: a run starts on a page and whole pages move, also
for the tail of a sequence that does not fill its place. The last two are memory: only wanted bytes move.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvtide.errors import ConfigError
from kvtide.spec.geometry import POSITIONS_MAX, shown, whole_number
from kvtide.spec.layout import BLOCK_TOKENS_MAX, PAGE_BYTES, KVShape, LayerShape, SlotLayout, page_up


class Layout(Enum):
    """Order in which KV lies on a medium."""

    BLOCK_FIRST = "block_first"
    LAYER_MAJOR = "layer_major"
    TOKEN_FIRST = "token_first"  # noqa: S105
    LAYER_FIRST = "layer_first"


class Access(Enum):
    """What is wanted at once."""

    WRITE_PREFIX = "write_prefix"
    READ_PREFIX = "read_prefix"
    READ_LAYER = "read_layer"
    READ_BLOCKS = "read_blocks"
    READ_HEAD_TOKENS = "read_head_tokens"


@dataclass(frozen=True, slots=True)
class Fragments:
    """Runs one access takes. `fragment_bytes` is the longest, `padded_bytes` all bytes that move."""

    fragment_bytes: int
    num_fragments: int
    wanted_bytes: int
    padded_bytes: int

    @property
    def amplification(self) -> float:
        """Bytes moved for one byte wanted."""
        return self.padded_bytes / self.wanted_bytes


def fragments(
    shape: KVShape,
    layout: Layout,
    access: Access,
    *,
    num_tokens: int,
    block_tokens: int,
    group_blocks: int = 1,
    k: int = 1,
    layer: int = 0,
) -> Fragments:
    """Runs `access` needs on a medium laid out as `layout`, for a sequence of `num_tokens` tokens.

    `layer` (an index into `shape.layers`) and `k` say which layer and how many scattered blocks or tokens are read,
    where the access reads one layer. Scattered means: no two of them are neighbours, and a row of one head does not
    cross a page. `group_blocks` matters to LAYER_MAJOR only.

    Raises: ConfigError if a number is out of range, or `k` is more than there is.
    """
    whole_number("num_tokens", num_tokens, least=1, most=POSITIONS_MAX)
    whole_number("block_tokens", block_tokens, least=1, most=BLOCK_TOKENS_MAX)
    whole_number("layer", layer, least=0, most=shape.num_layers - 1)
    num_blocks = -(-num_tokens // block_tokens)
    if access is Access.READ_BLOCKS:
        whole_number("k", k, least=1, most=num_blocks)
    elif access is Access.READ_HEAD_TOKENS:
        whole_number("k", k, least=1, most=num_tokens)
    one = shape.layers[layer]
    if access is Access.READ_HEAD_TOKENS:
        return _rows(layout, one, k)
    if layout is Layout.BLOCK_FIRST:
        return _in_slots(SlotLayout(shape, block_tokens, 1), access, num_tokens, k, layer, header=False)
    if layout is Layout.LAYER_MAJOR:
        return _in_slots(SlotLayout(shape, block_tokens, group_blocks), access, num_tokens, k, layer, header=True)
    if layout is Layout.TOKEN_FIRST:
        return _in_log(shape, access, num_tokens, block_tokens, k, layer)
    if layout is Layout.LAYER_FIRST:
        return _in_tensors(shape, access, num_tokens, block_tokens, k, layer)
    raise ConfigError(f"unknown layout {shown(layout)}")


def _rows(layout: Layout, layer: LayerShape, k: int) -> Fragments:
    """K and V rows of one head: apart, unless it is the only head of a token."""
    key_row, value_row = layer.k_bytes // layer.num_heads, layer.v_bytes // layer.num_heads
    if layout is Layout.TOKEN_FIRST and layer.num_heads == 1:
        rows = [key_row + value_row]
    else:
        rows = [row for row in (key_row, value_row) if row]
    paged = layout in {Layout.BLOCK_FIRST, Layout.LAYER_MAJOR}
    return Fragments(
        fragment_bytes=max(rows),
        num_fragments=k * len(rows),
        wanted_bytes=k * sum(rows),
        padded_bytes=k * sum(page_up(row) if paged else row for row in rows),
    )


def _in_slots(slot: SlotLayout, access: Access, num_tokens: int, k: int, layer: int, *, header: bool) -> Fragments:
    shape, one = slot.shape, slot.shape.layers[layer]
    num_slots = -(-num_tokens // slot.tokens_per_group)
    if access in {Access.WRITE_PREFIX, Access.READ_PREFIX}:
        with_header = header and access is Access.WRITE_PREFIX  # a read takes checksums from the index
        moved = slot.slot_bytes - (0 if with_header else slot.header_bytes)
        return Fragments(
            fragment_bytes=min(num_tokens, slot.tokens_per_group) * shape.bytes_per_token,
            num_fragments=num_slots,
            wanted_bytes=num_tokens * shape.bytes_per_token,
            padded_bytes=num_slots * moved,
        )
    if access is Access.READ_LAYER:
        return Fragments(
            fragment_bytes=min(num_tokens, slot.tokens_per_group) * one.token_bytes,
            num_fragments=num_slots,
            wanted_bytes=num_tokens * one.token_bytes,
            padded_bytes=num_slots * slot.fragment_padded_bytes[layer],
        )
    parts = [one.token_bytes] if slot.group_blocks == 1 else [part for part in (one.k_bytes, one.v_bytes) if part]
    return Fragments(
        fragment_bytes=min(slot.block_tokens, num_tokens) * max(parts),
        num_fragments=k * len(parts),
        wanted_bytes=min(k * slot.block_tokens, num_tokens) * one.token_bytes,
        padded_bytes=k * _block_pages(slot, layer) * PAGE_BYTES,
    )


def _block_pages(slot: SlotLayout, layer: int) -> int:
    """Pages that move for one block of one layer, at the place in its group that touches most of them."""
    one = slot.shape.layers[layer]
    if slot.group_blocks == 1:
        return slot.fragment_padded_bytes[layer] // PAGE_BYTES
    base_of_part = ((0, slot.block_tokens * one.k_bytes), (slot.k_bytes[layer], slot.block_tokens * one.v_bytes))
    return max(
        sum(_pages_touched(base + place * size, size) for base, size in base_of_part if size)
        for place in range(slot.group_blocks)
    )


def _pages_touched(offset: int, length: int) -> int:
    return -(-(offset + length) // PAGE_BYTES) - offset // PAGE_BYTES


def _in_log(shape: KVShape, access: Access, num_tokens: int, block_tokens: int, k: int, layer: int) -> Fragments:
    if access in {Access.WRITE_PREFIX, Access.READ_PREFIX}:
        total = num_tokens * shape.bytes_per_token
        return Fragments(total, 1, total, total)
    one = shape.layers[layer].token_bytes
    tokens = num_tokens if access is Access.READ_LAYER else min(k * block_tokens, num_tokens)
    if shape.num_layers > 1:
        run_tokens = 1
    else:  # nothing lies between one token and the next
        run_tokens = num_tokens if access is Access.READ_LAYER else min(block_tokens, num_tokens)
    return Fragments(run_tokens * one, -(-tokens // run_tokens), tokens * one, tokens * one)


def _in_tensors(shape: KVShape, access: Access, num_tokens: int, block_tokens: int, k: int, layer: int) -> Fragments:
    whole = access in {Access.WRITE_PREFIX, Access.READ_PREFIX}
    layers = shape.layers if whole else shape.layers[layer : layer + 1]
    parts = [part for one in layers for part in (one.k_bytes, one.v_bytes) if part]
    if access is Access.READ_BLOCKS:
        blocks, tokens = k, min(k * block_tokens, num_tokens)
    else:
        blocks, tokens = -(-num_tokens // block_tokens), num_tokens
    total = tokens * sum(parts)
    return Fragments(min(block_tokens, tokens) * max(parts), blocks * len(parts), total, total)
