"""The kernel's side of io_uring: three syscalls and the ring mapped into arrays. Next: uring.

Decides how a ring is made and mapped; knows nothing of operations, depth or retries. The syscalls go through
ctypes, so that installing needs no compiler.

Theory. The kernel shares two pieces of memory:

    rings   [sq head, tail, mask, array of u32] [cq head, tail, mask, CQEs of 16 bytes]
    sqes    [entries of 64 bytes, eight little-endian words]

      word  0          1       2        3             4          5
            opcode|fd  offset  address  length|flags  user_data  buf_index

An entry is named to the kernel by its index in `array`. We use that freedom: entry number = slot number, and
`user_data` is written once. Source: io_uring(7), include/uapi/linux/io_uring.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import struct
import threading

import numpy as np

from kvtide.errors import UnsupportedError

# These numbers are the same on every architecture but alpha: include/uapi/asm-generic/unistd.h.
SYS_SETUP, SYS_ENTER, SYS_REGISTER = 425, 426, 427
ENTRIES_MAX = 32768  # IORING_MAX_ENTRIES
SETUP_CLAMP, SETUP_SUBMIT_ALL, SETUP_COOP_TASKRUN = 1 << 4, 1 << 7, 1 << 8
# SINGLE_ISSUER and DEFER_TASKRUN are left out: they bind a ring to one thread, the contract does not.
SETUP_FLAGS = (SETUP_CLAMP | SETUP_SUBMIT_ALL | SETUP_COOP_TASKRUN, SETUP_CLAMP, 0)
ENTER_GETEVENTS = 1
FEAT_SINGLE_MMAP, FEAT_NODROP = 1 << 0, 1 << 1
OFF_SQES = 0x10000000
REGISTER_BUFFERS2, REGISTER_BUFFERS_UPDATE, REGISTER_SPARSE = 15, 16, 1
SQE_BYTES = 64
CQE_BYTES = 16
PARAMS = struct.Struct("<10I20I")  # struct io_uring_params with sq_off at word 10 and cq_off at word 20

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long  # no argtypes: they cost 1 us a call; addresses are wrapped by hand
_REASONS = {
    errno.ENOSYS: "this kernel has no io_uring",
    errno.EPERM: "io_uring is disabled here (sysctl kernel.io_uring_disabled, or a seccomp filter)",
    errno.EACCES: "io_uring is forbidden here (a security module)",
    errno.ENOMEM: "io_uring gets no memory for its ring (see `ulimit -l`)",
}


def syscall(number: int, *words: int) -> int:
    """Return what the kernel returns, or minus errno."""
    result = int(_LIBC.syscall(number, *(ctypes.c_long(word) for word in words)))
    return result if result >= 0 else -ctypes.get_errno()


class Ring:
    """One submission/completion queue pair, mapped. The arrays must not be used after `close`.

    Shapes: sqes [entries, 8] words; sq_array [entries]; cqes [2 * entries, 4] half words: user_data, result, flags.
    """

    def __init__(self, entries: int) -> None:
        """Make a ring of at least `entries`.

        Raises: UnsupportedError where the kernel refuses, with its reason.
        """
        self.fd, params = _setup(entries)
        self._maps: list[mmap.mmap] = []
        try:
            self._map(params)
        except BaseException:
            self.close()
            raise
        self._enter = _LIBC.syscall
        self._order = None if platform.machine() in {"x86_64", "AMD64"} else threading.Lock()
        if self._order:
            self._order.acquire()

    def _map(self, params: tuple[int, ...]) -> None:
        sq_entries, cq_entries = params[0], params[1]
        sq_off, cq_off = params[10:20], params[20:30]
        rings = self._mmap(max(sq_off[6] + sq_entries * 4, cq_off[5] + cq_entries * CQE_BYTES), 0)
        entries = self._mmap(sq_entries * SQE_BYTES, OFF_SQES)
        view = memoryview(rings)

        def word(offset: int) -> memoryview:
            return view[offset : offset + 4].cast("I")

        self.sq_tail, self.cq_head, self.cq_tail = word(sq_off[1]), word(cq_off[0]), word(cq_off[1])
        self.sq_mask, self.cq_mask = word(sq_off[2])[0], word(cq_off[2])[0]
        self.sq_array = np.frombuffer(rings, np.uint32, sq_entries, sq_off[6])
        self.sq_array_raw = self.sq_array.data
        self.cqes = np.frombuffer(rings, np.int32, cq_entries * 4, cq_off[5]).reshape(cq_entries, 4)
        self.cqes_raw = view[cq_off[5] : cq_off[5] + cq_entries * CQE_BYTES]
        self.sqes_raw = memoryview(entries)
        self.sqes = np.frombuffer(entries, np.uint64).reshape(sq_entries, 8)
        self.sqes[:, 4] = np.arange(sq_entries)

    def _mmap(self, num_bytes: int, offset: int) -> mmap.mmap:
        made = mmap.mmap(self.fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=offset)
        self._maps.append(made)
        return made

    def enter(self, submit_num: int, wait_num: int) -> int:
        """Hand `submit_num` entries to the kernel, wait for `wait_num` completions; return the number taken or -errno.

        Pending completions are flushed in any case, which cooperative task running needs.
        """
        result: int = self._enter(SYS_ENTER, self.fd, submit_num, wait_num, ENTER_GETEVENTS, 0, 0)
        return result if result >= 0 else -ctypes.get_errno()

    def ready_num(self) -> int:
        """Completions that wait to be read. Entries read after this call are at least as new as the count."""
        num = (self.cq_tail[0] - self.cq_head[0]) & 0xFFFFFFFF
        if self._order and num:
            # A load of an entry may overtake that of the tail on weakly ordered machines; this pair forbids it.
            self._order.release()
            self._order.acquire()
        return num

    def register_table(self, entries: int) -> int:
        """Make an empty table of fixed buffers; return 0 or -errno."""
        request = struct.pack("<IIQQQ", entries, REGISTER_SPARSE, 0, 0, 0)
        return _register(self.fd, REGISTER_BUFFERS2, request, len(request))

    def register_buffer(self, index: int, address: int, num_bytes: int) -> int:
        """Pin one buffer as number `index` of the table; return 1 or -errno."""
        vector = np.array([address, num_bytes], np.uint64)
        data = int(vector.__array_interface__["data"][0])
        request = struct.pack("<IIQQII", index, 0, data, 0, 1, 0)
        return _register(self.fd, REGISTER_BUFFERS_UPDATE, request, len(request))

    def close(self) -> None:
        """Unmap and close; the kernel drops its buffer table with the ring. Idempotent."""
        if self.fd < 0:
            return
        for name in list(self.__dict__):
            if name not in {"fd", "_maps"}:
                del self.__dict__[name]
        for made in self._maps:
            # A view that someone still holds keeps the pages alive; dropping that view unmaps them.
            with contextlib.suppress(BufferError):
                made.close()
        self._maps.clear()
        os.close(self.fd)
        self.fd = -1


def _setup(entries: int) -> tuple[int, tuple[int, ...]]:
    """Return the ring's descriptor and its parameters, with the best flags this kernel knows."""
    result, params = -errno.EINVAL, ctypes.create_string_buffer(PARAMS.size)
    for flags in SETUP_FLAGS:
        params = ctypes.create_string_buffer(PARAMS.pack(entries, 0, flags, *(0,) * 27), PARAMS.size)
        result = syscall(SYS_SETUP, entries, ctypes.addressof(params))
        if result != -errno.EINVAL:
            break
    if result < 0:
        reason = _REASONS.get(-result, f"io_uring_setup failed: {os.strerror(-result)}")
        raise UnsupportedError(f"{reason}; use the `threads` engine, which `auto` takes by itself")
    unpacked = PARAMS.unpack(params.raw)
    if unpacked[5] & FEAT_SINGLE_MMAP == 0 or unpacked[5] & FEAT_NODROP == 0:
        os.close(result)
        raise UnsupportedError("this kernel's io_uring is older than Linux 5.6; use the `threads` engine")
    os.set_inheritable(result, False)  # noqa: FBT003
    return result, unpacked


def _register(fd: int, opcode: int, request: bytes, num_bytes: int) -> int:
    buffer = ctypes.create_string_buffer(request, num_bytes)
    return syscall(SYS_REGISTER, fd, opcode, ctypes.addressof(buffer), num_bytes)
