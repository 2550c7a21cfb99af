"""One log of a memory: rows are appended in groups, each durable when `append` returns. Next: parts.

Moves bytes only through an `io.Engine`. Decides where a group lies and which pages are written for it; knows nothing of
what rows mean.

Theory. `[header page][group][group]...[zeros]`. Space is written with zeros ahead of its use, a portion at a time: a
write into space that was never written, or that grows the file, makes the file system write its journal with each sync:
12 KiB a commit on ext4, and 24 KiB if the file grows. Groups overwrite the zeros in whole pages, then comes a sync. A
torn group fails its checksum and is the end of the log. The partly filled page at the end may be written again with the
next group: its first bytes stay as they are, so that a write torn between sectors leaves what was acknowledged.
"""

from __future__ import annotations

import ctypes
import errno
import os

import numpy as np
import numpy.typing as npt
import xxhash

from kvtide.errors import FormatError, IoError, ShortIo
from kvtide.io.ops import FSYNC, OP, READ, WRITE, Engine, address_of, aligned_buffer
from kvtide.recall.records import Placed, Scanned, Vectors, encode, place, scan
from kvtide.trace.events import CAUSES
from kvtide.trace.record import OP_EVENT, Recorder

MAGIC = b"KVTMLOG\0"
VERSION = 1
HEADER_BYTES = 4096
OP_BYTES_MAX = 1 << 20
RESERVE_BYTES_MIN = 64 << 10  # written with zeros at once; then half of what there is, so that little is for nothing
RESERVE_BYTES_MAX = 1 << 20  # about a second of 1,000 rows of 1 KiB
FALLOC_FL_WRITE_ZEROES = 0x80  # Linux 6.17: space that counts as written, without moving its bytes
_HEADER = np.dtype([("magic", "V8"), ("version", "<u4"), ("dim", "<u4"), ("log", "<u8"), ("check", "<u8")])


class MemoryIo:
    """Reads, writes and syncs of a memory, waited for, and recorded under their cause.

    Threads: one at a time.
    """

    def __init__(self, engine: Engine, recorder: Recorder | None = None) -> None:
        self.engine, self._recorder = engine, recorder
        self.written_bytes = self.read_bytes = self.num_writes = self.num_reads = self.num_syncs = 0

    def move(self, kind: int, fd: int, buffer: npt.NDArray[np.uint8], at: int, *, cause: str, what: str) -> None:
        """Read into `buffer`, or write it, at byte `at`: operations of up to 1 MiB, all in flight at once.

        Raises: IoError that names `what`; ShortIo at the end of the file.
        """
        starts = np.arange(0, buffer.nbytes, OP_BYTES_MAX, dtype=np.uint64)
        batch = np.zeros(len(starts), OP)
        batch["fd"], batch["kind"], batch["tag"] = fd, kind, np.arange(len(starts))
        batch["offset"], batch["address"] = starts + np.uint64(at), starts + np.uint64(address_of(buffer))
        batch["length"] = np.minimum(buffer.nbytes - starts.astype(np.int64), OP_BYTES_MAX)
        self.run(batch, cause=cause, what=what)

    def run(self, batch: npt.NDArray[np.void], *, cause: str, what: str) -> None:
        """Do every operation of `batch`, whose tags count from 0.

        Raises: as `move`, after all have ended.
        """
        self.engine.submit(batch)
        parts, num = [], 0
        while num < len(batch):
            parts.append(self.engine.reap(1))
            num += len(parts[-1])
        done = np.concatenate(parts)
        tags = done["tag"].astype(np.int64)
        is_write = batch["kind"][tags] == WRITE
        moved = done["length"].astype(np.int64)
        self.num_writes += int(is_write.sum())
        self.num_reads += int((batch["kind"][tags] == READ).sum())
        self.num_syncs += int((batch["kind"][tags] == FSYNC).sum())
        self.written_bytes += int(moved[is_write].sum())
        self.read_bytes += int(moved[~is_write].sum())
        self._record(batch[tags], done, cause)
        bad = np.flatnonzero((done["error"] != 0) | (moved != batch["length"][tags]))
        if len(bad):
            number = int(done["error"][bad[0]])
            where = f"{what}, byte {int(batch['offset'][tags[bad[0]]])}"
            if number:
                raise IoError(number, f"{where}: {os.strerror(number)}{_hint(number)}")
            raise ShortIo(errno.EIO, f"{where}: {int(moved[bad[0]])} bytes moved, not all of them")

    def sync(self, fd: int, *, what: str) -> None:
        """Wait until what was written to `fd` is durable.

        Raises: IoError.
        """
        batch = np.zeros(1, OP)
        batch["fd"], batch["kind"] = fd, FSYNC
        self.run(batch, cause="memory-log", what=what)

    def _record(self, batch: npt.NDArray[np.void], done: npt.NDArray[np.void], cause: str) -> None:
        kept = batch["kind"] != FSYNC
        if self._recorder is None or not kept.any():
            return
        batch, done = batch[kept], done[kept]
        events = np.zeros(len(batch), OP_EVENT)
        events["time_ns"], events["complete_ns"] = done["submit_ns"], done["complete_ns"]
        events["cause"], events["fd"], events["is_write"] = CAUSES.index(cause), batch["fd"], batch["kind"] == WRITE
        events["offset"], events["length"], events["num_fragments"] = batch["offset"], done["length"], 1
        events["depth"], events["error"], events["layer"], events["slot"] = done["depth"], done["error"], -1, -1
        self._recorder.record_ops(events)


