"""Mounts that are gone when this process is, however it ends. Next: check.loops, stores.device.

Theory. A mount belongs to a mount namespace, and a namespace to the threads in it. In one of our own, the kernel takes
the mounts away with the last thread, and a loop device that clears itself goes with its mount.
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache

from kvtide.errors import UnsupportedError

CLONE_NEWNS = 0x20000  # Source: linux/sched.h
MS_REC, MS_PRIVATE = 0x4000, 0x40000  # Source: linux/mount.h
_LIBC = ctypes.CDLL(None, use_errno=True)


def own_mounts() -> None:
    """Give the calling thread a mount namespace of its own, once.

    Raises: UnsupportedError where that is not allowed.
    """
    _own_mounts(os.getpid(), threading.get_native_id())


@cache
def _own_mounts(process: int, thread: int) -> None:  # noqa: ARG001
    """Leave the shared mounts. Not twice: threads that were started since would stay behind."""
    if _LIBC.unshare(CLONE_NEWNS) or _LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        raise UnsupportedError(f"cannot make a mount namespace: {os.strerror(ctypes.get_errno())}")
