"""The logs of a memory, oldest first: replayed when opened, appended to, rolled, read. Next: memory.

Decides when a log is full and which rows are live across logs. A full log is sealed and stays where it is: it is the
first segment. What searches see changes under `lock`, in one step a commit.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.errors import IoError
from kvtide.recall.contract import MemoryOptions
from kvtide.recall.log import HEADER_BYTES, Log
from kvtide.recall.ops import MemoryIo
from kvtide.recall.parts import LogPart
from kvtide.recall.payloads import read_payloads
from kvtide.recall.place import Place
from kvtide.recall.records import Ids, Vectors, group_bytes
from kvtide.recall.ring import Ring
from kvtide.recall.segments import Segment


@dataclass(slots=True, eq=False)
class Volume:
    """A log and its rows."""

    log: Log
    part: LogPart

    def payloads(self, io: MemoryIo, rows: Ids, salt: bytes) -> list[bytes]:
        """Return the payloads of some rows, each checked."""
        return read_payloads(io, self.log, self.part, rows, salt)

    def close(self) -> None:
        """Close the file. Idempotent."""
        with contextlib.suppress(OSError):
            os.close(self.log.fd)


class Shelf:
    """Every log of a memory.

    Threads: one commits at a time; any may read.
    """

    def __init__(self, place: Place, write_io: MemoryIo, read_io: MemoryIo, options: MemoryOptions) -> None:
        self.place, self.options = place, options
        self._write_io, self._read_io = write_io, read_io
        self._described = place.description
        self.lock = threading.Lock()
        self._read_lock = threading.Lock()
        self.segments: list[Segment] = []  # oldest first, older than every log
        self.volumes: list[Volume] = []  # oldest first; the last one is appended to
        self.num_bad = 0  # groups that could not be read
        fd, size_bytes = place.open_ring()
        name, page_bytes = str(place.ring_path), options.page_bytes
        self._ring = Ring(write_io, fd, page_bytes=page_bytes, size_bytes=size_bytes, name=name)

    # Opening

    def load(self, *, after: int = 0) -> None:
        """Replay every log whose number is above `after`; make a first one where there is none.

        Raises: IoError; FormatError for a file that is no log of this memory.
        """
        numbers = [number for number in self.place.logs() if number > after]
        for number in numbers:
            self._replay(number, is_last=number == numbers[-1])
        if not self.volumes:
            self._begin(after + 1)
        for volume in self.volumes[:-1]:
            self._seal(volume)

    def _replay(self, number: int, *, is_last: bool) -> None:
        volume = self._open(number)
        scanned = volume.log.load(is_last=is_last)
        self.num_bad += scanned.num_bad
        self._kill(scanned.placed["id"])
        volume.part.add(scanned.placed, scanned.vectors)

    def _open(self, number: int) -> Volume:
        fd, _ = self.place.open_log(number)
        log = Log(
            self._write_io,
            fd,
            ring=self._ring,
            number=number,
            dim=self._described.dim,
            salt=self._described.salt,
            page_bytes=self.options.page_bytes,
            log_bytes=self.options.log_bytes,
            name=str(self.place.log_path(number)),
        )
        volume = Volume(log, LogPart(self._described.dim, self._described.metric))
        self.volumes.append(volume)
        return volume

    def _begin(self, number: int) -> None:
        """Make log `number`, durable and empty, the one that is appended to."""
        self.place.reuse_spare(number)
        volume = self._open(number)
        try:
            volume.log.begin()
            self.place.sync()
        except BaseException:
            self.volumes.remove(volume)
            os.close(volume.log.fd)
            raise

    def _seal(self, volume: Volume) -> None:
        end = -(-volume.log.end // HEADER_BYTES) * HEADER_BYTES
        volume.part.seal(volume.log.fd, min(end, volume.log.size_bytes))

    # Writing

    def commit(self, rows: npt.NDArray[np.void], vectors: Vectors, payloads: list[bytes]) -> bool:
        """Make a group durable and let searches find it; say whether a log was sealed for it.

        Raises: IoError, and nothing has changed.
        """
        size = group_bytes(len(rows), len(vectors), self._described.dim, sum(map(len, payloads)))
        current = self.volumes[-1]
        is_full = current.log.end > HEADER_BYTES and current.log.end + size > self.options.log_bytes
        if is_full:
            self._roll()
        placed = self.volumes[-1].log.append(rows, vectors, payloads)
        with self.lock:
            self._kill(rows["id"])
            self.volumes[-1].part.add(placed, vectors)
        return is_full

    def _kill(self, ids: Ids) -> None:
        """Let rows older than the newest log be no longer live."""
        for older in self.all()[:-1]:
            older.part.kill(ids)

    def all(self) -> list[Segment | Volume]:
        """Return segments and logs, oldest first."""
        return [*self.segments, *self.volumes]

    def _roll(self) -> None:
        """Begin the next log, then seal the one before: its rows are found all the while."""
        full = self.volumes[-1]
        full.log.settle()
        self._begin(full.log.number + 1)
        with self.lock:
            self._seal(full)
        assert self.volumes[-2] is full, "one thread commits, and what is merged was sealed"

    # Reading

    @contextmanager
    def reading(self) -> Iterator[list[Segment | Volume]]:
        """Give segments and logs as they are now; none of them goes away meanwhile."""
        with self.lock:
            volumes = self.all()
            for volume in volumes:
                volume.part.num_readers += 1
        try:
            yield volumes
        finally:
            with self.lock:
                for volume in volumes:
                    volume.part.num_readers -= 1

    def payloads(self, ids: Ids) -> dict[int, bytes]:
        """Return the payloads of those of `ids` that are there, by their place in `ids`.

        Raises: Corrupt; IoError.
        """
        found: dict[int, bytes] = {}
        with self.reading() as volumes:
            with self.lock:
                rows = [volume.part.find(ids) for volume in volumes]
            with self._read_lock:
                for volume, row in zip(volumes, rows, strict=True):
                    at = np.flatnonzero(row >= 0)
                    texts = volume.payloads(self._read_io, row[at], self._described.salt)
                    found.update(zip(at.tolist(), texts, strict=True))
        return found

    def settle(self) -> None:
        """Write to the newest log what only the ring has; a full disk leaves it there."""
        with contextlib.suppress(IoError):
            self.volumes[-1].log.settle()

    def close(self) -> None:
        """Close every file. Idempotent."""
        if self._ring.fd >= 0:
            os.close(self._ring.fd)
            self._ring.fd = -1
        for one in self.all():
            one.close()
        self.segments, self.volumes = [], []
