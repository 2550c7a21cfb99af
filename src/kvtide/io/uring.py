"""The io_uring engine: batches in, completions out, no Python loop an operation. Next: threads.

Decides which operations are in the kernel and what an odd result means; `ring` knows how the kernel is reached.

Theory. An operation in flight owns a slot; submission entry `slot` and row `slot` of `_done` are its whole state:

    free -> started (entry written, in the ring) -> taken by the kernel -> result
      ^                     ^                                                | as wanted, end of file, error
      |                     '--- shifted remainder <--- partial, EAGAIN -----'
      '----------------------------------------------------------------------' row of `_done` goes to the caller

The completion queue has twice the entries of the submission queue and at most `depth_max` operations are in flight,
so it cannot overflow.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Self

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError, IoError
from kvtide.io.entries import FSYNC_DATASYNC, Continued, Words, encode, shift
from kvtide.io.ops import COMPLETION, FSYNC, OP, Batch, Completions, address_of
from kvtide.io.process import Opener
from kvtide.io.ring import ENTRIES_MAX, SQE_BYTES, Ring
from kvtide.io.vectors import Regions

FEW_NUM = 24  # up to here a loop with struct beats numpy's fixed cost: in our runs they meet at about 32
RETRIES_MAX = 64  # of one operation the kernel keeps answering EAGAIN to, for instance on a non-blocking pipe
REFILL_PARTS = 8  # with operations queued, wait for an eighth of the depth: fewer calls, depth stays over 7/8
UNHOPED = -(1 << 62)  # no result equals it
PAUSE_S = 0.001  # before asking again a kernel that has no memory and nothing of ours in flight
TABLE_ENTRIES = 64  # registered buffers, each at most 1 GiB (io_uring_register(2))
FIXED_BYTES_MAX = 1 << 30

_OP_ROW = struct.Struct("<iIQQIIQ")
_SQE_ROW = struct.Struct("<BBHiQQIIQQ")
_DONE_ROW = struct.Struct("<QQiIqq")
_CQE_ROW = struct.Struct("<qi")
_LONG = struct.Struct("<q")


class UringEngine:
    """Engine over one io_uring."""

    def __init__(
        self, *, depth_max: int = 128, fixed_buffers: bool = False, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """Make the ring; `fixed_buffers` lets `register` pin memory, which saves the kernel a page walk an operation.

        Off by default because it did not pay where we measured (2 EPYC cores, virtio drive, Linux 6.18, medians of 5):
        128 KiB at depth 32 gave 10.3k IOPS against 10.4k without, 4 KiB at depth 128 61k against 59k, at no less CPU.

        Raises: ConfigError for a depth no ring has; UnsupportedError where the kernel refuses.
        """
        if not 1 <= depth_max <= ENTRIES_MAX:
            raise ConfigError(f"depth_max is {depth_max}; io_uring takes 1 to {ENTRIES_MAX}")
        self.depth_max = depth_max
        self.fallback_reason = ""
        self._clock_ns = clock_ns
        self._opener = Opener()
        self._ring = Ring(depth_max)
        self._free = np.arange(depth_max - 1, -1, -1)  # a stack of slots; slot 0 is taken first
        self._free_num = depth_max
        self._done = np.zeros(depth_max, COMPLETION)
        self._done_words = self._done.view(np.uint64).reshape(-1, 5)
        self._done_raw = self._done.view(np.uint8).data
        self._free_raw = self._free.data
        self._want = np.zeros(depth_max, np.int64)  # bytes an operation in flight still has to move
        self._want_raw = self._want.data
        self._odd: dict[int, Continued] = {}  # operations in flight again after a result that was not hoped for
        self._queue: deque[Words] = deque()  # operations beyond the depth
        self._queue_first = 0  # row of the first batch in the queue that has not started
        self._queued_num = 0
        self._unsubmitted_num = 0  # entries in the ring which the kernel has not taken
        self._few_num = 0 if fixed_buffers else FEW_NUM  # the short way knows no fixed buffers
        self._fixed_buffers = fixed_buffers
        self._regions = Regions()

    def submit(self, batch: Batch) -> None:
        """Start what fits; see `Engine`."""
        self._check_open()
        if batch.dtype is not OP or not batch.flags.c_contiguous:
            batch = np.ascontiguousarray(batch, OP)
        num = len(batch)
        if num == 0:
            return
        if self._queued_num or num > self._free_num:
            self._queue.append(batch.view(np.uint64).reshape(num, 5).copy())
            self._queued_num += num
            self._refill()
        elif num <= self._few_num:
            self._start_few(batch, 0, num)
        else:
            self._start(batch.view(np.uint64).reshape(num, 5))
        self._flush()

    def reap(self, wait_num: int = 0) -> Completions:
        """Return what is done; see `Engine`. Operations that waited for a slot start here."""
        self._check_open()
        part = self._take()
        if part is None and self._free_num < self.depth_max:
            self._wait(wait_num)
            part = self._take()
        if part is not None and len(part) >= wait_num:
            if self._queued_num:
                self._refill()
            if self._unsubmitted_num:
                self._flush()
            return part
        return self._reap_on(part, wait_num)

    def _reap_on(self, part: Completions | None, wait_num: int) -> Completions:
        """Go on reaping after `part`, the first harvest, until `wait_num` are there; keep the depth full meanwhile."""
        parts = [] if part is None else [part]
        have = 0 if part is None else len(part)
        wait_num = min(wait_num, have + self._outstanding())
        self._refill()
        while have < wait_num:
            self._wait(wait_num - have)
            part = self._take()
            if part is not None:
                parts.append(part)
                have += len(part)
                self._refill()
        self._flush()
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, COMPLETION)

    def register(self, arena: npt.NDArray[np.uint8]) -> None:
        """Pin `arena` in pieces of at most 1 GiB, if fixed buffers are on and kernel and RLIMIT_MEMLOCK allow it."""
        self._check_open()
        start, end = address_of(arena), address_of(arena) + arena.nbytes
        if not self._fixed_buffers or (not self._regions and self._ring.register_table(TABLE_ENTRIES) < 0):
            return
        for first in range(start, end, FIXED_BYTES_MAX):
            last, number = min(first + FIXED_BYTES_MAX, end), len(self._regions)
            if number == TABLE_ENTRIES or self._ring.register_buffer(number, first, last - first) < 0:
                break
            self._regions.add(first, last)

    def close(self) -> None:
        """Wait for every operation taken, then unmap and close the ring. Idempotent.

        A forked child gives up its copy and waits for nothing: what is in flight is its parent's.
        """
        if self._ring.fd < 0:
            return
        while self._opener.is_here and self._outstanding():
            self.reap(self._outstanding())
        self._ring.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._ring.fd < 0:
            raise ConfigError("this engine is closed; make a new one with `open_engine`")
        self._opener.check("this engine")

    def _in_flight(self) -> int:
        return self.depth_max - self._free_num

    def _outstanding(self) -> int:
        return self.depth_max - self._free_num + self._queued_num

    def _refill(self) -> None:
        """Move queued operations into free slots."""
        while self._queued_num and self._free_num:
            head, first = self._queue[0], self._queue_first
            num = min(self._free_num, len(head) - first)
            if num <= self._few_num:
                self._start_few(head, first, num)
            else:
                self._start(head[first : first + num])
            self._queued_num -= num
            self._queue_first += num
            if self._queue_first == len(head):
                self._queue.popleft()
                self._queue_first = 0

    def _start_few(self, rows: npt.NDArray[np.generic], first: int, num: int) -> None:
        """Do what `_start` does, cheaper for a few operations. Shapes: rows [n] of OP, or [n, 5] words."""
        ring, raw, now = self._ring, rows.data, self._clock_ns()
        depth, tail = self._in_flight(), ring.sq_tail[0]
        for index in range(first, first + num):
            fd, kind, offset, address, length, num_vectors, tag = _OP_ROW.unpack_from(raw, index * 40)
            self._free_num -= 1
            slot = self._free_raw[self._free_num]
            size, flags, opcode = length, 0, 22 + kind
            if kind >= FSYNC:
                opcode = 3 if kind == FSYNC else 255
                offset, address, size, length, flags = 0, 0, 0, 0, FSYNC_DATASYNC
            elif num_vectors:
                opcode, size = 1 + kind, num_vectors
            row = slot * SQE_BYTES
            _SQE_ROW.pack_into(ring.sqes_raw, row, opcode, 0, 0, fd, offset, address, size, flags, slot, 0)
            depth += 1
            _DONE_ROW.pack_into(self._done_raw, slot * 40, tag, length, 0, depth, now, 0)
            self._want_raw[slot] = length
            ring.sq_array_raw[tail & ring.sq_mask] = slot
            tail += 1
        ring.sq_tail[0] = tail & 0xFFFFFFFF
        self._unsubmitted_num += num

    def _start(self, words: Words) -> None:
        """Fill the entries of operations that all have a free slot.

        Shapes: words [n, 5], the rows of OP.
        """
        num = len(words)
        depth = self._in_flight() + 1
        self._free_num -= num
        slots = self._free[self._free_num : self._free_num + num][::-1].copy()
        entries, lengths = encode(words, slots, self._regions)
        self._ring.sqes[slots, :6] = entries
        done = np.empty((num, 5), np.uint64)
        done[:, 0] = words[:, 4]
        done[:, 1] = lengths
        done[:, 2] = np.arange(depth, depth + num) << 32
        done[:, 3] = self._clock_ns()
        self._done_words[slots] = done
        self._want[slots] = lengths
        self._put_many(slots)

    def _put(self, slot: int) -> None:
        ring = self._ring
        tail = ring.sq_tail[0]
        ring.sq_array[tail & ring.sq_mask] = slot
        ring.sq_tail[0] = (tail + 1) & 0xFFFFFFFF
        self._unsubmitted_num += 1

    def _put_many(self, slots: npt.NDArray[np.intp]) -> None:
        ring, num = self._ring, len(slots)
        tail = ring.sq_tail[0]
        first = tail & ring.sq_mask
        room = ring.sq_mask + 1 - first
        ring.sq_array[first : first + num] = slots[:room]
        ring.sq_array[: max(0, num - room)] = slots[room:]
        ring.sq_tail[0] = (tail + num) & 0xFFFFFFFF
        self._unsubmitted_num += num

    def _flush(self) -> None:
        """Give the kernel every entry it will take now; `reap` sees to the rest."""
        while self._unsubmitted_num:
            taken = self._ring.enter(self._unsubmitted_num, 0)
            if taken <= 0:
                _check_enter(taken)
                return
            self._unsubmitted_num -= taken

    def _wait(self, missing_num: int) -> None:
        """Enter the kernel, submit what is ready and sleep until some of `missing_num` completions are there."""
        if missing_num > 0 and self._queued_num:
            missing_num = min(missing_num, max(1, self.depth_max // REFILL_PARTS))
        taken = self._ring.enter(self._unsubmitted_num, max(0, min(missing_num, self._in_flight())))
        if taken >= 0:
            self._unsubmitted_num -= taken
            return
        _check_enter(taken)
        if missing_num <= 0 or taken == -errno.EINTR or self._ring.ready_num():
            return
        # The kernel lacks memory. What is in flight will free some; with nothing in flight there is only waiting.
        if self._in_flight() > self._unsubmitted_num:
            _check_enter(self._ring.enter(0, 1))
        else:
            time.sleep(PAUSE_S)

    def _take(self) -> Completions | None:
        """Read the completion queue and free the slots of what is finished; None where nothing is."""
        ring = self._ring
        num = ring.ready_num()
        if num == 0:
            return None
        head = ring.cq_head[0]
        if num > FEW_NUM:
            return self._take_many(head & ring.cq_mask, num, head)
        now, done, rows = self._clock_ns(), self._done_raw, bytearray()
        for index in range(head, head + num):
            slot, result = _CQE_ROW.unpack_from(ring.cqes_raw, (index & ring.cq_mask) * 16)
            if result == self._want_raw[slot] or self._settle(slot, result):
                first = slot * 40
                _LONG.pack_into(done, first + 32, now)
                rows += done[first : first + 40]
                self._free_raw[self._free_num] = slot
                self._free_num += 1
        ring.cq_head[0] = (head + num) & 0xFFFFFFFF
        return np.frombuffer(rows, COMPLETION) if rows else None

    def _take_many(self, first: int, num: int, head: int) -> Completions | None:
        ring = self._ring
        room = ring.cq_mask + 1 - first
        cqes = np.concatenate([ring.cqes[first : first + num], ring.cqes[: max(0, num - room)]])
        ring.cq_head[0] = (head + num) & 0xFFFFFFFF
        slots, results = cqes[:, 0], cqes[:, 2]
        odd = results != self._want[slots]
        if odd.any():
            for index in np.flatnonzero(odd).tolist():
                odd[index] = not self._settle(int(slots[index]), int(results[index]))
            slots = slots[~odd]
        self._free[self._free_num : self._free_num + len(slots)] = slots
        self._free_num += len(slots)
        part = self._done_words[slots]
        part[:, 4] = self._clock_ns()
        return part.view(COMPLETION).reshape(-1) if len(part) else None

    def _settle(self, slot: int, result: int) -> bool:
        """Judge a result other than the one hoped for; return whether the operation is finished.

        An unfinished one is put back into the ring, shifted by what has moved, and none of its results is hoped for.
        """
        entry = self._ring.sqes[slot]
        odd = self._odd.pop(slot, None) or Continued(int(self._want[slot]))
        refused = result in {-errno.EAGAIN, -errno.EINTR}
        odd.want_bytes -= max(result, 0)
        odd.tries += refused
        if (result > 0 and odd.want_bytes > 0) or (refused and odd.tries <= RETRIES_MAX):
            if result > 0:
                shift(entry, result, odd)
            self._odd[slot] = odd
            self._want[slot] = UNHOPED
            self._put(slot)
            return False
        moved = int(self._done["length"][slot]) - odd.want_bytes
        reading = int(entry[0]) & 0xFF in {1, 4, 22}
        # A direct read that meets an unaligned end of file stops there; its remainder is then refused as unaligned.
        at_end = reading and moved > 0 and result == -errno.EINVAL
        self._done["length"][slot] = moved
        self._done["error"][slot] = 0 if at_end else max(-result, 0)
        return True


def _check_enter(result: int) -> None:
    if result < 0 and -result not in {errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ENOMEM}:
        raise IoError(-result, f"io_uring_enter: {os.strerror(-result)}")
