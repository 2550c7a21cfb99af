"""Files and directories of a store, opened without trusting what lies there. Next: owner, namespace.

Decides what may be a part of a store: directories that are ours and that nobody else may write to, and in them regular
files under names of our own. No link is followed, no pipe waited for, nothing read without a bound. Modes are set, not
asked for, so a umask changes nothing. Once a directory is ours alone, a file cannot be swapped between a look and its
opening.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path

from kvtide.errors import ConfigError
from kvtide.units import printable

LOG = logging.getLogger("kvtide.store")
FILE_MODE, DIRECTORY_MODE = 0o600, 0o700
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def make_directory(path: Path, *, parents: bool = False) -> None:
    """Make directory `path` for its owner only, unless it is there; then see that it is safe.

    Raises: ConfigError as `check_directory`; OSError of the system.
    """
    with suppress(FileExistsError):
        if parents:
            path.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        path.mkdir(mode=DIRECTORY_MODE)
        with suppress(OSError):  # of file systems that have no modes
            path.chmod(DIRECTORY_MODE)
    check_directory(path, may_be_link=parents)


def check_directory(path: Path, *, may_be_link: bool = False) -> None:
    """Raise unless `path` is a directory that only this user, or root, may write to.

    A warning is logged where a group may, or where root uses a directory of somebody else.

    Raises: ConfigError that says what to type; FileExistsError if it is no directory, or a link where that may not be.
    """
    status = path.stat() if may_be_link else path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise FileExistsError(errno.EEXIST, "it is no directory", str(path))
    name, us = printable(str(path)), os.geteuid()
    if status.st_uid not in {us, 0} and us != 0:
        raise ConfigError(
            f"{name} belongs to user {status.st_uid}, who could read and change all that is in it; "
            f"type another directory, or chown -R {us} {name}"
        )
    if status.st_mode & stat.S_IWOTH:
        raise ConfigError(f"everybody may write to {name}, and so put files of theirs in it; type chmod go-w {name}")
    if status.st_mode & stat.S_IWGRP:
        LOG.warning("a group may write to %s; type chmod go-w %s unless all its members are trusted", name, name)
    if status.st_uid != us and us == 0:
        LOG.warning("%s belongs to user %d, who can read and change all that is in it", name, status.st_uid)


def open_file(path: Path, flags: int) -> int:
    """Open the regular file `path`, following no link; one that is made, or can be, is for its owner only.

    Raises: OSError of the system, and EINVAL for anything but a regular file.
    """
    fd = os.open(path, flags | _SAFE, FILE_MODE)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    is_written = flags & (os.O_CREAT | os.O_RDWR | os.O_WRONLY)
    if is_written and status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != FILE_MODE:
        with suppress(OSError):  # of file systems that have no modes
            os.fchmod(fd, FILE_MODE)
    os.set_blocking(fd, True)  # it was for pipes; older kernels would answer io_uring EAGAIN
    return fd


def read_file(path: Path, bytes_max: int) -> bytes:
    """Return what the regular file `path` holds, following no link.

    Raises: OSError of the system, EINVAL for anything but a regular file, and EFBIG if it is longer than `bytes_max`.
    """
    fd = open_file(path, os.O_RDONLY)
    with os.fdopen(fd, "rb") as file:
        if os.fstat(fd).st_size > bytes_max:
            raise OSError(errno.EFBIG, f"it is longer than the {bytes_max} bytes it can have", str(path))
        return file.read(bytes_max)


def read_secret(path: Path, bytes_max: int, hint: str) -> bytes:
    """Return what `path` holds, a file, or a link to one, that nobody but this user, or root, may read.

    Raises: ConfigError that says what is wrong with it, and `hint`.
    """
    name = printable(str(path))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise ConfigError(f"--key-file {name}: {error.strerror}; {hint}") from None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"--key-file {name} is no regular file; {hint}")
        if status.st_mode & 0o077:
            raise ConfigError(f"others may read --key-file {name}; type chmod 600 {name}")
        if status.st_uid not in {os.geteuid(), 0}:
            raise ConfigError(f"--key-file {name} belongs to user {status.st_uid}; {hint}")
        return file.read(bytes_max)


def write_whole(path: Path, content: bytes) -> None:
    """Let `path` appear whole or not at all, readable by its owner only.

    What an interrupted one left under the name it is written as is replaced, whatever it is but a directory.
    """
    partial = partial_of(path)
    with suppress(FileNotFoundError):
        partial.unlink()
    with os.fdopen(open_file(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def partial_of(path: Path) -> Path:
    """Return the name that `write_whole` writes `path` under until it is whole."""
    return path.with_name(path.name + ".partial")


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
