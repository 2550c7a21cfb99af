"""A bounded, checksummed, restart-safe store of other engines' chunks: one file, one worker, the oldest gives way.

Look-ups ask memory alone and never wait. Bytes move on the worker: loads before stores, what waits in the queue is
moved together, so that many small jobs reach the drive as a few large operations. Where chunks are whole pages and lie
on page boundaries they move straight from and to the engine's memory; else through a buffer of our own.
Next: several.
"""

from __future__ import annotations

import collections
import itertools
import logging
import threading
from collections.abc import Callable, KeysView
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KEY, KeyArray
from kvtide.chunks.bounce import Addresses, Bounce
from kvtide.chunks.door import Door
from kvtide.chunks.options import ChunkOptions
from kvtide.chunks.records import ChunkCounts, records_of
from kvtide.chunks.transfer import LOAD, STORE, Kind, Transfer, take_some
from kvtide.errors import IoError
from kvtide.evict import Lru
from kvtide.io.process import Opener
from kvtide.tiers.contract import FAILED, FULL, OK, READ_REQUEST, Statuses, TierStats
from kvtide.tiers.namespace import open_namespace
from kvtide.trace.record import Recorder

BATCH_BYTES = 32 << 20  # moved at once: keeps any drive busy, and a load waits for no more than this of a store
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
        self._pins: collections.Counter[bytes] = collections.Counter()
        self._pins_lock = threading.Lock()
        self._opener = Opener()
        self._actions: collections.deque[Callable[[], object]] = collections.deque()
        self._queues: dict[Kind, collections.deque[Transfer]] = {LOAD: collections.deque(), STORE: collections.deque()}
        self._ready = threading.Condition()
        self._num_open, self._is_closed, self._is_lost = 0, False, False
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
        return self._num_open

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
        num_max = max(1, int(PINNED_SHARE * self._tier.num_slots))
        with self._pins_lock:
            kept = self._tier.lookup(keys)
            for row in np.flatnonzero(kept).tolist():
                key = keys[row].tobytes()
                if key in self._pins or len(self._pins) < num_max:
                    self._pins[key] += 1
                else:
                    kept[row] = False
        return kept

    def unpin(self, keys: KeyArray) -> None:
        """Undo one `pin` of each key; of keys that are not pinned, nothing. Never waits for the drive."""
        with self._pins_lock:
            for key in keys.tolist():
                if self._pins[key] > 1:
                    self._pins[key] -= 1
                else:
                    del self._pins[key]

    def submit(self, transfer: Transfer) -> Transfer:
        """Begin to move chunks between the store and memory. Never waits.

        At each of the transfer's addresses lies one piece of a chunk, all of it where chunks have one piece.
        Raises: IoError after `close`; ConfigError for another number of pieces.
        """
        transfer.check_pieces(len(self._options.pieces()))
        self._opener.check(f"the store {self.path}")
        with self._ready:
            self._check_open()
            if len(transfer.keys):
                self._num_open += 1
                self._queues[transfer.kind].append(transfer)
                self._ready.notify_all()
                return transfer
        transfer.finish()
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
        with self._ready:
            self._ready.wait_for(lambda: not self._num_open)

    def close(self) -> None:
        """Finish what was begun, then give up file and lock; a forked child gives up its copies. Idempotent."""
        if self._opener.is_here:
            with self._ready:
                self._is_closed = True
                self._ready.notify_all()
            self._worker.join()
        self._space.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise IoError(0, f"the store {self._space.path} is closed; open it again")

    def _between(self, action: Callable[[], object]) -> None:
        """Run `action` on the worker, between batches, and wait for it; pass on what it raises."""
        self._opener.check(f"the store {self.path}")
        done, raised = threading.Event(), []

        def run() -> None:
            try:
                action()
            except BaseException as error:  # raised where it was asked for
                raised.append(error)
            finally:
                done.set()

        with self._ready:
            self._check_open()
            self._actions.append(run)
            self._ready.notify_all()
        done.wait()
        if raised:
            raise raised[0]

    # The worker

    def _run(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._is_closed or self._actions or any(self._queues.values()))
                actions, self._actions = self._actions, collections.deque()
                if not actions and not any(self._queues.values()):
                    return
                loads, stores = self._queues[LOAD], self._queues[STORE]  # loads go first
                taken = [] if actions else take_some(loads or stores, max(1, BATCH_BYTES // self.chunk_bytes))
            for action in actions:
                action()
            if taken:
                self._move(taken)

    def _move(self, taken: list[tuple[Transfer, slice]]) -> None:
        """Move chunks, and end the transfers whose last ones these were."""
        keys = np.concatenate([transfer.keys[rows] for transfer, rows in taken])
        addresses = np.concatenate([transfer.addresses[rows] for transfer, rows in taken])
        statuses = np.full(len(keys), FAILED, np.uint8)
        try:
            self._note_touches()
            if not self._is_lost:
                statuses = (self._load if taken[0][0].kind == LOAD else self._store)(keys, addresses)
        except Exception as error:  # the engine goes on without these chunks
            _log.warning("kvtide: %d chunks were given up: %s", len(keys), error)
        bounds = itertools.accumulate((rows.stop - rows.start for _, rows in taken), initial=0)
        self.counts.failed += int((statuses == FAILED).sum())
        for (transfer, rows), start in zip(taken, bounds, strict=False):
            if transfer.end(rows, statuses[start : start + rows.stop - rows.start]):
                self._finish(transfer)

    def _finish(self, transfer: Transfer) -> None:
        try:
            transfer.finish()
        except Exception:  # a callback of the engine: its fault must not stop the worker
            _log.exception("kvtide: the engine's answer to a finished transfer failed")
        with self._ready:
            self._num_open -= 1
            self._ready.notify_all()

    def _load(self, keys: KeyArray, addresses: Addresses) -> Statuses:
        bounced = self._bounce.needed(addresses)
        at = self._bounce.lend(len(keys)) if bounced else addresses
        num_fragments = at.shape[1]
        requests = np.zeros(at.size, READ_REQUEST)
        requests["row"] = np.repeat(np.arange(len(keys)), num_fragments)
        requests["fragment"] = np.tile(np.arange(num_fragments), len(keys))
        requests["address"] = at.ravel()
        slots = self._tier.slots_of(keys)
        statuses = self._tier.read(keys, requests, cause="restore").reshape(at.shape).max(axis=1)
        good = statuses == OK
        self._tier.drop(keys[statuses == FAILED], reason="unreadable")  # or the engine would ask for them for ever
        lost = ~good & (slots >= 0)
        self._lru.forget(slots[lost])
        self._lru.touch(slots[good])
        if bounced:
            self._bounce.empty(np.flatnonzero(good), addresses[good])
        self.counts.loaded += int(good.sum())
        self.counts.missed += int((~good).sum())
        if lost.any():
            _log.warning("kvtide: %d chunks were corrupt or could not be read, and are forgotten", int(lost.sum()))
            self._tell_gone(keys[lost])
        return statuses

    def _store(self, keys: KeyArray, addresses: Addresses) -> Statuses:
        statuses = np.full(len(keys), OK, np.uint8)
        is_new = ~self._tier.lookup(keys)
        place = {key: row for row, key in enumerate(keys.tolist())}  # of one key named twice, once is enough
        is_last = np.zeros(len(keys), np.bool_)
        is_last[list(place.values())] = True
        rows = np.flatnonzero(is_new & is_last)
        self.counts.known += len(keys) - len(rows)
        self._lru.touch(self._tier.slots_of(keys[~is_new]))
        rows, refused = self._door.let_in(keys, rows)
        if len(refused):
            self._tier.note(records_of(keys[refused]), "refused")
            self.counts.refused += len(refused)
        statuses[is_new] = FULL
        if not len(rows):
            return statuses
        self._make_room(len(rows))
        at = addresses[rows]
        if self._bounce.needed(at):
            at = self._bounce.lend(len(rows))
            self._bounce.fill(addresses[rows])
        records = records_of(keys[rows])
        wrote = self._tier.write(records, at, cause="demote")
        statuses[rows] = wrote
        statuses[is_new & ~is_last] = np.where(self._tier.lookup(keys[is_new & ~is_last]), OK, FAILED)
        statuses[~is_new] = np.where(self._tier.lookup(keys[~is_new]), OK, FULL)  # some may have given way just now
        if (wrote != OK).any():
            self._tier.note(records.take(wrote == FULL), "full")
            self._tier.note(records.take(wrote == FAILED), "failed")
        self._lru.admit(self._tier.slots_of(keys[rows[wrote == OK]]))
        self.counts.refused += int((wrote != OK).sum())
        self.counts.stored += int((wrote == OK).sum())
        return statuses

    # What stays

    def _note_touches(self) -> None:
        while self._touched:
            slots = self._tier.slots_of(self._touched.popleft())
            self._lru.touch(slots[slots >= 0])

    def _make_room(self, num: int) -> None:
        """Give up the chunks that were not used for the longest time and are not pinned, until `num` fit."""
        num_free = self._tier.num_slots - self._tier.stats().num_groups
        if num <= num_free:
            return
        with self._pins_lock:  # what is pinned from here on is found to be gone
            evictable = self._tier.table.used.copy()
            slots = self._tier.slots_of(np.frombuffer(b"".join(self._pins), KEY))
            evictable[slots[slots >= 0]] = False
            victims = self._lru.victims(num - num_free, evictable)
            keys = self._tier.table.keys[victims].copy()
            self._lru.forget(victims)
            self._tier.unlist(keys, "evicted")
        self._tier.flush_departures()  # waits for the drive, which `pin` must not
        self.counts.evicted += len(keys)
        self._tell_gone(keys)

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
        if self._on_gone is None or not len(keys):
            return
        try:
            self._on_gone(keys)
        except Exception:  # as of a transfer's callback
            _log.exception("kvtide: the engine's answer to chunks that left failed")
