"""Bringing layers to the device, on demand and ahead of it. Decides when a window is good enough. Next: match."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future

from kvtide.cache.ledger import Ledger
from kvtide.cache.mover import DEMAND, PREFETCH, Mover
from kvtide.cache.sequence import Sequence
from kvtide.cache.traffic import FillCounts, Traffic
from kvtide.cache.windows import Window, Windows
from kvtide.errors import IoError
from kvtide.tiers.contract import Cause


class Loader:
    """Fills windows through the mover.

    Threads: the thread that runs the model.
    """

    def __init__(
        self, ledger: Ledger, windows: Windows, traffic: Traffic, mover: Mover, lock: threading.Condition
    ) -> None:
        self._ledger, self._windows, self._traffic, self._mover, self._lock = ledger, windows, traffic, mover, lock

    def load(self, sequences: list[Sequence], layer: int, cause: Cause) -> tuple[Window, FillCounts]:
        """Return the window that holds all sealed KV of `layer`, in use from now on, and where its bytes came from.

        Raises: LostKv if some of it cannot be read.
        """
        num_tokens, counts = [len(sequence.tokens) for sequence in sequences], FillCounts()
        with self._lock:
            for other in self._windows.windows:
                other.in_use = False
            window = self._windows.find(layer)
            job = window.job if window is not None else None
        if job is not None:
            self._mover.hasten(job)
            with contextlib.suppress(IoError):  # a prefetch may fail; what is still wanted is demanded below
                self._collect(window, job, counts)
        with self._lock:
            window = self._windows.find(layer)
            if window is not None and self._is_filled(window, sequences, num_tokens):
                window.in_use = True
                return window, counts
            started = self._start(sequences, layer, num_tokens, cause, DEMAND)
        if started is None:  # every window is being filled for others
            self._mover.drain()
            with self._lock:
                started = self._start(sequences, layer, num_tokens, cause, DEMAND)
        assert started is not None, "a window without a job cannot be taken"
        window, job = started
        self._collect(window, job, counts)
        window.in_use = True
        return window, counts

    def prefetch(self, sequences: list[Sequence], layer: int, *, is_written: bool) -> None:
        """Begin to fill a window with `layer`; with the KV of the step in progress too if `is_written`."""
        if len(self._windows.windows) < 2:
            return
        with self._lock:
            window = self._windows.find(layer)
            num_tokens = [len(s.tokens) + (s.num_pending if is_written else 0) for s in sequences]
            if window is None or (window.job is None and not self._is_filled(window, sequences, num_tokens)):
                self._start(sequences, layer, num_tokens, "prefetch", PREFETCH)

    def _start(
        self, sequences: list[Sequence], layer: int, num_tokens: list[int], cause: Cause, priority: int
    ) -> tuple[Window, Future[object]] | None:
        window = self._windows.find(layer) or self._windows.victim(layer)
        if window is None:
            return None
        if window.layer != layer:
            window.layer, window.uids, window.num_tokens = layer, [], []
        filled, units = window, [sequence.units for sequence in sequences]
        uids = [self._ledger.uid[row_units] for row_units in units]
        window.job = self._mover.submit(
            lambda: self._traffic.fill(filled, layer, units, uids, num_tokens, cause=cause), priority
        )
        return window, window.job

    @staticmethod
    def _collect(window: Window | None, job: Future[object], counts: FillCounts) -> None:
        """Wait for the fill of `window`, and add what it moved to `counts`."""
        assert window is not None, "a job belongs to a window"
        try:
            moved = job.result()
        finally:
            window.job = None
        assert isinstance(moved, FillCounts), "a fill counts bytes"
        counts.dram_bytes += moved.dram_bytes
        counts.file_bytes += moved.file_bytes

    def _is_filled(self, window: Window, sequences: list[Sequence], num_tokens: list[int]) -> bool:
        group = self._ledger.layout.tokens_per_group
        return len(window.num_tokens) >= len(sequences) and all(
            window.common_tokens(row, self._ledger.uid[sequence.units], group) >= num_tokens[row]
            for row, sequence in enumerate(sequences)
        )
