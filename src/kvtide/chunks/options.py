"""What a chunk is: its size, its pieces in the engine's memory, and its fragments on disk. Pure. Next: bounce.

*Theory.* An engine may keep one chunk in several pieces of memory: K and V of a page, or each layer. Pieces that are
whole 4 KiB pages become fragments of one slot, so they move straight between memory and disk, and are found, checked,
given up and made whole together: a chunk half there is a thing that cannot be. Other pieces must pass through memory of
our own anyway, so they are put side by side there and become one fragment without gaps. Pieces as chunks of their own,
the way other stores keep them, would need a header each, and could be given up one without the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvtide.errors import ConfigError
from kvtide.io.ops import PAGE_BYTES
from kvtide.spec import Dtype, Identity, KVShape, LayerShape, Layout, SlotLayout
from kvtide.tiers.cipher import MasterKey
from kvtide.units import format_bytes

_CHUNK_BYTES_MAX = 1 << 30
_PIECES_MAX = 4096  # layers of an identity


@dataclass(frozen=True, slots=True)
class ChunkOptions:
    """Where chunks lie and how many. `facts` are what the bytes depend on: chunks of other facts are never found.
    `master` encrypts them on disk.

    `piece_bytes` are the sizes of a chunk's pieces in memory, in order; none: a chunk is one piece.
    """

    directory: Path
    capacity_bytes: int
    chunk_bytes: int
    model: str
    facts: Mapping[str, str] = field(default_factory=dict)
    weights_digest: str = ""
    engine: str = "auto"
    piece_bytes: tuple[int, ...] = ()
    admission: str = "always"  # which chunks are worth writing: a name of `kvtide.evict.admission`
    bytes_per_day: int = 0  # what admission by endurance may write
    master: MasterKey | None = None

    def identity(self) -> Identity:
        """Return the identity of these chunks, as of KV of one token, a layer for each piece.

        Raises: ConfigError for sizes out of range, or pieces that do not add up to the chunk.
        """
        if not 1 <= self.chunk_bytes <= _CHUNK_BYTES_MAX:
            raise ConfigError(
                f"chunks of {self.chunk_bytes} bytes; 1 byte to {format_bytes(_CHUNK_BYTES_MAX)} are kept"
            )
        pieces = self.pieces()
        if sum(pieces) != self.chunk_bytes or min(pieces) < 1 or len(pieces) > _PIECES_MAX:
            raise ConfigError(
                f"{len(pieces)} pieces of {sum(pieces)} bytes; a chunk of {self.chunk_bytes} bytes has 1 to "
                f"{_PIECES_MAX} pieces, none of them empty, that add up to it"
            )
        return Identity(
            model=self.model,
            weights_digest=self.weights_digest or hashlib.sha256(self.model.encode()).hexdigest(),
            tokenizer_digest="0" * 64,
            revision="",
            adapter="",
            rope=(),
            dtype=Dtype.FP8_E4M3,
            layout=Layout.LAYER_MAJOR,
            block_tokens=1,
            group_blocks=1,
            tp_rank=0,
            tp_size=1,
            layers=tuple((index, size, 0, 1, 0) for index, size in enumerate(pieces)),
            facts=tuple(sorted((name, told[:256]) for name, told in self.facts.items())),
            encryption=self.master.name if self.master is not None else "",
        )

    def pieces(self) -> tuple[int, ...]:
        """Return the bytes of each piece of a chunk."""
        return self.piece_bytes or (self.chunk_bytes,)

    def slot_layout(self) -> SlotLayout:
        """Return how a chunk lies on disk."""
        pieces = self.pieces()
        fragments = pieces if not any(size % PAGE_BYTES for size in pieces) else (self.chunk_bytes,)
        layers = tuple(LayerShape(size, 0, 1) for size in fragments)
        shape = KVShape(Dtype.FP8_E4M3, layers, tuple(range(len(layers))))
        return SlotLayout(shape, block_tokens=1, group_blocks=1, is_encrypted=self.master is not None)
