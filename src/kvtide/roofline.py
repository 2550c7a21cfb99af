"""How fast a device can go at a size and a depth: the model that `probe` fits and that verdicts compare with.

Pure: numbers in, numbers out. Next: probe, trace.indicators.

Theory. An op of S bytes at depth Q runs into the lowest of four roofs:

    latency     Q * S / (L0 + S / b1)     Q ops in flight, each waits L0 and then moves at the rate b1 of one channel
    IOPS        S * iops_max
    bandwidth   bytes_per_s_max
    host        S * num_threads / host_ns

The knee is where the IOPS roof meets the bandwidth roof: below it a read costs about the same whatever its size. So a
read may go on over a gap of G unwanted bytes to the next wanted S bytes and cost no more than an op of its own, as long
as the bytes it moves are cheaper than the op it saves. With t(S) the time of one op of a full queue, which is S over
the lowest roof, and c = max(1 / (Q * b1), 1 / bytes_per_s_max) the time of one more byte of it:

    c * (S + G) <= t(S)      so      G = t(S) / c - S

In a deep queue this is the knee less S; at depth 1 it is L0 * b1, the bytes a channel moves in the time an op waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ROOFS = ("latency", "iops", "bandwidth", "host")


@dataclass(frozen=True, slots=True)
class Roof:
    """Roofs of one device in one direction. Times in ns; 0 for `host_ns`: the host is not counted."""

    latency_ns: float  # L0: of an op without its bytes
    channel_bytes_per_s: float  # b1: of one op in flight
    iops_max: float
    bytes_per_s_max: float
    host_ns: float = 0.0  # CPU time of one op

    def each(self, size: npt.ArrayLike, depth: npt.ArrayLike, *, num_threads: int = 1) -> npt.NDArray[np.float64]:
        """Return bytes a second under each roof, in the order of ROOFS.

        Shapes: size and depth broadcast to [...]; result [4, ...].
        """
        sizes, depths = np.broadcast_arrays(np.asarray(size, np.float64), np.asarray(depth, np.float64))
        latency = depths * sizes / (self.latency_ns / 1e9 + sizes / self.channel_bytes_per_s)
        host = sizes * num_threads / (self.host_ns / 1e9) if self.host_ns else np.full(sizes.shape, np.inf)
        return np.stack([latency, sizes * self.iops_max, np.full(sizes.shape, self.bytes_per_s_max), host])

    def bytes_per_s(
        self, size: npt.ArrayLike, depth: npt.ArrayLike, *, num_threads: int = 1
    ) -> npt.NDArray[np.float64]:
        """Return bytes a second the device reaches: the lowest roof. Shapes: as `each`, without the first axis."""
        return self.each(size, depth, num_threads=num_threads).min(axis=0)

    def bound(self, size: float, depth: float, *, num_threads: int = 1) -> str:
        """Return the name of the roof that limits ops of `size` bytes at `depth`."""
        return ROOFS[int(self.each(size, depth, num_threads=num_threads).argmin())]

    @property
    def knee_bytes(self) -> float:
        """Size from which on bandwidth limits a deep queue, and no longer the number of ops."""
        return self.bytes_per_s_max / self.iops_max

    def gap_bytes(self, size: float, depth: float, *, num_threads: int = 1) -> float:
        """Return the widest gap that reads of `size` bytes may be joined over and be no slower; see the theory.

        It holds for any number of reads in a row, and as long as the queue stays full with fewer of them.
        """
        byte_s = max(1 / (depth * self.channel_bytes_per_s), 1 / self.bytes_per_s_max)
        op_s = size / float(self.bytes_per_s(size, depth, num_threads=num_threads))
        return max(0.0, op_s / byte_s - size)

    def depth_for(self, share: float, size: float) -> float:
        """Return the depth at which ops of `size` bytes reach `share` of what the deepest queue would."""
        roof = min(size * self.iops_max, self.bytes_per_s_max)
        return max(1.0, share * roof * (self.latency_ns / 1e9 + size / self.channel_bytes_per_s) / size)


@dataclass(frozen=True, slots=True)
class Roofline:
    """Both directions of a device."""

    read: Roof
    write: Roof
