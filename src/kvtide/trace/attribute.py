"""Joining block commands to the ops they carry: so a command names the layer and the cause. Next: indicators.

Pure: arrays in, arrays out.

Theory. An op is an extent of a file; FIEMAP says where on the device that lies, so an op is one or more pieces of the
device for the time it is in flight. A command belongs to the op whose piece it begins in, at a time when that op was in
flight. Slots are used again and again, so pieces are looked up by page of the device, and among the pieces of one page
by time: the one submitted last before the command was queued.

    device pages   |..|A |A |A |B |B |..        entries (page, submitted) in order
    command              ^ its first page: the last entry of that page that is not later
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtide.io.ops import PAGE_BYTES
from kvtide.trace.events import UNKNOWN, UNKNOWN_CAUSE

if TYPE_CHECKING:
    import polars as pl

    from kvtide.trace.file import TracedFile

SLACK_NS = (
    2_000_000  # a completion is reaped, and so noted, some time after the device was done; and clocks are read late
)
PAGES_MAX = 1 << 25  # entries of the index: 0.8 GB
Ints = npt.NDArray[np.int64]


class OpIndex:
    """Finds ops by place on a device and time.

    `ops` are all op rows of the trace, in the order of its file. Ops to files without extents are left out, and so are
    the newest where there are more than `PAGES_MAX` pages.
    """

    def __init__(self, ops: pl.DataFrame, files: list[TracedFile]) -> None:
        self._ops = ops
        self._devices = np.unique(np.array([file.device for file in files], np.int64))
        pieces = [_pieces(ops, file) for file in files if file.extents]
        op, start, length, device = (
            (np.concatenate(column) for column in zip(*pieces, strict=True)) if pieces else (np.zeros(0, np.int64),) * 4
        )
        num_pages = (start + length - 1) // PAGE_BYTES - start // PAGE_BYTES + 1
        kept = np.cumsum(num_pages) <= PAGES_MAX
        self.num_left_out = int((~kept).sum())
        op, start, num_pages, device = op[kept], start[kept], num_pages[kept], device[kept]
        within = np.arange(int(num_pages.sum())) - np.repeat(np.cumsum(num_pages) - num_pages, num_pages)
        page = np.repeat(self._place(device, start), num_pages) + within
        entry = np.repeat(op, num_pages)
        submitted = ops["time_ns"].to_numpy()[entry]
        order = np.lexsort((submitted, page))
        self._page, self._submitted, self._entry = page[order], submitted[order], entry[order]
        self._completed = ops["complete_ns"].to_numpy()

    def find(self, device: Ints, offset: Ints, time_ns: Ints) -> Ints:
        """Return the op of each command, UNKNOWN where there is none. Shapes: all [n]."""
        place = self._place(device, offset)
        low = np.searchsorted(self._page, place, side="left")
        high = np.searchsorted(self._page, place, side="right")
        first = low.copy()
        limit = time_ns + SLACK_NS
        while bool((low < high).any()):  # all commands halve their range together
            middle = (low + high) // 2
            is_earlier = (low < high) & (self._submitted[np.minimum(middle, len(self._page) - 1)] <= limit)
            high = np.where((low < high) & ~is_earlier, middle, high)
            low = np.where(is_earlier, middle + 1, low)
        found = low - 1
        has_any = found >= first
        op = np.where(has_any, self._entry[np.maximum(found, 0)] if len(self._entry) else UNKNOWN, UNKNOWN)
        is_alive = (
            has_any & (self._completed[np.maximum(op, 0)] + SLACK_NS >= time_ns) if len(self._completed) else has_any
        )
        return np.where(is_alive, op, UNKNOWN)

    def attribute(self, block: pl.DataFrame) -> pl.DataFrame:
        """Return block rows with `op`, `cause` and `layer` of the op each one carries."""
        from kvtide.tables import pl

        queued, issued = block["queue_ns"].to_numpy(), block["time_ns"].to_numpy()
        time_ns = np.where(queued == UNKNOWN, issued, queued)
        op = self.find(block["device"].to_numpy(), block["offset"].to_numpy(), time_ns)
        is_known = pl.Series(op != UNKNOWN)
        rows = self._ops.select("cause", "layer")[np.maximum(op, 0)] if len(self._ops) else None
        if rows is None:
            return block
        cause = rows["cause"].cast(pl.String)
        return block.with_columns(
            pl.Series("op", op),
            pl.select(pl.when(is_known).then(cause).otherwise(pl.lit(UNKNOWN_CAUSE))).to_series().alias("cause"),
            pl.select(pl.when(is_known).then(rows["layer"]).otherwise(UNKNOWN)).to_series().alias("layer"),
        )

    def _place(self, device: Ints, offset: Ints) -> Ints:
        """Return one number for a page of a device, UNKNOWN for devices without files of ours."""
        index = np.searchsorted(self._devices, device)
        is_known = np.isin(device, self._devices)
        return np.where(is_known, index << 48 | offset // PAGE_BYTES, UNKNOWN)


def _pieces(ops: pl.DataFrame, file: TracedFile) -> tuple[Ints, Ints, Ints, Ints]:
    """Return op, start, length and device of each piece that an op to `file` has on its device."""
    fd, offset, length = (ops[name].to_numpy() for name in ("fd", "offset", "length"))
    chosen = np.flatnonzero((fd == file.fd) & (length > 0))
    begin, end = offset[chosen], offset[chosen] + length[chosen]
    extents = sorted(file.extents, key=lambda extent: extent.logical)
    logical, physical, size = (
        np.array([getattr(extent, name) for extent in extents], np.int64) for name in ("logical", "physical", "length")
    )
    first = np.searchsorted(logical + size, begin, side="right")  # the first extent that ends after the op's start
    last = np.searchsorted(logical, end, side="left")  # one behind the last that begins before its end
    num = np.maximum(last - first, 0)
    which = np.repeat(np.arange(len(chosen)), num)
    extent = np.repeat(first, num) + np.arange(int(num.sum())) - np.repeat(np.cumsum(num) - num, num)
    lower = np.maximum(begin[which], logical[extent])
    upper = np.minimum(end[which], logical[extent] + size[extent])
    return (
        chosen[which],
        physical[extent] + lower - logical[extent],
        upper - lower,
        np.full(len(which), file.device, np.int64),
    )
