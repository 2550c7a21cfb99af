"""Memory that KV lives in: page-aligned arenas, fixed frames, and a tier held wholly in DRAM. Next: file.

Decides how memory is handed out and accounted; knows no policy and no device but the CPU (`tiers.cuda` has the other).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KeyArray
from kvtide.errors import ConfigError
from kvtide.io.ops import PAGE_BYTES, address_of
from kvtide.spec import SlotLayout
from kvtide.tiers.contract import FULL, MISSING, OK, Cause, GroupRecords, Reason, Statuses, TierStats
from kvtide.units import format_bytes

MADV_POPULATE_WRITE = 23  # Linux 5.14 and later, asm-generic/mman-common.h
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # its calls let other threads run
HUGE_PAGE_BYTES = 2 << 20  # x86-64 and arm64 with 4 KiB base pages


class Arena:
    """A page-aligned run of anonymous memory, seen as numpy without copies.

    Memory is committed by the kernel as it is touched, so an arena costs only what is used of it.
    Shapes: buffer [num_bytes] uint8.
    """

    def __init__(self, num_bytes: int) -> None:
        if num_bytes < 1:
            raise ConfigError(f"an arena of {num_bytes} bytes: at least one byte is needed")
        self.num_bytes = num_bytes
        size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        try:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError, MemoryError):
            raise ConfigError(f"{format_bytes(num_bytes)} of memory are not to be had here; ask for less") from None
        if num_bytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages: only speed is lost
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.buffer: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, num_bytes)
        self.address = address_of(self.buffer)

    def populate(self, start: int, num_bytes: int) -> None:
        """Have the kernel commit this part at once; where it cannot, it does so as the part is touched."""
        if _LIBC is not None:
            _LIBC.madvise(ctypes.c_void_p(self.address + start), ctypes.c_size_t(num_bytes), MADV_POPULATE_WRITE)


class FramePool:
    """Equal frames cut from an arena. Which frame is free is all it knows.

    Shapes: rows [num_frames, frame_bytes] uint8, a view of the arena.
    """

    def __init__(self, num_frames: int, frame_bytes: int) -> None:
        if frame_bytes % PAGE_BYTES:
            raise ConfigError(f"frames of {frame_bytes} bytes: a multiple of {PAGE_BYTES} is needed for direct I/O")
        self.num_frames, self.frame_bytes = num_frames, frame_bytes
        self.address, self.rows = self._make_room()
        self._free = np.arange(num_frames - 1, -1, -1, dtype=np.int64)
        self._num_free = num_frames

    def _make_room(self) -> tuple[int, npt.NDArray[np.uint8]]:
        """Return the address of the first frame, and all of them as rows."""
        self.arena = Arena(self.num_frames * self.frame_bytes)
        return self.arena.address, self.arena.buffer.reshape(self.num_frames, self.frame_bytes)

    @property
    def num_free(self) -> int:
        """Frames that hold nothing."""
        return self._num_free

    def take(self, num: int) -> npt.NDArray[np.int64]:
        """Return up to `num` frames: fewer when the pool runs out, which is a value, not an error."""
        got = min(num, self._num_free)
        frames = self._free[self._num_free - got : self._num_free][::-1].copy()
        self._num_free -= got
        return frames

    def give(self, frames: npt.NDArray[np.int64]) -> None:
        """Take frames back."""
        assert self._num_free + len(frames) <= self.num_frames, "a frame was given back twice"
        self._free[self._num_free : self._num_free + len(frames)] = frames
        self._num_free += len(frames)

    def addresses(self, frames: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return the address of each frame."""
        return (self.address + frames * self.frame_bytes).astype(np.uint64)

    def populate(self, start: int, num_bytes: int) -> None:
        """Have the kernel commit a part at once; frames are taken from the first on."""
        self.arena.populate(start, num_bytes)

    def clear(self, frames: npt.NDArray[np.int64]) -> None:
        """Fill frames with zeros."""
        self.rows[frames] = 0

    def copy(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        """Copy frames to as many others."""
        self.rows[targets] = self.rows[sources]

    def put(self, frame: int, start: int, row_bytes: int, first_row: int, rows: npt.NDArray[np.uint8]) -> None:
        """Put rows of equal length, from number `first_row` on, into the part of a frame that begins at `start`.

        Shapes: rows [n, row_bytes].
        """
        at = start + first_row * row_bytes
        self.rows[frame, at : at + rows.size].reshape(rows.shape)[:] = rows


class HollowFramePool(FramePool):
    """Frames without memory, for a cache whose I/O is only modelled: what is put is not kept.

    Shapes: rows as in a FramePool, but every byte is the same one.
    """

    def _make_room(self) -> tuple[int, npt.NDArray[np.uint8]]:
        one = np.zeros(1, np.uint8)
        return PAGE_BYTES, np.lib.stride_tricks.as_strided(one, (self.num_frames, self.frame_bytes), (0, 0))

    def populate(self, start: int, num_bytes: int) -> None:
        """Do nothing: there is nothing to commit."""

    def clear(self, frames: npt.NDArray[np.int64]) -> None:
        """Do nothing: no frame holds anything."""

    def copy(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        """Do nothing."""

    def put(self, frame: int, start: int, row_bytes: int, first_row: int, rows: npt.NDArray[np.uint8]) -> None:
        """Do nothing."""


def bytes_at(address: int, length: int) -> npt.NDArray[np.uint8]:
    """Return `length` bytes of this process's memory as an array, without a copy."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))


class MemoryTier:
    """A `Tier` held in DRAM: the plainest one that keeps the contract, and the fake in tests.

    Threads: one at a time.
    """

    def __init__(self, layout: SlotLayout, capacity_bytes: int) -> None:
        num_slots = capacity_bytes // layout.slot_bytes
        if num_slots < 1:
            raise ConfigError(f"a capacity of {capacity_bytes} bytes holds no slot: {layout.slot_bytes} are needed")
        self._layout = layout
        self._arena = Arena(num_slots * layout.slot_bytes)
        self._slots = self._arena.buffer.reshape(num_slots, layout.slot_bytes)
        self._slot_of: dict[bytes, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._stats = TierStats(capacity_bytes=num_slots * layout.slot_bytes)

    def lookup(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        return np.fromiter((key in self._slot_of for key in keys.tolist()), np.bool_, len(keys))

    def read(self, keys: KeyArray, requests: npt.NDArray[np.void], *, cause: Cause) -> Statuses:
        del cause
        slots = [self._slot_of.get(key, -1) for key in keys.tolist()]
        statuses = np.full(len(requests), OK, np.uint8)
        for index, (row, fragment, address) in enumerate(requests.tolist()):
            if slots[row] < 0:
                statuses[index] = MISSING
                continue
            start, length = self._layout.fragment_offset[fragment], self._layout.fragment_padded_bytes[fragment]
            bytes_at(address, length)[:] = self._slots[slots[row], start : start + length]
            self._stats.read_bytes += length
            self._stats.num_reads += 1
        return statuses

    def write(self, records: GroupRecords, addresses: npt.NDArray[np.uint64], *, cause: Cause) -> Statuses:
        del cause
        statuses = np.full(len(records), OK, np.uint8)
        for index, key in enumerate(records.keys.tolist()):
            if not self._free:
                statuses[index] = FULL
                self._stats.num_full += 1
                continue
            slot = self._free.pop()
            for fragment, address in enumerate(addresses[index].tolist()):
                start, length = self._layout.fragment_offset[fragment], self._layout.fragment_padded_bytes[fragment]
                self._slots[slot, start : start + length] = bytes_at(address, length)
                self._stats.written_bytes += length
                self._stats.num_writes += 1
            old = self._slot_of.get(key)
            self._slot_of[key] = slot
            if old is not None:
                self._free.append(old)
        return statuses

    def drop(self, keys: KeyArray, *, reason: Reason = "dropped") -> None:
        for key in keys.tolist():
            slot = self._slot_of.pop(key, None)
            if slot is not None:
                self._free.append(slot)
                self._stats.note_dropped(1, reason)

    def stats(self) -> TierStats:
        self._stats.num_groups = len(self._slot_of)
        self._stats.used_bytes = len(self._slot_of) * self._layout.slot_bytes
        return self._stats