def _hint(number: int) -> str:
    return "; nothing that was acknowledged is lost: make room and add again" if number == errno.ENOSPC else ""


class Log:
    """A log that can be appended to.

    Threads: one at a time.
    """

    def __init__(
        self, io: MemoryIo, fd: int, *, number: int, dim: int, salt: bytes, page_bytes: int, size_bytes: int, name: str
    ) -> None:
        """Take over an open file of `size_bytes` that were all written once; `load` or `begin` comes next."""
        self.fd, self.number, self.dim, self.name = fd, number, dim, name
        self._io, self._salt, self._page_bytes = io, salt, page_bytes
        self.size_bytes = size_bytes
        self.end, self.sequence = HEADER_BYTES, 1
        self._tail = b""  # what the page in which the last group ends holds of it
        self._can_write_zeroes = True

    def begin(self) -> None:
        """Make the log empty and its header durable: the groups of an earlier life have another number.

        Raises: IoError.
        """
        if self.size_bytes < HEADER_BYTES:
            self._reserve(HEADER_BYTES)
        page = aligned_buffer(HEADER_BYTES)
        header = page[: _HEADER.itemsize].view(_HEADER)
        header["magic"], header["version"] = np.frombuffer(MAGIC, "V8")[0], VERSION
        header["dim"], header["log"] = self.dim, self.number
        header["check"] = _header_check(page)
        self._io.move(WRITE, self.fd, page, 0, cause="memory-log", what=self.name)
        self._io.sync(self.fd, what=self.name)

    def load(self) -> Scanned:
        """Read what the log holds, so that `append` goes on behind it; a header that is not whole is made again.

        A file that was another log before holds nothing of this one.

        Raises: IoError; FormatError if it is a log of other vectors.
        """
        raw = aligned_buffer(self.size_bytes)
        self._io.move(READ, self.fd, raw, 0, cause="memory-read", what=self.name)
        is_begun = len(raw) >= HEADER_BYTES and self._is_header(raw)
        scanned = scan(
            raw, start=HEADER_BYTES, log=self.number, dim=self.dim, salt=self._salt, page_bytes=self._page_bytes
        )
        if not is_begun:
            self.begin()
        self.end, self.sequence = scanned.end, scanned.sequence
        self._tail = raw[self.end - self.end % self._page_bytes : self.end].tobytes()
        return scanned

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
        at, first, head = self._where(len(raw))
        pages = aligned_buffer(-(-(at + len(raw) - first) // self._page_bytes) * self._page_bytes)
        body = head + raw
        pages[: len(body)] = np.frombuffer(body, np.uint8)
        if first + pages.nbytes > self.size_bytes:
            self._reserve(first + pages.nbytes)
        self._io.move(WRITE, self.fd, pages, first, cause="memory-log", what=self.name)
        self._io.sync(self.fd, what=self.name)
        self.end, self.sequence = at + len(raw), self.sequence + 1
        self._tail = body[len(body) - self.end % self._page_bytes :] if self.end % self._page_bytes else b""
        return place(rows, len(vectors), self.dim, at)

    def _where(self, num_bytes: int) -> tuple[int, int, bytes]:
        """Return where a group goes, where its first page begins, and what that page holds before it."""
        page, filled = self._page_bytes, len(self._tail)
        if filled and -(-(filled + num_bytes) // page) <= -(-num_bytes // page):
            return self.end, self.end - filled, self._tail
        at = -(-self.end // page) * page
        return at, at, b""

    def pages_for(self, num_bytes: int) -> int:
        """Return the bytes that a group of `num_bytes` would write."""
        at, first, _ = self._where(num_bytes)
        return -(-(at + num_bytes - first) // self._page_bytes) * self._page_bytes

    def _reserve(self, end: int) -> None:
        """Let the space up to `end`, and some more, be written: with zeros, unless the drive can say so without."""
        portion = min(max(RESERVE_BYTES_MIN, self.size_bytes // 2), RESERVE_BYTES_MAX)
        portion = max(portion, end - self.size_bytes)
        portion = -(-portion // HEADER_BYTES) * HEADER_BYTES
        if not (self._can_write_zeroes and _write_zeroes(self.fd, self.size_bytes, portion)):
            self._can_write_zeroes = False
            zeros = aligned_buffer(portion)
            self._io.move(WRITE, self.fd, zeros, self.size_bytes, cause="memory-log", what=self.name)
        self._io.sync(self.fd, what=self.name)
        self.size_bytes += portion


def _header_check(page: npt.NDArray[np.uint8]) -> int:
    return int(xxhash.xxh3_64_intdigest(page[: _HEADER.itemsize - 8].tobytes()))


def _write_zeroes(fd: int, at: int, length: int) -> bool:
    """Ask for space that counts as written; False where kernel, file system or drive cannot."""
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return bool(call(fd, FALLOC_FL_WRITE_ZEROES, at, length) == 0)
