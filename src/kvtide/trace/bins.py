"""What happens over time, in bins of equal width: ops in flight and bytes. Next: flow, slices.

Decides how time is cut. Pure; the order in which events are added does not matter.

Theory. The number of ops in flight is the number of starts so far less the number of ends so far. So its integral over
a bin needs two figures of the starts in it and two of the ends: how many there are, and the sum of the time that each
leaves of the bin. When an event lies outside, the bins become twice as wide, two by two, until it lies inside.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NUM_BINS = 2048  # even, so that two make one

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class TimeBins:
    """The axis: bin `i` starts at `start_ns + i * width_ns`. Those who count by it are told when it changes."""

    def __init__(self, start_ns: int = 0, end_ns: int = 0) -> None:
        self.is_known = end_ns > start_ns
        self.start_ns = start_ns
        self.width_ns = max(1, -(-(end_ns - start_ns) // NUM_BINS))
        self._rows: list[BinRows] = []

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.width_ns * NUM_BINS

    def rows(self, num_rows: int) -> BinRows:
        """Return counters of `num_rows` kinds of things over this axis."""
        made = BinRows(self, num_rows)
        self._rows.append(made)
        return made

    def cover(self, first_ns: int, last_ns: int) -> None:
        """Make every bin wide enough for these times to lie inside."""
        if not self.is_known:
            self.is_known, self.start_ns = True, first_ns
            self.width_ns = max(1, -(-(last_ns + 1 - first_ns) // NUM_BINS))
        while last_ns >= self.end_ns:
            self._double(is_before=False)
        while first_ns < self.start_ns:
            self._double(is_before=True)

    def index(self, times_ns: Ints) -> Ints:
        """Return the bin of each time. Shapes: [n] to [n]."""
        return (times_ns - self.start_ns) // self.width_ns

    def _double(self, *, is_before: bool) -> None:
        for rows in self._rows:
            rows.halve(is_before=is_before)
        if is_before:
            self.start_ns -= self.width_ns * NUM_BINS
        self.width_ns *= 2


class BinRows:
    """Sums over time of several kinds of things. Shapes: sums, left [num_rows, NUM_BINS].

    `sums` adds up what each event brings, `left` the same times the part of its bin that follows the event, in ns.
    """

    def __init__(self, axis: TimeBins, num_rows: int) -> None:
        self.axis = axis
        self.sums: Floats = np.zeros((num_rows, NUM_BINS))
        self.left: Floats = np.zeros((num_rows, NUM_BINS))

    def add(self, times_ns: Ints, rows: Ints | int = 0, amounts: Ints | None = None, *, is_timed: bool = False) -> None:
        """Add events, of amount 1 unless told; the axis must cover them. `left` is kept only if `is_timed`."""
        bins = self.axis.index(times_ns)
        places = bins + np.asarray(rows) * NUM_BINS
        self.sums += np.bincount(places, amounts, minlength=self.sums.size).reshape(self.sums.shape)
        if is_timed:
            left = (bins + 1) * self.axis.width_ns - (times_ns - self.axis.start_ns)
            self.left += np.bincount(places, left, minlength=self.left.size).reshape(self.left.shape)

    def halve(self, *, is_before: bool) -> None:
        """Let two bins become one; the room that is won lies before them or after."""
        even, odd = slice(0, None, 2), slice(1, None, 2)
        left = self.left[:, even] + self.sums[:, even] * self.axis.width_ns + self.left[:, odd]
        sums = self.sums[:, even] + self.sums[:, odd]
        room = np.zeros_like(sums)
        self.sums = np.hstack([room, sums] if is_before else [sums, room])
        self.left = np.hstack([room, left] if is_before else [left, room])

    def integral(self, row: int) -> Floats:
        """Return, for each bin, the time that passed in it after the events of `row`, summed over all of them, in ns.

        Shapes: [NUM_BINS].
        """
        before = np.concatenate([[0.0], np.cumsum(self.sums[row])[:-1]])
        return before * self.axis.width_ns + self.left[row]
