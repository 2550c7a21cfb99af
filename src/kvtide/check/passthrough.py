"""A file system that passes all on to another directory, save what a fault strikes. Next: faultfs, which mounts it.

Decides what each of the kernel's requests does in the directory below. Refuses to know who uses the mount.

*Theory.* Each inode the kernel knows is an O_PATH descriptor, so that renamed and unlinked files stay what they are:

    node id -> descriptor, times looked up          handle -> descriptor opened for reading and writing

Names and attributes are valid for no time at all, so what is changed below shows above.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from kvtide.check.faults import Armed, Faults
from kvtide.check.fuse import Act, Connection, Request

NOT_OURS = os.O_DIRECT | os.O_APPEND | os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL  # the kernel has dealt with them
PAST_THE_CACHE = 1 << 0 | 1 << 6  # FOPEN_DIRECT_IO, FOPEN_PARALLEL_DIRECT_WRITES

_ATTR = struct.Struct("<6Q10I")
_ENTRY = struct.Struct("<QQQQII")
_SETATTR = struct.Struct("<IIQQQQQQIIIIIIII")
_MOVE = struct.Struct("<QQIIQII")  # read and write
_DIRENT = struct.Struct("<QQII")
_STATFS = struct.Struct("<5QIIII24x")
_FALLOCATE = struct.Struct("<QQQII")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class Node:
    """An inode the kernel knows."""

    fd: int
    identity: tuple[int, int]
    lookups: int = 1


@dataclass(slots=True)
class Handle:
    """An open file, or an open directory with what was found in it."""

    fd: int
    names: list[tuple[bytes, int, int]] = field(default_factory=list)


class PassThrough:
    """The file system: `backing` seen through the FUSE connection `device`."""

    def __init__(self, device: int, backing: Path, faults: Faults) -> None:
        root = os.open(backing, os.O_PATH | os.O_DIRECTORY)
        self._faults, self._lock = faults, threading.Lock()
        self._nodes = {1: Node(root, _identity(os.fstat(root)))}
        self._ids = {self._nodes[1].identity: 1}
        self._handles: dict[int, Handle] = {}
        self._next_id = 2
        self._root = os.fsencode(backing.resolve())
        self._connection = Connection(device, faults)

    def _acts(self) -> dict[int, tuple[str, Act]]:
        """For each request the kernel may make the name a fault knows it by, and what is done."""
        return {
            1: ("lookup", self._lookup),
            3: ("getattr", self._getattr),
            4: ("setattr", self._setattr),
            5: ("readlink", self._readlink),
            6: ("symlink", self._symlink),
            8: ("mknod", self._mknod),
            9: ("mkdir", self._mkdir),
            10: ("unlink", self._unlink),
            11: ("rmdir", self._rmdir),
            12: ("rename", self._rename),
            13: ("link", self._link),
            14: ("open", self._open),
            15: ("read", self._read),
            16: ("write", self._write),
            17: ("statfs", self._statfs),
            18: ("release", self._release),
            20: ("fsync", self._fsync),
            27: ("opendir", self._opendir),
            28: ("readdir", self._readdir),
            29: ("release", self._release),
            30: ("fsync", self._fsync),
            35: ("create", self._create),
            43: ("fallocate", self._fallocate),
            45: ("rename", self._rename),
            46: ("lseek", self._lseek),
        }

    def serve(self) -> None:
        """Answer requests until the file system is unmounted."""
        os.umask(0)  # the kernel has taken the caller's off the modes
        self._connection.serve(self._acts(), self._forget, self._path)

    def counts(self) -> Counter[str]:
        """How often each operation came."""
        return self._connection.counts.copy()

    def forget_pages(self) -> None:
        """Have the kernel drop what it keeps of all files, so that the next read comes here."""
        with self._lock:
            nodes = list(self._nodes)
        self._connection.forget_pages(nodes)

    def _path(self, request: Request) -> str:
        """The path below the mount that a request is about."""
        base = os.readlink(_proc(self._nodes[request.node].fd).encode()) if request.node else self._root  # noqa: PTH115
        skip = {1: 0, 9: 8, 10: 0, 11: 0, 12: 8, 35: 16, 45: 16}.get(request.opcode)
        whole = base if skip is None else base + b"/" + request.name(skip)
        return os.fsdecode(whole[len(self._root) + 1 :])

    # Inodes

    def _fd(self, request: Request) -> int:
        return self._nodes[request.node].fd

    def _entry(self, parent: int, name: bytes) -> bytes:
        """Find `name` in a directory and count it as known to the kernel; return what the kernel wants of it."""
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent)
        found = os.fstat(fd)
        with self._lock:
            known = self._ids.get(_identity(found))
            if known is None:
                known, self._next_id = self._next_id, self._next_id + 1
                self._nodes[known], self._ids[_identity(found)] = Node(fd, _identity(found)), known
            else:
                self._nodes[known].lookups += 1
                os.close(fd)
        return _ENTRY.pack(known, 0, 0, 0, 0, 0) + _attributes(found)

    def _forget(self, pairs: list[tuple[int, int]]) -> None:
        with self._lock:
            for node, times in pairs:
                one = self._nodes.get(node)
                if one is None or node == 1:
                    continue
                one.lookups -= times
                if one.lookups <= 0:
                    del self._nodes[node], self._ids[one.identity]
                    os.close(one.fd)

    def _handle(self, fd: int, flags: int = 0) -> bytes:
        with self._lock:
            number, self._next_id = self._next_id, self._next_id + 1
            self._handles[number] = Handle(fd)
        return struct.pack("<QII", number, PAST_THE_CACHE if flags & os.O_DIRECT else 0, 0)

    # What requests do

    def _lookup(self, request: Request, _: list[Armed]) -> bytes:
        return self._entry(self._fd(request), request.name())

    def _getattr(self, request: Request, _: list[Armed]) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + _attributes(os.fstat(self._fd(request)))

    def _setattr(self, request: Request, _: list[Armed]) -> bytes:
        valid, _, handle, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid, _ = _SETATTR.unpack_from(
            request.body
        )
        path = Path(_proc(self._fd(request)))
        if valid & 1:
            path.chmod(stat.S_IMODE(mode))
        if valid & 6:
            os.chown(path, uid if valid & 2 else -1, gid if valid & 4 else -1)
        if valid & 8:
            os.truncate(self._handles[handle].fd if valid & 64 else path, size)
        if valid & 0x1B0:
            now, old = time.time_ns(), path.stat()
            first = now if valid & 128 else atime * 10**9 + atime_ns if valid & 16 else old.st_atime_ns
            last = now if valid & 256 else mtime * 10**9 + mtime_ns if valid & 32 else old.st_mtime_ns
            os.utime(path, ns=(first, last))
        return self._getattr(request, _)

    def _readlink(self, request: Request, _: list[Armed]) -> bytes:
        return os.readlink(b"", dir_fd=self._fd(request))

    def _made(self, request: Request, name: bytes) -> bytes:
        """What was made belongs to who asked for it."""
        if request.uid or request.gid:
            os.chown(name, request.uid, request.gid, dir_fd=self._fd(request), follow_symlinks=False)
        return self._entry(self._fd(request), name)

    def _symlink(self, request: Request, _: list[Armed]) -> bytes:
        name, target = request.names()
        os.symlink(target, name, dir_fd=self._fd(request))
        return self._made(request, name)

    def _mknod(self, request: Request, _: list[Armed]) -> bytes:
        mode, device, _, _ = struct.unpack_from("<IIII", request.body)
        os.mknod(request.name(16), mode, device, dir_fd=self._fd(request))
        return self._made(request, request.name(16))

    def _mkdir(self, request: Request, _: list[Armed]) -> bytes:
        os.mkdir(request.name(8), struct.unpack_from("<I", request.body)[0], dir_fd=self._fd(request))
        return self._made(request, request.name(8))

    def _unlink(self, request: Request, _: list[Armed]) -> bytes:
        os.unlink(request.name(), dir_fd=self._fd(request))
        return b""

    def _rmdir(self, request: Request, _: list[Armed]) -> bytes:
        os.rmdir(request.name(), dir_fd=self._fd(request))
        return b""

    def _rename(self, request: Request, _: list[Armed]) -> bytes:
        skip = 16 if request.opcode == 45 else 8
        to, flags = (
            struct.unpack_from("<QI", request.body) if skip == 16 else (*struct.unpack_from("<Q", request.body), 0)
        )
        old, new = request.names(skip)
        _check(_libc.renameat2(self._fd(request), old, self._nodes[to].fd, new, ctypes.c_uint(flags)))
        return b""

    def _link(self, request: Request, _: list[Armed]) -> bytes:
        (old,) = struct.unpack_from("<Q", request.body)
        os.link(_proc(self._nodes[old].fd), request.name(8), dst_dir_fd=self._fd(request))
        return self._entry(self._fd(request), request.name(8))

    def _open(self, request: Request, _: list[Armed]) -> bytes:
        (flags,) = struct.unpack_from("<I", request.body)
        fd = os.open(_proc(self._fd(request)), _own(flags))
        return self._handle(fd, flags)

    def _create(self, request: Request, _: list[Armed]) -> bytes:
        flags, mode = struct.unpack_from("<II", request.body)
        name = request.name(16)
        kept = flags & os.O_EXCL | os.O_CREAT | os.O_NOFOLLOW
        fd = os.open(name, _own(flags) | kept, mode, dir_fd=self._fd(request))
        entry = self._made(request, name)
        return entry + self._handle(fd, flags)

    def _read(self, request: Request, struck: list[Armed]) -> bytes:
        handle, offset, size, _, _, _, _ = _MOVE.unpack_from(request.body)
        data = os.pread(self._handles[handle].fd, size, offset)
        return _altered(data, struck)

    def _write(self, request: Request, struck: list[Armed]) -> bytes:
        handle, offset, size, _, _, _, _ = _MOVE.unpack_from(request.body)
        data = bytes(request.body[_MOVE.size : _MOVE.size + size])
        room = self._faults.room("write", self._path(request), size)
        if room is not None:
            if room == 0 and size:
                raise OSError(errno.ENOSPC, "injected")
            data = data[:room]
        data = _altered(data, struck)
        done = 0
        while done < len(data):
            done += os.pwrite(self._handles[handle].fd, data[done:], offset + done)
        is_torn = any(one.fault.kind == "torn" for one in struck)
        return struct.pack("<II", size if is_torn else len(data), 0)

    def _statfs(self, request: Request, _: list[Armed]) -> bytes:
        found, left = os.statvfs(_proc(self._fd(request))), self._faults.bytes_left()
        free = found.f_bfree if left is None else min(found.f_bfree, left // found.f_frsize)
        usable = min(found.f_bavail, free)
        sizes = (found.f_bsize, found.f_namemax, found.f_frsize, 0)
        return _STATFS.pack(found.f_blocks, free, usable, found.f_files, found.f_ffree, *sizes)

    def _release(self, request: Request, _: list[Armed]) -> bytes:
        with self._lock:
            handle = self._handles.pop(struct.unpack_from("<Q", request.body)[0])
        os.close(handle.fd)
        return b""

    def _fsync(self, request: Request, _: list[Armed]) -> bytes:
        handle, flags = struct.unpack_from("<QI", request.body)
        (os.fdatasync if flags & 1 else os.fsync)(self._handles[handle].fd)
        return b""

    def _opendir(self, request: Request, _: list[Armed]) -> bytes:
        fd = os.open(_proc(self._fd(request)), os.O_RDONLY | os.O_DIRECTORY)
        return self._handle(fd)

    def _readdir(self, request: Request, _: list[Armed]) -> bytes:
        number, offset, size, _, _, _, _ = _MOVE.unpack_from(request.body)
        handle = self._handles[number]
        if offset == 0:
            handle.names = _listed(handle.fd)
        answer = bytearray()
        for at, (name, inode, kind) in enumerate(handle.names[offset:], offset + 1):
            row = _DIRENT.pack(inode, at, len(name), kind) + name
            row += bytes(-len(row) % 8)
            if len(answer) + len(row) > size:
                break
            answer += row
        return bytes(answer)

    def _fallocate(self, request: Request, _: list[Armed]) -> bytes:
        handle, offset, size, mode, _ = _FALLOCATE.unpack_from(request.body)
        fd = self._handles[handle].fd
        grown = 0 if mode & 2 else max(offset + size - os.fstat(fd).st_blocks * 512, 0)
        room = self._faults.room("fallocate", self._path(request), grown)
        if room is not None and room < grown:
            raise OSError(errno.ENOSPC, "injected")
        _check(_libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(size)))
        return b""

    def _lseek(self, request: Request, _: list[Armed]) -> bytes:
        handle, offset, whence, _ = struct.unpack_from("<QQII", request.body)
        return struct.pack("<Q", os.lseek(self._handles[handle].fd, offset, whence))


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _proc(fd: int) -> str:
    return f"/proc/self/fd/{fd}"


def _own(flags: int) -> int:
    """Flags to open a file below with: a file that is only written may yet have to be read for a page of it."""
    own = flags & ~NOT_OURS
    return own & ~os.O_ACCMODE | os.O_RDWR if own & os.O_ACCMODE == os.O_WRONLY else own


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _attributes(found: os.stat_result) -> bytes:
    times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
    return _ATTR.pack(
        *(found.st_ino, found.st_size, found.st_blocks),
        *(max(one, 0) // 10**9 for one in times),
        *(max(one, 0) % 10**9 for one in times),
        *(found.st_mode, found.st_nlink, found.st_uid, found.st_gid, found.st_rdev & 0xFFFFFFFF, found.st_blksize, 0),
    )


def _listed(fd: int) -> list[tuple[bytes, int, int]]:
    """Name, inode and type of what a directory holds."""
    own = os.fstat(fd).st_ino
    kinds = {stat.S_IFDIR: 4, stat.S_IFREG: 8, stat.S_IFLNK: 10}
    with os.scandir(fd) as entries:
        rows = [
            (
                os.fsencode(one.name),
                one.inode(),
                4 if one.is_dir(follow_symlinks=False) else 10 if one.is_symlink() else 8,
            )
            for one in entries
        ]
    return [(b".", own, kinds[stat.S_IFDIR]), (b"..", own, kinds[stat.S_IFDIR]), *rows]


def _altered(data: bytes, struck: list[Armed]) -> bytes:
    """Return what is moved of `data`: cut where it is short or torn, a bit turned where one flips."""
    for one in struck:
        if one.fault.kind in {"short", "torn"}:
            data = data[: one.fault.bytes or len(data) // 2]
        elif one.fault.kind == "flip" and data:
            place = one.fault.bit % (8 * len(data))
            turned = bytearray(data)
            turned[place // 8] ^= 1 << place % 8
            data = bytes(turned)
    return data
