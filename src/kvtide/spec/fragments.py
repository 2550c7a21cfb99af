"""Contiguous runs one access needs, for each way of laying KV out: where small I/O is born. Pure. Next: identity.

*Theory.* L layers, B blocks of T tokens, H heads of D numbers; g blocks a group.

    BLOCK_FIRST   [B][L, each on a page][K,V][T, H, D]               a block lies together
    LAYER_MAJOR   [B/g][header][L, each on a page][K,V][g*T, H, D]   one layer of a group lies together: our slot
    KV_APART      [B/g][header][L][K,V, each on a page][g*T, H, D]   values can be read alone: our slot, split kv
    HEAD_MAJOR    [B/g][header][L][H, each on a page][K,V][g*T, D]   a head can be read alone: our slot, split head
    TOKEN_FIRST   [T][L][K,V][H, D]                                  a token lies together; a sequence is a log
    LAYER_FIRST   [L][K,V][B][T, H, D]                               tensors of a layer; blocks are no neighbours

The first four are media with 4 KiB pages and places of fixed size: a run starts on a page and whole pages move, also
for the tail of a sequence that does not fill its place. Padding does not end a run. The last two are memory: only
wanted bytes move.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvtide.errors import ConfigError
from kvtide.spec.geometry import POSITIONS_MAX, shown, whole_number
from kvtide.spec.layout import BLOCK_TOKENS_MAX, PAGE_BYTES, KVShape, LayerShape, Piece, SlotLayout, Split, page_up


class Layout(Enum):
    """Order in which KV lies on a medium."""

    BLOCK_FIRST = "block_first"
    LAYER_MAJOR = "layer_major"
    KV_APART = "kv_apart"
    HEAD_MAJOR = "head_major"
    TOKEN_FIRST = "token_first"  # noqa: S105
    LAYER_FIRST = "layer_first"

    @property
    def is_paged(self) -> bool:
        """Whether it is that of a medium with pages, which the file tier can have; the others are of memory."""
        return self not in {Layout.TOKEN_FIRST, Layout.LAYER_FIRST}

    @property
    def split(self) -> Split:
        """How a slot of this layout cuts a layer."""
        return "kv" if self is Layout.KV_APART else "head" if self is Layout.HEAD_MAJOR else "none"


class Access(Enum):
    """What is wanted at once. Values of MLA lie in the rows of its keys.

    READ_HEAD and READ_HEAD_BLOCKS are of one head: all tokens, or k scattered blocks.
    """

    WRITE_PREFIX = "write_prefix"
    READ_PREFIX = "read_prefix"
    READ_LAYER = "read_layer"
    READ_BLOCKS = "read_blocks"
    READ_VALUES = "read_values"
    READ_HEAD_TOKENS = "read_head_tokens"
    READ_HEAD_BLOCKS = "read_head_blocks"
    READ_HEAD = "read_head"


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
    cross a page. Of a medium on which heads do not lie apart, one head cannot be read without the others of its blocks.
    `group_blocks` matters to LAYER_MAJOR, KV_APART and HEAD_MAJOR only.

    Raises: ConfigError if a number is out of range, `k` is more than there is, or the layers cannot be cut so.
    """
    whole_number("num_tokens", num_tokens, least=1, most=POSITIONS_MAX)
    whole_number("block_tokens", block_tokens, least=1, most=BLOCK_TOKENS_MAX)
    whole_number("layer", layer, least=0, most=shape.num_layers - 1)
    num_blocks = -(-num_tokens // block_tokens)
    if access in {Access.READ_BLOCKS, Access.READ_VALUES, Access.READ_HEAD_BLOCKS}:
        whole_number("k", k, least=1, most=num_blocks)
    elif access is Access.READ_HEAD_TOKENS:
        whole_number("k", k, least=1, most=num_tokens)
    is_head = access in {Access.READ_HEAD, Access.READ_HEAD_BLOCKS}
    if is_head and shape.layers[layer].num_heads == 1:
        access = Access.READ_LAYER if access is Access.READ_HEAD else Access.READ_BLOCKS
    if layout.is_paged:
        is_block = layout is Layout.BLOCK_FIRST
        slot = SlotLayout(shape, block_tokens, 1 if is_block else group_blocks, layout.split)
        if access is not Access.READ_HEAD_TOKENS:
            return _in_slots(slot, access, num_tokens, k, layer, header=not is_block)
    elif access is Access.READ_HEAD:
        return _rows(layout, shape.layers[layer], num_tokens)
    elif access is Access.READ_HEAD_BLOCKS:
        return _rows(layout, shape.layers[layer], min(k * block_tokens, num_tokens))
    if access is Access.READ_HEAD_TOKENS:
        return _rows(layout, shape.layers[layer], k)
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
    return Fragments(
        fragment_bytes=max(rows),
        num_fragments=k * len(rows),
        wanted_bytes=k * sum(rows),
        padded_bytes=k * sum(page_up(row) if layout.is_paged else row for row in rows),
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
            padded_bytes=num_slots * slot.layer_padded_bytes(layer),
        )
    if access in {Access.READ_HEAD, Access.READ_HEAD_BLOCKS}:
        return _head_in_slots(slot, access, num_tokens, k, layer)
    tokens, num_wanted = min(slot.block_tokens, num_tokens), min(k * slot.block_tokens, num_tokens)
    if access is Access.READ_BLOCKS and slot.group_blocks == 1:  # all of the layer, in one run
        return Fragments(
            fragment_bytes=tokens * one.token_bytes,
            num_fragments=k,
            wanted_bytes=num_wanted * one.token_bytes,
            padded_bytes=k * slot.layer_padded_bytes(layer),
        )
    pieces = slot.pieces[layer]
    if access is Access.READ_VALUES and one.v_bytes:
        pieces = tuple(piece for piece in pieces if piece.is_value)
    return Fragments(
        fragment_bytes=tokens * max(piece.row_bytes for piece in pieces),
        num_fragments=k * len(pieces),
        wanted_bytes=num_wanted * sum(piece.row_bytes for piece in pieces),
        padded_bytes=k * _block_pages(slot, pieces) * PAGE_BYTES,
    )


def _head_in_slots(slot: SlotLayout, access: Access, num_tokens: int, k: int, layer: int) -> Fragments:
    """One head's part of other accesses: its own fragments where heads lie apart, else all that holds its rows."""
    one, is_apart = slot.shape.layers[layer], slot.split == "head"
    row = one.token_bytes // one.num_heads
    first = slot.layer_fragments(layer).start  # the heads of a layer are alike
    if access is Access.READ_HEAD or slot.group_blocks == 1:
        is_all = access is Access.READ_HEAD
        runs = -(-num_tokens // slot.tokens_per_group) if is_all else k
        wanted = num_tokens if is_all else min(k * slot.block_tokens, num_tokens)
        moved = slot.fragment_padded_bytes[first] if is_apart else slot.layer_padded_bytes(layer)
        return Fragments(min(wanted, slot.tokens_per_group) * row, runs, wanted * row, runs * moved)
    pieces = slot.pieces[layer]
    pieces = tuple(piece for piece in pieces if piece.part == 0) if is_apart else pieces
    tokens, wanted = min(slot.block_tokens, num_tokens), min(k * slot.block_tokens, num_tokens)
    longest = max(one.k_bytes, one.v_bytes) // one.num_heads
    return Fragments(
        fragment_bytes=tokens * longest,
        num_fragments=k * len(pieces),
        wanted_bytes=wanted * row,
        padded_bytes=k * _block_pages(slot, pieces) * PAGE_BYTES,
    )


def _block_pages(slot: SlotLayout, pieces: tuple[Piece, ...]) -> int:
    """Pages that move for `pieces` of one block, at the place in its group that touches most of them."""
    sizes = [(piece.start, slot.block_tokens * piece.row_bytes) for piece in pieces]
    return max(
        sum(_pages_touched(start + place * size, size) for start, size in sizes) for place in range(slot.group_blocks)
    )


def _pages_touched(offset: int, length: int) -> int:
    return -(-(offset + length) // PAGE_BYTES) - offset // PAGE_BYTES


def _in_log(shape: KVShape, access: Access, num_tokens: int, block_tokens: int, k: int, layer: int) -> Fragments:
    if access in {Access.WRITE_PREFIX, Access.READ_PREFIX}:
        total = num_tokens * shape.bytes_per_token
        return Fragments(total, 1, total, total)
    whole = shape.layers[layer]
    is_apart = access is Access.READ_VALUES and whole.v_bytes > 0  # keys lie between the values of two tokens
    one = whole.v_bytes if is_apart else whole.token_bytes
    tokens = num_tokens if access is Access.READ_LAYER else min(k * block_tokens, num_tokens)
    if shape.num_layers > 1 or is_apart:
        run_tokens = 1
    else:  # nothing lies between one token and the next
        run_tokens = num_tokens if access is Access.READ_LAYER else min(block_tokens, num_tokens)
    return Fragments(run_tokens * one, -(-tokens // run_tokens), tokens * one, tokens * one)


def _in_tensors(shape: KVShape, access: Access, num_tokens: int, block_tokens: int, k: int, layer: int) -> Fragments:
    whole = access in {Access.WRITE_PREFIX, Access.READ_PREFIX}
    layers = shape.layers if whole else shape.layers[layer : layer + 1]
    parts = [part for one in layers for part in (one.k_bytes, one.v_bytes) if part]
    if access is Access.READ_VALUES:
        parts = parts[-1:]  # MLA has but one
    if access in {Access.READ_BLOCKS, Access.READ_VALUES}:
        blocks, tokens = k, min(k * block_tokens, num_tokens)
    else:
        blocks, tokens = -(-num_tokens // block_tokens), num_tokens
    total = tokens * sum(parts)
    return Fragments(min(block_tokens, tokens) * max(parts), blocks * len(parts), total, total)
