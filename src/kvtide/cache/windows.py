"""The device tier: contiguous copies of one layer's KV, which attention reads as plain tensors. Next: traffic.

Theory. Attention kernels want K and V of one layer in one piece. So the device budget is cut into equal *windows*,
each `[rows, K of capacity tokens][rows, V of capacity tokens]` for one layer of the sequences that decode together.
Decoding walks the layers in a circle, and least-recently-used keeps nothing of a circle that does not fit. The order is
known, so the victim is the window whose layer comes last from now on: what Belady's rule would choose. Windows never
hold the only copy (new KV goes to DRAM at once), so dropping one costs nothing.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError
from kvtide.spec import SlotLayout
from kvtide.tiers.memory import Arena
from kvtide.units import format_bytes


class DeviceArena(Protocol):
    """Memory windows are cut from. On the CPU it is an `Arena`; `tiers.cuda` has the other."""

    num_bytes: int

    def write(self, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """Copy host bytes to `offset`, in the order of `data`'s indices, whatever its strides."""

    def populate(self, start: int, num_bytes: int) -> None:
        """Have a part committed, where memory is committed as it is touched."""


class CpuArena(Arena):
    """Device memory on a machine whose device is the CPU."""

    def write(self, offset: int, data: npt.NDArray[np.uint8]) -> None:
        self.buffer[offset : offset + data.size].reshape(data.shape)[...] = data


@dataclass(slots=True)
class Window:
    """One window: where it lies and what it holds.

    Shapes: units and uids are one array a row, `num_tokens` one number a row.
    """

    offset: int
    layer: int = -1
    uids: list[npt.NDArray[np.int64]] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    job: Future[object] | None = None
    in_use: bool = False

    def common_tokens(self, row: int, uids: npt.NDArray[np.int64], tokens_per_group: int) -> int:
        """Return how many leading tokens of the sequence with `uids` row `row` already holds."""
        if row >= len(self.uids):
            return 0
        num = min(len(uids), len(self.uids[row]))
        differs = np.flatnonzero(uids[:num] != self.uids[row][:num])
        same = int(differs[0]) if len(differs) else num
        return min(same * tokens_per_group, self.num_tokens[row])


class Windows:
    """All windows of the device budget.

    Threads: callers hold the cache's lock; bytes of one window are written by one thread at a time.
    """

    def __init__(self, layout: SlotLayout, arena: DeviceArena) -> None:
        self.arena, self._layout = arena, layout
        self._k_bytes = max(layer.k_bytes for layer in layout.shape.layers)
        self._v_bytes = max(layer.v_bytes for layer in layout.shape.layers)
        self.rows = self.capacity_tokens = 0
        self.windows: list[Window] = []

    def window_bytes(self, num_tokens: int, rows: int) -> int:
        """Return the bytes of a window for `rows` sequences of `num_tokens`."""
        return rows * num_tokens * (self._k_bytes + self._v_bytes)

    def resize(self, num_tokens: int, rows: int) -> None:
        """Make windows hold `num_tokens` for `rows` sequences; where they do not, new ones are cut, empty.

        Raises: ConfigError if not even one window fits the budget.
        """
        group = self._layout.tokens_per_group
        needed = -(-num_tokens // group) * group
        if rows == self.rows and needed <= self.capacity_tokens:
            return
        size = self.window_bytes(needed, rows)
        if size > self.arena.num_bytes:
            raise ConfigError(
                f"device memory of {format_bytes(self.arena.num_bytes)} cannot hold one layer of {rows} x {num_tokens} "
                f"tokens: {format_bytes(size)} are needed; type --device-memory {-(-size // 2**20)}MiB or more"
            )
        self.rows, self.capacity_tokens = rows, needed
        num = min(self.arena.num_bytes // size, self._layout.num_layers)
        self.windows = [Window(index * size) for index in range(num)]

    def find(self, layer: int) -> Window | None:
        """Return the window that holds `layer`."""
        return next((window for window in self.windows if window.layer == layer), None)

    def victim(self, layer: int) -> Window | None:
        """Return the window to fill with `layer`: the one whose own layer is used last from here on."""
        num_layers = self._layout.num_layers
        idle = [window for window in self.windows if not window.in_use and (window.job is None or window.job.done())]
        return max(idle, key=lambda w: num_layers if w.layer < 0 else (w.layer - layer) % num_layers, default=None)

    def k_offset(self, window: Window, row: int, token: int) -> int:
        """Return where K of `token` in `row` lies in the arena."""
        k_bytes = self._layout.shape.layers[window.layer].k_bytes
        return window.offset + row * self.capacity_tokens * self._k_bytes + token * k_bytes

    def v_offset(self, window: Window, row: int, token: int) -> int:
        """Return where V of `token` in `row` lies in the arena."""
        v_bytes = self._layout.shape.layers[window.layer].v_bytes
        v_start = window.offset + self.rows * self.capacity_tokens * self._k_bytes
        return v_start + row * self.capacity_tokens * self._v_bytes + token * v_bytes

    def used_bytes(self) -> int:
        """Return the bytes of KV the windows hold now."""
        layers = self._layout.shape.layers
        return sum(sum(w.num_tokens) * layers[w.layer].token_bytes for w in self.windows if w.layer >= 0)
