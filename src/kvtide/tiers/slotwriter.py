"""Writing groups into slots: encrypted, hashed, and in the order that a crash at any moment asks for. Next: file.

Decides in which steps the parts of a group reach the file, as the theory in `file` has it. Knows neither keys nor room.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvtide.io.ops import WRITE, address_of, aligned_buffer
from kvtide.io.schedule import Merged
from kvtide.spec.layout import PROOF_BYTES
from kvtide.tiers.cipher import Cipher
from kvtide.tiers.contract import Cause, GroupRecords
from kvtide.tiers.header import HeaderCodec
from kvtide.tiers.slotio import SlotIo
from kvtide.tiers.slots import SlotTable

PORTION_BYTES = 16 << 20  # written at once where slots are packed: many operations of the largest size
FIRST_SHARE = 4  # of a portion goes first: the drive has nothing to do while that is hashed

Written = tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint64], npt.NDArray[np.uint8]]
"""Which slots are whole, and of each the checksums of its fragments and its proof."""


class SlotWriter:
    """Writes slots, and notes in `table` which of them may have a header. Threads: one at a time."""

    def __init__(
        self, io: SlotIo, codec: HeaderCodec, table: SlotTable, cipher: Cipher | None, *, is_packed: bool
    ) -> None:
        self._io, self._codec, self._table, self._cipher = io, codec, table, cipher
        self._layout = io.layout
        num_bytes = max(PORTION_BYTES, self._layout.slot_bytes) + PROOF_BYTES
        self._memory = aligned_buffer(0 if cipher is None else num_bytes)
        self.write = self._write_packed if is_packed else self._write_in_steps

    def _write_packed(
        self,
        slots: npt.NDArray[np.int64],
        records: GroupRecords,
        sequences: npt.NDArray[np.uint64],
        addresses: npt.NDArray[np.uint64],
        cause: Cause,
    ) -> Written:
        """Write headers and fragments at once, in portions: one is hashed while the drive has the one before."""
        num, num_fragments = addresses.shape
        addresses, proofs = self._encrypted(slots, records, sequences, addresses)
        checksums, good = np.empty((num, num_fragments), np.uint64), np.zeros(num, np.bool_)
        pages = aligned_buffer(num * self._layout.header_bytes).reshape(num, self._layout.header_bytes)
        self._table.has_header[slots] = True  # even a failed write may have landed
        begun: list[tuple[slice, Merged]] = []
        for rows in self._portions(num):
            fragments = np.tile(np.arange(num_fragments), rows.stop - rows.start)
            at = addresses[rows].ravel()
            checksums[rows] = self._io.checksums(fragments, at).reshape(-1, num_fragments)
            self._codec.encode(records.take(rows), sequences[rows], checksums[rows], pages[rows], proofs[rows])
            parts = self._io.fragment_ops(np.repeat(slots[rows], num_fragments), fragments, at, WRITE)
            batch = np.concatenate([self._io.header_ops(slots[rows], pages[rows], WRITE), parts])
            begun.append((rows, self._io.begin(batch)))
            if len(begun) > 1:
                self._end_packed(*begun.pop(0), slots, good, cause)
        for rows, merged in begun:
            self._end_packed(rows, merged, slots, good, cause)
        return good, checksums, proofs

    def _portions(self, num: int) -> Iterator[slice]:
        """Yield which of `num` slots are hashed and written at once."""
        portion = max(1, PORTION_BYTES // self._layout.slot_bytes)
        start, end = 0, min(num, max(1, portion // FIRST_SHARE))
        while start < num:
            yield slice(start, end)
            start, end = end, min(num, end + portion)

    def _end_packed(
        self, rows: slice, merged: Merged, slots: npt.NDArray[np.int64], good: npt.NDArray[np.bool_], cause: Cause
    ) -> None:
        """Wait for one portion and note which of its slots are whole."""
        num = rows.stop - rows.start
        per_slot = np.repeat(slots[rows], len(merged.part_of) // num - 1)
        done = self._io.all_done(merged, cause, np.concatenate([slots[rows], per_slot]), None)
        good[rows] = done[:num] & done[num:].reshape(num, -1).all(axis=1)

    def _write_in_steps(
        self,
        slots: npt.NDArray[np.int64],
        records: GroupRecords,
        sequences: npt.NDArray[np.uint64],
        addresses: npt.NDArray[np.uint64],
        cause: Cause,
    ) -> Written:
        """Write in the three steps of the theory."""
        num, num_fragments = addresses.shape
        addresses, proofs = self._encrypted(slots, records, sequences, addresses)
        pages = aligned_buffer(num * self._layout.header_bytes).reshape(num, self._layout.header_bytes)
        good = np.ones(num, np.bool_)
        stale = np.flatnonzero(self._table.has_header[slots])
        if len(stale):
            good[stale] = self._io.run(self._io.header_ops(slots[stale], pages, WRITE), "metadata", slots[stale])
            self._table.has_header[slots[stale[good[stale]]]] = False
        fragments = np.tile(np.arange(num_fragments), num)
        rows = np.flatnonzero(good)
        wanted = fragments[: len(rows) * num_fragments]
        batch = self._io.fragment_ops(np.repeat(slots[rows], num_fragments), wanted, addresses[rows].ravel(), WRITE)
        merged = self._io.begin(batch)
        hashed = self._io.checksums(fragments, addresses.ravel())  # while the drive is busy
        checksums = hashed.reshape(num, num_fragments)
        done = self._io.all_done(merged, cause, np.repeat(slots[rows], num_fragments), wanted)
        good[rows] = done.reshape(len(rows), num_fragments).all(axis=1)
        self._codec.encode(records, sequences, checksums, pages, proofs)
        rows = np.flatnonzero(good)
        header_pages = pages if len(rows) == num else _aligned_copy(pages[rows])
        self._table.has_header[slots[rows]] = True  # even a failed write may have landed
        good[rows] = self._io.run(self._io.header_ops(slots[rows], header_pages, WRITE), "metadata", slots[rows])
        return good, checksums, proofs

    def _encrypted(
        self,
        slots: npt.NDArray[np.int64],
        records: GroupRecords,
        sequences: npt.NDArray[np.uint64],
        addresses: npt.NDArray[np.uint64],
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint8]]:
        """Return where what goes to the file lies, until this is called again, and the proofs."""
        if self._cipher is None:
            return addresses, np.zeros((len(slots), self._layout.proof_bytes), np.uint8)
        lengths = np.array(self._layout.fragment_padded_bytes)
        sizes = np.broadcast_to(lengths, addresses.shape)
        targets = (address_of(self._memory) + np.cumsum(sizes).reshape(sizes.shape) - sizes).astype(np.uint64)
        parts = np.arange(len(lengths))
        return targets, self._cipher.encrypt(records, sequences, slots, parts, addresses, targets, sizes)


def _aligned_copy(pages: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    copy = aligned_buffer(pages.size).reshape(pages.shape)
    copy[:] = pages
    return copy
