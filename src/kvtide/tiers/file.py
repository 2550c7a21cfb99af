"""The file tier: groups in fixed slots of one preallocated file, every byte checked. Next: namespace (who opens it).

Decides where a group lies, in which order its parts reach the file, and what a reader may believe. Knows no policy:
when it is full it says so, and the cache chooses what to drop. It moves bytes only through an `io.Engine`, so the same
code runs on a drive and on the simulator.

Theory. `[superblock page][slot 0][slot 1]...`. A group is written in three steps, each complete before the next:
(1) the header that an earlier group left in the slot is wiped, (2) the fragments, (3) the new header. A crash at any
moment thus leaves an empty slot or a whole one. An older version of a group lies in another slot and stays until the
cache drops it, after the new one is whole.

With `is_packed` header and fragments go in one write, and neighbouring slots with them: small groups reach the drive in
large operations. What a crash leaves half written may then have a header, and is found out by the checksums of its
fragments when it is read. It may hide a whole older copy of the same group: who packs stores no group that is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, KeysView
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KeyArray
from kvtide.io.ops import READ, Engine, aligned_buffer
from kvtide.io.schedule import Merged
from kvtide.spec import SlotLayout
from kvtide.tiers.cipher import Cipher
from kvtide.tiers.contract import CORRUPT, FAILED, FULL, MISSING, OK, Cause, GroupRecords, Reason, Statuses, TierStats
from kvtide.tiers.departures import Departures
from kvtide.tiers.header import Decoded, HeaderCodec
from kvtide.tiers.slotio import SlotIo
from kvtide.tiers.slots import SlotTable
from kvtide.tiers.slotwriter import Begun, SlotWriter
from kvtide.trace.record import Recorder

SCAN_SLOTS = 512  # headers read at once when opening
SEQUENCES_UNSEEN = 1 << 40  # more than one owner writes: what a header that cannot be read may have as its number

Numbers = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]


@dataclass(eq=False, slots=True)
class Reading:
    """A read that was begun: of each request its slot and what is known of it, and which ones are under way."""

    slots: Numbers
    requests: npt.NDArray[np.void]
    statuses: Statuses
    cause: Cause
    wanted: npt.NDArray[np.intp] = field(init=False)
    merged: Merged = field(init=False)


@dataclass(eq=False, slots=True)
class Writing:
    """A write that was begun: what is known of each group, and the first of them, for which there was room."""

    statuses: Statuses
    begun: Begun | None


class FileTier:
    """A `Tier` over one open file.

    Fragments that lie up to `gap_bytes_max` bytes apart are read together, over what lies between them. `is_packed`:
    see the theory above. `departures` is where it notes why a group is not there. `cipher` encrypts what is written; a
    tier of encrypted slots without one can tell which are whole, but not read them.
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
        is_packed: bool = False,
        departures: Departures | None = None,
        cipher: Cipher | None = None,
    ) -> None:
        assert cipher is None or layout.is_encrypted, "slots without room for what proves encrypted fragments"
        self._departures, self._cipher, self.fd = departures, cipher, fd
        self.layout, self.num_slots, self.table = layout, num_slots, SlotTable.empty(num_slots, layout)
        self._gap_bytes_max = gap_bytes_max
        self._codec = HeaderCodec(layout, identity_digest)
        self._slot_of: dict[bytes, int] = {}
        self._free = np.ones(num_slots, np.bool_)
        self._sequence = 0
        self._stats = TierStats(capacity_bytes=num_slots * layout.slot_bytes)
        self._io = self._make_io(engine, recorder)
        self._writer = SlotWriter(self._io, self._codec, self.table, cipher, is_packed=is_packed)

    def _make_io(self, engine: Engine, recorder: Recorder | None) -> SlotIo:
        return SlotIo(engine, self.fd, self.layout, self._stats, recorder)

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
            batch = self._io.header_ops(slots, pages, READ)
            good = self._io.run(batch, "metadata", slots)
            self._stats.num_failed += int((~good).sum())
            self.table.has_header[slots[~good]] = True  # for all we know
            decoded = self._codec.decode(pages[: len(slots)])
            self.adopt(slots, decoded, decoded.valid & good)
        if self._stats.num_failed:  # what is written from here on must win over what could not be read, once it can be
            self.write_after(self._sequence + SEQUENCES_UNSEEN)

    def adopt(self, slots: Numbers, decoded: Decoded, kept: npt.NDArray[np.bool_]) -> None:
        """Take over the `kept` of slots that a former owner filled; of two with one key the later one wins."""
        slots, records = slots[kept], decoded.records.take(kept)
        sequences, checksums = decoded.sequences[kept], decoded.checksums[kept]
        self.table.fill(slots, records, sequences, checksums, decoded.proofs[kept])
        for index in np.argsort(sequences, kind="stable").tolist():
            key, slot = records.keys[index].tobytes(), int(slots[index])
            rival = self._slot_of.get(key)
            if rival is not None and self.table.sequences[rival] > sequences[index]:
                self._release(slot)  # slots are scanned in order of place, not of time
            else:
                self._own(key, slot)
        self.write_after(int(sequences.max(initial=0)))

    @property
    def sequence(self) -> int:
        """The number of the newest group, whether it is still there or not."""
        return self._sequence

    def write_after(self, sequence: int) -> None:
        """Number what is written from here on beyond `sequence`: headers of dropped groups may lie in the file."""
        self._sequence = max(self._sequence, sequence)

    def headers(self) -> tuple[Numbers, npt.NDArray[np.uint8]]:
        """Return the used slots and their header pages: what a checkpoint keeps. Shapes: [n], [n, header_bytes]."""
        slots = np.flatnonzero(self.table.used)
        pages = np.zeros((len(slots), self.layout.header_bytes), np.uint8)
        table = self.table
        numbers, checksums, proofs = table.sequences[slots], table.checksums[slots], table.proofs[slots]
        self._codec.encode(table.records(slots), numbers, checksums, pages, proofs)
        return slots, pages

    def inventory(self) -> GroupRecords:
        """Return the records of every group, oldest write first."""
        slots = np.flatnonzero(self.table.used)
        return self.table.records(slots[np.argsort(self.table.sequences[slots], kind="stable")])

    # The contract

    def lookup(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        return self.slots_of(keys) >= 0

    @property
    def held(self) -> KeysView[bytes]:
        """The keys of all groups, kept up to date. Threads: any may ask what is in it."""
        return self._slot_of.keys()

    def read(self, keys: KeyArray, requests: npt.NDArray[np.void], *, cause: Cause) -> Statuses:
        with self._consistent():
            return self.finish_read(self.begin_read(keys, requests, cause=cause))

    def begin_read(self, keys: KeyArray, requests: npt.NDArray[np.void], *, cause: Cause) -> Reading:
        """Begin what `finish_read` ends; several may be under way, and meanwhile nothing is written."""
        slots = self.slots_of(keys)[requests["row"]]
        reading = Reading(slots, requests, np.where(slots < 0, MISSING, OK).astype(np.uint8), cause)
        with self._consistent():
            self._begin(reading, np.flatnonzero(slots >= 0), self._gap_bytes_max)
            return reading

    def finish_read(self, reading: Reading) -> Statuses:
        """Wait for the bytes and verify them; return what became of each request."""
        with self._consistent():
            lost = self._finish(reading)
            if len(lost) and self._gap_bytes_max:  # perhaps for bytes between them that nobody wants
                self._begin(reading, lost, 0)
                lost = self._finish(reading)
            reading.statuses[lost] = FAILED
            self._stats.num_failed += len(lost)
            self._drop_slots(reading.slots[reading.statuses == CORRUPT], "corrupt")  # written down with what comes next
            return reading.statuses

    def _begin(self, reading: Reading, wanted: npt.NDArray[np.intp], gap_bytes_max: int) -> None:
        requests = reading.requests[wanted]
        batch = self._io.fragment_ops(reading.slots[wanted], requests["fragment"], requests["address"], READ)
        reading.wanted, reading.merged = wanted, self._io.begin(batch, gap_bytes_max)

    def _finish(self, reading: Reading) -> npt.NDArray[np.intp]:
        """Verify what was begun as it arrives, note what is corrupt, and return what did not move."""
        wanted, never = reading.wanted, []
        slots, requests = reading.slots[wanted], reading.requests[wanted]
        fragments, addresses = requests["fragment"].astype(np.int64), requests["address"].copy()
        for moved, lost in self._io.finish(reading.merged, reading.cause, slots, fragments):
            bad = self._bad(slots[moved], fragments[moved], addresses[moved])
            reading.statuses[wanted[moved[bad]]] = CORRUPT
            never.append(wanted[lost])
        return np.concatenate(never) if never else wanted[:0]

    def write(self, records: GroupRecords, addresses: Addresses, *, cause: Cause) -> Statuses:
        with self._consistent() as written:
            slots, statuses = self._room_for(records)
            portions = list(self._writer.portions(len(slots)))
            for number, rows in enumerate(portions):  # one is hashed while the drive has the one before
                written.append(self._begin_write(slots[rows], records.take(rows), addresses[rows], cause))
                if number:
                    statuses[portions[number - 1]] = self._end_write(written[number - 1])
            if portions:
                statuses[portions[-1]] = self._end_write(written[-1])
            self.flush_departures()
            return statuses

    def portion(self, *, is_idle: bool) -> int:
        """Return how many groups `begin_write` is best given. `is_idle`: nothing is being written."""
        return self._writer.portion(is_idle=is_idle)

    def begin_write(self, records: GroupRecords, addresses: Addresses, *, cause: Cause) -> Writing:
        """Begin what `finish_write` ends: a `portion` at most, packed. Two may be under way; meanwhile nothing is read.

        Groups are not there before `finish_write`. What is at `addresses` must stay as it is until then.
        """
        assert self._writer.is_packed, "a write in steps is over when it has begun"
        with self._consistent():
            slots, statuses = self._room_for(records)
            num = len(slots)
            begun = self._begin_write(slots, records.take(slice(num)), addresses[:num], cause) if num else None
            return Writing(statuses, begun)

    def finish_write(self, writing: Writing) -> Statuses:
        """Wait until groups are written; return what became of each.

        Raises: IoError where the engine raised meanwhile, whatever for; none of them is there then.
        """
        with self._consistent() as written:
            if writing.begun is not None:
                written.append(writing.begun)
                writing.statuses[: len(writing.begun.slots)] = self._end_write(writing.begun)
            self.flush_departures()
            return writing.statuses

    def _room_for(self, records: GroupRecords) -> tuple[Numbers, Statuses]:
        """Return slots for the first groups, and the statuses of all, FULL."""
        slots = self._allocate(len(records), self.slots_of(records.parents[:1])[0] if len(records) else -1)
        self._stats.num_full += len(records) - len(slots)
        return slots, np.full(len(records), FULL, np.uint8)

    def _begin_write(self, slots: Numbers, records: GroupRecords, addresses: Addresses, cause: Cause) -> Begun:
        return self._writer.begin(slots, records, self._next_sequences(len(slots)), addresses, cause)

    def _end_write(self, begun: Begun) -> Statuses:
        """Note groups that are whole."""
        self._writer.finish(begun)
        good, slots, records = begun.good, begun.slots, begun.records
        self._stats.num_failed += int((~good).sum())
        self._free[slots[~good]] = True
        rows = np.flatnonzero(good)
        self.table.fill(
            slots[rows], records.take(rows), begun.sequences[rows], begun.checksums[rows], begun.proofs[rows]
        )
        for key, slot in zip(records.keys[rows].tolist(), slots[rows].tolist(), strict=True):
            self._own(key, slot)
        return np.where(good, OK, FAILED).astype(np.uint8)

    def drop(self, keys: KeyArray, *, reason: Reason = "dropped") -> None:
        self.unlist(keys, reason)
        self.flush_departures()

    def unlist(self, keys: KeyArray, reason: Reason) -> None:
        """Do what `drop` does in memory, so it never waits; `flush_departures` is to follow."""
        with self._consistent():
            slots = self.slots_of(keys)
            self._drop_slots(slots[slots >= 0], reason)

    def flush_departures(self) -> None:
        """Write down what was noted of groups that left."""
        if self._departures is not None:
            self._departures.flush()

    def lose(self) -> None:
        """Hold nothing, and have room for nothing: whoever closed the file cannot open it again."""
        self._slot_of.clear()  # those who have `held` see it
        self.table.used[:] = False
        self._free[:] = False

    def note(self, records: GroupRecords, reason: Reason) -> None:
        """Remember that groups were not let in, and why."""
        if self._departures is not None:
            self._departures.note(records, reason)
            self.flush_departures()

    @property
    def num_free(self) -> int:
        """Slots that hold nothing and are not being written."""
        return int(np.count_nonzero(self._free))

    def stats(self) -> TierStats:
        self._stats.num_groups = len(self._slot_of)
        self._stats.used_bytes = len(self._slot_of) * self.layout.slot_bytes
        return self._stats

    # Slots

    def slots_of(self, keys: KeyArray) -> Numbers:
        """Return where each group lies, -1 where it is not there. Threads: any may ask.

        No step of it is Python's own, so another thread that computes does not get the interpreter in between.
        """
        return np.fromiter(map(self._slot_of.get, keys.tolist(), repeat(-1)), np.int64, len(keys))

    def _allocate(self, num: int, after: int) -> Numbers:
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

    @contextlib.contextmanager
    def _consistent(self) -> Iterator[list[Begun]]:
        """Leave nothing under way and no slot without an owner, whatever interrupts: an engine that raises, Ctrl-C.

        Yields a list for what is being written: nobody is told which of those are whole, so none may stay.
        """
        written: list[Begun] = []
        try:
            yield written
        except BaseException:
            self._io.settle()
            self.table.used[:] = False
            self.table.used[list(self._slot_of.values())] = True
            self._free = ~self.table.used
            for begun in written:
                self._drop_slots(begun.slots[self.table.sequences[begun.slots] == begun.sequences], "failed")
            raise

    def _release(self, slot: int) -> None:
        self._free[slot] = True
        self.table.used[slot] = False

    def _drop_slots(self, slots: Numbers, reason: Reason) -> None:
        if not len(slots):
            return
        slots = np.unique(slots)
        slots = slots[self.table.used[slots]]
        self._stats.note_dropped(len(slots), reason)
        if self._departures is not None:
            self._departures.note(self.table.records(slots), reason, self.table.sequences[slots])
        for slot in slots.tolist():
            del self._slot_of[self.table.keys[slot].tobytes()]
            self._release(slot)

    # Bytes

    def _next_sequences(self, num: int) -> npt.NDArray[np.uint64]:
        """Return the next `num` numbers in the order of writing."""
        self._sequence += num
        return np.arange(self._sequence + 1 - num, self._sequence + 1, dtype=np.uint64)

    def _bad(self, slots: Numbers, fragments: Numbers, addresses: Addresses) -> npt.NDArray[np.intp]:
        """Return which fragments in memory are not what was written. What is encrypted is decrypted in place.

        Shapes: slots, fragments, addresses [n]; returns [m], rows of those.
        """
        is_bad = self._io.checksums(fragments, addresses) != self.table.checksums[slots, fragments]
        if self._cipher is not None:
            rows = np.flatnonzero(~is_bad)
            is_bad[rows] = ~self._decrypted(slots[rows], fragments[rows], addresses[rows])
        bad = np.flatnonzero(is_bad)
        self._stats.num_corrupt += len(bad)
        return bad

    def _decrypted(self, slots: Numbers, fragments: Numbers, addresses: Addresses) -> npt.NDArray[np.bool_]:
        """Decrypt fragments where they were read to, and say which are what was written."""
        assert self._cipher is not None, "asked to decrypt without a key"
        groups, rows = np.unique(slots, return_inverse=True)
        table, lengths = self.table, np.array(self.layout.fragment_padded_bytes)[fragments]
        about = table.records(groups), table.sequences[groups], groups, table.proofs[groups]
        return self._cipher.decrypt(*about, rows, fragments, addresses, lengths)
