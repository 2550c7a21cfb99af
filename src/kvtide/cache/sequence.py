"""A sequence of tokens and the units that hold its KV. Values only; the cache gives them meaning. Next: ledger."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtide.blocks import BlockTable
from kvtide.cache.choice import Choice


@dataclass(slots=True)
class Match:
    """The longest kept prefix of some tokens, and in which tier its bytes lie (the fastest that has them)."""

    units: npt.NDArray[np.int64]
    num_tokens: int
    keys: tuple[bytes, ...]
    device_bytes: int = 0
    dram_bytes: int = 0
    file_bytes: int = 0
    remote_bytes: int = 0


@dataclass(slots=True)
class Sequence:
    """Tokens whose KV is kept.

    KV that attention to a selection made is not what the tokens alone make of it, nor the same another time: from
    `num_exact` tokens on, blocks have keys that only this sequence can know, so nobody mistakes them for exact ones.
    Shapes: keys has one entry a full block; pending [n, 3] (unit, first token in it, end) of a step in progress.
    """

    sequence_id: int
    table: BlockTable
    root: bytes
    tokens: list[int]
    keys: list[bytes]
    matched: Match
    choice: Choice
    pending: npt.NDArray[np.int64] | None = None
    num_pending: int = 0
    num_exact: int | None = None  # None: all
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    units: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        self.units = np.array(self.table.units, np.int64)

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is complete in every layer."""
        return len(self.tokens)

    def own_units(self, tokens_per_group: int) -> npt.NDArray[np.int64]:
        """Return the units that hold nothing but KV that is not exact."""
        if self.num_exact is None:
            return self.units[:0]
        return self.units[-(-self.num_exact // tokens_per_group) :]

    def key_before(self, block: int) -> bytes:
        """Return the key of the block before `block`; that of the root before the first."""
        return self.keys[block - 1] if block else self.root

    def is_own(self, block: int, block_tokens: int) -> bool:
        """Say whether `block` holds KV that is not exact."""
        return self.num_exact is not None and block >= self.num_exact // block_tokens

    def parent_key(self, block: int, block_tokens: int) -> bytes:
        """Return the key that the key of `block` is computed from."""
        key = self.key_before(block)
        if not self.is_own(block, block_tokens):
            return key
        return hashlib.sha256(b"kvtide own\0" + self.secret + key).digest()
