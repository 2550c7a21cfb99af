"""Keys of SGLang as keys of ours: hexadecimal SHA-256 as its bytes, any other text hashed. Pure. Next: storage."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvtide.blocks import KEY, KeyArray

_HEX = 2 * KEY.itemsize


def keys_of(names: Sequence[str]) -> KeyArray:
    """Return one key of ours for each of `names`, the same in every process. Shapes: returns [n]."""
    joined = "".join(names)
    if all(len(name) == _HEX for name in names):
        try:
            folded = bytes.fromhex(joined)
        except ValueError:
            folded = b""
        if len(folded) == KEY.itemsize * len(names):  # spaces would have been passed over
            return np.frombuffer(folded, KEY)
    return np.frombuffer(b"".join(map(_one, names)), KEY)


def _one(name: str) -> bytes:
    if len(name) == _HEX:
        try:
            folded = bytes.fromhex(name)
        except ValueError:
            folded = b""
        if len(folded) == KEY.itemsize:
            return folded
    return hashlib.sha256(name.encode()).digest()
