"""A drive that exists only in memory: files, a model of the device's speed, and crashes. Next: sim.

Decides how long an operation takes and which bytes survive a crash; knows no engine and reads no clock.

Theory. An operation passes four stations; each may hold it up, and the last one lets it go:

    channel (one of `parallelism`) -> gate (`iops_max` a second) -> medium (latency) -> bus (bytes a second)

So depth 1 costs latency + length / rate (of the bus, or of one channel where that is slower), and a deep queue runs
into the lowest of parallelism / latency, `iops_max` and the bus. Files are sparse: what was never written costs no
memory and reads as zeros.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import random
from dataclasses import dataclass, field

from kvtide.errors import ConfigError
from kvtide.io.ops import FSYNC, READ

SECTOR_BYTES = 512  # what a drive writes whole or not at all
CHUNK_BYTES = 65536
PS_PER_NS = 1000  # inside, time is in picoseconds, so that roofs of millions a second are exact
FIRST_FD = 1 << 20  # far from real descriptors, so that one handed to the kernel by mistake is refused


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Speed of a drive, all of it measured or taken from a data sheet: there are no defaults."""

    read_latency_ns: int
    write_latency_ns: int
    sync_latency_ns: int
    iops_max: int
    read_bytes_per_s: int
    write_bytes_per_s: int
    parallelism: int
    read_channel_bytes_per_s: int = 0  # of one operation in flight; 0: that of the bus
    write_channel_bytes_per_s: int = 0
    write_iops_max: int = 0  # 0: `iops_max`, which then counts both

    def __post_init__(self) -> None:
        rates = (self.iops_max, self.read_bytes_per_s, self.write_bytes_per_s, self.parallelism)
        latencies = (self.read_latency_ns, self.write_latency_ns, self.sync_latency_ns)
        channels = (self.read_channel_bytes_per_s, self.write_channel_bytes_per_s)
        if min(rates) < 1 or min(*latencies, *channels, self.write_iops_max) < 0:
            raise ConfigError(f"{self}: rates and parallelism must be at least 1, latencies at least 0")


