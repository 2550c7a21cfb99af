"""The kernel's FUSE requests, read from /dev/fuse and answered, without libfuse. Next: passthrough, which acts on them.

Decides how requests are read, held up and answered; knows nothing of files. Formats are those of linux/fuse.h,
protocol 7.31.

*Theory.* A few threads answer requests. One that a fault holds up waits in a thread of its own, so that any number
may; the kernel tells when its caller is killed, and that ends the wait.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvtide.check.faults import Armed, Faults

WRITE_BYTES_MAX = 1 << 20
THREADS = 4  # that answer requests; what a fault holds up waits elsewhere
PROTOCOL = (7, 31)
# FUSE_ASYNC_READ, ATOMIC_O_TRUNC, BIG_WRITES, ASYNC_DIO, PARALLEL_DIROPS, MAX_PAGES, INIT_EXT; locks stay the kernel's
WANTED_FLAGS = 1 << 0 | 1 << 3 | 1 << 5 | 1 << 15 | 1 << 18 | 1 << 22 | 1 << 30
WANTED_MORE = 1 << 4  # FUSE_DIRECT_IO_ALLOW_MMAP, in the second word
INVALIDATE_INODE = 2  # FUSE_NOTIFY_INVAL_INODE
WAIT_S = 0.02  # between looks at whether a wait is over
INIT, FORGET, INTERRUPT, BATCH_FORGET = 26, 2, 36, 42

_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_INIT = struct.Struct("<IIIIHHIIHHI28x")


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the kernel: `body` is what follows the header."""

    opcode: int
    unique: int
    node: int
    uid: int
    gid: int
    body: memoryview

    def name(self, skip: int = 0) -> bytes:
        """The name that stands alone after `skip` bytes."""
        return bytes(self.body[skip:]).split(b"\0", 1)[0]

    def names(self, skip: int = 0) -> tuple[bytes, bytes]:
        """The two names that stand after `skip` bytes."""
        first, second, _ = bytes(self.body[skip:]).split(b"\0", 2)
        return first, second


Act = Callable[[Request, list[Armed]], bytes]  # what a request does, struck by these faults; returns the answer


class Connection:
    """The requests of one mount. `acts`: for each opcode the name a fault knows it by, and what is done."""

    def __init__(self, device: int, faults: Faults) -> None:
        self._device, self._faults = device, faults
        self._held: dict[int, threading.Event] = {}  # requests held up, by number: set when the caller is killed
        self.counts: Counter[str] = Counter()

    def serve(
        self,
        acts: Mapping[int, tuple[str, Act]],
        forget: Callable[[list[tuple[int, int]]], None],
        path: Callable[[Request], str],
    ) -> None:
        """Answer requests until the file system is unmounted.

        `forget` is told of pairs of an inode and the times the kernel no longer knows it; `path` names what a request
        is about.
        """
        self._acts, self._forget, self._path = acts, forget, path
        threads = [threading.Thread(target=self._answer, daemon=True) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def forget_pages(self, nodes: list[int]) -> None:
        """Have the kernel drop what it keeps of these files, so that the next read comes here."""
        for node in nodes:
            note = _OUT.pack(_OUT.size + 24, INVALIDATE_INODE, 0) + struct.pack("<Qqq", node, 0, 0)
            try:
                os.write(self._device, note)
            except OSError as problem:
                if problem.errno != errno.ENOENT:  # the kernel has forgotten the inode
                    raise

    def _answer(self) -> None:
        buffer = bytearray(WRITE_BYTES_MAX + 8192)
        view = memoryview(buffer)
        while True:
            try:
                size = os.readv(self._device, [buffer])
            except OSError as problem:
                if problem.errno in {errno.EINTR, errno.EAGAIN, errno.ENOENT}:
                    continue
                return  # ENODEV: unmounted
            _, opcode, unique, node, uid, gid, _, _, _ = _IN.unpack_from(view)
            request = Request(opcode, unique, node, uid, gid, view[_IN.size : size])
            if opcode in {FORGET, BATCH_FORGET}:
                self._forget(_forgotten(request))
            elif opcode == INTERRUPT:
                held = self._held.get(struct.unpack_from("<Q", request.body)[0])
                if held is not None:
                    held.set()
            elif opcode == INIT:
                self._reply(unique, 0, _greeting(request))
            else:
                self._take(request)

    def _take(self, request: Request) -> None:
        """Do it here, or in a thread of its own if a fault holds it up."""
        op, act = self._acts.get(request.opcode, ("other", None))
        if act is None:
            self._reply(request.unique, errno.ENOSYS)
            return
        self.counts[op] += 1
        struck = self._faults.strike(op, self._path(request)) if self._faults.is_any() else []
        if any(one.fault.kind in {"delay", "stall"} for one in struck):
            body = memoryview(bytes(request.body))
            kept = Request(request.opcode, request.unique, request.node, request.uid, request.gid, body)
            self._held[request.unique] = threading.Event()
            threading.Thread(target=self._wait, args=(kept, act, struck), daemon=True).start()
        else:
            self._do(request, act, struck)

    def _wait(self, request: Request, act: Act, struck: list[Armed]) -> None:
        is_killed = self._held[request.unique]
        for one in struck:
            until = time.monotonic() + one.fault.seconds if one.fault.kind == "delay" else float("inf")
            while one.fault.kind in {"delay", "stall"} and not is_killed.is_set() and time.monotonic() < until:
                if one.released.wait(min(WAIT_S, max(until - time.monotonic(), 0))):
                    break
        del self._held[request.unique]
        if is_killed.is_set():
            self._reply(request.unique, errno.EINTR)
        else:
            self._do(request, act, struck)

    def _do(self, request: Request, act: Act, struck: list[Armed]) -> None:
        try:
            _fail(struck)
            answer = act(request, struck)
        except OSError as problem:
            self._reply(request.unique, problem.errno or errno.EIO)
        except Exception as problem:  # a caller that is never answered cannot even be killed
            print(f"request {request.opcode} of node {request.node}: {problem!r}", file=sys.stderr, flush=True)
            self._reply(request.unique, errno.EIO)
        else:
            self._reply(request.unique, 0, answer)

    def _reply(self, unique: int, problem: int, answer: bytes = b"") -> None:
        try:
            os.writev(self._device, [_OUT.pack(_OUT.size + len(answer), -problem, unique), answer])
        except OSError as failed:
            if failed.errno not in {errno.ENOENT, errno.ENODEV}:  # the caller, or the mount, is gone
                raise


def _fail(struck: list[Armed]) -> None:
    for one in struck:
        if one.fault.kind == "error":
            raise OSError(one.fault.number, "injected")


def _greeting(request: Request) -> bytes:
    _, _, readahead, offered, more = struct.unpack_from("<IIIII", request.body)
    flags, pages = offered & WANTED_FLAGS, WRITE_BYTES_MAX // 4096
    return _INIT.pack(*PROTOCOL, readahead, flags, 64, 48, WRITE_BYTES_MAX, 1, pages, 0, more & WANTED_MORE)


def _forgotten(request: Request) -> list[tuple[int, int]]:
    if request.opcode == FORGET:
        return [(request.node, struct.unpack_from("<Q", request.body)[0])]
    (number,) = struct.unpack_from("<I", request.body)
    return list(struct.iter_unpack("<QQ", request.body[8 : 8 + 16 * number]))
