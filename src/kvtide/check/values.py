"""Values that say themselves whose they are, so that any wrong byte is found and named. Pure. Next: wire.

*Theory.* A value is 32 bytes of head (magic, index, version, size; little endian) and random bytes seeded by all three.
Whoever reads one makes it again and compares every byte.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

_HEAD = struct.Struct("<8sQQQ")
_MAGIC = b"kvcheck1"
VALUE_BYTES_MIN = 64


def value_of(index: int, version: int, size: int) -> bytes:
    """Return the value of key number `index` in its `version`: `size` bytes, at least 64."""
    assert size >= VALUE_BYTES_MIN, "a value has room for its head"
    random = np.random.Generator(np.random.SFC64([index, version, size])).bytes(size - _HEAD.size)
    return _HEAD.pack(_MAGIC, index, version, size) + random


def version_of(value: bytes, index: int, size: int) -> int | None:
    """Return the version of a value of key `index`, None unless every byte is right."""
    if len(value) != size or len(value) < _HEAD.size:
        return None
    magic, found, version, told = _HEAD.unpack_from(value)
    if (magic, found, told) != (_MAGIC, index, size) or value != value_of(index, version, size):
        return None
    return int(version)


@dataclass(frozen=True, slots=True)
class Wrong:
    """A wrong value of the `place`-th of the keys asked for."""

    place: int
    what: str


def what_is_wrong(value: bytes, index: int, version: int, size: int) -> str:
    """Return in words how `value` is not version `version` of key `index`; empty if it is."""
    if len(value) != size:
        return f"{len(value)} bytes instead of {size}"
    wanted = value_of(index, version, size)
    if value == wanted:
        return ""
    magic, found, told, _ = _HEAD.unpack_from(value)
    if magic == _MAGIC and found != index:
        return f"the value of key {found} instead of that of key {index}"
    if magic == _MAGIC and told != version:
        return f"version {told} instead of {version}"
    differs = np.frombuffer(value, np.uint8) != np.frombuffer(wanted, np.uint8)
    first, num = int(differs.argmax()), int(differs.sum())
    zeros = ", zeros in their place" if not any(np.frombuffer(value, np.uint8)[differs]) else ""
    return f"{num} of {size} bytes differ, the first at {first}{zeros}"


def wrong_values(got: list[bytes | None], indices: list[int], size: int, version: int = 0) -> list[Wrong]:
    """Return what is wrong with values that were got of the keys `indices`; a miss is not wrong."""
    found = []
    for place, (value, index) in enumerate(zip(got, indices, strict=True)):
        if value is not None and (what := what_is_wrong(value, index, version, size)):
            found.append(Wrong(place, what))
    return found
