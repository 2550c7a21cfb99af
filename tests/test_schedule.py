"""Joining and cutting move exactly the bytes that were asked for, within the limits."""

from __future__ import annotations

import ctypes
import errno
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.errors import ConfigError
from kvtide.io.ops import COMPLETION, FSYNC, IOVEC, OP, PAGE_BYTES, READ, WRITE, address_of
from kvtide.io.schedule import merge, split

UNIT = 512


@st.composite
def batches(draw: st.DrawFn) -> np.ndarray:
    """Operations on a small grid, so that many are neighbours in file and memory, and some overlap or repeat."""
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(3, 4),
                st.sampled_from([READ, READ, READ, WRITE, FSYNC]),
                st.integers(0, 24),
                st.integers(0, 4),
                st.one_of(st.none(), st.integers(0, 30)),
            ),
            max_size=40,
        )
    )
    ops = np.zeros(len(rows), OP)
    for index, (fd, kind, place, units, memory) in enumerate(rows):
        address = 1 << 20 if memory is None else memory * UNIT
        ops[index] = (fd, kind, place * UNIT, address + place * UNIT, units * UNIT, 0, 100 + index)
    return ops


def moves(batch: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Every unit moved: fd, kind, offset in the file, address in memory. FSYNC counts as one of its own."""
    found = []
    for fd, kind, offset, address, length, num_vectors, _ in batch.tolist():
        if kind == FSYNC:
            found.append((fd, kind, 0, 0))
            continue
        pieces = [(address, length)]
        if num_vectors:
            raw = ctypes.string_at(address, num_vectors * IOVEC.itemsize)
            pieces = np.frombuffer(raw, IOVEC).tolist()
            assert sum(size for _, size in pieces) == length
        at = offset
        for start, size in pieces:
            found += [(fd, kind, at + step, start + step) for step in range(0, size, UNIT)]
            at += size
    return sorted(found)


@given(batches(), st.integers(1, 16), st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_merging_moves_the_same_bytes_within_limits(batch: np.ndarray, units_max: int, vectors_max: int) -> None:
    bytes_max = units_max * UNIT
    merged = merge(batch, bytes_max=bytes_max, vectors_max=vectors_max)
    joined = merged.batch
    assert moves(joined) == moves(batch)
    assert joined["tag"].tolist() == list(range(len(joined)))
    assert joined["num_vectors"].max(initial=0) <= vectors_max
    counts = np.bincount(merged.part_of, minlength=len(joined))
    assert counts.min(initial=1) >= 1
    assert (joined["length"][counts > 1] <= bytes_max).all()
    for index, part in enumerate(merged.part_of.tolist()):
        row, carrier = batch[index], joined[part]
        assert (row["fd"], row["kind"]) == (carrier["fd"], carrier["kind"])
        if row["kind"] != FSYNC:
            assert carrier["offset"] <= row["offset"]
            assert row["offset"] + row["length"] <= carrier["offset"] + carrier["length"]


@given(batches(), st.integers(1, 16), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_merging_leaves_no_neighbours_that_would_fit(batch: np.ndarray, units_max: int, vectors_max: int) -> None:
    bytes_max = units_max * UNIT
    joined = merge(batch, bytes_max=bytes_max, vectors_max=vectors_max).batch
    for before, after in itertools.pairwise(joined):
        mergeable = before["kind"] != FSYNC and min(before["length"], after["length"]) > 0
        same = before["fd"] == after["fd"] and before["kind"] == after["kind"]
        if mergeable and same and before["offset"] + before["length"] == after["offset"]:
            vectors = max(before["num_vectors"], 1) + max(after["num_vectors"], 1)
            assert before["length"] + after["length"] > bytes_max or vectors > vectors_max


@pytest.mark.parametrize("num", [1, 2, 1000, 4097])
def test_a_run_contiguous_in_memory_becomes_plain_operations(num: int) -> None:
    ops = np.zeros(num, OP)
    ops["offset"] = np.random.default_rng(1).permutation(num) * PAGE_BYTES
    ops["address"] = (1 << 30) + ops["offset"]
    ops["length"] = PAGE_BYTES
    merged = merge(ops, bytes_max=64 * PAGE_BYTES)
    assert len(merged.batch) == -(-num // 64)
    assert not merged.batch["num_vectors"].any()
    assert len(merged.vectors) == 0
    assert merged.part_of.tolist() == (ops["offset"] // (64 * PAGE_BYTES)).tolist()


def test_vectored_operations_pass_as_they_are() -> None:
    ops = np.zeros(2, OP)
    ops["offset"], ops["length"], ops["num_vectors"], ops["address"] = [0, 100], 100, 3, [7, 9]
    merged = merge(ops, bytes_max=1000)
    assert merged.batch["address"].tolist() == [7, 9]
    assert merged.batch["num_vectors"].tolist() == [3, 3]


@given(batches(), st.integers(0, 40), st.sampled_from([0, errno.EIO]))
@settings(max_examples=100, deadline=None)
def test_completions_are_handed_back_to_the_inputs(batch: np.ndarray, cut_units: int, error: int) -> None:
    merged = merge(batch, bytes_max=8 * UNIT)
    joined = merged.batch
    done = np.zeros(len(joined), COMPLETION)
    done["tag"] = joined["tag"]
    done["length"] = np.where(joined["kind"] == FSYNC, 0, np.minimum(joined["length"], cut_units * UNIT))
    done["error"] = np.where(done["length"] < joined["length"], error, 0)
    back = merged.completions_of(batch, done[::-1])
    assert back["tag"].tolist() == batch["tag"].tolist()
    for row, given_back, part in zip(batch, back, merged.part_of.tolist(), strict=True):
        wanted = 0 if row["kind"] == FSYNC else int(row["length"])
        start = int(row["offset"]) - int(joined["offset"][part])
        assert given_back["length"] == min(wanted, max(0, cut_units * UNIT - start))
        if wanted:
            assert given_back["error"] == (error if given_back["length"] < wanted else 0)


def runs_of(batch: np.ndarray, gap_bytes_max: int) -> set[int]:
    """Inputs that follow another within `gap_bytes_max` in one file: what may be joined, one at a time."""
    simple = [row for row in batch.tolist() if row[1] != FSYNC and row[4] > 0 and not row[5]]
    return {
        after[6]
        for before, after in itertools.product(simple, simple)
        if before[:2] == after[:2]
        and 0 <= after[2] - before[2] - before[4] <= (gap_bytes_max if after[1] == READ else 0)
    }


def pieces_of(op: np.void) -> list[tuple[int, int, int]]:
    """Offset in the file, address and length of each buffer of one operation."""
    pieces = [(int(op["address"]), int(op["length"]))]
    if op["num_vectors"]:
        pieces = np.frombuffer(ctypes.string_at(int(op["address"]), int(op["num_vectors"]) * IOVEC.itemsize), IOVEC)
        pieces = [(int(at), int(size)) for at, size in pieces.tolist()]
    ends = list(itertools.accumulate((size for _, size in pieces), initial=int(op["offset"])))
    return [(start, at, size) for start, (at, size) in zip(ends, pieces, strict=False)]


@given(batches(), st.integers(1, 16), st.integers(1, 6), st.integers(0, 6))
@settings(max_examples=200, deadline=None)
def test_merging_over_gaps_moves_what_was_asked_and_else_only_into_scratch(
    batch: np.ndarray, units_max: int, vectors_max: int, gap_units: int
) -> None:
    bytes_max, gap_bytes_max = units_max * UNIT, gap_units * UNIT
    merged = merge(batch, bytes_max=bytes_max, vectors_max=vectors_max, gap_bytes_max=gap_bytes_max)
    joined, scratch = merged.batch, address_of(merged.scratch)
    useful, gaps = [], [0] * len(joined)
    for index, op in enumerate(joined):
        if op["kind"] == FSYNC:
            useful.append((int(op["fd"]), FSYNC, 0, 0))
            continue
        for start, at, size in pieces_of(op):
            if len(merged.scratch) and at == scratch:
                assert 0 < size <= min(gap_bytes_max, len(merged.scratch))
                assert op["kind"] == READ, "no write may cover what nobody asked for"
                gaps[index] += size
            else:
                useful += [(int(op["fd"]), int(op["kind"]), start + step, at + step) for step in range(0, size, UNIT)]
    assert sorted(useful) == moves(batch)
    assert merged.gap_bytes.tolist() == gaps
    counts = np.bincount(merged.part_of, minlength=len(joined))
    assert (joined["length"][counts > 1] <= bytes_max).all()
    assert joined["num_vectors"].max(initial=0) <= vectors_max
    ends = batch["offset"].astype(int) + np.where(batch["kind"] == FSYNC, 0, batch["length"])
    assert merged.end_of.tolist() == (ends - joined["offset"][merged.part_of].astype(int)).tolist()
    assert len(batch) - len(joined) <= len(runs_of(batch, gap_bytes_max))


@given(batches(), st.integers(1, 16), st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_merging_over_gaps_leaves_no_reads_that_would_fit(
    batch: np.ndarray, units_max: int, vectors_max: int, gap_units: int
) -> None:
    bytes_max, gap_bytes_max = units_max * UNIT, gap_units * UNIT
    joined = merge(batch, bytes_max=bytes_max, vectors_max=vectors_max, gap_bytes_max=gap_bytes_max).batch
    for before, after in itertools.pairwise(joined):
        mergeable = before["kind"] == READ and min(before["length"], after["length"]) > 0
        gap = int(after["offset"]) - int(before["offset"]) - int(before["length"])
        if mergeable and before["fd"] == after["fd"] and after["kind"] == READ and 0 < gap <= gap_bytes_max:
            vectors = max(before["num_vectors"], 1) + max(after["num_vectors"], 1) + 1
            fits_first = pieces_of(after)[0][2]  # greedy: already the first input of the next one did not fit
            vectors_first = max(before["num_vectors"], 1) + 2
            too_long = before["length"] + gap + fits_first > bytes_max
            assert too_long or vectors > vectors_max or vectors_first > vectors_max


@given(batches(), st.integers(0, 40), st.integers(0, 6))
@settings(max_examples=100, deadline=None)
def test_a_read_that_ends_in_a_gap_is_right_for_what_came_before(
    batch: np.ndarray, cut_units: int, gap_units: int
) -> None:
    merged = merge(batch, bytes_max=16 * UNIT, gap_bytes_max=gap_units * UNIT)
    joined = merged.batch
    done = np.zeros(len(joined), COMPLETION)
    done["tag"] = joined["tag"]
    done["length"] = np.where(joined["kind"] == FSYNC, 0, np.minimum(joined["length"], cut_units * UNIT))
    done["error"] = np.where(done["length"] < joined["length"], errno.EIO, 0)
    back = merged.completions_of(batch, done[::-1])
    for row, given_back, part in zip(batch, back, merged.part_of.tolist(), strict=True):
        wanted = 0 if row["kind"] == FSYNC else int(row["length"])
        start = int(row["offset"]) - int(joined["offset"][part])
        assert given_back["length"] == min(wanted, max(0, cut_units * UNIT - start))
        if wanted:
            assert given_back["error"] == (errno.EIO if given_back["length"] < wanted else 0)


def test_gaps_are_joined_up_to_the_limit_and_no_further() -> None:
    ops = np.zeros(4, OP)
    ops["offset"], ops["length"] = [0, 12 << 10, 28 << 10, 60 << 10], 4096  # gaps of 8, 12 and 28 KiB
    ops["address"] = [1 << 20, 3 << 20, 2 << 20, 4 << 20]
    merged = merge(ops, bytes_max=1 << 20, gap_bytes_max=12 << 10)
    assert merged.part_of.tolist() == [0, 0, 0, 1]
    assert merged.batch["length"].tolist() == [32 << 10, 4096]
    assert merged.batch["num_vectors"].tolist() == [5, 0]
    assert merged.gap_bytes.tolist() == [20 << 10, 0]
    scratch = address_of(merged.scratch)
    assert merged.vectors.tolist() == [
        (1 << 20, 4096), (scratch, 8 << 10), (3 << 20, 4096), (scratch, 12 << 10), (2 << 20, 4096)
    ]  # fmt: skip
    assert len(merged.scratch) == 12 << 10
    ops["kind"] = WRITE
    assert len(merge(ops, bytes_max=1 << 20, gap_bytes_max=12 << 10).batch) == 4


@given(
    st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 60_000), st.booleans()), max_size=10),
    st.integers(PAGE_BYTES, 20_000),
)
@settings(max_examples=100, deadline=None)
def test_splitting_moves_the_same_bytes_in_small_aligned_pieces(
    rows: list[tuple[int, int, bool]], bytes_max: int
) -> None:
    ops = np.zeros(len(rows), OP)
    for index, (offset, length, sync) in enumerate(rows):
        ops[index] = (3, FSYNC if sync else READ, offset, (1 << 30) + offset, length, 0, index)
    pieces = split(ops, bytes_max=bytes_max)
    for index, (offset, length, sync) in enumerate(rows):
        mine = pieces.batch[pieces.part_of == index]
        edges = [*mine["offset"].tolist(), offset + length]
        assert edges[0] == offset
        if sync:
            assert len(mine) == 1
            continue
        assert mine["length"].tolist() == np.diff(edges).tolist()
        assert all(edge % PAGE_BYTES == 0 for edge in edges[1:-1])
        assert mine["length"].max() <= bytes_max
        assert (mine["address"] - mine["offset"] == 1 << 30).all()
    assert pieces.batch["tag"].tolist() == list(range(len(pieces.batch)))


def test_pieces_are_handed_back_as_one() -> None:
    ops = np.zeros(4, OP)
    ops["length"], ops["tag"] = [10_000, 100, 20_000, 9000], [5, 6, 7, 8]
    pieces = split(ops, bytes_max=PAGE_BYTES)
    assert pieces.part_of.tolist() == [0] * 3 + [1] + [2] * 5 + [3] * 3
    done = np.zeros(12, COMPLETION)
    done["tag"], done["length"], done["complete_ns"] = np.arange(12), pieces.batch["length"], np.arange(12)
    done["length"][5], done["error"][5] = 50, errno.EIO  # second piece of the third: what follows does not count
    done["length"][10:] = [1000, 0]  # end of file
    back = pieces.completions_of(ops, done[::-1])
    assert back["tag"].tolist() == [5, 6, 7, 8]
    assert back["length"].tolist() == [10_000, 100, 4146, 5096]
    assert back["error"].tolist() == [0, 0, errno.EIO, 0]
    assert back["complete_ns"].tolist() == [2, 3, 8, 11]


def test_empty_batches_stay_empty() -> None:
    none = np.empty(0, OP)
    merged, pieces = merge(none, bytes_max=4096), split(none, bytes_max=4096)
    assert len(merged.batch) == len(merged.part_of) == len(pieces.batch) == 0
    assert len(merged.completions_of(none, np.empty(0, COMPLETION))) == 0
    assert len(pieces.completions_of(none, np.empty(0, COMPLETION))) == 0


def test_impossible_limits_are_refused() -> None:
    none = np.empty(0, OP)
    for limits in (
        {"bytes_max": 0},
        {"bytes_max": 1 << 31},
        {"bytes_max": 1, "vectors_max": 1025},
        {"bytes_max": 1, "gap_bytes_max": -1},
    ):
        with pytest.raises(ConfigError, match="_max is"):
            merge(none, **limits)
    with pytest.raises(ConfigError, match="bytes_max is 100"):
        split(none, bytes_max=100)
