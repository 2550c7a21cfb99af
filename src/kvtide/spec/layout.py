"""Where a token's KV lies on a medium: bytes a layer, and the exact slot of the file tier. Pure. Next: fragments.

*Theory.* A slot holds one group of blocks, layer after layer. How a layer is cut into fragments, the pieces that can be
read alone, is its *split*: P parts a layer, and part p of layer l is fragment `l * P + p`.

    none   | header pages | layer 0: K [T, H, D], V [T, H, D], pad | layer 1: K, V, pad | ... |           P = 1
    kv     | header pages | layer 0: K [T, H, D], pad | layer 0: V [T, H, D], pad | layer 1: K ...        P = 2
    head   | header pages | layer 0: K_0 [T, D], V_0 [T, D], pad | layer 0: K_1, V_1, pad | ...           P = H
           0              fragment_offset[0]                     fragment_offset[1]           slot_bytes

Each bar stands on a 4 KiB page, because direct reads can begin nowhere else. T = tokens of the group, H = KV heads; K_h
and V_h are of head h. All of a layer lies together whatever the split, so reading all of it is still one run, with more
padding; `none` pads least, `kv` lets values be read alone, `head` one head alone. Layers without KV take no room and
have no entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvtide.errors import ConfigError
from kvtide.spec.geometry import Dtype, LayerKV, shown, whole_number
from kvtide.spec.model import ModelSpec

PAGE_BYTES = 4096  # the alignment direct I/O needs on every drive in common use
HEADER_FIXED_BYTES = 256  # magic, versions, keys, counts, digest, checksum of the header: docs/formats.md
HEADER_BLOCK_BYTES = 36  # a block's key and its valid tokens
HEADER_FRAGMENT_BYTES = 8  # a fragment's checksum
PROOF_BYTES = 16  # what makes the key of an encrypted slot one of its own; and the tag of each of its fragments
GROUP_BLOCKS_MAX = 64  # above it a partial group wastes more than a larger read can gain
BLOCK_TOKENS_MAX = 1 << 16
TP_MAX = 1 << 12

Split = Literal["none", "kv", "head"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Bytes one token adds to one layer on one rank. `v_bytes` is 0 where K and V share one row (MLA)."""

    k_bytes: int
    v_bytes: int
    num_heads: int
    window_tokens: int | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token."""
        return self.k_bytes + self.v_bytes


@dataclass(frozen=True, slots=True)
class KVShape:
    """KV geometry one tensor-parallel rank stores: one entry for each layer that has KV.

    `layer_index[i]` is the number in the model of the i-th entry.
    """

    dtype: Dtype
    layers: tuple[LayerShape, ...]
    layer_index: tuple[int, ...]
    tp_size: int = 1
    tp_rank: int = 0

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("no layer keeps any KV: there is nothing to store for this model")
        if len(self.layers) != len(self.layer_index):
            raise ConfigError(f"{len(self.layers)} layers but {len(self.layer_index)} layer numbers")

    @classmethod
    def of(cls, model: ModelSpec, dtype: Dtype | str, tp_size: int = 1, tp_rank: int = 0) -> KVShape:
        """Geometry rank `tp_rank` of `tp_size` keeps for `model`.

        KV heads are divided among the ranks; with fewer heads than ranks each rank keeps a copy of one head; the
        shared row of MLA is kept by every rank.

        Raises: ConfigError if the heads do not divide, or no layer keeps KV.
        """
        whole_number("tp_size", tp_size, least=1, most=TP_MAX)
        whole_number("tp_rank", tp_rank, least=0, most=tp_size - 1)
        kept = [(index, layer) for index, layer in enumerate(model.layers) if layer.kind != "none"]
        if kept and model.num_q_heads % tp_size:
            raise ConfigError(
                f"{model.num_q_heads} query heads of {model.name} do not divide among {tp_size} ranks; "
                f"type a --tp that divides {model.num_q_heads}"
            )
        wanted = Dtype.parse(dtype)
        return cls(
            dtype=wanted,
            layers=tuple(_on_rank(layer, wanted.itemsize, tp_size) for _, layer in kept),
            layer_index=tuple(index for index, _ in kept),
            tp_size=tp_size,
            tp_rank=tp_rank,
        )

    @property
    def num_layers(self) -> int:
        """Layers that keep KV."""
        return len(self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token adds over all layers of this rank."""
        return sum(layer.token_bytes for layer in self.layers)

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes of one block over all layers, without any padding."""
        return whole_number("block_tokens", block_tokens, least=1, most=BLOCK_TOKENS_MAX) * self.bytes_per_token


def _on_rank(layer: LayerKV, itemsize: int, tp_size: int) -> LayerShape:
    heads = layer.num_kv_heads
    if layer.kind == "mla":
        num_heads = heads
    elif heads % tp_size == 0:
        num_heads = heads // tp_size
    elif tp_size % heads == 0:
        num_heads = 1
    else:
        raise ConfigError(
            f"{heads} KV heads neither divide among {tp_size} ranks nor are copied evenly; "
            f"type a --tp that divides {heads} or is a multiple of it"
        )
    return LayerShape(
        k_bytes=num_heads * layer.head_dim_k * itemsize,
        v_bytes=num_heads * layer.head_dim_v * itemsize,
        num_heads=num_heads,
        window_tokens=layer.window_tokens,
    )


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of K or of V in one part of a layer: T rows of `row_bytes` from byte `start` of the fragment on.

    They are bytes `column` to `column + row_bytes` of the layer's whole rows, those of all heads.
    """

    part: int
    start: int
    row_bytes: int
    column: int
    is_value: bool


