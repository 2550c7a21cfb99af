"""IOVEC arrays at raw addresses: reading them, and what is left after some bytes moved. Next: threads.

Both engines continue partial vectored transfers with this; it knows neither kernel nor thread.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.uint64]


def read_vectors(address: int, num_vectors: int) -> Vectors:
    """Return the IOVEC array at `address` without a copy; the owner must keep it alive.

    Shapes: [num_vectors, 2], address and length.
    """
    raw = (ctypes.c_uint64 * (2 * num_vectors)).from_address(address)
    return np.ctypeslib.as_array(raw).reshape(num_vectors, 2)


def remaining_vectors(vectors: Vectors, moved: int) -> Vectors:
    """Return a copy of `vectors` without their first `moved` bytes.

    Shapes: [n, 2] to [at most n, 2].
    """
    ends = np.cumsum(vectors[:, 1])
    first = int(np.searchsorted(ends, np.uint64(moved), side="right"))
    rest = vectors[first:].copy()
    if len(rest):
        into = np.uint64(moved - (int(ends[first - 1]) if first else 0))
        rest[0, 0] += into
        rest[0, 1] -= into
    return rest


class Regions:
    """Registered memory: which of a few regions holds the whole of a buffer."""

    def __init__(self) -> None:
        self._starts = np.zeros(0, np.uint64)
        self._ends = np.zeros(0, np.uint64)
        self._numbers = np.zeros(0, np.uint64)

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, end: int) -> None:
        """Add [start, end); its number is how many there were before."""
        place = int(np.searchsorted(self._starts, np.uint64(start)))
        self._numbers = np.insert(self._numbers, place, np.uint64(len(self)))
        self._starts = np.insert(self._starts, place, np.uint64(start))
        self._ends = np.insert(self._ends, place, np.uint64(end))

    def find(self, addresses: Vectors, lengths: Vectors) -> tuple[npt.NDArray[np.bool_], Vectors]:
        """Return which buffers lie inside one region, and that region's number for each.

        Shapes: [n] each.
        """
        place = np.searchsorted(self._starts, addresses, side="right") - 1
        inside = (place >= 0) & (addresses + lengths <= self._ends[place])
        return inside, self._numbers[place]
