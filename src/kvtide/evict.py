"""What a tier gives up when it is full. Pure: ids in, ids out. Next: cache.ledger.

Each evictor is one array of stamps, lowest goes first; they differ only in the stamp an admission and a touch give.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError

Ids = npt.NDArray[np.int64]
_ABSENT = np.iinfo(np.int64).max


class Evictor(Protocol):
    """Orders the ids 0 to capacity - 1 that are in a tier. Within one call, later ids count as more recent."""

    def admit(self, ids: Ids) -> None:
        """Note that `ids` came in."""

    def touch(self, ids: Ids) -> None:
        """Note that `ids` were used; those that are not in stay out."""

    def forget(self, ids: Ids) -> None:
        """Note that `ids` left."""

    def victims(self, num: int, evictable: npt.NDArray[np.bool_]) -> Ids:
        """Return up to `num` ids to drop, best first, among those in and `evictable` (a mask over all ids)."""


class Lru:
    """Least recently used goes first."""

    def __init__(self, capacity: int) -> None:
        self._stamps = np.full(capacity, _ABSENT, np.int64)
        self._now = 0

    def admit(self, ids: Ids) -> None:
        """Let `ids` go last."""
        self._stamp(ids)

    def touch(self, ids: Ids) -> None:
        """Let those of `ids` that are in go last."""
        self._stamp(ids[self._stamps[ids] != _ABSENT])

    def forget(self, ids: Ids) -> None:
        """Take the stamps of `ids` away."""
        self._stamps[ids] = _ABSENT

    def victims(self, num: int, evictable: npt.NDArray[np.bool_]) -> Ids:
        """Return the lowest stamps in order; only as many as asked for are sorted."""
        ids = np.flatnonzero(evictable & (self._stamps != _ABSENT))
        stamps = self._stamps[ids]
        if 0 < num < len(ids):
            ids = ids[np.argpartition(stamps, num - 1)[:num]]
            stamps = self._stamps[ids]
        return ids[np.argsort(stamps, kind="stable")][: max(num, 0)]

    def _stamp(self, ids: Ids) -> None:
        self._stamps[ids] = np.arange(self._now, self._now + len(ids))
        self._now += len(ids)


class Fifo(Lru):
    """First in goes first, used or not."""

    def touch(self, ids: Ids) -> None:
        """Use changes nothing."""


class Lip(Lru):
    """New ids go first until they are used again; then least recently used.

    Decoding reads every layer in a circle. Where the circle does not fit, least-recently-used drops each entry just
    before its next use; this keeps what fits and lets the rest pass through.
    Source: LRU insertion policy, Qureshi et al., ISCA 2007.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._low = -1

    def admit(self, ids: Ids) -> None:
        """Let `ids` go first."""
        self._stamps[ids] = self._low - np.arange(len(ids))
        self._low -= len(ids)


_EVICTORS = {"lru": Lru, "fifo": Fifo, "lip": Lip}


def make_evictor(name: str, capacity: int) -> Evictor:
    """Return the evictor called `name`.

    Raises: ConfigError that lists the names.
    """
    if name not in _EVICTORS:
        raise ConfigError(f"unknown evictor {name!r}; type one of {', '.join(_EVICTORS)}")
    return _EVICTORS[name](capacity)
