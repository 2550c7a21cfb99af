"""Puts and gets out of jobs that a store does in its own time, and the page-aligned memory they take. Next: vllm.

Decides how long a caller waits: until the store says that a job ended. A store that never says so hangs its caller,
and the suite sees that.
"""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvtide.check.contract import Setup

PAUSE_S = 2e-4  # between looks at whether a job has ended
Found = list[bool] | list[bytes | None]


def aligned_rows(num: int, size: int) -> npt.NDArray[np.uint8]:
    """Return rows of `size` bytes that start at a page. Shapes: [num, size]."""
    return np.frombuffer(mmap.mmap(-1, max(num * size, 1)), np.uint8)[: num * size].reshape(num, size)


class JobTarget:
    """A target of a store with jobs. Subclasses say how one begins (`_submit`) and which have ended (`_ended`)."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._lock = setup, threading.Lock()
        self._ids = itertools.count()
        self._rows: dict[int, tuple[str, npt.NDArray[np.uint8]]] = {}
        self._done: dict[int, Found] = {}
        self._own: set[int] = set()  # jobs of put and get, which `finish` does not tell

    def put(self, keys: Sequence[bytes], values: Sequence[bytes]) -> list[bool]:
        """Store each value by a job of its own, so that each has an answer of its own."""
        jobs = [self._begin("put", [key], [value], is_own=True) for key, value in zip(keys, values, strict=True)]
        return [bool(self._await(job)[0]) for job in jobs]

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Read what the look-up says is there, all in one job."""
        there = [place for place, is_there in enumerate(self._hold(keys)) if is_there]
        found = list[bytes | None]([None] * len(keys))
        if there:
            held = [keys[place] for place in there]
            try:
                values = self._await(self._begin("get", held, (), is_own=True))
            finally:
                self._release(held)
            for place, value in zip(there, values, strict=True):
                found[place] = value if isinstance(value, bytes) else None
        return found

    def _hold(self, keys: Sequence[bytes]) -> list[bool]:
        """Look keys up, and have those that are there kept until `_release`, where the store can do that."""
        return self.has(keys)

    def _release(self, keys: Sequence[bytes]) -> None:
        """Undo `_hold` of keys that were there."""

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        raise NotImplementedError

    def begin(self, kind: Literal["put", "get"], keys: Sequence[bytes], values: Sequence[bytes]) -> int:
        return self._begin(kind, keys, values, is_own=False)

    def finish(self, timeout_s: float) -> dict[int, Found]:
        until = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._collect()
                ended = {job: self._done.pop(job) for job in set(self._done) - self._own}
            if ended or time.monotonic() >= until:
                return ended
            time.sleep(PAUSE_S)

    def _begin(self, kind: str, keys: Sequence[bytes], values: Sequence[bytes], *, is_own: bool) -> int:
        with self._lock:
            job = next(self._ids)
            rows = self._take(len(keys))
            for row, value in zip(rows, values, strict=False):
                row[:] = np.frombuffer(value, np.uint8)
            self._rows[job] = kind, rows
            if is_own:
                self._own.add(job)
            self._submit(job, kind, keys, rows)
            return job

    def _await(self, job: int) -> Found:
        while True:
            with self._lock:
                self._collect()
                if job in self._done:
                    self._own.discard(job)
                    return self._done.pop(job)
            time.sleep(PAUSE_S)

    def _collect(self) -> None:
        """Note what has ended. A value that a get did not bring is None."""
        for job, good in self._ended().items():
            kind, rows = self._rows.pop(job)
            is_put = kind == "put"
            self._done[job] = (
                list(good) if is_put else [row.tobytes() if one else None for row, one in zip(rows, good, strict=True)]
            )
            self._give(rows)

    def _take(self, num: int) -> npt.NDArray[np.uint8]:
        return aligned_rows(num, self._setup.value_bytes)

    def _give(self, rows: npt.NDArray[np.uint8]) -> None:
        """Take back the memory of a job."""

    def _submit(self, job: int, kind: str, keys: Sequence[bytes], rows: Any) -> None:
        raise NotImplementedError

    def _ended(self) -> dict[int, list[bool]]:
        """Return for each job that ended since it was last asked which of its keys went well."""
        raise NotImplementedError
