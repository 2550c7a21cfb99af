"""How many reads a query needs, and how many of them must wait for one another. Next: traced.

Pure: arrays in, arrays out. The one place that says what a dependent round is.

Theory. The dependent rounds of a query are the longest chain of its reads in which each read was issued when the one
before was complete. Reads that overlap cannot depend on each other, so a chain bounds from below how many times the
device's latency is paid. (It bounds dependency from above: a program may also wait without need.)

    read 1   |-----|                     A beam of three reads, twice: two rounds, six reads.
    read 2   |-------|
    read 3   |----|
    read 4            |-----|            One after another: as many rounds as reads.
    read 5            |----|
    read 6            |------|

The longest chain is found by always taking the read that completes first among those issued since.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def queries_of(issued_ns: Ints, started_ns: Ints, ended_ns: Ints) -> Ints:
    """Return for each read the query in whose time it was issued, -1 for none.

    Shapes: issued_ns and the result [r]; started_ns and ended_ns [q], in order, not overlapping.
    """
    query = np.searchsorted(started_ns, issued_ns, side="right") - 1
    if not len(started_ns):
        return np.full(len(issued_ns), -1, np.int64)
    is_inside = (query >= 0) & (issued_ns <= ended_ns[np.maximum(query, 0)])
    return np.where(is_inside, query, -1).astype(np.int64)


def rounds_of(query: Ints, issued_ns: Ints, complete_ns: Ints, *, num_queries: int) -> Ints:
    """Return the dependent rounds of each query.

    Reads of query -1 and reads without a known end count for nothing.
    Shapes: query, issued_ns, complete_ns [r]; the result [num_queries].
    """
    is_known = (query >= 0) & (complete_ns >= issued_ns)
    order = np.lexsort((issued_ns[is_known], query[is_known]))
    query, issued_ns, complete_ns = (each[is_known][order] for each in (query, issued_ns, complete_ns))
    complete_ns = np.maximum(complete_ns, issued_ns + 1)  # no read follows itself
    begin = np.searchsorted(query, np.arange(num_queries), side="left")
    end = np.searchsorted(query, np.arange(num_queries), side="right")
    earliest = _earliest_end(query, complete_ns)
    rounds = np.zeros(num_queries, np.int64)
    at = begin.copy()
    while bool((is_left := at < end).any()):  # all queries take one step of their chain together
        rounds += is_left
        until = np.where(is_left, earliest[np.minimum(at, len(earliest) - 1)], 0)
        at = np.where(is_left, _first_after(query, issued_ns, until, at, end), at)
    return rounds


def _earliest_end(query: Ints, complete_ns: Ints) -> Ints:
    """Return the earliest end among a read and those of its query that were issued later. Shapes: [r]."""
    earliest = complete_ns.copy()
    if len(earliest):
        # Later queries get larger numbers, so the minimum from the right never leaves a query.
        base = int(complete_ns.min())
        span = int(complete_ns.max()) - base + 1
        if span * (int(query.max()) + 1) < 1 << 62:
            keyed = query * span + (complete_ns - base)
            return np.minimum.accumulate(keyed[::-1])[::-1] - query * span + base
        for start, stop in zip(*_runs(query), strict=True):
            earliest[start:stop] = np.minimum.accumulate(earliest[start:stop][::-1])[::-1]
    return earliest


def _runs(query: Ints) -> tuple[list[int], list[int]]:
    borders = np.flatnonzero(np.diff(query)) + 1
    return [0, *borders.tolist()], [*borders.tolist(), len(query)]


def _first_after(query: Ints, issued_ns: Ints, until: Ints, low: Ints, high: Ints) -> Ints:
    """Return for each query its first read issued at `until` or later; `high` where there is none. Shapes: [q]."""
    low, high = low.copy(), high.copy()
    while bool((is_open := low < high).any()):
        middle = (low + high) // 2
        is_earlier = is_open & (issued_ns[np.minimum(middle, len(query) - 1)] < until)
        high = np.where(is_open & ~is_earlier, middle, high)
        low = np.where(is_earlier, middle + 1, low)
    return low
