"""Durations and sizes counted in buckets, so that any number of events fits in little memory. Next: bins.

Decides how exact percentiles and sizes are. Pure: arrays in, figures out; knows no trace.

Theory. Log-linear buckets, as HDR histograms have them: each power of two is cut into 32 equal parts, so that the
middle of a bucket is within 1/64 (1.6 %) of everything in it. The number of a bucket is the exponent and the first
five bits of the fraction of the value as a float, side by side. Counts of the same buckets add up, in any order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtide.trace.figures import Latency, Sizes

PARTS_BITS = 5
NUM_BUCKETS = 64 << PARTS_BITS
DISTINCT_MAX = 4096  # sizes counted exactly; when there are more, the rare ones are gathered in buckets
EXACT_KEPT = 1024  # most frequent sizes that stay exact then
_FRACTION_BITS = 52  # of a float of 64 bits
_EXPONENT_BIAS = 1023

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def bucket_of(values: Ints) -> Ints:
    """Return the bucket of each value; what is below 1 is in bucket 0. Shapes: [n] to [n]."""
    bits: Ints = np.maximum(values, 1).astype(np.float64).view(np.int64)
    return (bits >> (_FRACTION_BITS - PARTS_BITS)) - (_EXPONENT_BIAS << PARTS_BITS)


def bucket_middle(buckets: Ints) -> Floats:
    """Return the value that stands for each bucket. Shapes: [n] to [n]."""
    power = np.exp2(buckets >> PARTS_BITS)
    part = (buckets & ((1 << PARTS_BITS) - 1)) + 0.5
    return power * (1 + part / (1 << PARTS_BITS))


def percentiles(counts: Ints, shares: npt.ArrayLike, *, least: float, most: float) -> Floats:
    """Return the values below which `shares` of what was counted lie, between `least` and `most`.

    Shapes: counts [NUM_BUCKETS], shares [n], result [n].
    """
    running = np.cumsum(counts)
    ranks = np.maximum(1, np.ceil(np.asarray(shares, np.float64) * running[-1]))
    return np.clip(bucket_middle(np.searchsorted(running, ranks)), least, most)


def latency_of(counts: Ints, *, total_ns: float, least_ns: int, most_ns: int) -> Latency:
    """Return the percentiles of durations counted in buckets. `total_ns` is their exact sum."""
    num = int(counts.sum())
    if not num:
        return Latency()
    p50, p90, p99, p999 = percentiles(counts, [0.5, 0.9, 0.99, 0.999], least=least_ns, most=most_ns).tolist()
    return Latency(num, total_ns / num, p50, p90, p99, p999, float(most_ns))


class SizeCounts:
    """How many ops of each size there are, for each cell: a number that says what kind of op it is.

    Exact up to DISTINCT_MAX pairs of cell and size.
    """

    _CELL_BITS = 52  # sizes below 4 PiB and up to 2,048 cells fit one number

    def __init__(self) -> None:
        self.codes: Ints = np.zeros(0, np.int64)  # ascending
        self.counts: Ints = np.zeros(0, np.int64)

    def add(self, cells: Ints, sizes: Ints) -> None:
        """Count ops. Shapes: [n] each."""
        codes = np.sort(cells << self._CELL_BITS | np.clip(sizes, 0, (1 << self._CELL_BITS) - 1))
        edges = np.flatnonzero(np.diff(codes, prepend=-1))
        self._merge(codes[edges], np.diff(edges, append=len(codes)))

    def _merge(self, codes: Ints, counts: Ints) -> None:
        self.codes, self.counts = _summed(np.concatenate([self.codes, codes]), np.concatenate([self.counts, counts]))
        if len(self.codes) <= DISTINCT_MAX:
            return
        rare = np.ones(len(self.codes), bool)
        rare[np.argpartition(self.counts, -EXACT_KEPT)[-EXACT_KEPT:]] = False
        sizes = self.codes & ((1 << self._CELL_BITS) - 1)
        gathered = bucket_middle(bucket_of(sizes[rare])).astype(np.int64)
        self.codes[rare] = (self.codes[rare] >> self._CELL_BITS << self._CELL_BITS) | gathered
        self.codes, self.counts = _summed(self.codes, self.counts)

    def sizes(self, cells: Ints, total_bytes: int) -> Sizes:
        """Return the sizes of all ops in `cells`; `total_bytes` is their exact sum."""
        chosen = np.isin(self.codes >> self._CELL_BITS, cells)
        sizes, counts = _summed(self.codes[chosen] & ((1 << self._CELL_BITS) - 1), self.counts[chosen])
        if not len(sizes):
            return Sizes()
        running, running_bytes = np.cumsum(counts), np.cumsum(sizes * counts)
        mode = int(counts.argmax())
        return Sizes(
            sizes=sizes,
            counts=counts,
            mode_bytes=int(sizes[mode]),
            mode_share=float(counts[mode] / running[-1]),
            median_bytes=int(sizes[np.searchsorted(running, (running[-1] + 1) // 2)]),
            median_by_bytes=int(sizes[np.searchsorted(running_bytes, (running_bytes[-1] + 1) // 2)]),
            mean_bytes=float(total_bytes / running[-1]),
        )


def _summed(codes: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Return the codes once each, ascending, and the sum of the counts of each."""
    order = np.argsort(codes, kind="stable")
    codes, counts = codes[order], counts[order]
    edges = np.flatnonzero(np.diff(codes, prepend=-1))
    return codes[edges], np.add.reduceat(counts, edges) if len(edges) else counts
