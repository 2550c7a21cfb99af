"""The third engine: the same contract on a drive in memory, under a virtual clock, with faults on request. Next: tiers.

Decides the order of events and what goes wrong; `drive` decides how long things take. Everything is drawn from one
seed, a fixed number of draws an operation, so that raising one probability leaves the other faults where they were.
"""

from __future__ import annotations

import ctypes
import errno
import heapq
import itertools
import random
from collections import deque
from dataclasses import dataclass, fields
from typing import cast

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError
from kvtide.io.drive import SECTOR_BYTES, OpenFile, SimDrive, sectors
from kvtide.io.ops import COMPLETION, FSYNC, OP, READ, WRITE, Batch, Completions
from kvtide.io.vectors import read_vectors

REORDER_SPAN = 8  # a reordered operation is held back by up to this many times its own time

_Row = tuple[int, int, int, int, int, int, int]  # the fields of OP


@dataclass(slots=True)
class VirtualClock:
    """Time that passes when told to."""

    now: int = 0

    def now_ns(self) -> int:
        """Return the time in nanoseconds."""
        return self.now

    def advance_to(self, time_ns: int) -> None:
        """Let time pass until `time_ns`; a time already past changes nothing."""
        self.now = max(self.now, time_ns)


@dataclass(frozen=True, slots=True)
class Faults:
    """Probability of each fault, an operation.

    short: some bytes move, then end of file or an error. eio: refused. enospc: a write refused. reordered: completes
    after later ones. delayed: takes `delay_factor` times as long. torn: a write of which some sectors stay, reported as
    done. flipped: one bit differs, in memory after a read, on the drive after a write.
    """

    short: float = 0.0
    eio: float = 0.0
    enospc: float = 0.0
    reordered: float = 0.0
    delayed: float = 0.0
    torn: float = 0.0
    flipped: float = 0.0
    delay_factor: int = 10

    def __post_init__(self) -> None:
        for name in FAULT_NAMES:
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"Faults.{name} is {getattr(self, name)}; a probability is from 0 to 1")


FAULT_NAMES = tuple(item.name for item in fields(Faults) if item.name != "delay_factor")
NO_FAULTS = Faults()


@dataclass(frozen=True, slots=True)
class _Running:
    """One operation between start and completion."""

    tag: int
    kind: int
    offset: int
    length: int
    memory: list[list[int]]  # address and length of each piece
    opened: OpenFile | None  # None: refused with `refusal` at once
    refusal: int
    serial: int  # of the write, or of the sync
    data: bytes  # what a write carries, taken when it started
    faults: frozenset[str]
    chance: float  # decides the details of a fault
    depth: int
    submit_ns: int


