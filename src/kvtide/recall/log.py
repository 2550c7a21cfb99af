"""One log of a memory: rows are appended in groups, each durable when `append` returns. Next: parts.

Decides where a group lies and what is written for it; knows nothing of what rows mean.

Theory. `[header page][group][group]...`. Where the log's space was written before (a log that was another one, a drive
that can promise zeros without moving them), a group is written where it lies, in whole pages, and synced. Where it was
not, each sync would cost the file system a journal write: 12 KiB on ext4, and 24 KiB if the file grows. There a group
is made durable in the ring, and held in memory, until there are enough of them to be written to the log, without gaps,
by one write and one sync. Its place in the log is known from the start.

A torn group fails its checksum and is the end of the log: what it should have held is still in the ring.
"""

from __future__ import annotations

import ctypes
import errno
import os

import numpy as np
import numpy.typing as npt
import xxhash

from kvtide.errors import FormatError, IoError
from kvtide.io.ops import READ, WRITE, aligned_buffer
from kvtide.recall.ops import MemoryIo
from kvtide.recall.records import Placed, Scanned, Vectors, encode, place, scan
from kvtide.recall.ring import Ring, Tail

MAGIC = b"KVTMLOG\0"
VERSION = 1
HEADER_BYTES = 4096
JOURNAL_BYTES = 12 << 10  # ext4, at a sync of space that is written for the first time; measured
SPARE_BYTES = 512  # of a page: as good as full
FIRST_BYTES = 1 << 20  # allocated at once; then all of the log
FALLOC_FL_WRITE_ZEROES = 0x80  # Linux 6.17: space that counts as written, without moving its bytes
_HEADER = np.dtype([("magic", "V8"), ("version", "<u4"), ("dim", "<u4"), ("log", "<u8"), ("check", "<u8")])


