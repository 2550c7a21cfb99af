"""Who owns a namespace: one process, for as long as it holds an flock. Next: namespace.

A forked child shares the lock of its parent, and would keep it when the parent is gone. So it gives up its share at
once, and the parent unlocks what it gives back, for children that were forked past Python.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtide.errors import IoError
from kvtide.tiers.guard import open_file
from kvtide.units import printable

_PAUSES_S = 0.002, 0.008, 0.02, 0.02
_held: dict[int, tuple[int, int]] = {}  # descriptors of locks and their files: a forked child closes them


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
        fd = open_file(path / "owner.lock", os.O_RDWR | os.O_CREAT)
    try:
        _try_lock(fd)
    except OSError as error:
        owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        owner = printable(owner) or "unknown"
        os.close(fd)
        if error.errno not in {errno.EAGAIN, errno.EACCES}:
            raise IoError(error.errno or 0, f"cannot lock {path}: {error.strerror}") from None
        raise IoError(
            errno.EBUSY, f"{path} is owned by process {owner}; wait for it to end, or type another {option}"
        ) from None
    if not _is_at(fd, path / "owner.lock"):
        os.close(fd)
        raise IoError(errno.EBUSY, f"{path} is being removed by another process; try again")
    with contextlib.suppress(OSError):  # a full disk must not keep its owner out
        os.ftruncate(fd, os.pwrite(fd, f"{os.getpid()}\n".encode(), 0))  # in this order it needs no new space
    _held[fd] = _file_of(fd)
    return fd


def unlock(fd: int) -> None:
    """Give back what `lock` returned. In a forked child, which has given it up, nothing."""
    if _held.pop(fd, None) is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _give_up() -> None:
    for fd, file in _held.items():
        with contextlib.suppress(OSError):
            if _file_of(fd) == file:  # else it was closed past us, and is something else now
                os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_give_up)


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
        unlock(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Say whether `path` still names the file behind `fd`: it may have been removed before the lock was got."""
    try:
        there, here = path.lstat(), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _file_of(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
