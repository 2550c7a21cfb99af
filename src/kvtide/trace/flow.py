"""What depends on the order of ops: time with any in flight, gaps between them, runs of neighbours. Next: rows, slices.

Decides what is sequential and what is busy. Pure. Each piece of a trace must come in order of time; pieces may overlap
a little, at the price of a little busy time not counted.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtide.trace.buckets import NUM_BUCKETS, bucket_of, percentiles

STREAMS = 32  # an op is sequential if it begins where one of this many before it ended, on its device and direction
OFFSET_BITS = 52  # offsets below 4 PiB and up to 2,048 keys fit one number
_NOWHERE = -1

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Flow:
    """Ops of one slice, as they pass."""

    def __init__(self) -> None:
        self.busy_ns = 0
        self._busy_until_ns: int | None = None
        self._last_ns: int | None = None
        self._gaps: Ints = np.zeros(NUM_BUCKETS, np.int64)

    def add_issues(self, times_ns: Ints) -> None:
        """Note when ops were issued. Shapes: [n], ascending."""
        if not len(times_ns):
            return
        first = times_ns[0] if self._last_ns is None else self._last_ns
        gaps = np.diff(times_ns, prepend=first)
        self._gaps += np.bincount(bucket_of(gaps[self._last_ns is None :]), minlength=NUM_BUCKETS)
        self._last_ns = int(times_ns[-1])

    def add_spans(self, start_ns: Ints, end_ns: Ints) -> None:
        """Note when ops were in flight. Shapes: [n] each, ascending by start."""
        if not len(start_ns):
            return
        carried = start_ns[0] if self._busy_until_ns is None else self._busy_until_ns
        until = np.maximum.accumulate(np.concatenate([[carried], end_ns]))
        self.busy_ns += int(np.maximum(0, end_ns - np.maximum(start_ns, until[:-1])).sum())
        self._busy_until_ns = int(until[-1])

    @property
    def gap_ns(self) -> float | None:
        """Median time from one issue to the next; None with fewer than two."""
        if not self._gaps.any():
            return None
        return float(percentiles(self._gaps, [0.5], least=0, most=np.inf)[0])


class Runs:
    """Finds ops that go on where one before them ended. Keys tell devices and directions apart."""

    def __init__(self) -> None:
        self._keys: Ints = np.zeros(0, np.int64)  # of the last STREAMS ops of each key, oldest first
        self._ends: Ints = np.zeros(0, np.int64)

    def add(self, keys: Ints, offsets: Ints, lengths: Ints) -> Bools:
        """Return which ops are sequential. Shapes: [n] each, in order of issue; result [n]."""
        num_old = len(self._keys)
        all_keys = np.concatenate([self._keys, keys])
        order = np.argsort(all_keys.astype(np.uint16), kind="stable")  # 16 bits: sorted in linear time
        starts = np.concatenate([np.full(num_old, _NOWHERE), keys << OFFSET_BITS | offsets])[order]
        ends = np.concatenate([self._ends, keys << OFFSET_BITS | (offsets + lengths)])[order]
        found = np.zeros(len(order), bool)
        for lag in range(1, min(STREAMS, len(order) - 1) + 1):
            found[lag:] |= starts[lag:] == ends[:-lag]
        sorted_keys = all_keys[order]
        group_end = np.searchsorted(sorted_keys, sorted_keys, side="right")
        is_kept = group_end - np.arange(len(order)) <= STREAMS
        self._keys, self._ends = sorted_keys[is_kept], ends[is_kept]
        result = np.empty(len(order), bool)
        result[order] = found
        return result[num_old:]
