"""An engine that moves no bytes: when operations would end, and nothing else. Next: planner.virtual.

The same contract and the same device model as `sim`, without files, faults or buffers, so that terabytes of KV can be
planned in little memory. Addresses are never looked at.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import cast

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError
from kvtide.io.drive import DeviceQueue
from kvtide.io.ops import COMPLETION, OP, Batch, Completions
from kvtide.io.sim import VirtualClock


class HollowEngine:
    """Engine over a modelled device. The host spends `host_ns` on each operation, one after the other.

    Raises: ConfigError if `depth_max` is below 1.
    """

    def __init__(self, device: DeviceQueue, clock: VirtualClock, *, depth_max: int, host_ns: int = 0) -> None:
        if depth_max < 1:
            raise ConfigError(f"depth_max is {depth_max}; it must be at least 1")
        self.depth_max, self.fallback_reason = depth_max, ""
        self._device, self._clock, self._host_ns = device, clock, host_ns
        self._queue: deque[tuple[int, ...]] = deque()
        self._running: list[tuple[int, int, int, int, int]] = []  # complete_ns, tag, length, depth, submit_ns: a heap

    def submit(self, batch: Batch) -> None:
        """Start what fits; see `Engine`."""
        self._queue.extend(cast("list[tuple[int, ...]]", np.asarray(batch, OP).tolist()))
        self._refill()

    def reap(self, wait_num: int = 0) -> Completions:
        """Return what is done, moving the clock to the completion waited for."""
        entered_ns = self._clock.now_ns()
        wait_num = min(wait_num, len(self._running) + len(self._queue))
        rows: list[tuple[int, ...]] = []
        while self._running and (len(rows) < wait_num or self._running[0][0] <= entered_ns):
            complete_ns, tag, length, depth, submit_ns = heapq.heappop(self._running)
            self._clock.advance_to(complete_ns)
            rows.append((tag, length, 0, depth, submit_ns, complete_ns))
            self._refill()
        return np.array(rows, COMPLETION)

    def register(self, arena: npt.NDArray[np.uint8]) -> None:
        """Do nothing: there is no one to pin for."""

    def close(self) -> None:
        """Let what is outstanding complete. Idempotent."""
        self.reap(len(self._running) + len(self._queue))

    def _refill(self) -> None:
        while self._queue and len(self._running) < self.depth_max:
            _, kind, _, _, length, _, tag = self._queue.popleft()
            self._clock.advance_to(self._clock.now_ns() + self._host_ns)
            now_ns = self._clock.now_ns()
            complete_ns = self._device.complete_ns(kind, length, now_ns)
            heapq.heappush(self._running, (complete_ns, tag, length, len(self._running) + 1, now_ns))
