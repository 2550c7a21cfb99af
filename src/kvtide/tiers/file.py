"""The file tier: groups in fixed slots of one preallocated file, every byte checked. Next: namespace (who opens it).

Decides where a group lies, in which order its parts reach the file, and what a reader may believe. Knows no policy:
when it is full it says so, and the cache chooses what to drop. It moves bytes only through an `io.Engine`, so the same
code runs on a drive and on the simulator.

Theory. `[superblock page][slot 0][slot 1]...`. A group is written in three steps, each complete before the next:
(1) the header that an earlier group left in the slot is wiped, (2) the fragments, (3) the new header. A crash at any
moment thus leaves an empty slot or a whole one. An older version of a group lies in another slot and stays until the
cache drops it, after the new one is whole.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import xxhash

from kvtide.blocks import KeyArray
from kvtide.errors import IoError, ShortIo
from kvtide.io.ops import OP, PAGE_BYTES, READ, WRITE, Batch, Engine, address_of, aligned_buffer
from kvtide.io.schedule import Merged, merge
from kvtide.spec import SlotLayout
from kvtide.tiers.contract import CORRUPT, FAILED, FULL, MISSING, OK, Cause, GroupRecords, Statuses, TierStats
from kvtide.tiers.header import Decoded, HeaderCodec
from kvtide.tiers.slots import SlotTable
from kvtide.trace.events import CAUSES
from kvtide.trace.record import OP_EVENT, Recorder

OP_BYTES_MAX = 1 << 20  # large enough for full bandwidth on any drive measured, small enough to keep depth
SCAN_SLOTS = 512  # headers read at once when opening


class FileTier:
    """A `Tier` over one open file.

    Fragments that lie up to `gap_bytes_max` bytes apart are read together, over what lies between them.
    Threads: one at a time.
    """

    def __init__(
        self,
        engine: Engine,
        fd: int,
        layout: SlotLayout,
        identity_digest: bytes,
        num_slots: int,
        *,
        recorder: Recorder | None = None,
        gap_bytes_max: int = 0,
    ) -> None:
        self.layout, self.num_slots, self.table = layout, num_slots, SlotTable.empty(num_slots, layout)
        self._engine, self._fd, self._recorder, self._gap_bytes_max = engine, fd, recorder, gap_bytes_max
        self._codec = HeaderCodec(layout, identity_digest)
        self._slot_of: dict[bytes, int] = {}
        self._free = np.ones(num_slots, np.bool_)
        self._sequence = 0
        self._stats = TierStats(capacity_bytes=num_slots * layout.slot_bytes)
        self._offsets = np.array(layout.fragment_offset, np.uint64)
        self._lengths = np.array(layout.fragment_padded_bytes, np.uint32)
        self._views = [(ctypes.c_uint8 * length).from_address for length in layout.fragment_padded_bytes]

    # Opening

    def scan(self) -> None:
        """Fill the slot table from the headers in the file, many reads in flight.

        A slot whose header cannot be read is left free and counted as failed.
        """
        header_bytes = self.layout.header_bytes
        pages = aligned_buffer(SCAN_SLOTS * header_bytes).reshape(SCAN_SLOTS, header_bytes)
        for first in range(0, self.num_slots, SCAN_SLOTS):
            slots = np.arange(first, min(first + SCAN_SLOTS, self.num_slots))
            pages[:] = 0
            batch = self._header_ops(slots, pages, READ)
            good = self._run(batch, "metadata", slots)
            self._stats.num_failed += int((~good).sum())
            self.table.has_header[slots[~good]] = True  # for all we know
            decoded = self._codec.decode(pages[: len(slots)])
            self.adopt(slots, decoded, decoded.valid & good)

    def adopt(self, slots: npt.NDArray[np.int64], decoded: Decoded, kept: npt.NDArray[np.bool_]) -> None:
        """Take over the `kept` of slots that a former owner filled; of two with one key the later one wins."""
        slots, records = slots[kept], decoded.records.take(kept)
        sequences, checksums = decoded.sequences[kept], decoded.checksums[kept]
        self.table.fill(slots, records, sequences, checksums)
        for index in np.argsort(sequences, kind="stable").tolist():
            key, slot = records.keys[index].tobytes(), int(slots[index])
            rival = self._slot_of.get(key)
            if rival is not None and self.table.sequences[rival] > sequences[index]:
                self._release(slot)  # slots are scanned in order of place, not of time
            else:
                self._own(key, slot)
        self._sequence = max(self._sequence, int(sequences.max(initial=0)))

    def headers(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """Return the used slots and their header pages: what a checkpoint keeps. Shapes: [n], [n, header_bytes]."""
        slots = np.flatnonzero(self.table.used)
        pages = np.zeros((len(slots), self.layout.header_bytes), np.uint8)
        table = self.table
        self._codec.encode(table.records(slots), table.sequences[slots], table.checksums[slots], pages)
        return slots, pages

    def inventory(self) -> GroupRecords:
        """Return the records of every group, oldest write first."""
        slots = np.flatnonzero(self.table.used)
        return self.table.records(slots[np.argsort(self.table.sequences[slots], kind="stable")])

    # The contract

    def lookup(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        return self._slots(keys) >= 0

    def read(self, keys: KeyArray, requests: npt.NDArray[np.void], *, cause: Cause) -> Statuses:
        slots = self._slots(keys)[requests["row"]]
        statuses = np.where(slots < 0, MISSING, OK).astype(np.uint8)
        wanted = np.flatnonzero(slots >= 0)
        lost = self._read(slots, requests, wanted, statuses, cause, self._gap_bytes_max)
        if len(lost) and self._gap_bytes_max:  # perhaps for bytes between them that nobody wants
            lost = self._read(slots, requests, lost, statuses, cause, 0)
        statuses[lost] = FAILED
        self._stats.num_failed += len(lost)
        self._drop_slots(slots[statuses == CORRUPT])
        return statuses

    def _read(
        self,
        slots: npt.NDArray[np.int64],
        requests: npt.NDArray[np.void],
        wanted: npt.NDArray[np.intp],
        statuses: Statuses,
        cause: Cause,
        gap_bytes_max: int,
    ) -> npt.NDArray[np.intp]:
        """Read and verify the `wanted` of all requests, note what is corrupt, and return what did not move."""
        slots, requests = slots[wanted], requests[wanted]
        batch = self._fragment_ops(slots, requests["fragment"], requests["address"], READ)
        lost = []
        for parts, is_whole in self._finish(self._begin(batch, gap_bytes_max), cause, slots, requests["fragment"]):
            moved = parts[is_whole]
            statuses[wanted[moved]] = self._verify(slots[moved], requests[moved])
            lost.append(wanted[parts[~is_whole]])
        return np.concatenate(lost) if lost else wanted[:0]

    def write(self, records: GroupRecords, addresses: npt.NDArray[np.uint64], *, cause: Cause) -> Statuses:
        statuses = np.full(len(records), FULL, np.uint8)
        slots = self._allocate(len(records), self._slots(records.parents[:1])[0] if len(records) else -1)
        num = len(slots)
        self._stats.num_full += len(records) - num
        if not num:
            return statuses
        good, sequences, checksums = self._write_slots(slots, records.take(slice(num)), addresses[:num], cause)
        statuses[:num] = np.where(good, OK, FAILED)
        self._stats.num_failed += int((~good).sum())
        self._free[slots[~good]] = True
        rows = np.flatnonzero(good)
        self.table.fill(slots[rows], records.take(rows), sequences[rows], checksums[rows])
        for key, slot in zip(records.keys[rows].tolist(), slots[rows].tolist(), strict=True):
            self._own(key, slot)
        return statuses

    def drop(self, keys: KeyArray) -> None:
        slots = self._slots(keys)
        self._drop_slots(slots[slots >= 0])

    def stats(self) -> TierStats:
        self._stats.num_groups = len(self._slot_of)
        self._stats.used_bytes = len(self._slot_of) * self.layout.slot_bytes
        return self._stats

    # Slots

    def _slots(self, keys: KeyArray) -> npt.NDArray[np.int64]:
        get = self._slot_of.get
        return np.array([get(key, -1) for key in keys.tolist()], np.int64)

    def _allocate(self, num: int, after: int) -> npt.NDArray[np.int64]:
        """Return up to `num` free slots, in one run behind slot `after` where there is one, else the lowest."""
        free = np.flatnonzero(self._free)
        start = int(np.searchsorted(free, after + 1))
        slots = np.concatenate([free[start : start + num], free[:start]])[:num]
        self._free[slots] = False
        return slots

    def _own(self, key: bytes, slot: int) -> None:
        """Let `slot` be the one that holds `key`; an older one is freed."""
        old = self._slot_of.get(key)
        if old is not None:
            self._release(old)
        self._slot_of[key] = slot
        self._free[slot] = False

    def _release(self, slot: int) -> None:
        self._free[slot] = True
        self.table.used[slot] = False

    def _drop_slots(self, slots: npt.NDArray[np.int64]) -> None:
        for slot in np.unique(slots).tolist():
            if self.table.used[slot]:
                del self._slot_of[self.table.keys[slot].tobytes()]
                self._release(slot)

    # Bytes

    def _start(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        return (PAGE_BYTES + slots * self.layout.slot_bytes).astype(np.uint64)

    def _header_ops(self, slots: npt.NDArray[np.int64], pages: npt.NDArray[np.uint8], kind: int) -> Batch:
        batch = np.zeros(len(slots), OP)
        batch["fd"], batch["kind"], batch["length"] = self._fd, kind, self.layout.header_bytes
        batch["offset"] = self._start(slots)
        batch["address"] = address_of(pages) + np.arange(len(slots), dtype=np.uint64) * self.layout.header_bytes
        return batch

    def _fragment_ops(
        self,
        slots: npt.NDArray[np.int64],
        fragments: npt.NDArray[np.integer],
        addresses: npt.NDArray[np.uint64],
        kind: int,
    ) -> Batch:
        batch = np.zeros(len(slots), OP)
        batch["fd"], batch["kind"] = self._fd, kind
        batch["offset"] = self._start(slots) + self._offsets[fragments]
        batch["length"], batch["address"] = self._lengths[fragments], addresses
        return batch

    def _write_slots(
        self, slots: npt.NDArray[np.int64], records: GroupRecords, addresses: npt.NDArray[np.uint64], cause: Cause
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Write in the three steps of the theory; return which slots are whole, and their numbers and checksums."""
        num, num_fragments = addresses.shape
        pages = aligned_buffer(num * self.layout.header_bytes).reshape(num, self.layout.header_bytes)
        good = np.ones(num, np.bool_)
        stale = np.flatnonzero(self.table.has_header[slots])
        if len(stale):
            good[stale] = self._run(self._header_ops(slots[stale], pages, WRITE), "metadata", slots[stale])
            self.table.has_header[slots[stale[good[stale]]]] = False
        fragments = np.tile(np.arange(num_fragments), num)
        rows = np.flatnonzero(good)
        wanted = fragments[: len(rows) * num_fragments]
        batch = self._fragment_ops(np.repeat(slots[rows], num_fragments), wanted, addresses[rows].ravel(), WRITE)
        merged = self._begin(batch)
        checksums = self._checksums(fragments, addresses.ravel()).reshape(num, num_fragments)  # while the drive is busy
        done = self._all_done(merged, cause, np.repeat(slots[rows], num_fragments), wanted)
        good[rows] = done.reshape(len(rows), num_fragments).all(axis=1)
        sequences = np.arange(self._sequence + 1, self._sequence + 1 + num, dtype=np.uint64)
        self._sequence += num
        self._codec.encode(records, sequences, checksums, pages)
        rows = np.flatnonzero(good)
        header_pages = pages if len(rows) == num else _aligned_copy(pages[rows])
        self.table.has_header[slots[rows]] = True  # even a failed write may have landed
        good[rows] = self._run(self._header_ops(slots[rows], header_pages, WRITE), "metadata", slots[rows])
        return good, sequences, checksums

    def _run(self, batch: Batch, cause: Cause, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Do every operation and say which went well. Shapes: batch, slots [n]."""
        return self._all_done(self._begin(batch), cause, slots, None)

    def _begin(self, batch: Batch, gap_bytes_max: int = 0) -> Merged:
        """Hand over every operation, merged where they touch, or nearly so."""
        merged = merge(batch, bytes_max=OP_BYTES_MAX, gap_bytes_max=gap_bytes_max)
        self._engine.submit(merged.batch)
        return merged

    def _all_done(
        self,
        merged: Merged,
        cause: Cause,
        slots: npt.NDArray[np.int64],
        fragments: npt.NDArray[np.integer] | None,
    ) -> npt.NDArray[np.bool_]:
        """Wait for what was begun and say which operations went well. Shapes: slots, fragments, result [n]."""
        good = np.zeros(len(merged.part_of), np.bool_)
        for parts, is_whole in self._finish(merged, cause, slots, fragments):
            good[parts] = is_whole
        return good

    def _finish(
        self,
        merged: Merged,
        cause: Cause,
        slots: npt.NDArray[np.int64],
        fragments: npt.NDArray[np.integer] | None,
    ) -> Iterator[tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]]:
        """Yield, as operations end, which of those before merging that were, and whether each moved whole.

        Of a read that ends early, what came before its end is whole.
        Shapes: slots, fragments [n]; yields [m], [m].
        """
        order = np.argsort(merged.part_of, kind="stable")
        bounds = np.searchsorted(merged.part_of[order], np.arange(len(merged.batch) + 1))
        outstanding = len(merged.batch)
        while outstanding:
            completions = self._engine.reap(1)
            outstanding -= len(completions)
            tags = completions["tag"].astype(np.int64)
            whole = (completions["error"] == 0) & (completions["length"] == merged.batch["length"][tags])
            is_write = merged.batch["kind"][tags] == WRITE
            self._count(is_write, completions["length"] * whole)
            self._stats.gap_bytes += int(merged.gap_bytes[tags[whole]].sum())
            self._record(merged, completions, bounds, order, slots, fragments, cause)
            parts = np.concatenate([order[bounds[tag] : bounds[tag + 1]] for tag in tags.tolist()])
            moved = np.where(whole | ~is_write, completions["length"], 0).astype(np.int64)
            yield parts, merged.end_of[parts] <= np.repeat(moved, bounds[tags + 1] - bounds[tags])

    def _count(self, is_write: npt.NDArray[np.bool_], num_bytes: npt.NDArray[np.uint64]) -> None:
        self._stats.num_writes += int(is_write.sum())
        self._stats.written_bytes += int(num_bytes[is_write].sum())
        self._stats.num_reads += int((~is_write).sum())
        self._stats.read_bytes += int(num_bytes[~is_write].sum())

    def _checksums(
        self, fragments: npt.NDArray[np.integer], addresses: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.uint64]:
        """Return the xxh3-64 of each fragment in memory, padding included."""
        views = (self._views[one](at) for one, at in zip(fragments.tolist(), addresses.tolist(), strict=True))
        return np.fromiter(map(xxhash.xxh3_64_intdigest, views), np.uint64, len(addresses))

    def _verify(self, slots: npt.NDArray[np.int64], requests: npt.NDArray[np.void]) -> Statuses:
        found = self._checksums(requests["fragment"], requests["address"])
        bad = found != self.table.checksums[slots, requests["fragment"]]
        self._stats.num_corrupt += int(bad.sum())
        return np.where(bad, CORRUPT, OK).astype(np.uint8)

    def _record(
        self,
        merged: Merged,
        completions: npt.NDArray[np.void],
        bounds: npt.NDArray[np.intp],
        order: npt.NDArray[np.intp],
        slots: npt.NDArray[np.int64],
        fragments: npt.NDArray[np.integer] | None,
        cause: Cause,
    ) -> None:
        if self._recorder is None:
            return
        tags = completions["tag"].astype(np.int64)
        first = order[bounds[tags]]
        events = np.zeros(len(completions), OP_EVENT)
        events["time_ns"], events["complete_ns"] = completions["submit_ns"], completions["complete_ns"]
        events["cause"], events["fd"] = CAUSES.index(cause), self._fd
        events["is_write"] = merged.batch["kind"][tags] == WRITE
        events["offset"], events["length"] = merged.batch["offset"][tags], completions["length"]
        events["num_fragments"] = bounds[tags + 1] - bounds[tags]
        events["depth"], events["error"] = completions["depth"], completions["error"]
        events["slot"] = slots[first]
        events["layer"] = -1 if fragments is None else fragments[first] // self.layout.parts_per_layer
        self._recorder.record_ops(events)


def _aligned_copy(pages: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    copy = aligned_buffer(pages.size).reshape(pages.shape)
    copy[:] = pages
    return copy


def move_page(engine: Engine, fd: int, page: npt.NDArray[np.uint8], kind: int) -> None:
    """Read or write the superblock page, through the engine as everything else.

    Raises: IoError with the errno; ShortIo at the end of the file.
    """
    batch = np.zeros(1, OP)
    batch["fd"], batch["kind"], batch["address"], batch["length"] = fd, kind, address_of(page), PAGE_BYTES
    engine.submit(batch)
    done = engine.reap(1)[0]
    if done["error"]:
        raise IoError(int(done["error"]), f"superblock: {os.strerror(int(done['error']))}")
    if done["length"] != PAGE_BYTES:
        raise ShortIo(errno.EIO, f"superblock: {int(done['length'])} of {PAGE_BYTES} bytes moved")
