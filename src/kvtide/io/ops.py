"""Operations as numpy arrays: the one thing every engine takes and gives back. Next: schedule, then uring.

A batch is a structured array with one row an operation, so that building, merging, submitting and reaping cost no
Python loop. This file knows no kernel and no file format.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

READ, WRITE, FSYNC = 0, 1, 2
PAGE_BYTES = 4096  # the alignment O_DIRECT asks for on every drive in common use

OP = np.dtype(
    [
        ("fd", "<i4"),
        ("kind", "<u4"),
        ("offset", "<u8"),
        ("address", "<u8"),  # of the buffer; of an array of IOVEC where num_vectors > 0
        ("length", "<u4"),  # bytes in all, also for a vectored operation; 0 for FSYNC
        ("num_vectors", "<u4"),  # 0: one plain buffer
        ("tag", "<u8"),  # comes back with the completion
    ]
)
IOVEC = np.dtype([("address", "<u8"), ("length", "<u8")])
COMPLETION = np.dtype(
    [
        ("tag", "<u8"),
        ("length", "<u8"),  # bytes that moved; below the wanted length only at end of file or with an error
        ("error", "<i4"),  # errno, 0 when all went well
        ("depth", "<u4"),  # operations in flight just after this one was submitted, itself included
        ("submit_ns", "<i8"),  # engine clock when the kernel got it
        ("complete_ns", "<i8"),  # engine clock when it was reaped
    ]
)

Batch = npt.NDArray[np.void]
Completions = npt.NDArray[np.void]


class Engine(Protocol):
    """Moves bytes between files and memory, `depth_max` operations at a time.

    Threads: one thread at a time may call an engine; it needs not be the one that made it.
    """

    depth_max: int

    def submit(self, batch: Batch) -> None:
        """Take every operation of `batch`; start as many as `depth_max` allows, the rest as others complete.

        Buffers and IOVEC arrays must stay alive until the operation was reaped. Partial transfers are continued
        inside; a failure is an `error` in the completion, never an exception.
        """

    def reap(self, wait_num: int = 0) -> Completions:
        """Return the completions at hand, waiting for at least `wait_num` of those outstanding."""

    def register(self, arena: npt.NDArray[np.uint8]) -> None:
        """Tell the engine that buffers will lie in `arena`, so that it may pin it; a refusal costs only speed."""

    def close(self) -> None:
        """Wait for what is in flight and give everything back. Idempotent."""


def address_of(array: npt.NDArray[np.generic]) -> int:
    """Address of the array's first byte, for the `address` field."""
    return int(array.__array_interface__["data"][0])


def copy_bytes(sources: npt.NDArray[np.uint64], targets: npt.NDArray[np.uint64], sizes: Iterable[int]) -> None:
    """Copy runs of this process's memory from address to address. Shapes: sources and targets alike; a size each."""
    for source, target, size in zip(sources.ravel().tolist(), targets.ravel().tolist(), sizes, strict=True):
        ctypes.memmove(target, source, size)


def aligned_buffer(num_bytes: int, align: int = PAGE_BYTES) -> npt.NDArray[np.uint8]:
    """Return zeroed bytes whose address is a multiple of `align`, as O_DIRECT needs.

    Shapes: [num_bytes].
    """
    raw = np.zeros(num_bytes + align, np.uint8)
    start = -address_of(raw) % align
    return raw[start : start + num_bytes]
