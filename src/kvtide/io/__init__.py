"""Engines that move bytes: io_uring, threads, and a simulated drive, behind one contract."""

from kvtide.io.drive import DeviceModel, SimDrive
from kvtide.io.opening import open_engine
from kvtide.io.ops import (
    COMPLETION,
    FSYNC,
    IOVEC,
    OP,
    PAGE_BYTES,
    READ,
    WRITE,
    Batch,
    Completions,
    Engine,
    address_of,
    aligned_buffer,
)
from kvtide.io.schedule import Merged, Split, merge, split
from kvtide.io.sim import Faults, SimEngine, VirtualClock
from kvtide.io.threads import ThreadEngine
from kvtide.io.uring import UringEngine

__all__ = [
    "COMPLETION",
    "FSYNC",
    "IOVEC",
    "OP",
    "PAGE_BYTES",
    "READ",
    "WRITE",
    "Batch",
    "Completions",
    "DeviceModel",
    "Engine",
    "Faults",
    "Merged",
    "SimDrive",
    "SimEngine",
    "Split",
    "ThreadEngine",
    "UringEngine",
    "VirtualClock",
    "address_of",
    "aligned_buffer",
    "merge",
    "open_engine",
    "split",
]
