"""What a measured engine must do, and what it says of itself. Next: names.

Knows no library. An engine lives in a process of its own: it may keep what it likes in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine is opened. `is_durable`: rows must survive a power cut once `insert` returns, if it can do that."""

    folder: Path
    dim: int
    is_durable: bool = False


class Engine(Protocol):
    """Keeps vectors in a folder. Its constructor opens what is there, or makes it.

    Shapes: ids [n] int64, vectors [n, D] float32 of length 1, queries [q, D].
    """

    def insert(self, ids: Ids, vectors: Vectors) -> None:
        """Keep rows; when it returns they are acknowledged, in the sense of `Acknowledged`."""
        ...

    def finish(self) -> None:
        """Do what the library does once rows have come in: save, merge, build the index."""
        ...

    def search(self, queries: Vectors, k: int) -> Ids:
        """Return the ids of the k rows nearest to each query, -1 where there are fewer. Shapes: [q, k]."""
        ...

    def ids(self) -> Ids:
        """Return the ids of all rows that are there, each read, in any order."""
        ...

    def close(self) -> None:
        """Close. Idempotent."""
        ...


@runtime_checkable
class LateEngine(Protocol):
    """An engine that acknowledges after `insert` has returned."""

    def num_durable(self) -> int:
        """Return how many of the inserted rows were acknowledged: the first so many."""
        ...


@dataclass(frozen=True, slots=True)
class About:
    """One engine: where its class is, what must be installed, and what its acknowledgement means."""

    name: str
    place: str  # module:class
    package: str  # what pip installs; empty: nothing
    module: str  # that must be importable
    acknowledged: str  # what insert's return means
    durable: str  # and with --durable; empty: the library offers no more
    search: str  # what a search does


def brute_force(queries: Vectors, ids: Ids, vectors: Vectors, k: int) -> Ids:
    """Return the ids of the k nearest by dot product, best first. Shapes: queries [q, D]; result [q, k]."""
    found = np.full((len(queries), k), -1, np.int64)
    if len(ids):
        scores = queries @ vectors.T
        num = min(k, len(ids))
        best = np.argpartition(-scores, num - 1, axis=1)[:, :num]
        order = np.take_along_axis(scores, best, 1).argsort(axis=1)[:, ::-1]
        found[:, :num] = ids[np.take_along_axis(best, order, 1)]
    return found
