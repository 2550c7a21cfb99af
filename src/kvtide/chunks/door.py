"""Which chunks are worth writing. Next: records."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KeyArray
from kvtide.chunks.options import ChunkOptions
from kvtide.evict.admission import make_admission
from kvtide.spec import SlotLayout

Rows = npt.NDArray[np.intp]


class Door:
    """Admission to one store, by the name its options give.

    Raises: ConfigError for a name there is not.
    """

    def __init__(self, options: ChunkOptions, layout: SlotLayout) -> None:
        num_keys = max(1, 2 * options.capacity_bytes // layout.slot_bytes)  # as many again as there is room for
        self._admission = make_admission(options.admission, num_keys=num_keys, bytes_per_day=options.bytes_per_day)
        self._chunk_bytes = options.chunk_bytes

    def let_in(self, keys: KeyArray, rows: Rows) -> tuple[Rows, Rows]:
        """Part `rows` of `keys` in those that are worth writing and those that are not. Shapes: keys [n]; rows [m]."""
        short = np.ascontiguousarray(keys[rows]).view("<u8").reshape(len(rows), 4)[:, 0]  # of 32 bytes
        good = self._admission.admits(short, num_bytes=self._chunk_bytes, now_ns=time.monotonic_ns())
        return rows[good], rows[~good]
