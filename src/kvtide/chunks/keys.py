"""Keys of other engines as keys of ours: 32 bytes each. Pure. Next: transfer.

*Theory.* Engines name a chunk by the SHA-256 of all tokens up to its end, and a few bytes beside it (vLLM: the number
of its cache group). 32 bytes of hash stay as they are, with what is beside it added to its first bytes (XOR): two
names then agree only if two SHA-256 agree in all their other bytes. Whatever is not of that form is hashed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvtide.blocks import KEY, KeyArray

_HASH = KEY.itemsize
_BESIDE_MAX = 8
_FORMS = {_HASH + beside: np.dtype([("hash", KEY), ("beside", np.uint8, beside)]) for beside in range(_BESIDE_MAX + 1)}


def fold_one(key: bytes) -> bytes:
    """Return what `fold` returns for one key, faster: 32 bytes."""
    beside = len(key) - _HASH
    if not 0 <= beside <= _BESIDE_MAX:
        return hashlib.sha256(key).digest()
    if not any(key[_HASH:]):
        return key[:_HASH]
    first = int.from_bytes(key[:beside]) ^ int.from_bytes(key[_HASH:])
    return first.to_bytes(beside) + key[beside:_HASH]


def fold(keys: Sequence[bytes]) -> KeyArray:
    """Return one key of ours for each of `keys`, the same in every process.

    Shapes: returns [n].
    """
    if not keys:
        return np.zeros(0, KEY)
    length, joined = len(keys[0]), b"".join(keys)
    form = _FORMS.get(length)
    if form is None or len(joined) != length * len(keys) or set(map(len, keys)) != {length}:
        return np.frombuffer(b"".join(map(fold_one, keys)), KEY)
    rows = np.frombuffer(joined, form)
    folded, beside = rows["hash"].copy(), rows["beside"].tobytes()
    if beside.strip(b"\0"):
        firsts = folded.view(np.uint8).reshape(len(keys), _HASH)[:, : length - _HASH]
        firsts ^= np.frombuffer(beside, np.uint8).reshape(firsts.shape)
    return folded
