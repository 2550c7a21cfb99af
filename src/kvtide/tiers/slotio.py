"""Moving the bytes of slots: operations from slots and fragments, merged, waited for, counted and recorded. Next: file.

Knows where in the file a fragment of a slot lies. Decides nothing of what is kept or believed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import xxhash

from kvtide.errors import ConfigError, IoError, ShortIo
from kvtide.io.ops import OP, PAGE_BYTES, WRITE, Batch, Completions, Engine, address_of
from kvtide.io.schedule import Index, Merged, merge
from kvtide.spec import SlotLayout
from kvtide.tiers.contract import Cause, TierStats
from kvtide.trace.events import CAUSES
from kvtide.trace.record import OP_EVENT, Recorder
from kvtide.units import format_bytes

FRAGMENT_BYTES_MAX = 1 << 31  # of one operation of the kernel, whose lengths are signed 32-bit numbers
OP_BYTES_MAX = 1 << 20  # large enough for full bandwidth on any drive measured, small enough to keep depth


class SlotIo:
    """Operations on the slots of one open file. Fills the counters of `stats` that count operations and bytes.

    Threads: one at a time.
    """

    def __init__(
        self, engine: Engine, fd: int, layout: SlotLayout, stats: TierStats, recorder: Recorder | None
    ) -> None:
        if (largest := max(layout.fragment_padded_bytes)) > FRAGMENT_BYTES_MAX:
            raise ConfigError(
                f"a fragment of {format_bytes(largest)} is more than one operation moves; make groups smaller"
            )
        self.engine = engine
        self._fd, self.layout, self._stats, self._recorder = fd, layout, stats, recorder
        self._num_batches, self._under_way, self._early = 0, set[int](), dict[int, Completions]()
        self._offsets = np.array(layout.fragment_offset, np.uint64)
        self._lengths = np.array(layout.fragment_padded_bytes, np.uint32)
        self._views = [(ctypes.c_uint8 * length).from_address for length in layout.fragment_padded_bytes]
        self._is_even = len(set(layout.fragment_padded_bytes)) == 1

    def _start(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        return (PAGE_BYTES + slots * self.layout.slot_bytes).astype(np.uint64)

    def header_ops(self, slots: npt.NDArray[np.int64], pages: npt.NDArray[np.uint8], kind: int) -> Batch:
        """Return operations on the headers of `slots`. Shapes: slots [n]; pages [n, header_bytes]."""
        batch = np.zeros(len(slots), OP)
        batch["fd"], batch["kind"], batch["length"] = self._fd, kind, self.layout.header_bytes
        batch["offset"] = self._start(slots)
        batch["address"] = address_of(pages) + np.arange(len(slots), dtype=np.uint64) * self.layout.header_bytes
        return batch

    def fragment_ops(
        self,
        slots: npt.NDArray[np.int64],
        fragments: npt.NDArray[np.integer],
        addresses: npt.NDArray[np.uint64],
        kind: int,
    ) -> Batch:
        """Return operations on one fragment of each slot. Shapes: [n] each."""
        batch = np.zeros(len(slots), OP)
        batch["fd"], batch["kind"] = self._fd, kind
        batch["offset"] = self._start(slots) + self._offsets[fragments]
        batch["length"], batch["address"] = self._lengths[fragments], addresses
        return batch

    def run(self, batch: Batch, cause: Cause, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Do every operation and say which went well. Shapes: batch, slots [n]."""
        return self.all_done(self.begin(batch), cause, slots, None)

    def begin(self, batch: Batch, gap_bytes_max: int = 0) -> Merged:
        """Hand over every operation, merged where they touch, or nearly so. Several batches may be under way."""
        merged = merge(batch, bytes_max=OP_BYTES_MAX, gap_bytes_max=gap_bytes_max)
        self._num_batches = (self._num_batches + 1) % (1 << 31)
        merged.batch["tag"] += np.uint64(self._num_batches << 32)
        if len(merged.batch):
            self._under_way.add(self._num_batches)
            self.engine.submit(merged.batch)
        return merged

    def all_done(
        self,
        merged: Merged,
        cause: Cause,
        slots: npt.NDArray[np.int64],
        fragments: npt.NDArray[np.integer] | None,
    ) -> npt.NDArray[np.bool_]:
        """Wait for what was begun and say which operations went well. Shapes: slots, fragments, result [n]."""
        good = np.zeros(len(merged.part_of), np.bool_)
        for moved, _ in self.finish(merged, cause, slots, fragments):
            good[moved] = True
        return good

    def finish(
        self,
        merged: Merged,
        cause: Cause,
        slots: npt.NDArray[np.int64],
        fragments: npt.NDArray[np.integer] | None,
    ) -> Iterator[tuple[Index, Index]]:
        """Yield, as operations end, which of those before merging moved whole, and which did not.

        Of a read that ends early, what came before its end is whole. All of one `begin` are reads, or all are writes.
        Shapes: slots, fragments [n]; yields [m], [k].
        Raises: IoError where the engine raised meanwhile, whatever for.
        """
        order = np.argsort(merged.part_of, kind="stable")
        bounds = np.searchsorted(merged.part_of[order], np.arange(len(merged.batch) + 1))
        wanted, edges, has_gaps = merged.batch["length"].astype(np.uint64), bounds.tolist(), len(merged.scratch) > 0
        outstanding = len(merged.batch)
        number = int(merged.batch["tag"][0]) >> 32 if outstanding else 0
        is_write = bool((merged.batch["kind"][:1] == WRITE).all())
        while outstanding:
            completions = self._reap(number)
            outstanding -= len(completions)
            tags, lengths = completions["tag"].astype(np.intp), completions["length"]
            whole = (completions["error"] == 0) & (lengths == wanted[tags])
            is_all_whole = bool(whole.all())
            self._count(
                len(completions), int(lengths.sum() if is_all_whole else lengths[whole].sum()), is_write=is_write
            )
            if has_gaps:
                self._stats.gap_bytes += int(merged.gap_bytes[tags[whole]].sum())
            self._record(merged, completions, bounds, order, slots, fragments, cause)
            spans = [order[edges[tag] : edges[tag + 1]] for tag in tags.tolist()]
            parts = spans[0] if len(spans) == 1 else np.concatenate(spans)
            if is_all_whole:
                yield parts, parts[:0]
                continue
            moved = np.where(whole | (not is_write), lengths, 0).astype(np.int64)
            is_whole = merged.end_of[parts] <= np.repeat(moved, bounds[tags + 1] - bounds[tags])
            yield parts[is_whole], parts[~is_whole]
        self._under_way.discard(number)

    def settle(self) -> None:
        """Wait until nothing is in flight, whose ends nobody wants: an engine raised, and what it moves may go on.

        Only then are slots and memory free for others. An engine that cannot even say so fails whoever asks it next.
        """
        self._early.clear()
        self._under_way.clear()
        with contextlib.suppress(Exception):  # the first failure is the one to tell
            while len(self.engine.reap(1)):
                pass

    def _reap(self, number: int) -> Completions:
        """Return completions of one batch, tags counted from 0; what ends of others meanwhile is kept for them."""
        if number not in self._under_way:
            raise IoError(errno.EIO, "given up with others, since the engine failed meanwhile")
        done = self._early.pop(number, None)
        while done is None:
            found = self.engine.reap(1)
            whose = found["tag"] >> np.uint64(32)
            found["tag"] &= np.uint64(0xFFFFFFFF)
            if (whose == number).all():
                return found
            for other in np.unique(whose).tolist():
                part = found[whose == other]
                if other == number:
                    done = part
                else:
                    self._early[other] = np.concatenate([self._early[other], part]) if other in self._early else part
        return done

    def _count(self, num: int, num_bytes: int, *, is_write: bool) -> None:
        if is_write:
            self._stats.num_writes += num
            self._stats.written_bytes += num_bytes
        else:
            self._stats.num_reads += num
            self._stats.read_bytes += num_bytes

    def checksums(
        self, fragments: npt.NDArray[np.integer], addresses: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.uint64]:
        """Return the xxh3-64 of each fragment in memory, padding included."""
        places = addresses.tolist()
        views: Iterable[ctypes.Array[ctypes.c_uint8]] = (
            map(self._views[0], places)
            if self._is_even
            else (self._views[one](at) for one, at in zip(fragments.tolist(), places, strict=True))
        )
        return np.fromiter(map(xxhash.xxh3_64_intdigest, views), np.uint64, len(addresses))

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
