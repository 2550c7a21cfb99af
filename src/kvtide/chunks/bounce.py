"""Memory of our own that chunks pass through where direct I/O cannot use the engine's. Next: transfer."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from kvtide.io.ops import PAGE_BYTES, address_of, aligned_buffer, copy_bytes
from kvtide.spec import SlotLayout

Addresses = npt.NDArray[np.uint64]


class Bounce:
    """Finds for the pieces of chunks the addresses that a tier's fragments move from and to.

    `pieces` are the bytes of each piece; the fragments of `layout` are the same, or one that holds them all.
    Threads: one at a time.
    """

    def __init__(self, layout: SlotLayout, pieces: tuple[int, ...]) -> None:
        self._pieces = pieces
        padded = layout.fragment_padded_bytes
        self._is_apart = len(padded) == len(pieces)
        self._can_be_direct = self._is_apart and padded == pieces
        self._starts = np.array([0, *itertools.accumulate(padded)], np.uint64)
        inside = [0, *itertools.accumulate(pieces)]
        self._piece_starts = self._starts[:-1] if self._is_apart else np.array(inside[:-1], np.uint64)
        self._buffer = np.empty(0, np.uint8)

    def needed(self, addresses: Addresses) -> bool:
        """Say whether chunks at `addresses` cannot move by themselves. Shapes: [n, P]."""
        return not self._can_be_direct or bool((addresses % PAGE_BYTES).any())

    def lend(self, num: int) -> Addresses:
        """Return where the fragments of `num` chunks may lie, until it is asked again. Shapes: [n, F]."""
        return self._bases(num)[:, None] + self._starts[:-1]

    def fill(self, sources: Addresses) -> None:
        """Copy chunks from the engine's memory to what was lent. Shapes: [n, P]."""
        self._copy(sources, self._places(np.arange(len(sources))))

    def empty(self, rows: npt.NDArray[np.intp], targets: Addresses) -> None:
        """Copy the chunks `rows` of what was lent to the engine's memory. Shapes: [m], [m, P]."""
        self._copy(self._places(rows), targets)

    def _bases(self, num: int) -> Addresses:
        step = int(self._starts[-1])
        if len(self._buffer) < step * num:
            self._buffer = aligned_buffer(step * num)
        return np.arange(num, dtype=np.uint64) * np.uint64(step) + np.uint64(address_of(self._buffer))

    def _places(self, rows: npt.NDArray[np.intp]) -> Addresses:
        """Return where the pieces of the chunks `rows` lie in what was lent. Shapes: [m, P]."""
        bases = np.uint64(address_of(self._buffer)) + rows.astype(np.uint64) * self._starts[-1]
        return bases[:, None] + self._piece_starts

    def _copy(self, sources: Addresses, targets: Addresses) -> None:
        copy_bytes(sources, targets, self._pieces * len(sources))
