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
        self._buffers = [np.empty(0, np.uint8)] * 2  # what was lent last, and before

    def needed(self, addresses: Addresses) -> bool:
        """Say whether chunks at `addresses` cannot move by themselves. Shapes: [n, P]."""
        return not self._can_be_direct or bool((addresses % PAGE_BYTES).any())

    def lend(self, num: int, *, keeps_last: bool = False) -> Addresses:
        """Return where the fragments of `num` chunks may lie, until it is asked again, or twice with `keeps_last`.

        Shapes: returns [n, F].
        """
        size = int(self._starts[-1]) * num
        if keeps_last:
            self._buffers.reverse()
        if len(self._buffers[0]) < size:
            self._buffers[0] = aligned_buffer(size)
        return self._bases(np.arange(num))[:, None] + self._starts[:-1]

    def fill(self, sources: Addresses) -> None:
        """Copy chunks from the engine's memory to what was lent last. Shapes: [n, P]."""
        self._copy(sources, self._places(np.arange(len(sources))))

    def empty(self, rows: npt.NDArray[np.intp], targets: Addresses) -> None:
        """Copy the chunks `rows` of what was lent last to the engine's memory. Shapes: [m], [m, P]."""
        self._copy(self._places(rows), targets)

    def _bases(self, rows: npt.NDArray[np.intp]) -> Addresses:
        """Return where the chunks `rows` begin in what was lent last. Shapes: [m]."""
        return np.uint64(address_of(self._buffers[0])) + rows.astype(np.uint64) * self._starts[-1]

    def _places(self, rows: npt.NDArray[np.intp]) -> Addresses:
        """Return where the pieces of the chunks `rows` lie in what was lent last. Shapes: [m, P]."""
        return self._bases(rows)[:, None] + self._piece_starts

    def _copy(self, sources: Addresses, targets: Addresses) -> None:
        copy_bytes(sources, targets, self._pieces * len(sources))