class SimEngine:
    """Engine over a `SimDrive`. `complete_ns` is when the device was done, at or before the moment of reaping."""

    def __init__(
        self, drive: SimDrive, clock: VirtualClock, faults: Faults = NO_FAULTS, *, depth_max: int = 128, seed: int = 0
    ) -> None:
        if depth_max < 1:
            raise ConfigError(f"depth_max is {depth_max}; it must be at least 1")
        self.depth_max = depth_max
        self.fallback_reason = ""
        self._drive = drive
        self._clock = clock
        self._faults = faults
        self._rng = random.Random(seed)
        self._queue: deque[_Row] = deque()
        self._events: list[tuple[int, int, _Running]] = []  # a heap by time, then by order of starting
        self._order = itertools.count()
        self._closed = False

    def submit(self, batch: Batch) -> None:
        """Start what fits, now; see `Engine`."""
        self._check_open()
        self._queue.extend(cast("list[_Row]", np.asarray(batch, OP).tolist()))
        self._refill(self._clock.now_ns())

    def reap(self, wait_num: int = 0) -> Completions:
        """Return what is done, moving the clock to the completion waited for. Queued operations start on the way."""
        self._check_open()
        entered_ns = self._clock.now_ns()
        wait_num = min(wait_num, len(self._events) + len(self._queue))
        rows: list[tuple[int, ...]] = []
        while self._events and (len(rows) < wait_num or self._events[0][0] <= entered_ns):
            complete_ns, _, running = heapq.heappop(self._events)
            self._clock.advance_to(complete_ns)
            moved, error = self._finish(running)
            rows.append((running.tag, moved, error, running.depth, running.submit_ns, complete_ns))
            self._refill(self._clock.now_ns())
        return np.array(rows, COMPLETION)

    def register(self, arena: npt.NDArray[np.uint8]) -> None:
        """Do nothing: there is no one to pin for."""

    def close(self) -> None:
        """Let what is outstanding complete. Idempotent."""
        while not self._closed and self._events:
            self.reap(len(self._events) + len(self._queue))
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this engine is closed; make a new one")

    def _refill(self, now_ns: int) -> None:
        while self._queue and len(self._events) < self.depth_max:
            running = self._start(self._queue.popleft(), now_ns)
            heapq.heappush(self._events, (self._complete_ns(running), next(self._order), running))

    def _start(self, row: _Row, now_ns: int) -> _Running:
        fd, kind, offset, address, length, num_vectors, tag = row
        draws = [self._rng.random() for _ in FAULT_NAMES]
        chance = self._rng.random()
        names = (name for name, draw in zip(FAULT_NAMES, draws, strict=True) if draw < getattr(self._faults, name))
        opened = self._drive.lookup(fd)
        memory: list[list[int]] = [[address, length]]
        if kind not in {READ, WRITE}:
            memory, length = [], 0
        elif num_vectors:
            memory = read_vectors(address, num_vectors).tolist()
        refusal = _refusal(opened, kind, offset, memory)
        if refusal:
            opened = None
        data, serial = b"", 0
        if opened and kind == WRITE:
            data = b"".join(ctypes.string_at(at, num) for at, num in memory)
            serial = self._drive.begin_write(opened.file, offset, data)
        elif opened and kind == FSYNC:
            serial = self._drive.begin_sync()
        depth = len(self._events) + 1
        return _Running(
            tag, kind, offset, length, memory, opened, refusal, serial, data, frozenset(names), chance, depth, now_ns
        )

    def _complete_ns(self, running: _Running) -> int:
        now_ns = running.submit_ns
        if running.opened is None:
            return now_ns
        took_ns = self._drive.device.complete_ns(running.kind, running.length, now_ns) - now_ns
        if "delayed" in running.faults:
            took_ns *= self._faults.delay_factor
        if "reordered" in running.faults:
            took_ns += int(took_ns * REORDER_SPAN * running.chance)
        return now_ns + took_ns

    def _finish(self, running: _Running) -> tuple[int, int]:
        """Move the bytes; return how many moved, and errno."""
        if running.opened is None:
            return 0, running.refusal
        if running.kind == WRITE:
            return self._finish_write(running)
        if "eio" in running.faults:
            return 0, errno.EIO
        if running.kind == FSYNC:
            self._drive.end_sync(running.opened.file, running.serial)
            return 0, 0
        data, error = running.opened.file.read(running.offset, running.length), 0
        if "short" in running.faults and data:
            data = data[: int(len(data) * running.chance)]
            error = self._rng_of(running).choice([0, errno.EIO])
        if "flipped" in running.faults and data:
            data = _flip(data, running.chance)
        _scatter(data, running.memory)
        return len(data), error

    def _finish_write(self, running: _Running) -> tuple[int, int]:
        data, error = running.data, 0
        if "eio" in running.faults:
            data, error = b"", errno.EIO
        elif "enospc" in running.faults:
            data, error = b"", errno.ENOSPC
        elif "short" in running.faults and data:
            data = data[: int(len(data) * running.chance)]
            error = self._rng_of(running).choice([errno.EIO, errno.ENOSPC])
        landed = [(running.offset, data)]
        if "torn" in running.faults and data:
            rng = self._rng_of(running)
            landed = [piece for piece in sectors(running.offset, data) if rng.random() < 0.5]
        if "flipped" in running.faults and landed and data:
            at, piece = landed[0]
            landed[0] = (at, _flip(piece, running.chance))
        moved, refused = self._drive.end_write(running.serial, landed, len(data))
        return moved, refused or error

    def _rng_of(self, running: _Running) -> random.Random:
        """Return a generator for the details of one operation's fault, apart from the engine's own."""
        return random.Random(running.chance)


def _refusal(opened: OpenFile | None, kind: int, offset: int, memory: list[list[int]]) -> int:
    """Return the errno with which a kernel would refuse at once, 0 if it would not."""
    if opened is None or (kind == WRITE and not opened.writable):
        return errno.EBADF
    if kind not in {READ, WRITE, FSYNC}:
        return errno.EINVAL
    if opened.direct and kind != FSYNC and any(number % SECTOR_BYTES for number in itertools.chain([offset], *memory)):
        return errno.EINVAL
    return 0


def _flip(data: bytes, chance: float) -> bytes:
    """Return `data` with one bit turned, the one `chance` of the way through."""
    at, bit = divmod(int(len(data) * 8 * chance), 8)
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


def _scatter(data: bytes, memory: list[list[int]]) -> None:
    """Copy `data` to the pieces of memory, in order, as far as it goes."""
    at = 0
    for address, num in memory:
        piece = data[at : at + num]
        ctypes.memmove(address, piece, len(piece))
        at += len(piece)
