"""Where a token's KV lies on a medium: bytes a layer, and the exact slot of the file tier. Pure. Next: fragments.

*Theory.* A slot holds one group of blocks, layer after layer, so that one layer of the group is one read:

    | header pages | layer 0: K of the group, V of the group, pad | layer 1: K, V, pad | ... |
    0              fragment_offset[0]                             fragment_offset[1]         slot_bytes

Each bar stands on a 4 KiB page, because direct reads can begin nowhere else. K of a group is `[T, H, D]` with
T = tokens of the group; V follows at once. Layers without KV take no room and have no entry.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtide.errors import ConfigError
from kvtide.spec.geometry import Dtype, LayerKV, whole_number
from kvtide.spec.model import ModelSpec

PAGE_BYTES = 4096  # the alignment direct I/O needs on every drive in common use
HEADER_FIXED_BYTES = 256  # magic, versions, keys, counts, digest, checksum of the header: docs/formats.md
HEADER_BLOCK_BYTES = 36  # a block's key and its valid tokens
HEADER_LAYER_BYTES = 8  # a fragment's checksum
GROUP_BLOCKS_MAX = 64  # above it a partial group wastes more than a larger read can gain
BLOCK_TOKENS_MAX = 1 << 16
TP_MAX = 1 << 12


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


@dataclass(frozen=True, slots=True, init=False)
class SlotLayout:
    """Byte geometry of one slot of the file tier: a header, then one page-aligned fragment a layer.

    `fragment_bytes` are wanted bytes, `fragment_padded_bytes` what a direct read moves. `k_bytes` is the K part at
    the front of each fragment; V is the rest of `fragment_bytes`.
    """

    shape: KVShape
    block_tokens: int
    group_blocks: int
    tokens_per_group: int
    header_bytes: int
    fragment_offset: tuple[int, ...]
    fragment_bytes: tuple[int, ...]
    fragment_padded_bytes: tuple[int, ...]
    k_bytes: tuple[int, ...]
    slot_bytes: int

    def __init__(self, shape: KVShape, block_tokens: int, group_blocks: int) -> None:
        """Lay out groups of `group_blocks` blocks of `block_tokens` tokens.

        Raises: ConfigError if a size is out of range.
        """
        whole_number("block_tokens", block_tokens, least=1, most=BLOCK_TOKENS_MAX)
        whole_number("group_blocks", group_blocks, least=1, most=GROUP_BLOCKS_MAX)
        tokens = block_tokens * group_blocks
        header = page_up(HEADER_FIXED_BYTES + HEADER_BLOCK_BYTES * group_blocks + HEADER_LAYER_BYTES * shape.num_layers)
        wanted = tuple(tokens * layer.token_bytes for layer in shape.layers)
        padded = tuple(page_up(count) for count in wanted)
        offset = [header]
        for count in padded:
            offset.append(offset[-1] + count)
        values = {
            "shape": shape,
            "block_tokens": block_tokens,
            "group_blocks": group_blocks,
            "tokens_per_group": tokens,
            "header_bytes": header,
            "fragment_offset": tuple(offset[:-1]),
            "fragment_bytes": wanted,
            "fragment_padded_bytes": padded,
            "k_bytes": tuple(tokens * layer.k_bytes for layer in shape.layers),
            "slot_bytes": offset[-1],
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the way a frozen value fills derived fields

    @property
    def num_layers(self) -> int:
        """Fragments of a slot: layers that keep KV."""
        return len(self.fragment_bytes)


def page_up(count: int) -> int:
    """`count` rounded up to whole 4 KiB pages."""
    return -(-count // PAGE_BYTES) * PAGE_BYTES


def auto_group_blocks(shape: KVShape, block_tokens: int, knee_bytes: int) -> int:
    """Smallest power of two of blocks a group whose every per-layer fragment reaches `knee_bytes`, at most 64.

    The knee is where a drive stops being limited by operations and starts being limited by bytes: larger groups
    gain nothing above it, and cost room for partial ones.

    Raises: ConfigError if a size is out of range.
    """
    whole_number("block_tokens", block_tokens, least=1, most=BLOCK_TOKENS_MAX)
    whole_number("knee_bytes", knee_bytes, least=1, most=1 << 40)
    least = min(layer.token_bytes for layer in shape.layers) * block_tokens
    group_blocks = 1
    while least * group_blocks < knee_bytes and group_blocks < GROUP_BLOCKS_MAX:
        group_blocks *= 2
    return group_blocks
