"""Submission entries as words: how an operation is written for the kernel, whole or shifted. Next: uring.

Five words of an OP are, but for the first and the flags, the words of an entry: that is why filling is cheap. Knows
nothing of slots, rings or results.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.io.ops import FSYNC, address_of
from kvtide.io.vectors import Regions, read_vectors, remaining_vectors

Words = npt.NDArray[np.uint64]

# enum io_uring_op by kind: READ, WRITE, FSYNC, and an opcode no kernel has for every other, answered by EINVAL.
OPCODES = np.array([22, 23, 3, 255], np.uint64)
OPCODES_VECTORED = np.array([1, 2, 3, 255], np.uint64)
OPCODES_FIXED = np.array([4, 5, 3, 255], np.uint64)
FSYNC_DATASYNC = 1
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
UNKNOWN = np.uint64(3)


@dataclass(slots=True)
class Continued:
    """What only an operation needs that did not go through at once."""

    want_bytes: int
    tries: int = 0
    vectors: Words | None = None  # the remainder the kernel reads, kept alive here


def encode(words: Words, slots: npt.NDArray[np.intp], regions: Regions) -> tuple[Words, Words]:
    """Return the entries of operations, and the bytes each will move.

    Plain operations inside one of the registered `regions` become fixed ones.

    Shapes: words [n, 5], the rows of OP; slots [n]; the result is [n, 6] and [n].
    """
    head, sizes = words[:, 0], words[:, 3]
    kinds, vectors = np.minimum(head >> HALF, UNKNOWN), sizes >> HALF
    lengths = sizes & LOW
    entries = np.zeros((len(words), 6), np.uint64)
    entries[:, 0] = (head << HALF) | OPCODES[kinds]
    entries[:, 1:4] = words[:, 1:4]
    entries[:, 4] = slots
    if vectors.any() or kinds.max() >= FSYNC:
        _correct(entries, kinds, vectors, lengths)
    if regions:
        inside, numbers = regions.find(entries[:, 2], lengths)
        plain = (entries[:, 0] & np.uint64(0xFE)) == OPCODES[0]  # 22 and 23, READ and WRITE
        chosen = np.flatnonzero(inside & plain)
        entries[chosen, 0] ^= OPCODES[kinds[chosen]] ^ OPCODES_FIXED[kinds[chosen]]
        entries[chosen, 5] = numbers[chosen]
    return entries, lengths


def _correct(entries: Words, kinds: Words, vectors: Words, lengths: Words) -> None:
    """Correct the entries of vectored operations and of FSYNC, and the bytes FSYNC moves: none."""
    vectored = np.flatnonzero(vectors)
    entries[vectored, 0] ^= OPCODES[kinds[vectored]] ^ OPCODES_VECTORED[kinds[vectored]]
    entries[vectored, 3] = vectors[vectored]
    syncs = np.flatnonzero(kinds >= FSYNC)
    entries[syncs, 1:3] = 0
    entries[syncs, 3] = FSYNC_DATASYNC << 32
    lengths[syncs] = 0


def shift(entry: Words, moved: int, rest: Continued) -> None:
    """Let `entry` begin `moved` bytes later, in the file and in memory."""
    opcode, size = int(entry[0]) & 0xFF, int(entry[3])
    entry[1] += np.uint64(moved)
    if opcode not in {1, 2}:
        entry[2] += np.uint64(moved)
        entry[3] = size - moved
        return
    rest.vectors = remaining_vectors(read_vectors(int(entry[2]), size), moved)
    entry[2] = address_of(rest.vectors)
    entry[3] = len(rest.vectors)
