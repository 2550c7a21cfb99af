"""Who owns a namespace: one process, for as long as it holds an flock. Next: namespace."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtide.errors import IoError

_PAUSES_S = 0.002, 0.008, 0.02, 0.02


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Turn what the system refuses about `path` into an IoError that names it."""
    try:
        yield
    except IoError:
        raise
    except OSError as error:
        raise IoError(error.errno or 0, f"cannot open {error.filename or path}: {error.strerror}") from None


def lock(path: Path, *, option: str = "--dir") -> int:
    """Become the one owner of namespace `path`; return the file descriptor that holds the lock.

    `option` is what to type to choose another.

    Raises: IoError(EBUSY) that names the process that owns it.
    """
    with named(path / "owner.lock"):
        fd = os.open(path / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _try_lock(fd)
    except OSError as error:
        owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        if error.errno not in {errno.EAGAIN, errno.EACCES}:
            raise IoError(error.errno or 0, f"cannot lock {path}: {error.strerror}") from None
        raise IoError(
            errno.EBUSY, f"{path} is owned by process {owner}; wait for it to end, or type another {option}"
        ) from None
    if not _is_at(fd, path / "owner.lock"):
        os.close(fd)
        raise IoError(errno.EBUSY, f"{path} is being removed by another process; try again")
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _try_lock(fd: int) -> None:
    """Take the lock; try again a few times, since who only looks whether there is an owner has it for a moment."""
    for pause_s in _PAUSES_S:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in {errno.EAGAIN, errno.EACCES}:
                raise
        time.sleep(pause_s)
    return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Own namespace `path` for the length of a `with` block."""
    fd = lock(path)
    try:
        yield
    finally:
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Say whether `path` still names the file behind `fd`: it may have been removed before the lock was got."""
    try:
        there, here = path.lstat(), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
