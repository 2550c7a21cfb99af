"""The temporary file that a probe measures on: how large it is, how it is opened, and that it always goes away.

Decides direct or buffered access. The file has no name while it is in use, so that the kernel frees it however the
process ends. Every byte is written before it is read, with data that no drive can compress: a hole, or an extent that
was only reserved, would be read without the drive. Next: measure.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError, IoError
from kvtide.io.ops import OP, WRITE, Engine, address_of
from kvtide.probe.memory import available_bytes
from kvtide.units import format_bytes

MIB = 1 << 20
FILE_BYTES_MAX = 1 << 30
FILE_BYTES_MIN = 64 * MIB
FREE_SHARE = 0.1  # of the free space, at most
PIECE_BYTES = 16 * MIB  # written between two looks at the clock
WRITE_BYTES = MIB  # of one write while filling


class Scratch:
    """A nameless file under `directory`, open for reading and writing.

    Raises: ConfigError if nothing can be made there or too little is free; IoError where the disk refuses.
    """

    def __init__(self, directory: Path, *, is_memory: bool = False, file_bytes_max: int = FILE_BYTES_MAX) -> None:
        self.directory = directory
        self.wanted_bytes = _wanted_bytes(directory, file_bytes_max, is_memory=is_memory)
        self.file_bytes = 0  # written so far: what may be measured
        self.fd = -1
        self.is_direct = True
        try:
            self.fd = _open_nameless(directory, os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise _cannot_make(directory, error) from None
            self._open_buffered()

    def fill(
        self, engine: Engine, arena: npt.NDArray[np.uint8], end_ns: int, *, on_progress: Callable[[int], None]
    ) -> None:
        """Write the file from `arena`, which holds random bytes; stop early, with a shorter file, after `end_ns`.

        `on_progress` gets the bytes written.
        Raises: IoError where the disk refuses.
        """
        try:
            os.posix_fallocate(self.fd, 0, self.wanted_bytes)
        except OSError as error:
            if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:  # those only mean: not here
                raise _cannot_write(self.directory, error.errno or errno.EIO) from None
        words = arena.view(np.uint64)
        for first in range(0, self.wanted_bytes, PIECE_BYTES):
            number = self._write(engine, arena, first)
            if number == errno.EINVAL and first == 0 and self.is_direct:  # accepted at opening, refused at writing
                self._open_buffered()
                number = self._write(engine, arena, first)
            if number:
                raise _cannot_write(self.directory, number)
            self.file_bytes = first + PIECE_BYTES
            on_progress(self.file_bytes)
            words[: PIECE_BYTES // 8] += np.uint64(0x9E3779B97F4A7C15)  # so that no two pieces are the same
            if time.monotonic_ns() > end_ns:
                break
        os.ftruncate(self.fd, self.file_bytes)
        self.sync()

    def sync(self) -> None:
        """Let the drive write what it was given; without direct access, forget the pages in memory too."""
        try:
            os.fdatasync(self.fd)
        except OSError as error:
            raise _cannot_write(self.directory, error.errno or errno.EIO) from None
        if not self.is_direct:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file, which ends it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_buffered(self) -> None:
        self.close()
        self.is_direct = False
        try:
            self.fd = _open_nameless(self.directory, 0)
        except OSError as error:
            raise _cannot_make(self.directory, error) from None

    def _write(self, engine: Engine, arena: npt.NDArray[np.uint8], first: int) -> int:
        """Write one piece; return the first errno, 0 if there is none."""
        num = PIECE_BYTES // WRITE_BYTES
        ops = np.zeros(num, OP)
        steps = np.arange(num, dtype=np.uint64) * np.uint64(WRITE_BYTES)
        ops["fd"], ops["kind"], ops["length"] = self.fd, WRITE, WRITE_BYTES
        ops["offset"], ops["address"] = np.uint64(first) + steps, np.uint64(address_of(arena)) + steps
        engine.submit(ops)
        done = engine.reap(num)
        if (done["length"] != WRITE_BYTES).any() and not done["error"].any():
            return errno.ENOSPC
        return int(done["error"][done["error"].nonzero()[0][0]]) if done["error"].any() else 0


def _wanted_bytes(directory: Path, file_bytes_max: int, *, is_memory: bool) -> int:
    """Return the size of the file: whole pieces, a share of what is free."""
    try:
        space = os.statvfs(directory)
    except OSError as error:
        raise _cannot_make(directory, error) from None
    free_bytes = space.f_bavail * space.f_frsize
    if is_memory:
        free_bytes = min(free_bytes, available_bytes())
    least = min(FILE_BYTES_MIN, file_bytes_max)
    if free_bytes < 2 * least:
        raise ConfigError(
            f"{directory} has {format_bytes(free_bytes)} free; a probe needs {format_bytes(2 * least)}: "
            f"make room, or type another directory"
        )
    wanted = max(least, min(file_bytes_max, int(free_bytes * FREE_SHARE)))
    return max(PIECE_BYTES, wanted // PIECE_BYTES * PIECE_BYTES)


def _open_nameless(directory: Path, flags: int) -> int:
    flags |= os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT}:
            raise
    name = directory / f".kvtide-probe-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        return os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
    finally:
        name.unlink(missing_ok=True)


def _cannot_make(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot make a file in {directory}: {error.strerror}; type a directory that you may write to")


def _cannot_write(directory: Path, number: int) -> IoError:
    return IoError(number, f"cannot write the probe's file in {directory}: {os.strerror(number)}")