@dataclass(frozen=True, slots=True, init=False)
class SlotLayout:
    """Byte geometry of one slot of the file tier: a header, then page-aligned fragments, `parts_per_layer` a layer.

    `fragment_bytes` are wanted bytes, `fragment_padded_bytes` what a direct read moves; both, and `fragment_offset`,
    have one entry a fragment. `k_bytes` is K of the whole group in each layer, `pieces` what each layer's fragments
    hold. `is_encrypted`: fragments are encrypted, and the header has room for what proves them.
    """

    shape: KVShape
    block_tokens: int
    group_blocks: int
    split: Split
    tokens_per_group: int
    parts_per_layer: int
    header_bytes: int
    fragment_offset: tuple[int, ...]
    fragment_bytes: tuple[int, ...]
    fragment_padded_bytes: tuple[int, ...]
    k_bytes: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    slot_bytes: int
    is_encrypted: bool

    def __init__(
        self,
        shape: KVShape,
        block_tokens: int,
        group_blocks: int,
        split: Split = "none",
        *,
        is_encrypted: bool = False,
    ) -> None:
        """Lay out groups of `group_blocks` blocks of `block_tokens` tokens, each layer cut as `split` says.

        Raises: ConfigError if a size is out of range, or the layers cannot be cut so.
        """
        whole_number("block_tokens", block_tokens, least=1, most=BLOCK_TOKENS_MAX)
        whole_number("group_blocks", group_blocks, least=1, most=GROUP_BLOCKS_MAX)
        if problem := why_not_split(shape, split):
            raise ConfigError(problem)
        tokens = block_tokens * group_blocks
        pieces_of = {layer: _pieces(layer, tokens, split) for layer in set(shape.layers)}  # most layers are alike
        wanted_of = {layer: _part_bytes(pieces, tokens) for layer, pieces in pieces_of.items()}
        wanted = tuple(count for layer in shape.layers for count in wanted_of[layer])
        header_bytes = HEADER_FIXED_BYTES + HEADER_BLOCK_BYTES * group_blocks + HEADER_FRAGMENT_BYTES * len(wanted)
        header = page_up(header_bytes + (PROOF_BYTES * (1 + len(wanted)) if is_encrypted else 0))
        padded = tuple(page_up(count) for count in wanted)
        offset = [header]
        for count in padded:
            offset.append(offset[-1] + count)
        values = {
            "shape": shape,
            "block_tokens": block_tokens,
            "group_blocks": group_blocks,
            "split": split,
            "tokens_per_group": tokens,
            "parts_per_layer": len(wanted) // shape.num_layers,
            "header_bytes": header,
            "fragment_offset": tuple(offset[:-1]),
            "fragment_bytes": wanted,
            "fragment_padded_bytes": padded,
            "k_bytes": tuple(tokens * layer.k_bytes for layer in shape.layers),
            "pieces": tuple(pieces_of[layer] for layer in shape.layers),
            "slot_bytes": offset[-1],
            "is_encrypted": is_encrypted,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the way a frozen value fills derived fields

    @property
    def num_layers(self) -> int:
        """Layers that keep KV."""
        return self.shape.num_layers

    @property
    def num_fragments(self) -> int:
        """Fragments of a slot."""
        return len(self.fragment_bytes)

    @property
    def proof_bytes(self) -> int:
        """Bytes of a header that prove its encrypted fragments: 16 for the slot and 16 each; 0 in plain ones."""
        return PROOF_BYTES * (1 + self.num_fragments) if self.is_encrypted else 0

    def layer_fragments(self, layer: int) -> range:
        """Return the numbers of the fragments of one layer, in the order they lie in."""
        return range(layer * self.parts_per_layer, (layer + 1) * self.parts_per_layer)

    def layer_padded_bytes(self, layer: int) -> int:
        """Return what a direct read of all fragments of one layer moves."""
        parts = self.layer_fragments(layer)
        return sum(self.fragment_padded_bytes[parts.start : parts.stop])


def why_not_split(shape: KVShape, split: str) -> str:
    """Return why layers of `shape` cannot be cut as `split` says; empty if they can be."""
    if split not in SPLITS:
        return f"split is {shown(split)}; known are {', '.join(SPLITS)}"
    if split == "none":
        return ""
    if not all(layer.v_bytes for layer in shape.layers):
        return f"split {split} needs K and V of their own, but a layer keeps both in one row (MLA); use split none"
    if split == "kv":
        return ""
    heads = {layer.num_heads for layer in shape.layers}
    if len(heads) > 1:
        return f"split head needs as many KV heads in every layer, found {sorted(heads)}; use split none or kv"
    if any(layer.k_bytes % layer.num_heads or layer.v_bytes % layer.num_heads for layer in shape.layers):
        return "split head needs rows that divide evenly among the heads; use split none or kv"
    return ""


def _pieces(layer: LayerShape, num_tokens: int, split: Split) -> tuple[Piece, ...]:
    """What the fragments of one layer of a group of `num_tokens` hold, in the order it lies in."""
    if split == "none":
        key = Piece(0, 0, layer.k_bytes, 0, is_value=False)
        value = Piece(0, num_tokens * layer.k_bytes, layer.v_bytes, 0, is_value=True)
        return (key, value) if layer.v_bytes else (key,)
    if split == "kv":
        return Piece(0, 0, layer.k_bytes, 0, is_value=False), Piece(1, 0, layer.v_bytes, 0, is_value=True)
    key_row, value_row = layer.k_bytes // layer.num_heads, layer.v_bytes // layer.num_heads
    return tuple(
        piece
        for head in range(layer.num_heads)
        for piece in (
            Piece(head, 0, key_row, head * key_row, is_value=False),
            Piece(head, num_tokens * key_row, value_row, head * value_row, is_value=True),
        )
    )


def _part_bytes(pieces: tuple[Piece, ...], num_tokens: int) -> list[int]:
    """Bytes of each part of a layer."""
    counts = [0] * (pieces[-1].part + 1)
    for piece in pieces:
        counts[piece.part] += num_tokens * piece.row_bytes
    return counts


def page_up(count: int) -> int:
    """`count` rounded up to whole 4 KiB pages."""
    return -(-count // PAGE_BYTES) * PAGE_BYTES


def auto_group_blocks(shape: KVShape, block_tokens: int, knee_bytes: int) -> int:
    """Smallest power of two of blocks a group of which every layer reaches `knee_bytes`, at most 64.

    The knee is where a drive stops being limited by operations and starts being limited by bytes: larger groups
    gain nothing above it, and cost room for partial ones. A layer counts whole, whatever its split: its fragments are
    neighbours, so reading all of them is one read.

    Raises: ConfigError if a size is out of range.
    """
    whole_number("block_tokens", block_tokens, least=1, most=BLOCK_TOKENS_MAX)
    whole_number("knee_bytes", knee_bytes, least=1, most=1 << 40)
    least = min(layer.token_bytes for layer in shape.layers) * block_tokens
    group_blocks = 1
    while least * group_blocks < knee_bytes and group_blocks < GROUP_BLOCKS_MAX:
        group_blocks *= 2
    return group_blocks
