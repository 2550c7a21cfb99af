"""Blocks of tokens: their chained keys, the index of prefixes, reference counts, tables. Pure. Next: evict, cache.

A *unit* is what a pool hands out: one block, or a group of consecutive blocks. Sequences share units by counting
references; whoever wants to write into a shared unit gets a copy of it first.

Theory. key of block i = SHA-256(key of block i-1, little-endian u32 token ids of block i). The first parent is a root
made of everything KV depends on and of the tenant's salt, so equal keys mean equal tokens, model and tenant, all the
way back.
Source: block tables and copy-on-write, PagedAttention (arXiv:2309.06180).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError

KEY = np.dtype("V32")  # not S32: numpy strips trailing zero bytes from those
KeyArray = npt.NDArray[np.void]
Ids = npt.NDArray[np.int64]


def chain_root(identity_digest: bytes, salt: str = "") -> bytes:
    """Return the parent of every first block: 32 bytes of identity and tenant salt.

    The digest has a fixed length, so digest and salt cannot be cut elsewhere into another pair.
    """
    assert len(identity_digest) == KEY.itemsize, "an identity is known by its SHA-256"
    return hashlib.sha256(b"kvtide chain 1\0" + identity_digest + salt.encode(errors="surrogatepass")).digest()


def chain_keys(tokens: npt.ArrayLike, *, block_tokens: int, parent: bytes) -> KeyArray:
    """Return one key for each full block of `tokens`; a rest that fills no block has none.

    Shapes: tokens [T]; returns [T // block_tokens].
    Raises: ConfigError if a token is no integer of 0 to 2**32 - 1, or block_tokens < 1.
    """
    if block_tokens < 1:
        raise ConfigError(f"blocks of {block_tokens} tokens: at least 1 is needed")
    ids = _token_ids(tokens)
    full = ids[: len(ids) // block_tokens * block_tokens].view(f"V{4 * block_tokens}")
    begin = hashlib.sha256().copy  # cheaper than a new context, see benchmarks/prefix_hash.py
    keys, key = [], parent
    for block in full.tolist():
        digest = begin()
        digest.update(key)
        digest.update(block)
        key = digest.digest()
        keys.append(key)
    return np.frombuffer(b"".join(keys), KEY)


def partial_keys(tokens: npt.ArrayLike, *, parent: bytes) -> KeyArray:
    """Return the keys an unfilled block would have with 1, 2, ... of `tokens`.

    Shapes: tokens [T]; returns [T].
    """
    raw = _token_ids(tokens).tobytes()
    digests = [hashlib.sha256(parent + raw[:end]).digest() for end in range(4, len(raw) + 1, 4)]
    return np.frombuffer(b"".join(digests), KEY)


def _token_ids(tokens: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    ids = np.asarray(tokens)
    if not ids.size:
        return np.zeros(0, np.uint32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ConfigError(f"token ids must be a flat array of integers, got shape {ids.shape} of {ids.dtype}")
    if ids.min() < 0 or ids.max() >= 1 << 32:
        raise ConfigError(f"token ids must be 0 to 2**32 - 1, got {ids.min()} to {ids.max()}")
    return ids.astype("<u4")


class PrefixIndex:
    """Finds the unit that holds a block by the block's key. Of several with one key the earliest is found,
    or the one preferred.

    An entry is one integer, unit << 32 | tokens, so a look-up of many keys is one pass in C.
    """

    def __init__(self) -> None:
        self._found: dict[bytes, int] = {}
        self._others: dict[bytes, list[int]] = {}  # of later units
        self._keys_of: dict[int, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, keys: KeyArray, *, unit: int, tokens: Ids) -> None:
        """Note that `unit` holds the blocks with `keys`; `tokens[i]` of its tokens end with block i.

        A key that `unit` has already stays as it was.
        """
        own = self._keys_of.setdefault(unit, [])
        for key, entry in zip(keys.tolist(), (tokens.astype(np.int64) | unit << 32).tolist(), strict=True):
            first = self._found.get(key)
            if first is None:
                self._found[key] = entry
            elif first >> 32 == unit or any(other >> 32 == unit for other in self._others.get(key, ())):
                continue
            else:
                self._others.setdefault(key, []).append(entry)
            own.append(key)

    def prefer(self, keys: KeyArray, *, unit: int) -> None:
        """Let `unit`, which holds the blocks with `keys`, be the one that is found."""
        for key in keys.tolist():
            others = self._others.get(key, [])
            mine = next((at for at, entry in enumerate(others) if entry >> 32 == unit), None)
            if mine is not None:
                self._found[key], others[mine] = others[mine], self._found[key]

    def get(self, keys: KeyArray) -> tuple[Ids, npt.NDArray[np.int32]]:
        """Return for each key the unit and the tokens of it that end there, or -1 and -1."""
        entries = np.fromiter(map(self._found.get, keys.tolist(), repeat(-1)), np.int64, len(keys))
        return entries >> 32, entries.astype(np.int32)  # the cast keeps the low half

    def discard(self, unit: int) -> None:
        """Forget `unit`; another unit with the same block takes its place."""
        for key in self._keys_of.pop(unit, ()):
            others = [entry for entry in self._others.pop(key, ()) if entry >> 32 != unit]
            if self._found[key] >> 32 == unit:
                del self._found[key]
                if others:
                    self._found[key] = others.pop(0)
            if others:
                self._others[key] = others


class UnitPool:
    """Reference-counted units: free, held by sequences, or idle (held by none, content kept).

    A unit goes free -> held (take) -> idle (release) -> held again (share) or free (recycle). One array may
    name a unit several times to share or release it as often.
    """

    def __init__(self, num_units: int) -> None:
        self._counts = np.zeros(num_units, np.int64)
        self._is_free = np.ones(num_units, np.bool_)
        self._free = np.arange(num_units - 1, -1, -1, dtype=np.int64)
        self._num_free = num_units

    @property
    def num_free(self) -> int:
        """Units nobody uses."""
        return self._num_free

    @property
    def num_held(self) -> int:
        """Units some sequence holds."""
        return int((self._counts > 0).sum())

    @property
    def num_idle(self) -> int:
        """Units with content that no sequence holds."""
        return len(self._counts) - self.num_free - self.num_held

    def counts(self) -> Ids:
        """Return the references to every unit, live and read-only. Shapes: [num_units]."""
        view = self._counts.view()
        view.flags.writeable = False
        return view

    def take(self, num: int) -> Ids:
        """Return `num` units, held once; none at all if fewer are free: a full pool is a value."""
        assert num >= 0, "a negative number of units was asked for"
        if num > self._num_free:
            return np.zeros(0, np.int64)
        units = self._free[self._num_free - num : self._num_free][::-1].copy()
        self._num_free -= num
        self._counts[units], self._is_free[units] = 1, False
        return units

    def share(self, units: Ids) -> None:
        """Hold units once more each, idle ones too."""
        assert not self._is_free[units].any(), "a free unit has nothing to share"
        np.add.at(self._counts, units, 1)

    def release(self, units: Ids) -> Ids:
        """Hold units once less each; return those that became idle."""
        np.subtract.at(self._counts, units, 1)
        assert (self._counts[units] >= 0).all(), "a unit was released more often than held"
        return np.unique(units[self._counts[units] == 0])

    def recycle(self, units: Ids) -> None:
        """Make idle units free."""
        assert not self._counts[units].any(), "a held unit cannot be recycled"
        assert not self._is_free[units].any(), "a unit was recycled twice"
        assert len(np.unique(units)) == len(units), "a unit was recycled twice at once"
        self._is_free[units] = True
        self._free[self._num_free : self._num_free + len(units)] = units
        self._num_free += len(units)


@dataclass(frozen=True, slots=True)
class Grown:
    """What an append did. `copy` is (source unit, target unit, tokens to copy) where a shared tail had to be split.

    Copy before you write: the first span begins right behind what is copied. The target is not in `new_units`.

    Shapes: new_units [n]; spans [m, 3] (unit, first token in it, end) of the appended tokens.
    """

    copy: tuple[int, int, int] | None
    new_units: Ids
    spans: Ids


class BlockTable:
    """Units of one sequence in order, and how many tokens they hold."""

    def __init__(self, unit_tokens: int, units: Iterable[int] = (), num_tokens: int = 0) -> None:
        self.unit_tokens, self.units, self.num_tokens = unit_tokens, list(units), num_tokens
        assert len(self.units) == -(-num_tokens // unit_tokens), "as many units as the tokens need"

    def append(self, pool: UnitPool, num_tokens: int) -> Grown | None:
        """Make room for `num_tokens` more; None, and nothing changed, if the pool has too few units.

        The tail unit is filled in place if this table alone holds it; otherwise it is replaced by a copy.
        """
        assert num_tokens >= 0, "a table is not truncated by appending"
        filled = self.num_tokens % self.unit_tokens
        is_shared = bool(filled and num_tokens) and int(pool.counts()[self.units[-1]]) > 1
        num_units = -(-(self.num_tokens + num_tokens) // self.unit_tokens)
        needed = num_units - len(self.units) + is_shared
        taken = pool.take(needed)
        if len(taken) < needed:
            return None
        copy = None
        if is_shared:
            copy = (self.units[-1], int(taken[0]), filled)
            pool.release(np.array(self.units[-1:]))
            self.units[-1] = int(taken[0])
            taken = taken[1:]
        self.units.extend(taken.tolist())
        first, end = self.num_tokens, self.num_tokens + num_tokens
        self.num_tokens = end
        return Grown(copy, taken, self._spans(first, end))

    def _spans(self, first: int, end: int) -> Ids:
        low = first // self.unit_tokens
        units = np.array(self.units[low:] if end > first else (), np.int64)  # not all: decode appends one token a time
        begins = (low + np.arange(len(units))) * self.unit_tokens
        starts, ends = np.maximum(first - begins, 0), np.minimum(end - begins, self.unit_tokens)
        return np.column_stack([units, starts, ends])

    def fork(self, pool: UnitPool) -> BlockTable:
        """Return a table that shares every unit."""
        pool.share(np.array(self.units, np.int64))
        return BlockTable(self.unit_tokens, self.units, self.num_tokens)

    def truncate(self, pool: UnitPool, num_tokens: int) -> Ids:
        """Keep the first `num_tokens`; return the units that became idle."""
        assert 0 <= num_tokens <= self.num_tokens, "a table is not grown by truncating"
        keep = -(-num_tokens // self.unit_tokens)
        gone = np.array(self.units[keep:], np.int64)
        del self.units[keep:]
        self.num_tokens = num_tokens
        return pool.release(gone)

    def release(self, pool: UnitPool) -> Ids:
        """Give every unit up; return those that became idle."""
        return self.truncate(pool, 0)
