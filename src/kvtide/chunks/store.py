"""A bounded, checksummed, restart-safe store of other engines' chunks: one file, one worker, the oldest gives way.

Look-ups ask memory alone and never wait. Bytes move on the worker: loads before stores, what waits in the queue is
moved together, so that many small jobs reach the drive as a few large operations. Where chunks are whole pages and lie
on page boundaries they move straight from and to the engine's memory; else through a buffer of our own.
Next: several.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, KeysView
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KeyArray
from kvtide.chunks.bounce import Addresses, Bounce
from kvtide.chunks.door import Door
from kvtide.chunks.options import ChunkOptions
from kvtide.chunks.pins import Pins
from kvtide.chunks.records import ChunkCounts, last_of, records_of
from kvtide.chunks.transfer import LOAD, STORE, Move, Storing, Transfer, tell
from kvtide.chunks.work import Work
from kvtide.errors import IoError
from kvtide.evict import Lru
from kvtide.io.process import Opener
from kvtide.tiers.contract import FAILED, FULL, OK, READ_REQUEST, Statuses, TierStats
from kvtide.tiers.file import Reading
from kvtide.tiers.namespace import open_namespace
from kvtide.trace.record import Recorder

LOAD_BYTES = 32 << 20  # read at once: keeps any drive busy
PINNED_SHARE = 0.5  # of the chunks there is room for: the rest can always give way to new ones
_TOUCHES_MAX = 1024  # calls of `touch` that wait for the worker; older ones are forgotten
_log = logging.getLogger("kvtide.chunks")


class ChunkStore:
    """Chunks by key.

    `on_gone` is called on the worker's thread with the keys of chunks that left without being dropped: given up for
    newer ones, or found unreadable or corrupt. It must not wait for the store.
    Threads: any may call.
    Raises: ConfigError, FormatError, IoError as `open_namespace` does.
    """

    def __init__(
        self,
        options: ChunkOptions,
        on_gone: Callable[[KeyArray], object] | None = None,
        *,
        recorder: Recorder | None = None,
    ) -> None:
        self._options, self._identity, self._on_gone, self._recorder = options, options.identity(), on_gone, recorder
        self.layout, self.counts, self.chunk_bytes = options.slot_layout(), ChunkCounts(), options.chunk_bytes
        self.model = options.model
        self._door = Door(options, self.layout)
        self._bounce = Bounce(self.layout, options.pieces())
        self._open(options.capacity_bytes)
        self.path = self._space.path
        self._touched: collections.deque[KeyArray] = collections.deque(maxlen=_TOUCHES_MAX)
        self._pins = Pins()
        self._opener = Opener()
        self._work, self._is_lost = Work(max(1, LOAD_BYTES // self.chunk_bytes)), False
        self._worker = threading.Thread(target=self._run, name="kvtide-chunks", daemon=True)
        self._worker.start()

    def _open(self, capacity_bytes: int) -> None:
        options = self._options
        self._space = open_namespace(
            options.directory,
            self._identity,
            self.layout,
            capacity_bytes=capacity_bytes,
            engine=options.engine,
            recorder=self._recorder,
            gap_bytes_max=self.layout.header_bytes,
            is_packed=True,
            master=options.master,
        )
        self._tier = self._space.tier
        self._lru = Lru(self._tier.num_slots)
        self._lru.admit(self._tier.slots_of(self._tier.inventory().keys))

    @property
    def num_chunks(self) -> int:
        """Chunks there are."""
        return self._tier.stats().num_groups

    @property
    def num_chunks_max(self) -> int:
        """Chunks there is room for."""
        return self._tier.num_slots

    @property
    def used_bytes(self) -> int:
        """Bytes of the file that hold chunks."""
        return self._tier.stats().used_bytes

    @property
    def num_pending(self) -> int:
        """Transfers that are not done."""
        return self._work.num_open

    def stats(self) -> TierStats:
        """Return counters and fill of the file."""
        return self._tier.stats()

    @property
    def num_pinned(self) -> int:
        """Chunks that are not given up."""
        return len(self._pins)

    def keys(self) -> KeyArray:
        """Return the keys of all chunks, oldest first. Waits for what moves. Shapes: returns [n]."""
        found: list[KeyArray] = []
        self._between(lambda: found.append(self._tier.inventory().keys))
        return found[0]

    def has(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """Say which chunks can be loaded. Never waits. Shapes: keys [n]; returns [n]."""
        return self._tier.lookup(keys)

    @property
    def held(self) -> KeysView[bytes]:
        """Keys of the chunks that can be loaded, as `fold_one` makes them. To ask what is in it never waits.

        `resize` begins another.
        """
        return self._tier.held

    def touch(self, keys: KeyArray) -> None:
        """Note that chunks are wanted, so that they are given up last. Never waits."""
        self._touched.append(keys)

    def pin(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """Keep chunks from being given up for others until `unpin` was called as often; say which are there and kept.

        At most `PINNED_SHARE` of the chunks there is room for are kept: of more, it says no. A pinned chunk that cannot
        be read is still forgotten. Never waits for the drive. Shapes: keys [n]; returns [n].
        """
        return self._pins.add(keys, self._tier.lookup, max(1, int(PINNED_SHARE * self._tier.num_slots)))

    def unpin(self, keys: KeyArray) -> None:
        """Undo one `pin` of each key; of keys that are not pinned, nothing. Never waits for the drive."""
        self._pins.remove(keys)

    def submit(self, transfer: Transfer) -> Transfer:
        """Begin to move chunks between the store and memory. Never waits.

        At each of the transfer's addresses lies one piece of a chunk, all of it where chunks have one piece.
        Raises: IoError after `close`; ConfigError for another number of pieces.
        """
        transfer.check_pieces(len(self._options.pieces()))
        self._opener.check(f"the store {self.path}")
        self._work.put(transfer)
        return transfer

    def store(self, keys: KeyArray, addresses: Addresses) -> Statuses:
        """Write chunks and wait; return what became of each. Shapes: [n], [n] or [n, P]; returns [n]."""
        return self.submit(Transfer(STORE, keys, addresses)).result()

    def load(self, keys: KeyArray, addresses: Addresses) -> Statuses:
        """Read chunks and wait; return what became of each. Shapes: [n], [n] or [n, P]; returns [n]."""
        return self.submit(Transfer(LOAD, keys, addresses)).result()

    def drop(self, keys: KeyArray) -> None:
        """Forget chunks, and wait until that is done, between two batches of what moves."""
        self._between(lambda: self._forget(keys))

    def resize(self, capacity_bytes: int) -> None:
        """Let the file have `capacity_bytes`, and wait for it; chunks that lie beyond are given up.

        Raises: ConfigError or IoError of `open_namespace`; the store then goes on as it was. Where even that cannot be
        opened again it has nothing, and every transfer fails, until another `resize` ends well.
        """
        self._between(lambda: self._reopen(capacity_bytes))

    def drain(self) -> None:
        """Return when every transfer is done."""
        self._opener.check(f"the store {self.path}")
        self._work.drain()

    def close(self) -> None:
        """Finish what was begun, then give up file and lock; a forked child gives up its copies. Idempotent."""
        if self._opener.is_here:
            self._work.close()
            self._worker.join()
        self._space.close()

    def _between(self, action: Callable[[], object]) -> None:
        self._opener.check(f"the store {self.path}")
        self._work.between(action)

    # The worker

    def _run(self) -> None:
        begun: Move | None = None  # ends when the next one has begun, so that the drive does not pause
        while True:
            num_stores = self._tier.portion(is_idle=begun is None or begun.kind == LOAD)
            work = self._work.take(num_stores, can_wait=begun is None)
            if work is None and begun is None:
                return
            actions, taken = work or ([], [])
            move = Move(taken) if taken else None
            if begun is not None and (move is None or not self._can_follow(move, begun)):
                self._end(begun)  # alone
                begun = None
            for action in actions:  # now nothing moves
                action()
            is_under_way = move is not None and self._begin(move)
            if begun is not None:
                self._end(begun)  # while the drive has the next one
            begun = move if is_under_way else None
            if move is not None and not is_under_way:
                self._end(move)  # there was nothing to wait for, or it could not begin

    def _can_follow(self, move: Move, begun: Move) -> bool:
        """Say whether a move may begin before another one ends: loads may, and stores of other chunks, with room."""
        if move.kind != begun.kind:
            return False
        if move.kind == LOAD:
            return True
        has_room = len(move.keys) + len(begun.keys) <= (1 - PINNED_SHARE) * self._tier.num_slots
        return has_room and set(move.keys.tolist()).isdisjoint(begun.keys.tolist())

    def _begin(self, move: Move) -> bool:
        """Begin to move chunks; say whether anything is under way."""
        if self._is_lost:
            return False
        try:
            self._note_touches()
            if move.kind == STORE:
                move.storing = self._begin_store(move)
            elif not self._bounce.needed(move.addresses):
                move.reading = self._read(move, move.addresses)
        except Exception as error:  # a load is tried again, and given up, when nothing else is under way
            level, what = (
                (logging.DEBUG, "cannot be read yet") if move.kind == LOAD else (logging.WARNING, "were given up")
            )
            _log.log(level, "kvtide: %d chunks %s: %s", len(move.keys), what, error)
        return move.reading is not None or (move.storing is not None and move.storing.writing is not None)

    def _end(self, move: Move) -> None:
        """Do what is left to do for chunks, and end the transfers whose last ones these were."""
        statuses = np.full(len(move.keys), FAILED, np.uint8)
        try:
            if move.kind == LOAD and not self._is_lost:
                statuses = self._load(move)
            elif move.storing is not None:
                statuses = self._finish_store(move.keys, move.storing)
        except Exception as error:  # the engine goes on without these chunks
            _log.warning("kvtide: %d chunks were given up: %s", len(move.keys), error)
        self.counts.failed += int((statuses == FAILED).sum())
        ended = [transfer for transfer, rows, found in move.parts(statuses) if transfer.end(rows, found)]
        for transfer in ended:
            tell("a finished transfer", transfer.finish)
        self._work.note_done(len(ended))

    def _read(self, move: Move, at: Addresses) -> Reading:
        """Begin to read the fragments of chunks. Shapes: at [n, F]."""
        requests = np.zeros(at.size, READ_REQUEST)
        requests["row"] = np.repeat(np.arange(at.shape[0]), at.shape[1])
        requests["fragment"] = np.tile(np.arange(at.shape[1]), at.shape[0])
        requests["address"] = at.ravel()
        move.slots = self._tier.slots_of(move.keys)
        return self._tier.begin_read(move.keys, requests, cause="restore")

    def _load(self, move: Move) -> Statuses:
        keys, is_bounced = move.keys, self._bounce.needed(move.addresses)
        at = self._bounce.lend(len(keys)) if is_bounced else move.addresses
        try:
            found = self._tier.finish_read(move.reading or self._read(move, at))
        except IoError:  # given up with another one, which could not be begun: once more, alone
            found = self._tier.finish_read(self._read(move, at))
        statuses = found.reshape(len(keys), -1).max(axis=1)
        good = statuses == OK
        self._tier.drop(keys[statuses == FAILED], reason="unreadable")  # or the engine would ask for them for ever
        lost = ~good & (move.slots >= 0)
        self._lru.forget(move.slots[lost])
        self._lru.touch(move.slots[good])
        if is_bounced:
            self._bounce.empty(np.flatnonzero(good), move.addresses[good])
        self.counts.loaded += int(good.sum())
        self.counts.missed += int((~good).sum())
        if lost.any():
            _log.warning("kvtide: %d chunks were corrupt or could not be read, and are forgotten", int(lost.sum()))
            self._tell_gone(keys[lost])
        return statuses

    def _begin_store(self, move: Move) -> Storing:
        """Make room for the chunks that are not there, and begin to write them."""
        keys, addresses = move.keys, move.addresses
        slots, last = self._tier.slots_of(keys), last_of(keys)
        is_new = slots < 0
        self._lru.touch(slots[~is_new])
        rows = np.flatnonzero(is_new & (last == np.arange(len(keys))))  # of one key named twice, once is enough
        rows, refused = self._door.let_in(keys, rows)
        if len(refused):
            self._tier.note(records_of(keys[refused]), "refused")
        storing = Storing(last, rows, records_of(keys[rows]))
        if len(rows):
            self._make_room(len(rows))
            at = addresses[rows]
            if self._bounce.needed(at):
                at = self._bounce.lend(len(rows), keeps_last=True)
                self._bounce.fill(addresses[rows])
            storing.writing = self._tier.begin_write(storing.records, at, cause="demote")
        return storing

    def _finish_store(self, keys: KeyArray, storing: Storing) -> Statuses:
        """Wait until chunks are written, and return what became of all. Shapes: keys, returns [n]."""
        records, num_stored = storing.records, 0
        statuses = np.where(self._tier.lookup(keys), OK, FULL).astype(np.uint8)  # some may have given way meanwhile
        if storing.writing is not None:
            wrote = self._tier.finish_write(storing.writing)
            if (wrote != OK).any():
                self._tier.note(records.take(wrote == FULL), "full")
                self._tier.note(records.take(wrote == FAILED), "failed")
            self._lru.admit(self._tier.slots_of(records.keys[wrote == OK]))
            statuses[storing.rows] = wrote
            num_stored = int((wrote == OK).sum())
        statuses = statuses[storing.last]
        self.counts.stored += num_stored
        self.counts.known += int((statuses == OK).sum()) - num_stored
        self.counts.refused += int((statuses == FULL).sum())
        return statuses

    # What stays

    def _note_touches(self) -> None:
        while self._touched:
            slots = self._tier.slots_of(self._touched.popleft())
            self._lru.touch(slots[slots >= 0])

    def _make_room(self, num: int) -> None:
        """Give up chunks that are not pinned, those used longest ago, until `num` fit."""
        num_free = self._tier.num_free
        if num <= num_free:
            return
        with self._pins.lock:  # what is pinned from here on is found to be gone
            evictable = self._tier.table.used.copy()
            slots = self._tier.slots_of(self._pins.keys())
            evictable[slots[slots >= 0]] = False
            victims = self._lru.victims(num - num_free, evictable)
            keys = self._tier.table.keys[victims].copy()
            self._lru.forget(victims)
            self._tier.unlist(keys, "evicted")
        self.counts.evicted += len(keys)
        self._tell_gone(keys)
        self._tier.flush_departures()  # waits for the drive, which `pin` must not

    def _forget(self, keys: KeyArray) -> None:
        slots = self._tier.slots_of(keys)
        self._lru.forget(slots[slots >= 0])
        self._tier.drop(keys)

    def _reopen(self, capacity_bytes: int) -> None:
        before = self._tier.inventory().keys
        self._space.close()
        try:
            self._open(capacity_bytes)
        except BaseException:
            try:
                self._open(self._options.capacity_bytes)
            except BaseException as error:
                _log.warning("kvtide: the store %s is lost until it is opened again: %s", self.path, error)
                self._tier.lose()
                self._is_lost = True
                self._tell_gone(before)
            raise
        self._is_lost = False
        self._options = replace(self._options, capacity_bytes=capacity_bytes)
        gone = before[~self._tier.lookup(before)]
        self.counts.evicted += len(gone)
        self._tell_gone(gone)

    def _tell_gone(self, keys: KeyArray) -> None:
        if self._on_gone is not None and len(keys):
            tell("chunks that left", partial(self._on_gone, keys))
