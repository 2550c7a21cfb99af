"""From measured cells to four roofs a direction, and how well they fit. Pure. Next: file.

Decides which cells speak for which roof:

    latency     the shallowest queue: mean latency against size is a line, L0 + S / b1
    host        small ops in a deep queue: CPU time of one op
    IOPS, bandwidth   the pair of values, out of those that were measured, that explains all cells best

All fits count relative errors, so that 4 KiB and 4 MiB weigh the same, and sum them without squares, so that one bad
cell does not move a roof. A cell above its roof counts BELOW_WEIGHT times: real drives come up to a roof slowly, and
most cells near the bend lie under it. A cell is compared at the depth it really had (Little's law), not at the depth
asked for. For the same reason the depth a size needs is read from the cells, and not from the roofs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError
from kvtide.probe.measure import Cell
from kvtide.roofline import Roof

SHARE = 0.9  # of a roof: what counts as reaching it
DEEP = 32  # a queue from here on is deep
HOST_BOUND = 0.9  # of one core: from here on the host limits small ops, and the drive may be able to do more
REWEIGHTS = 20  # of the latency line; it stands still after a few
BELOW_WEIGHT = 4  # of a cell above its roof: about one cell in five may be
ADVISED_BYTES = (4 << 10, 64 << 10, 128 << 10, 1 << 20)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Advice:
    """The depth that ops of one size need for SHARE of the most the device gives them."""

    size_bytes: int
    depth: float


@dataclass(frozen=True, slots=True)
class RoofFit:
    """Roofs of one direction, and how far they are from the cells."""

    roof: Roof
    num_cells: int
    error_median: float  # of |ln(predicted / measured)|: 0.1 is about 10 %
    error_max: float
    knee_bytes: float  # where the IOPS roof meets the bandwidth roof
    is_host_bound: bool  # the IOPS roof is what one thread could do, the drive's own may be higher
    depths: tuple[Advice, ...]


def fit(cells: Sequence[Cell]) -> RoofFit:
    """Return the roofs of cells of one direction. Random cells are used where there are any.

    Raises: ConfigError for no cells.
    """
    cells = [cell for cell in cells if cell.is_random] or list(cells)
    if not cells:
        raise ConfigError("no cell was measured; give the probe more time with --seconds")
    sizes, depths = _column(cells, "size_bytes"), np.maximum(_column(cells, "depth_mean"), 1e-3)
    rates = _column(cells, "bytes_per_s")
    latency_ns, channel = _latency_line(cells)
    host_ns = _host_ns(cells)
    iops, bandwidth = _flat_roofs(Roof(latency_ns, channel, 1.0, 1.0, host_ns), sizes, depths, rates)
    roof = Roof(latency_ns, channel, iops, bandwidth, host_ns)
    errors = np.abs(np.log(roof.bytes_per_s(sizes, depths) / rates))
    return RoofFit(
        roof,
        num_cells=len(cells),
        error_median=float(np.median(errors)),
        error_max=float(errors.max()),
        knee_bytes=roof.knee_bytes,
        is_host_bound=bool(host_ns * iops / 1e9 >= HOST_BOUND),
        depths=_advice(cells),
    )


def _advice(cells: Sequence[Cell]) -> tuple[Advice, ...]:
    """Return the depths at which the cells reach SHARE of the best of their size; both axes logarithmic between them.

    For a size between two measured ones, the depth lies between theirs. Sizes beyond the measured ones are left out.
    """
    sizes = sorted({cell.size_bytes for cell in cells})
    needed = []
    for size in sizes:
        mine = sorted((cell.depth, cell.bytes_per_s) for cell in cells if cell.size_bytes == size)
        depths, rates = np.log([depth for depth, _ in mine]), np.log([rate for _, rate in mine])
        goal = rates.max() + np.log(SHARE)
        after = int((rates >= goal).argmax())
        low = max(0, after - 1)
        needed.append(float(np.interp(goal, rates[low : after + 1], depths[low : after + 1])))
    advised = [size for size in ADVISED_BYTES if sizes[0] <= size <= sizes[-1]]
    found = np.exp(np.interp(np.log(advised), np.log(sizes), needed))
    return tuple(Advice(size, float(depth)) for size, depth in zip(advised, found, strict=True))


def _latency_line(cells: Sequence[Cell]) -> tuple[float, float]:
    """Return L0 in ns and b1 in bytes a second, both positive, from the cells of the shallowest queue.

    Least absolute relative errors, by reweighting least squares.
    """
    shallowest = min(cell.depth for cell in cells)
    chosen = [cell for cell in cells if cell.depth == shallowest]
    sizes, times = _column(chosen, "size_bytes"), _column(chosen, "latency_ns_mean")
    terms = np.stack([np.ones_like(sizes), sizes], axis=1) / times[:, None]
    weights: Floats = np.ones(len(sizes))
    line: Floats = np.zeros(2)
    for _ in range(REWEIGHTS):
        scale = np.sqrt(weights)
        line = np.asarray(np.linalg.lstsq(terms * scale[:, None], scale, rcond=None)[0], np.float64)
        weights = 1 / np.maximum(np.abs(terms @ line - 1), 1e-3)
    fastest = float((sizes / times).max()) * 1e9
    if len(set(sizes.tolist())) < 2 or line[1] <= 0:  # no slope: the rate of a channel does not show
        return float(np.median(times)), 100 * fastest
    # A line through the large ops alone may start at or below zero; no op takes less than a tenth of the shortest.
    return max(float(line[0]), float(times.min()) / 10), 1e9 / float(line[1])


def _host_ns(cells: Sequence[Cell]) -> float:
    """Return the CPU time of a small op in the deepest queues; at most what the fastest cell leaves for one."""
    smallest = min(cell.size_bytes for cell in cells)
    small = [cell for cell in cells if cell.size_bytes == smallest]
    deep = [cell for cell in small if cell.depth >= DEEP] or small
    fastest = max(cell.ops_per_s for cell in small)
    return min(float(np.median([cell.host_ns for cell in deep])), 1e9 / fastest)


def _flat_roofs(roof: Roof, sizes: Floats, depths: Floats, rates: Floats) -> tuple[float, float]:
    """Return the IOPS roof and the bandwidth roof, out of the measured values, with the least sum of errors.

    Of pairs that are equally good the lowest wins: a roof that no cell has touched is only known to be no lower.
    Shapes: sizes, depths, rates [cells]; errors [iops, bandwidth].
    """
    latency, _, _, host = roof.each(sizes, depths)
    other = np.minimum(latency, host)
    all_iops, all_rates = np.unique(rates / sizes), np.unique(rates)
    # A roof below the best cell by more than noise would be no roof: the upper half of the values is enough.
    all_iops, all_rates = all_iops[all_iops >= all_iops[-1] / 2], all_rates[all_rates >= all_rates[-1] / 2]
    by_iops = np.minimum(other, sizes * all_iops[:, None])
    predicted = np.minimum(by_iops[:, None, :], all_rates[None, :, None])
    over = np.log(predicted / rates)
    errors = np.where(over < 0, -BELOW_WEIGHT * over, over).sum(axis=2)
    best = np.argwhere(errors <= errors.min() * (1 + 1e-9) + 1e-12)[0]
    return float(all_iops[best[0]]), float(all_rates[best[1]])


def measured_knee_bytes(cells: Sequence[Cell], fitted: RoofFit) -> int:
    """Return the smallest power of two, from 4 KiB on, at which deep random reads reach SHARE of the bandwidth roof.

    Between measured sizes the rate is interpolated, both axes logarithmic. Where no measured size gets there, the
    fitted roofs decide.
    """
    best: dict[int, float] = {}
    for cell in cells:
        if cell.is_random and not cell.is_write and cell.depth >= DEEP:
            best[cell.size_bytes] = max(best.get(cell.size_bytes, 0.0), cell.bytes_per_s)
    goal = SHARE * fitted.roof.bytes_per_s_max
    if best:
        sizes = np.array(sorted(best), np.float64)
        rates = np.log([best[int(size)] for size in sizes])
        powers = 2 ** np.arange(int(np.ceil(np.log2(sizes[0]))), int(np.log2(sizes[-1])) + 1, dtype=np.int64)
        reached = np.interp(np.log(powers), np.log(sizes), rates) >= np.log(goal)
        if reached.any():
            return int(powers[int(reached.argmax())])
    return 1 << max(12, int(np.ceil(np.log2(SHARE * fitted.knee_bytes))))


def _column(cells: Sequence[Cell], name: str) -> Floats:
    return np.array([getattr(cell, name) for cell in cells], np.float64)