class Log:
    """A log that can be appended to.

    Threads: one appends; `held` may be read by any.
    """

    def __init__(
        self,
        io: MemoryIo,
        fd: int,
        *,
        ring: Ring,
        number: int,
        dim: int,
        salt: bytes,
        page_bytes: int,
        log_bytes: int,
        name: str,
    ) -> None:
        """Take over an open file; `load` or `begin` comes next."""
        self.fd, self.number, self.dim, self.name = fd, number, dim, name
        self._io, self._ring, self._salt, self._log_bytes = io, ring, salt, log_bytes
        self._file_bytes = os.fstat(fd).st_size // HEADER_BYTES * HEADER_BYTES
        self.size_bytes = _written_bytes(fd, self._file_bytes)
        self.sequence = 1
        self._tail = Tail(page_bytes, HEADER_BYTES)
        self._held_bytes = 0
        self.held: list[tuple[int, bytes]] = []  # groups the file does not have yet, and where they will be in it

    @property
    def end(self) -> int:
        """Where the last group ends, or will."""
        return self.held[0][0] + self._held_bytes if self.held else self._tail.end

    def begin(self) -> None:
        """Make the log empty and its header durable: the groups of an earlier life have another number.

        Raises: IoError.
        """
        if self._file_bytes < HEADER_BYTES:
            self._allocate(HEADER_BYTES)
        page = aligned_buffer(HEADER_BYTES)
        header = page[: _HEADER.itemsize].view(_HEADER)
        header["magic"], header["version"] = np.frombuffer(MAGIC, "V8")[0], VERSION
        header["dim"], header["log"] = self.dim, self.number
        header["check"] = _header_check(page)
        self._io.move(WRITE, self.fd, page, 0, cause="memory-log", what=self.name)
        self._io.sync(self.fd, what=self.name)
        self.size_bytes = max(self.size_bytes, HEADER_BYTES)

    def load(self, *, is_last: bool) -> Scanned:
        """Read what the log holds, so that `append` goes on behind it; a header that is not whole is made again.

        What the last log has not yet is in the ring. A file that was another log before holds nothing of this one.

        Raises: IoError; FormatError if it is a log of other vectors.
        """
        raw = aligned_buffer(self._file_bytes)
        if len(raw):  # else its maker ended before it was begun
            self._io.move(READ, self.fd, raw, 0, cause="memory-read", what=self.name)
        is_begun = len(raw) >= HEADER_BYTES and self._is_header(raw)
        late = self._ring.load(log=self.number, dim=self.dim, salt=self._salt) if is_last else {}
        scanned = self._scan(raw, late)
        late = {one: late[one] for one in sorted(late) if one >= scanned.sequence}
        end = scanned.end
        if late:
            raw, end = self._hold(raw, scanned.end, late)
            scanned = self._scan(raw, {})
        if not is_begun:
            self.begin()
        self.sequence = scanned.sequence
        page = self._tail.page_bytes
        self._tail = Tail(page, end, raw[end - end % page : end].tobytes())
        self.size_bytes = max(self.size_bytes, -(-end // page) * page)
        return scanned

    def _scan(self, raw: npt.NDArray[np.uint8], late: dict[int, bytes]) -> Scanned:
        page = self._tail.page_bytes
        start, number = HEADER_BYTES, self.number
        return scan(raw, start=start, log=number, dim=self.dim, salt=self._salt, page_bytes=page, late=late)

    def _hold(self, raw: npt.NDArray[np.uint8], end: int, late: dict[int, bytes]) -> tuple[npt.NDArray[np.uint8], int]:
        """Return the log with groups of the ring, and where its own end; drop what a torn write has left behind."""
        page = self._tail.page_bytes
        first = -(-end // page) * page
        at = first + np.cumsum([0, *map(len, late.values())])
        self.held = list(zip(at.tolist(), late.values(), strict=False))
        self._held_bytes = int(at[-1]) - first
        os.ftruncate(self.fd, first)
        self._file_bytes = self.size_bytes = first
        kept = np.zeros(first, np.uint8)
        kept[: min(first, len(raw))] = raw[:first]
        return np.concatenate([kept, np.frombuffer(b"".join(late.values()), np.uint8)]), end

    def _is_header(self, raw: npt.NDArray[np.uint8]) -> bool:
        header = raw[: _HEADER.itemsize].view(_HEADER)[0]
        is_whole = bytes(raw[:8]) == MAGIC and int(header["check"]) == _header_check(raw)
        if is_whole and int(header["log"]) == self.number:
            if (int(header["version"]), int(header["dim"])) != (VERSION, self.dim):
                got = f"version {int(header['version'])} with {int(header['dim'])} dimensions"
                wanted = f"version {VERSION} with {self.dim} dimensions"
                raise FormatError(f"{self.name}: byte 8: expected {wanted}, found {got}")
            return True
        return False

    def append(self, rows: npt.NDArray[np.void], vectors: Vectors, payloads: list[bytes]) -> Placed:
        """Add a group and return where its rows lie, once it is durable.

        After an error the log is as before, and the next group takes the place of this one.
        Shapes: rows [n] ROW; vectors [puts, D]; payloads [n].
        Raises: IoError, with ENOSPC where the file system is full.
        """
        raw = encode(rows, vectors, payloads, log=self.number, sequence=self.sequence, salt=self._salt)
        if self._is_written(len(raw)):
            at, first, pages = self._tail.pages(raw)
            self._io.move(WRITE, self.fd, pages, first, cause="memory-log", what=self.name)
            self._io.sync(self.fd, what=self.name)
            self._tail.wrote(at, raw)
        else:
            at = self.end if self.held else -(-self.end // self._tail.page_bytes) * self._tail.page_bytes
            packed = self._ring.packed(raw)
            if self._is_enough(at + len(raw), self._ring.room(len(packed))):
                self._write(at, raw)
            else:
                self._ring.write(packed)
                self.held.append((at, raw))
                self._held_bytes += len(raw)
        self.sequence += 1
        return place(rows, len(vectors), self.dim, at)

    def settle(self) -> None:
        """Write what only the ring has.

        Raises: IoError, and the ring still has it.
        """
        if self.held:
            self._write(self.end, b"")

    def pages_for(self, num_bytes: int) -> int:
        """Return the bytes that a group of `num_bytes` writes first."""
        if not self._is_written(num_bytes) and (size := self._ring.guess(num_bytes)):
            return size
        at, end = self._tail.pages_for(num_bytes)
        return end - at // self._tail.page_bytes * self._tail.page_bytes

    def _is_written(self, num_bytes: int) -> bool:
        """Say whether a group can be written in its place without a journal write."""
        return not self.held and self._tail.pages_for(num_bytes)[1] <= self.size_bytes

    def _is_enough(self, end: int, size: int) -> bool:
        """Say whether a group that ends at `end`, of `size` in the ring, goes to the log with all that is held."""
        spare = -end % self._tail.page_bytes
        return not size or size > JOURNAL_BYTES or (self._ring.filled > 0.75 and spare < SPARE_BYTES)

    def _write(self, at: int, raw: bytes) -> None:
        """Write what is held, and a group behind it at `at`."""
        first = self.held[0][0] if self.held else at
        body = b"".join([*(one for _, one in self.held), raw])
        page = self._tail.page_bytes
        pages = aligned_buffer(-(-len(body) // page) * page)
        pages[: len(body)] = np.frombuffer(body, np.uint8)
        if first + pages.nbytes > self._file_bytes:
            self._allocate(first + pages.nbytes)
        self._io.move(WRITE, self.fd, pages, first, cause="memory-log", what=self.name)
        self._io.sync(self.fd, what=self.name)
        self._ring.clear()
        end = first + len(body)
        self._tail = Tail(page, end, body[len(body) - end % page :] if end % page else b"")
        self.size_bytes = max(self.size_bytes, first + pages.nbytes)
        self.held, self._held_bytes = [], 0  # another list: who reads the old one goes on

    def _allocate(self, end: int) -> None:
        """Let the file have the space up to `end` and some more: it then does not grow at a sync."""
        least = -(-end // HEADER_BYTES) * HEADER_BYTES
        ample = FIRST_BYTES if end <= FIRST_BYTES else self._log_bytes // HEADER_BYTES * HEADER_BYTES
        for size in (max(least, ample), least):
            if _fallocate(self.fd, FALLOC_FL_WRITE_ZEROES, self._file_bytes, size):
                self.size_bytes = size if self.size_bytes == self._file_bytes else self.size_bytes
            elif not _fallocate(self.fd, 0, self._file_bytes, size):
                continue  # what the write says of it, counts
            self._file_bytes = size
            return


def _header_check(page: npt.NDArray[np.uint8]) -> int:
    return int(xxhash.xxh3_64_intdigest(page[: _HEADER.itemsize - 8].tobytes()))


def _written_bytes(fd: int, size_bytes: int) -> int:
    """Return up to where a file was written without a gap; what is only allocated reads as a hole."""
    try:
        return min(os.lseek(fd, 0, os.SEEK_HOLE), size_bytes) // HEADER_BYTES * HEADER_BYTES
    except OSError as error:
        if error.errno in {errno.ENXIO, errno.EINVAL, errno.EOPNOTSUPP}:  # empty, or a file system that cannot say
            return size_bytes
        raise IoError(error.errno or 0, f"cannot ask where a log has holes: {error.strerror}") from error


def _fallocate(fd: int, mode: int, start: int, end: int) -> bool:
    """Allocate space; False where kernel, file system or drive cannot."""
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return bool(call(fd, mode, start, end - start) == 0)
