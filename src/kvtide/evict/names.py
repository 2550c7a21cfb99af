"""The evictors by name. Next: admission.

A tier's options carry a name; unknown ones are answered with those near it and with all.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvtide.errors import ConfigError
from kvtide.evict.contract import Evictor
from kvtide.evict.recency import Fifo, Lip, LookAhead, Lru, Slru
from kvtide.evict.scanproof import Arc, S3Fifo
from kvtide.evict.values import Belady, Gdsf, Lfu

_EVICTORS: Mapping[str, Callable[[int], Evictor]] = MappingProxyType(
    {
        "lru": Lru,
        "fifo": Fifo,
        "lip": Lip,
        "slru": Slru,
        "lfu": Lfu,
        "s3-fifo": S3Fifo,
        "arc": Arc,
        "gdsf": Gdsf,
        "look-ahead": LookAhead,
        "belady": Belady,
    }
)
EVICTOR_NAMES = tuple(_EVICTORS)


def make_evictor(name: str, capacity: int) -> Evictor:
    """Return the evictor called `name` for the ids 0 to capacity - 1.

    Raises: ConfigError that lists the names, first those near.
    """
    if name not in _EVICTORS:
        raise ConfigError(unknown("evictor", name, EVICTOR_NAMES))
    return _EVICTORS[name](capacity)


def unknown(what: str, name: str, names: tuple[str, ...]) -> str:
    """Return the message for a name that is none of `names`."""
    near = difflib.get_close_matches(name[:64].lower().replace("_", "-"), names, n=3, cutoff=0.5)
    meant = f"near it: {', '.join(near)}; " if near else ""
    return f"unknown {what} {name!r}; {meant}type one of {', '.join(names)}"
