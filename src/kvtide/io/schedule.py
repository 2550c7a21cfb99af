"""Joining neighbours and cutting giants before operations reach an engine. Pure: numpy in, numpy out. Next: ring.

Decides which operations become one; knows no engine, file or clock. What engines do best is few, large operations;
what callers ask for is one operation a fragment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError
from kvtide.io.ops import COMPLETION, FSYNC, IOVEC, OP, PAGE_BYTES, Batch, Completions, address_of

VECTORS_MAX = 1024  # IOV_MAX of Linux, limits.h
BYTES_MAX = 0x7FFFF000  # MAX_RW_COUNT: the kernel moves no more in one call, fs.h

Index = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Merged:
    """Joined operations. It must live until they are reaped: `vectors` is what their addresses point to.

    Shapes: batch [m], its tags are 0..m-1; vectors [v]; part_of [n], the joined operation that carries each input.
    """

    batch: Batch
    vectors: npt.NDArray[np.void]
    part_of: Index

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
        start = batch["offset"][inputs].astype(np.int64) - self.batch["offset"][self.part_of[inputs]].astype(np.int64)
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


def merge(batch: Batch, *, bytes_max: int, vectors_max: int = VECTORS_MAX) -> Merged:
    """Return `batch` sorted by file, kind and offset, neighbours in the file joined as far as the limits allow.

    A joined operation is plain if its memory is contiguous too, else vectored. Overlapping operations, vectored ones
    and FSYNC pass as they are. Joining is greedy from the lowest offset, so no two neighbours left would fit together.

    Raises: ConfigError for limits that no kernel call allows.
    """
    _check_limits(bytes_max, vectors_max)
    order: Index = np.lexsort((batch["offset"], batch["kind"], batch["fd"]))
    ops = np.ascontiguousarray(batch[order], OP)
    joins, touches = _neighbours(ops)
    first = _group_starts(ops, joins, touches, bytes_max, vectors_max)
    group = np.cumsum(first) - 1
    merged, vectors = _join(ops, first, touches)
    part_of = np.empty(len(ops), np.intp)
    part_of[order] = group
    return Merged(merged, vectors, part_of)


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


def _check_limits(bytes_max: int, vectors_max: int) -> None:
    if not 1 <= bytes_max <= BYTES_MAX:
        raise ConfigError(f"bytes_max is {bytes_max}; a kernel call moves 1 to {BYTES_MAX} bytes")
    if not 1 <= vectors_max <= VECTORS_MAX:
        raise ConfigError(f"vectors_max is {vectors_max}; a kernel call takes 1 to {VECTORS_MAX} vectors")


def _lengths(ops: Batch) -> npt.NDArray[np.int64]:
    """Bytes each operation moves: none for FSYNC."""
    return np.where(ops["kind"] == FSYNC, 0, ops["length"].astype(np.int64))


def _neighbours(ops: Batch) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return whether each sorted operation follows the one before it in the file, and then in memory too.

    Shapes: [n] each; the first is False.
    """
    joins, touches = np.zeros(len(ops), np.bool_), np.zeros(len(ops), np.bool_)
    before, after = ops[:-1], ops[1:]
    simple = (ops["num_vectors"] == 0) & (ops["kind"] != FSYNC) & (ops["length"] > 0)
    joins[1:] = (
        (before["fd"] == after["fd"])
        & (before["kind"] == after["kind"])
        & (before["offset"] + before["length"] == after["offset"])
        & simple[:-1]
        & simple[1:]
    )
    touches[1:] = joins[1:] & (before["address"] + before["length"] == after["address"])
    return joins, touches


def _group_starts(
    ops: Batch,
    joins: npt.NDArray[np.bool_],
    touches: npt.NDArray[np.bool_],
    bytes_max: int,
    vectors_max: int,
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
    ends = np.cumsum(lengths)
    memory = np.cumsum(~touches)  # number of the memory run each operation is in
    run_starts = np.append(np.flatnonzero(first), num)
    run_end = np.repeat(run_starts[1:], np.diff(run_starts))
    fits_bytes = np.searchsorted(ends, ends - lengths + bytes_max, side="right")
    fits_vectors = np.searchsorted(memory, memory + vectors_max, side="left")
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
    ops: Batch, first: npt.NDArray[np.bool_], touches: npt.NDArray[np.bool_]
) -> tuple[Batch, npt.NDArray[np.void]]:
    """Return the joined operations and the vectors of those whose memory is in several pieces."""
    starts = np.flatnonzero(first)
    merged = ops[starts]
    merged["tag"] = np.arange(len(merged))
    if len(starts) == len(ops):
        return merged, np.empty(0, IOVEC)
    lengths = ops["length"].astype(np.int64)
    merged["length"] = np.add.reduceat(lengths, starts)
    pieces = np.flatnonzero(first | ~touches)  # the first operation of each memory run within a group
    counts = np.diff(np.append(np.searchsorted(pieces, starts), len(pieces)))
    vectored = counts > 1
    kept = np.repeat(vectored, counts)
    vectors = np.empty(int(kept.sum()), IOVEC)
    vectors["address"] = ops["address"][pieces[kept]]
    vectors["length"] = np.add.reduceat(lengths, pieces)[kept]
    row = np.cumsum(counts[vectored]) - counts[vectored]
    merged["num_vectors"][vectored] = counts[vectored]
    merged["address"][vectored] = address_of(vectors) + row * IOVEC.itemsize
    return merged, vectors