class DeviceQueue:
    """When operations handed to the device complete; hand them over in order of time."""

    def __init__(self, model: DeviceModel) -> None:
        self._model = model
        self._channels_ps = [0] * model.parallelism  # a heap: when each channel is free
        self._gate_ps = [0, 0]  # of reads, of writes; one for both where their rates are not told apart
        self._bus_ps = [0, 0]  # of reads, of writes

    def complete_ns(self, kind: int, length: int, now_ns: int) -> int:
        """Return when an operation handed over at `now_ns` completes."""
        model, now_ps = self._model, now_ns * PS_PER_NS
        if kind == FSYNC:
            return now_ns + model.sync_latency_ns
        latency_ns, rate, own_rate = (
            (model.read_latency_ns, model.read_bytes_per_s, model.read_channel_bytes_per_s)
            if kind == READ
            else (model.write_latency_ns, model.write_bytes_per_s, model.write_channel_bytes_per_s)
        )
        gate = kind if model.write_iops_max else READ
        start_ps = max(now_ps, heapq.heappop(self._channels_ps), self._gate_ps[gate])
        self._gate_ps[gate] = start_ps + 10**12 // (model.iops_max if gate == READ else model.write_iops_max)
        ready_ps = start_ps + latency_ns * PS_PER_NS
        self._bus_ps[kind] = max(ready_ps, self._bus_ps[kind]) + length * 10**12 // rate
        done_ps = max(self._bus_ps[kind], ready_ps + (length * 10**12 // own_rate if own_rate else 0))
        heapq.heappush(self._channels_ps, done_ps)
        return -(-done_ps // PS_PER_NS)


@dataclass(slots=True)
class SimFile:
    """Bytes of one file, in chunks that exist once written."""

    size_bytes: int = 0
    chunks: dict[int, bytearray] = field(default_factory=dict)

    def read(self, offset: int, length: int) -> bytes:
        """Return the bytes there are, fewer at the end of the file."""
        end = min(offset + length, self.size_bytes)
        parts = []
        while offset < end:
            number, start = divmod(offset, CHUNK_BYTES)
            num = min(CHUNK_BYTES - start, end - offset)
            chunk = self.chunks.get(number)
            parts.append(bytes(num) if chunk is None else chunk[start : start + num])
            offset += num
        return b"".join(parts)

    def write(self, offset: int, data: bytes) -> None:
        """Put `data`; the file grows to hold it."""
        if not data:
            return
        self.size_bytes = max(self.size_bytes, offset + len(data))
        at = 0
        while at < len(data):
            number, start = divmod(offset + at, CHUNK_BYTES)
            num = min(CHUNK_BYTES - start, len(data) - at)
            chunk = self.chunks.setdefault(number, bytearray(CHUNK_BYTES))
            chunk[start : start + num] = data[at : at + num]
            at += num


@dataclass(frozen=True, slots=True)
class OpenFile:
    """What a descriptor stands for."""

    file: SimFile
    writable: bool
    direct: bool  # offset, address and length must be multiples of the sector


@dataclass(frozen=True, slots=True)
class _Change:
    """A write that a crash may undo or tear."""

    file: SimFile
    offset: int
    data: bytes
    old: bytes
    old_size_bytes: int


class SimDrive:
    """Files on a modelled device, shared by the engines that run on it."""

    def __init__(self, model: DeviceModel, *, capacity_bytes: int = 1 << 50, keeps_unsynced: bool = False) -> None:
        """Make an empty drive.

        With `keeps_unsynced` every write since the last FSYNC of its file is remembered, at the cost of its bytes, so
        that `crash` can lose it. Without, only writes in flight are at risk, as on a drive with a safe cache.
        """
        self.device = DeviceQueue(model)
        self.model = model
        self.capacity_bytes = capacity_bytes
        self._keeps_unsynced = keeps_unsynced
        self._paths: dict[str, SimFile] = {}
        self._open: dict[int, OpenFile] = {}
        self._fds = itertools.count(FIRST_FD)
        self._serials = itertools.count()
        self._in_flight: dict[int, tuple[SimFile, int, bytes]] = {}
        self._unsynced: dict[int, _Change] = {}  # by serial of completion, in order

    def open(self, path: str, *, size_bytes: int = 0, writable: bool = True, direct: bool = False) -> int:
        """Return a descriptor of the file, made and grown to `size_bytes` where needed."""
        file = self._paths.setdefault(path, SimFile())
        file.size_bytes = max(file.size_bytes, size_bytes)
        fd = next(self._fds)
        self._open[fd] = OpenFile(file, writable, direct)
        return fd

    def close(self, fd: int) -> None:
        """Forget a descriptor."""
        del self._open[fd]

    def lookup(self, fd: int) -> OpenFile | None:
        """Return what `fd` stands for, None if nothing."""
        return self._open.get(fd)

    def contents(self, path: str) -> bytes:
        """Return every byte of a file."""
        file = self._paths[path]
        return file.read(0, file.size_bytes)

    def used_bytes(self) -> int:
        """Bytes taken by all files, holes included."""
        return sum(file.size_bytes for file in self._paths.values())

    def begin_write(self, file: SimFile, offset: int, data: bytes) -> int:
        """Note a write in flight; return its serial for `end_write`."""
        serial = next(self._serials)
        self._in_flight[serial] = (file, offset, data)
        return serial

    def end_write(self, serial: int, landed: list[tuple[int, bytes]], length: int) -> tuple[int, int]:
        """Let the pieces `landed` of a write of `length` bytes reach their file; return bytes moved and errno.

        A write that a crash has ended in the meantime is EIO.
        """
        noted = self._in_flight.pop(serial, None)
        if noted is None:
            return 0, errno.EIO
        file, offset, _ = noted
        room_end = file.size_bytes + self.capacity_bytes - self.used_bytes()
        moved = max(0, min(length, room_end - offset))
        for at, piece in landed:
            self._apply(file, at, piece[: max(0, offset + moved - at)])
        return moved, 0 if moved == length else errno.ENOSPC

    def begin_sync(self) -> int:
        """Return the mark for `end_sync`: a sync covers what was complete when it began."""
        return next(self._serials)

    def end_sync(self, file: SimFile, mark: int) -> None:
        """Make the writes to `file` that completed before `mark` safe from a crash."""
        safe = [serial for serial, change in self._unsynced.items() if serial < mark and change.file is file]
        for serial in safe:
            del self._unsynced[serial]

    def crash(self, seed: int) -> None:
        """Lose power: of each write at risk a random part of its sectors stays; what is in flight ends with EIO."""
        rng = random.Random(seed)
        risks = [(change.file, change.offset, change.data) for change in self._unsynced.values()]
        for change in reversed(self._unsynced.values()):
            change.file.write(change.offset, change.old)
            change.file.size_bytes = change.old_size_bytes
        for file, offset, data in [*risks, *self._in_flight.values()]:
            for at, piece in sectors(offset, data):
                if rng.random() < 0.5:
                    file.write(at, piece)
        self._unsynced.clear()
        self._in_flight.clear()

    def _apply(self, file: SimFile, offset: int, data: bytes) -> None:
        if self._keeps_unsynced and data:
            size_bytes = file.size_bytes
            old = file.read(offset, len(data)).ljust(len(data), b"\0")
            self._unsynced[next(self._serials)] = _Change(file, offset, data, old, size_bytes)
        file.write(offset, data)


def sectors(offset: int, data: bytes) -> list[tuple[int, bytes]]:
    """Return the pieces of a write that land whole or not at all, as (offset in the file, bytes)."""
    end = offset + len(data)
    edges = [offset, *range(offset - offset % SECTOR_BYTES + SECTOR_BYTES, end, SECTOR_BYTES), end]
    return [(at, data[at - offset : until - offset]) for at, until in itertools.pairwise(edges)]
