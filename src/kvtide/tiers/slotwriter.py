"""Writing groups into slots: encrypted, hashed, and in the order that a crash at any moment asks for. Next: file.

Decides in which steps the parts of a group reach the file, as the theory in `file` has it. Knows neither keys nor room.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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

PORTION_BYTES = 16 << 20  # written at once where slots are packed or encrypted: many operations of the largest size
FIRST_SHARE = 4  # of a portion goes first: the drive has nothing to do while that is hashed


@dataclass(eq=False, slots=True)
class Begun:
    """Slots that are being written, and what becomes known of them: checksums of fragments, proofs, which are whole."""

    slots: npt.NDArray[np.int64]
    records: GroupRecords
    sequences: npt.NDArray[np.uint64]
    cause: Cause
    proofs: npt.NDArray[np.uint8]
    checksums: npt.NDArray[np.uint64]
    pages: npt.NDArray[np.uint8]  # the headers
    good: npt.NDArray[np.bool_]  # right after `finish`
    merged: Merged | None = None  # what is under way

    @property
    def num_fragments(self) -> int:
        """Fragments of a slot."""
        return self.checksums.shape[1]


class SlotWriter:
    """Writes slots, and notes in `table` which of them may have a header. Threads: one at a time."""

    def __init__(
        self, io: SlotIo, codec: HeaderCodec, table: SlotTable, cipher: Cipher | None, *, is_packed: bool
    ) -> None:
        self._io, self._codec, self._table, self._cipher, self.is_packed = io, codec, table, cipher, is_packed
        self._layout = io.layout
        num_bytes = 0 if cipher is None else max(PORTION_BYTES, self._layout.slot_bytes) + PROOF_BYTES
        self._memory = [aligned_buffer(num_bytes) for _ in range(2)]  # of what is written, and of what is next

    def portions(self, num: int) -> Iterator[slice]:
        """Yield which of `num` slots to begin with at once: the next before the last one is finished."""
        start = 0
        while start < num:
            end = min(num, start + self.portion(is_idle=start == 0))
            yield slice(start, end)
            start = end

    def portion(self, *, is_idle: bool) -> int:
        """Return how many slots to begin with at once, at most; `is_idle`: none is being written."""
        if not self.is_packed and self._cipher is None:
            return self._table.used.size
        share = FIRST_SHARE if is_idle and self.is_packed else 1
        return max(1, PORTION_BYTES // share // self._layout.slot_bytes)

    def begin(
        self,
        slots: npt.NDArray[np.int64],
        records: GroupRecords,
        sequences: npt.NDArray[np.uint64],
        addresses: npt.NDArray[np.uint64],
        cause: Cause,
    ) -> Begun:
        """Hash slots and hand them to the drive, or write them right away where that takes steps.

        Of encrypted ones a portion at most. Before `finish` one more may be begun, no third one: it would take the
        memory of the first.
        """
        num, num_fragments = addresses.shape
        addresses, proofs = self._encrypted(slots, records, sequences, addresses)
        checksums, good = np.empty((num, num_fragments), np.uint64), np.ones(num, np.bool_)
        pages = aligned_buffer(num * self._layout.header_bytes).reshape(num, self._layout.header_bytes)
        begun = Begun(slots, records, sequences, cause, proofs, checksums, pages, good)
        write = self._begin_packed if self.is_packed else self._write_in_steps
        write(begun, addresses)
        return begun

    def finish(self, begun: Begun) -> None:
        """Wait, and note which slots are whole."""
        if begun.merged is not None:
            num = len(begun.slots)
            slots = np.concatenate([begun.slots, np.repeat(begun.slots, begun.num_fragments)])
            done = self._io.all_done(begun.merged, begun.cause, slots, None)
            begun.good = done[:num] & done[num:].reshape(num, -1).all(axis=1)

    def _begin_packed(self, begun: Begun, addresses: npt.NDArray[np.uint64]) -> None:
        """Begin to write headers and fragments together."""
        slots = begun.slots
        fragments = np.tile(np.arange(begun.num_fragments), len(slots))
        begun.checksums[:] = self._io.checksums(fragments, addresses.ravel()).reshape(len(slots), -1)
        self._codec.encode(begun.records, begun.sequences, begun.checksums, begun.pages, begun.proofs)
        self._table.has_header[slots] = True  # even a failed write may have landed
        parts = self._io.fragment_ops(np.repeat(slots, begun.num_fragments), fragments, addresses.ravel(), WRITE)
        begun.merged = self._io.begin(np.concatenate([self._io.header_ops(slots, begun.pages, WRITE), parts]))

    def _write_in_steps(self, begun: Begun, addresses: npt.NDArray[np.uint64]) -> None:
        """Write in the three steps of the theory."""
        slots, good, pages, num_fragments = begun.slots, begun.good, begun.pages, begun.num_fragments
        num = len(slots)
        stale = np.flatnonzero(self._table.has_header[slots])
        if len(stale):
            good[stale] = self._io.run(self._io.header_ops(slots[stale], pages, WRITE), "metadata", slots[stale])
            self._table.has_header[slots[stale[good[stale]]]] = False
        fragments = np.tile(np.arange(num_fragments), num)
        rows = np.flatnonzero(good)
        wanted = fragments[: len(rows) * num_fragments]
        batch = self._io.fragment_ops(np.repeat(slots[rows], num_fragments), wanted, addresses[rows].ravel(), WRITE)
        merged = self._io.begin(batch)
        begun.checksums[:] = self._io.checksums(fragments, addresses.ravel()).reshape(num, -1)  # the drive is busy
        done = self._io.all_done(merged, begun.cause, np.repeat(slots[rows], num_fragments), wanted)
        good[rows] = done.reshape(len(rows), num_fragments).all(axis=1)
        self._codec.encode(begun.records, begun.sequences, begun.checksums, pages, begun.proofs)
        rows = np.flatnonzero(good)
        header_pages = pages if len(rows) == num else _aligned_copy(pages[rows])
        self._table.has_header[slots[rows]] = True  # even a failed write may have landed
        good[rows] = self._io.run(self._io.header_ops(slots[rows], header_pages, WRITE), "metadata", slots[rows])

    def _encrypted(
        self,
        slots: npt.NDArray[np.int64],
        records: GroupRecords,
        sequences: npt.NDArray[np.uint64],
        addresses: npt.NDArray[np.uint64],
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint8]]:
        """Return where what goes to the file lies, until this is called twice more, and the proofs."""
        if self._cipher is None:
            return addresses, np.zeros((len(slots), self._layout.proof_bytes), np.uint8)
        lengths = np.array(self._layout.fragment_padded_bytes)
        sizes = np.broadcast_to(lengths, addresses.shape)
        assert sizes.sum() + PROOF_BYTES <= len(self._memory[0]), "more than a portion"
        self._memory.reverse()
        targets = (address_of(self._memory[0]) + np.cumsum(sizes).reshape(sizes.shape) - sizes).astype(np.uint64)
        parts = np.arange(len(lengths))
        return targets, self._cipher.encrypt(records, sequences, slots, parts, addresses, targets, sizes)


def _aligned_copy(pages: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    copy = aligned_buffer(pages.size).reshape(pages.shape)
    copy[:] = pages
    return copy
