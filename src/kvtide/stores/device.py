"""Where a store's I/O is counted: a loop device of its own, or the best that can be had without root. Next: host.

Decides what the counts mean and says so in `source`. Knows no store.

Theory. Bytes are counted by the block layer between two syncfs calls, because a process's own counters miss journal
writes and count pages that were never written. A loop device that only the measured store uses makes the count exact.
Its mount lives in a mount namespace of this process, its image has no name, and the loop device clears itself when
nobody has it open or mounted: however the process ends, the kernel takes all three away.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtide.errors import ConfigError, IoError, UnsupportedError
from kvtide.probe.caps import caps_of
from kvtide.probe.mounts import own_mounts
from kvtide.stores.loop import CONTROL, open_loop
from kvtide.units import format_bytes, printable

SECTOR_BYTES = 512  # of /sys/block/*/stat, whatever the device has
TOOLS = ("mkfs.ext4", "mount", "umount")
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Counts:
    """What a device has done since it was made; differences are what happened in between. Sizes in bytes."""

    num_reads: int = 0
    read_bytes: int = 0
    num_writes: int = 0
    write_bytes: int = 0
    num_flushes: int = 0

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, each.name) - getattr(other, each.name) for each in fields(self)))


def parse_stat(text: str) -> Counts:
    """Return the counts of a line of /sys/block/*/stat. Source: Documentation/block/stat.rst of the kernel.

    Raises: UnsupportedError where the line is no such line.
    """
    words = text.split()
    if len(words) < 11 or not all(word.isdigit() for word in words):
        raise UnsupportedError(f"the block layer's counters read {printable(text)[:60]!r}; expected 11 numbers or more")
    values = [int(word) for word in words]
    flushes = values[15] if len(values) > 15 else 0
    return Counts(values[0], values[2] * SECTOR_BYTES, values[4], values[6] * SECTOR_BYTES, flushes)


def sync_file_system(path: Path) -> None:
    """Write everything that is dirty in the file system of `path`.

    Raises: IoError where the disk refuses.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _LIBC.syncfs(fd):
            number = ctypes.get_errno()
            raise IoError(number, f"cannot sync {path}: {os.strerror(number)}")
    finally:
        os.close(fd)


class Shared:
    """A folder on a device that others use, too: their writes are counted with the store's."""

    is_own = False

    def __init__(self, work: Path) -> None:
        self.caps = caps_of(work)
        if not self.caps.name:
            raise UnsupportedError(
                f"no block device is under {work} ({self.caps.file_system}), so nothing counts its writes; "
                "type --dir with a folder on a disk"
            )
        self.number, self.name = self.caps.number, self.caps.name
        self.source = f"diskstats of {self.name}, others' writes included (root gets a loop device of its own)"
        self.folder = Path(tempfile.mkdtemp(prefix="kvtide-stores-", dir=work))

    def counts(self) -> Counts:
        """Return what the device has done so far."""
        return parse_stat(Path(f"/sys/block/{self.name}/stat").read_text())

    def refresh(self) -> None:
        """Forget the files' pages in memory, as far as one may without root."""
        sync_file_system(self.folder)
        for path in self.folder.rglob("*"):
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class LoopDisk:
    """An ext4 file system of `size_bytes` on a loop device of its own, backed by a nameless file in `work`.

    `image`: an open image to mount instead of a new one; its journal is replayed, as after a power cut.
    Raises: UnsupportedError without root or the tools; ConfigError where there is no room; IoError where a tool fails.
    Threads: only the thread that enters sees the mount, and what it starts afterwards.
    """

    is_own = True

    def __init__(self, work: Path, *, size_bytes: int = 4 << 30, image: int | None = None) -> None:
        why = why_not()
        if why:
            raise UnsupportedError(why)
        self.work, self.size_bytes = work, size_bytes
        self.name, self.number, self._is_mounted = "", 0, False
        self.image = _image(work, size_bytes) if image is None else image
        self._device = -1  # open while this lives, or the device clears itself
        self._is_new = image is None
        self.mount_point = Path(tempfile.mkdtemp(prefix="kvtide-mount-"))
        self.folder = self.mount_point / "store"
        self.source = "own loop device, ext4"

    def __enter__(self) -> Self:
        try:
            own_mounts()
            self._device, self.name = open_loop(self.image)
            number = os.fstat(self._device).st_rdev
            self.number = os.major(number) << 20 | os.minor(number)
            if self._is_new:
                # Nothing may be initialised later: it would be counted as the store's.
                lazy = "lazy_itable_init=0,lazy_journal_init=0"
                _tool("mkfs.ext4", "-q", "-F", "-m", "0", "-E", lazy, f"/dev/{self.name}")
            self._mount()
            self.folder.mkdir(exist_ok=True)
        except BaseException:
            self.close()
            raise
        sync_file_system(self.folder)
        return self

    def counts(self) -> Counts:
        """Return what the device has done so far."""
        return parse_stat(Path(f"/sys/block/{self.name}/stat").read_text())

    def refresh(self) -> None:
        """Mount the file system anew, so that nothing of it is in memory. No process may use it."""
        _tool("umount", str(self.mount_point))
        self._is_mounted = False
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._device, 0, 0, os.POSIX_FADV_DONTNEED)  # the device's own page cache
        self._mount()

    def copy_image(self) -> int:
        """Return a copy of what the device has been given so far, as an open nameless file: a power cut.

        Commands that were complete are in it, flushed or not; what only the page cache holds is not.
        """
        copy = _image(self.work, self.size_bytes)
        at = 0
        while at < self.size_bytes:
            try:
                start = os.lseek(self.image, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # no data behind
                    break
                raise
            at = os.lseek(self.image, start, os.SEEK_HOLE)
            while start < at:
                moved = os.copy_file_range(self.image, copy, min(at - start, 64 << 20), start, start)
                if not moved:
                    break
                start += moved
        return copy

    def close(self) -> None:
        """Unmount, which clears the loop device and frees the image. Idempotent."""
        if self._is_mounted:
            done = subprocess.run(["umount", str(self.mount_point)], capture_output=True, check=False)
            if done.returncode:  # somebody still holds a file: take it away when they are gone
                subprocess.run(["umount", "--lazy", str(self.mount_point)], capture_output=True, check=False)
            self._is_mounted = False
        self.name = ""
        for fd in (self._device, self.image):
            if fd >= 0:
                os.close(fd)
        self._device = self.image = -1
        with contextlib.suppress(OSError):
            self.mount_point.rmdir()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _mount(self) -> None:
        _tool("mount", "-t", "ext4", f"/dev/{self.name}", str(self.mount_point))
        self._is_mounted = True


Place = LoopDisk | Shared


def why_not() -> str:
    """Return why there can be no loop device here, empty if there can be one."""
    if os.geteuid():
        return "a loop device needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"a loop device needs {', '.join(missing)}; type apt install util-linux mount e2fsprogs"
    return "" if Path(CONTROL).exists() else f"this kernel has no loop devices ({CONTROL})"


def _image(work: Path, size_bytes: int) -> int:
    free = os.statvfs(work)
    if free.f_bavail * free.f_frsize < size_bytes:
        room = format_bytes(free.f_bavail * free.f_frsize)
        raise ConfigError(
            f"{work} has {room} free; an image of {format_bytes(size_bytes)} is needed: "
            "make room, or type --dir, --disk or fewer --rows"
        )
    fd = os.open(work, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    os.ftruncate(fd, size_bytes)
    return fd


def _tool(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise IoError(errno.EIO, f"{' '.join(words)}: {printable(done.stderr.strip())}")
