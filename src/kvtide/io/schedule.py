"""Joining neighbours and cutting giants before operations reach an engine. Pure: numpy in, numpy out. Next: ring.

Decides which operations become one; knows no engine, file or clock. What engines do best is few, large operations;
what callers ask for is one operation a fragment. Reads that lie near each other may be joined over what lies between
them: those bytes go to a scratch buffer that nobody looks at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError
from kvtide.io.ops import (
    COMPLETION,
    FSYNC,
    IOVEC,
    OP,
    PAGE_BYTES,
    READ,
    Batch,
    Completions,
    address_of,
    aligned_buffer,
)

VECTORS_MAX = 1024  # IOV_MAX of Linux, limits.h
BYTES_MAX = 0x7FFFF000  # MAX_RW_COUNT: the kernel moves no more in one call, fs.h

Index = npt.NDArray[np.intp]
Lengths = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Merged:
    """Joined operations. It must live until they are reaped: `vectors` is what their addresses point to.

    `scratch` takes the bytes of all gaps, one over the other.
    Shapes: batch [m], its tags are 0..m-1; vectors [v]; part_of [n], the joined operation that carries each input;
    end_of [n], the bytes it must move until that input is whole; gap_bytes [m], those it moves that nobody asked for.
    """

    batch: Batch
    vectors: npt.NDArray[np.void]
    part_of: Index
    end_of: Lengths
    gap_bytes: Lengths
    scratch: npt.NDArray[np.uint8]

    def completions_of(self, batch: Batch, completions: Completions) -> Completions:
        """Return completions of the input `batch`, with its tags, for what `completions` of the joined ones carry.

        An operation has an error only if its own bytes did not all move.

        Shapes: batch [n], the one merged; completions [c], in any order; the result has one row an input carried.
        """
        place = np.full(len(self.batch), -1)
        place[completions["tag"].astype(np.intp)] = np.arange(len(completions))
        carrier = place[self.part_of]
        inputs = np.flatnonzero(carrier >= 0)
        done: Completions = completions[carrier[inputs]]
        wanted = _lengths(batch[inputs])
        start = self.end_of[inputs] - wanted
        done["tag"] = batch["tag"][inputs]
        done["length"] = np.clip(done["length"].astype(np.int64) - start, 0, wanted)
        done["error"][(done["length"] == wanted) & (wanted > 0)] = 0
        return done


@dataclass(frozen=True, slots=True)
class Split:
    """Pieces of operations.

    Shapes: batch [m], its tags are 0..m-1; part_of [m], the input each piece belongs to.
    """

    batch: Batch
    part_of: Index

    def completions_of(self, batch: Batch, completions: Completions) -> Completions:
        """Return completions of the input `batch`, with its tags, once `completions` has every piece.

        The length counts bytes up to the first gap; the error is that of the first piece which has one.

        Shapes: completions [m], in any order; the result is [n].
        """
        pieces = np.empty(len(self.batch), COMPLETION)
        pieces[completions["tag"].astype(np.intp)] = completions
        starts = np.searchsorted(self.part_of, np.arange(len(batch)))
        done: Completions = pieces[starts]
        whole = (pieces["length"] == _lengths(self.batch)) & (pieces["error"] == 0)
        # A piece counts if all pieces of the same input before it are whole, and so does the first that is not.
        broken = np.cumsum(~whole) - ~whole
        counts = broken == broken[starts][self.part_of]
        done["tag"] = batch["tag"]
        done["length"] = np.add.reduceat(np.where(counts, pieces["length"], 0), starts) if len(starts) else 0
        first_bad = np.flatnonzero(counts & ~whole)
        done["error"][self.part_of[first_bad]] = pieces["error"][first_bad]
        done["complete_ns"] = np.maximum.reduceat(pieces["complete_ns"], starts) if len(starts) else 0
        done["submit_ns"] = np.minimum.reduceat(pieces["submit_ns"], starts) if len(starts) else 0
        return done


def merge(batch: Batch, *, bytes_max: int, vectors_max: int = VECTORS_MAX, gap_bytes_max: int = 0) -> Merged:
    """Return `batch` sorted by file, kind and offset, neighbours in the file joined as far as the limits allow.

    A joined operation is plain if its memory is contiguous too, else vectored. Reads are joined over gaps of up to
    `gap_bytes_max` bytes, too, which count against both limits. Overlapping operations, vectored ones and FSYNC pass as
    they are. Joining is greedy from the lowest offset, so no two neighbours left would fit together.

    Raises: ConfigError for limits that no kernel call allows, or a gap below 0.
    """
    _check_limits(bytes_max, vectors_max, gap_bytes_max)
    order: Index = np.lexsort((batch["offset"], batch["kind"], batch["fd"]))
    ops = np.ascontiguousarray(batch[order], OP)
    joins, touches, gaps = _neighbours(ops, gap_bytes_max)
    first = _group_starts(ops, joins, touches, gaps, bytes_max, vectors_max)
    gaps[first] = 0  # none lies within an operation before its first input
    group = np.cumsum(first) - 1
    widest = int(gaps.max(initial=0))
    scratch = aligned_buffer(widest) if widest else np.empty(0, np.uint8)
    merged, vectors = _join(ops, first, touches, gaps, scratch)
    starts = np.flatnonzero(first)
    part_of, end_of = np.empty(len(ops), np.intp), np.empty(len(ops), np.int64)
    part_of[order] = group
    lengths = _lengths(ops)
    ends = np.cumsum(gaps + lengths)
    end_of[order] = ends - (ends - lengths)[starts][group] if len(ops) else ends
    gap_bytes = np.add.reduceat(gaps, starts) if len(ops) else gaps
    return Merged(merged, vectors, part_of, end_of, gap_bytes, scratch)


def split(batch: Batch, *, bytes_max: int) -> Split:
    """Return `batch` with plain operations longer than `bytes_max` cut; every cut is at a multiple of a page.

    A cut is made in the file offset, so pieces of direct I/O stay aligned. Order is kept.

    Raises: ConfigError if `bytes_max` is less than a page, or more than a kernel call moves.
    """
    if not PAGE_BYTES <= bytes_max <= BYTES_MAX:
        raise ConfigError(f"bytes_max is {bytes_max}; pieces have {PAGE_BYTES} to {BYTES_MAX} bytes")
    step = bytes_max - bytes_max % PAGE_BYTES
    offsets, lengths = batch["offset"].astype(np.int64), _lengths(batch)
    cuttable = (batch["num_vectors"] == 0) & (batch["kind"] != FSYNC) & (lengths > bytes_max)
    # The first piece ends at a page boundary: the last one that bytes_max reaches.
    head = np.where(cuttable, (offsets + bytes_max) // PAGE_BYTES * PAGE_BYTES - offsets, lengths)
    num_pieces = 1 + np.where(cuttable, -(-(lengths - head) // step), 0)
    part_of: Index = np.repeat(np.arange(len(batch)), num_pieces)
    number = np.arange(len(part_of)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    start = np.where(number > 0, head[part_of] + (number - 1) * step, 0)
    end = np.minimum(head[part_of] + number * step, lengths[part_of])
    pieces = batch[part_of]
    pieces["offset"] += start.astype(np.uint64)
    pieces["address"] += start.astype(np.uint64)
    plain = pieces["kind"] != FSYNC
    pieces["length"][plain] = (end - start)[plain]
    pieces["tag"] = np.arange(len(pieces))
    return Split(pieces, part_of)


def _check_limits(bytes_max: int, vectors_max: int, gap_bytes_max: int) -> None:
    if not 1 <= bytes_max <= BYTES_MAX:
        raise ConfigError(f"bytes_max is {bytes_max}; a kernel call moves 1 to {BYTES_MAX} bytes")
    if not 1 <= vectors_max <= VECTORS_MAX:
        raise ConfigError(f"vectors_max is {vectors_max}; a kernel call takes 1 to {VECTORS_MAX} vectors")
    if not 0 <= gap_bytes_max <= BYTES_MAX:
        raise ConfigError(f"gap_bytes_max is {gap_bytes_max}; a gap has 0 to {BYTES_MAX} bytes")


def _lengths(ops: Batch) -> Lengths:
    """Bytes each operation moves: none for FSYNC."""
    return np.where(ops["kind"] == FSYNC, 0, ops["length"].astype(np.int64))


def _neighbours(ops: Batch, gap_bytes_max: int) -> tuple[Flags, Flags, Lengths]:
    """Return whether each sorted operation can be joined to the one before it, whether both touch in file and memory,
    and the bytes between them in the file where they can be joined.

    Shapes: [n] each; the first is False and 0.
    """
    joins, touches, gaps = np.zeros(len(ops), np.bool_), np.zeros(len(ops), np.bool_), np.zeros(len(ops), np.int64)
    before, after = ops[:-1], ops[1:]
    simple = (ops["num_vectors"] == 0) & (ops["kind"] != FSYNC) & (ops["length"] > 0)
    end = before["offset"] + before["length"]
    ahead = after["offset"] >= end  # else they overlap
    distance = np.where(ahead, after["offset"] - end, 0)
    reach = np.where(after["kind"] == READ, gap_bytes_max, 0).astype(np.uint64)
    joins[1:] = (
        (before["fd"] == after["fd"])
        & (before["kind"] == after["kind"])
        & ahead
        & (distance <= reach)
        & simple[:-1]
        & simple[1:]
    )
    gaps[1:] = np.where(joins[1:], distance, 0)
    touches[1:] = joins[1:] & (gaps[1:] == 0) & (before["address"] + before["length"] == after["address"])
    return joins, touches, gaps


def _group_starts(
    ops: Batch, joins: Flags, touches: Flags, gaps: Lengths, bytes_max: int, vectors_max: int
) -> npt.NDArray[np.bool_]:
    """Return which sorted operations begin a joined one.

    Greedy joining is a walk from each operation to the first that does not fit with it. All walks are taken at once
    by pointer doubling: after step k every start within 2^k strides of the beginning of its run is marked.
    """
    num = len(ops)
    first = ~joins
    if num == 0 or not joins.any():
        return first
    lengths = _lengths(ops)
    ends = np.cumsum(lengths + gaps)
    vectors = np.cumsum(~touches + (gaps > 0).astype(np.int64))  # up to each operation, gaps being vectors of their own
    run_starts = np.append(np.flatnonzero(first), num)
    run_end = np.repeat(run_starts[1:], np.diff(run_starts))
    fits_bytes = np.searchsorted(ends, ends - lengths + bytes_max, side="right")
    fits_vectors = np.searchsorted(vectors, vectors + vectors_max, side="left")
    stride = np.minimum(np.minimum(fits_bytes, fits_vectors), run_end)
    stride = np.append(np.maximum(stride, np.arange(num) + 1), num)  # past the end one stays
    marked = np.append(first, True)
    while True:
        reached = stride[marked]
        if marked[reached].all():
            return marked[:num]
        marked[reached] = True
        stride = stride[stride]


def _join(
    ops: Batch, first: Flags, touches: Flags, gaps: Lengths, scratch: npt.NDArray[np.uint8]
) -> tuple[Batch, npt.NDArray[np.void]]:
    """Return the joined operations and the vectors of those whose memory is in several pieces."""
    starts = np.flatnonzero(first)
    merged = ops[starts]
    merged["tag"] = np.arange(len(merged))
    if len(starts) == len(ops):
        return merged, np.empty(0, IOVEC)
    lengths = ops["length"].astype(np.int64)
    merged["length"] = np.add.reduceat(lengths + gaps, starts)
    pieces = np.flatnonzero(first | ~touches)  # the first operation of each memory run within a group
    is_after_gap = gaps[pieces] > 0
    place = np.cumsum(1 + is_after_gap) - 1  # of each piece among all vectors, a gap's being the one before it
    every = np.empty(int(place[-1]) + 1, IOVEC)
    every["address"][place], every["length"][place] = ops["address"][pieces], np.add.reduceat(lengths, pieces)
    before = place[is_after_gap] - 1
    every["address"][before], every["length"][before] = address_of(scratch), gaps[pieces[is_after_gap]]
    counts = np.diff(np.append(place[np.searchsorted(pieces, starts)], len(every)))
    vectored = counts > 1
    vectors = every[np.repeat(vectored, counts)]
    row = np.cumsum(counts[vectored]) - counts[vectored]
    merged["num_vectors"][vectored] = counts[vectored]
    merged["address"][vectored] = address_of(vectors) + row * IOVEC.itemsize
    return merged, vectors
