"""The engine for machines without io_uring: preadv and pwritev in threads. Next: sim.

Decides how many threads there are: one an operation in flight, started when first needed. Data is never copied: the
system calls get views over the caller's raw addresses.
"""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import struct
import threading
import time
from collections.abc import Callable
from typing import Self

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError
from kvtide.io.ops import COMPLETION, FSYNC, OP, READ, WRITE, Batch, Completions
from kvtide.io.process import Opener
from kvtide.io.vectors import Vectors, read_vectors, remaining_vectors

DEPTH_MAX = 1024  # beyond this, threads cost more than they hide
VECTORS_MAX = 1024  # IOV_MAX of Linux, limits.h
RETRIES_MAX = 64  # of one operation answered by EAGAIN
PAUSE_S = 0.001

_OP_ROW = struct.Struct("<iIQQIIQ")
_DONE_ROW = struct.Struct("<QQiIqq")
_View = ctypes.Array[ctypes.c_char]


class ThreadEngine:
    """Engine over a pool of threads."""

    def __init__(
        self, *, depth_max: int = 32, fallback_reason: str = "", clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """Make the pool, still empty.

        Raises: ConfigError for a depth that is not from 1 to 1024.
        """
        if not 1 <= depth_max <= DEPTH_MAX:
            raise ConfigError(f"depth_max is {depth_max}; the threads engine takes 1 to {DEPTH_MAX}")
        self.depth_max = depth_max
        self.fallback_reason = fallback_reason
        self._clock_ns = clock_ns
        self._opener = Opener()
        self._work: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._done = bytearray()  # rows of COMPLETION; with the counts below, under `_changed`
        self._in_flight_num = 0
        self._outstanding_num = 0
        self._closed = False

    def submit(self, batch: Batch) -> None:
        """Queue every operation; as many start as there are threads. See `Engine`."""
        self._check_open()
        rows = np.ascontiguousarray(batch, OP).tobytes()
        with self._changed:
            wanted_num = min(self.depth_max, self._outstanding_num + len(batch))
        try:
            while len(self._threads) < wanted_num:
                thread = threading.Thread(target=self._run, name="kvtide-io", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError:  # the system has no more: those there are do all the work
            if not self._threads:
                raise
        with self._changed:
            self._outstanding_num += len(batch)
        for first in range(0, len(rows), OP.itemsize):
            self._work.put(rows[first : first + OP.itemsize])

    def reap(self, wait_num: int = 0) -> Completions:
        """Return what is done; see `Engine`."""
        self._check_open()
        with self._changed:
            wait_bytes = min(wait_num, self._outstanding_num) * COMPLETION.itemsize
            self._changed.wait_for(lambda: len(self._done) >= wait_bytes)
            done, self._done = self._done, bytearray()
            self._outstanding_num -= len(done) // COMPLETION.itemsize
        completions = np.frombuffer(done, COMPLETION) if done else np.empty(0, COMPLETION)
        completions["complete_ns"] = self._clock_ns()
        return completions

    def register(self, arena: npt.NDArray[np.uint8]) -> None:
        """Do nothing: threads gain nothing from pinned memory."""

    def close(self) -> None:
        """Wait for every operation taken and end the threads. Idempotent. A forked child has none of them."""
        if self._closed:
            return
        self._closed = True
        if not self._opener.is_here:
            return
        for _ in self._threads:  # the queue is first in, first out: every operation is done before a thread ends
            self._work.put(b"")
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this engine is closed; make a new one with `open_engine`")
        self._opener.check("this engine")

    def _run(self) -> None:
        """Take operations until the empty row, which ends this thread."""
        while row := self._work.get():
            fd, kind, offset, address, length, num_vectors, tag = _OP_ROW.unpack(row)
            with self._changed:
                self._in_flight_num += 1
                depth = self._in_flight_num
            submit_ns = self._clock_ns()
            try:
                moved, error = _move(fd, kind, offset, address, length, num_vectors)
            except Exception:  # a thread that dies silently would hang `reap`, so its operation fails instead
                moved, error = 0, errno.EIO
            done = _DONE_ROW.pack(tag, moved, error, depth, submit_ns, 0)
            with self._changed:
                self._in_flight_num -= 1
                self._done += done
                self._changed.notify()


def _move(fd: int, kind: int, offset: int, address: int, length: int, num_vectors: int) -> tuple[int, int]:
    """Do one operation to its end; return bytes moved and errno."""
    if kind not in {READ, WRITE}:
        return 0, _sync(fd) if kind == FSYNC else errno.EINVAL
    if num_vectors > VECTORS_MAX:
        return 0, errno.EINVAL
    vectors = read_vectors(address, num_vectors) if num_vectors else np.array([[address, length]], np.uint64)
    call: Callable[[int, list[_View], int], int] = os.preadv if kind == READ else os.pwritev
    moved = tries = 0
    while True:
        try:
            step = call(fd, _views(vectors), offset + moved)
        except OSError as refused:
            number = refused.errno or errno.EIO
            if number == errno.EAGAIN and tries < RETRIES_MAX:
                tries += 1
                time.sleep(PAUSE_S)
                continue
            # A direct read that meets an unaligned end of file stops there; its remainder is refused as unaligned.
            at_end = kind == READ and moved > 0 and number == errno.EINVAL
            return moved, 0 if at_end else number
        except OverflowError:
            return moved, errno.EINVAL
        moved += step
        if step == 0 or moved >= length:
            return moved, 0
        vectors = remaining_vectors(vectors, step)


def _sync(fd: int) -> int:
    try:
        os.fdatasync(fd)
    except OSError as refused:
        return refused.errno or errno.EIO
    return 0


def _views(vectors: Vectors) -> list[_View]:
    """Return writable views over the memory the vectors name; nothing is copied."""
    rows: list[list[int]] = vectors.tolist()
    return [(ctypes.c_char * length).from_address(address) for address, length in rows]
