"""What one worker of a soak does with a chunk store: many transfers at once, all compared. Next: _cache_life."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

import _paths  # noqa: F401 - first, for what comes from tests
from engines import Memory
from kvtide.blocks import KeyArray
from kvtide.chunks import LOAD, STORE, ChunkOptions, ChunkStore, Transfer
from kvtide.tiers.contract import FULL, MISSING, OK
from kvtide.tiers.inspect import OUR_FILES
from oracle import Ledger, WrongStoreError, keys_of, seed_of, values_of, versions_in
from simkv import check_slots

NUM_KEYS, BATCH_MAX, NUM_BATCHES = 120, 8, 4
SHAPES = (8192, ()), (5000, ()), (12288, (8192, 4096)), (300, (100, 200))
SLOTS = 40, 80, 130  # the last has room for all keys
PATIENCE_S = 300
OPERATIONS = {"begin_store": 30, "begin_load": 30, "drop": 5, "pin": 5, "touch": 5, "list": 2, "reopen": 2, "resize": 1}


class ChunkLife:
    """One owner of one chunk store. `ledger` says what earlier owners were told."""

    def __init__(self, root: Path, ledger: Ledger, rng: np.random.Generator, *, shape: int, engine: str) -> None:
        self._root, self._ledger, self._rng, self._engine = root, ledger, rng, engine
        self._size, self._pieces = SHAPES[shape % len(SHAPES)]
        self._keys = keys_of(ledger.num_keys)
        self._number_of = {key: number for number, key in enumerate(self._keys.tolist())}
        self._memory = Memory(NUM_BATCHES * BATCH_MAX, self._size, shift=8 * int(rng.integers(0, 2)))
        ends = np.cumsum([0, *(self._pieces or (self._size,))])[:-1].astype(np.uint64)
        self._addresses = self._memory.addresses[:, None] + ends
        self._free = [np.arange(BATCH_MAX) + first * BATCH_MAX for first in range(NUM_BATCHES)]
        self._busy: set[int] = set()  # keys under way
        self._wrong: list[str] = []
        self._changed = threading.Condition()
        self._store: ChunkStore

    def _options(self, num_slots: int) -> ChunkOptions:
        bare = ChunkOptions(self._root, 0, self._size, "soak", engine=self._engine, piece_bytes=self._pieces)
        capacity_bytes = 4096 + num_slots * bare.slot_layout().slot_bytes
        return ChunkOptions(
            self._root, capacity_bytes, self._size, "soak", engine=self._engine, piece_bytes=self._pieces
        )

    def begin(self) -> None:
        """Open what the one before left, and check all of it."""
        self._num_slots = int(self._rng.choice(SLOTS))
        slot_bytes = self._options(1).slot_layout().slot_bytes
        for path in self._root.glob("*/data.kvt"):
            if path.stat().st_size > 4096 + self._num_slots * slot_bytes:
                self._ledger.expose(np.arange(self._ledger.num_keys))
        self._open(is_clean=False)

    def work(self, until: float) -> None:
        """Do operations until that time of the monotonic clock, then close."""
        names, shares = list(OPERATIONS), np.array(list(OPERATIONS.values())) / sum(OPERATIONS.values())
        while time.monotonic() < until:
            getattr(self, "_" + str(self._rng.choice(names, p=shares)))()
            self._ledger.add("operations")
            self._check_wrong()
        self._close()

    def _check_wrong(self) -> None:
        if self._wrong:
            raise WrongStoreError("; ".join(self._wrong[:3]))

    # Opening and closing

    def _open(self, *, is_clean: bool) -> None:
        due = ~self._ledger.may_miss & (self._ledger.acked > 0)
        before = {number: int(self._ledger.acked[number]) for number in np.flatnonzero(due).tolist()}
        self._store = store = ChunkStore(self._options(self._num_slots), self._note_gone)
        numbers = self._numbers(store.keys())
        found = np.full(len(numbers), -1)
        for first in range(0, len(numbers), len(self._memory.rows)):
            some = numbers[first : first + len(self._memory.rows)]
            # What a killed owner left half written answers CORRUPT: small chunks are written header and all at once.
            good = store.load(self._keys[some], self._addresses[: len(some)]) == OK
            found[first : first + len(some)] = np.where(good, versions_in(self._rows(len(some)), some), 0)
        held = self._ledger.judge(numbers[found != 0], found[found != 0])
        if is_clean and held != before:
            raise WrongStoreError(f"closed with {before}, opened with {held}")
        self._check(store)
        self._ledger.add("verified_bytes", int((found > 0).sum()) * self._size)
        self._ledger.add("reopened")

    def _rows(self, num: int) -> npt.NDArray[np.uint8]:
        return np.ascontiguousarray(self._memory.rows[:num])

    def _check(self, store: ChunkStore) -> None:
        tier = store._tier  # noqa: SLF001
        check_slots(tier)
        assert store.num_chunks <= store.num_chunks_max == self._num_slots
        assert (store.path / "data.kvt").stat().st_size == 4096 + self._num_slots * store.layout.slot_bytes
        strays = {path.name for path in store.path.iterdir()} - set(OUR_FILES)
        assert not strays, f"files that are not ours: {strays}"

    def _close(self) -> None:
        self._drain()
        self._store.close()

    def _drain(self) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._busy and len(self._free) == NUM_BATCHES, PATIENCE_S):
                raise WrongStoreError(f"a transfer did not end within {PATIENCE_S} s")
        self._check_wrong()

    def _reopen(self) -> None:
        self._close()
        self._open(is_clean=True)

    def _resize(self) -> None:
        self._drain()
        num_slots = int(self._rng.choice(SLOTS))
        if num_slots < self._num_slots:
            self._ledger.expose(np.arange(self._ledger.num_keys))
        self._num_slots = num_slots
        self._store.resize(self._options(num_slots).capacity_bytes)
        numbers = self._numbers(self._store.keys())
        if len(self._wrong):
            return
        self._ledger.may_miss[:] = True
        self._ledger.may_miss[numbers] = False
        self._check(self._store)

    # Chunks

    def _numbers(self, keys: KeyArray) -> npt.NDArray[np.int64]:
        return np.array([self._number_of[key] for key in keys.tolist()], np.int64)

    def _note_gone(self, keys: KeyArray) -> None:
        """On the worker, before anything takes the place of what left."""
        self._ledger.expose(self._numbers(keys))

    def _take(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """Return keys that are not under way, and rows of memory for them."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free, PATIENCE_S):
                raise WrongStoreError(f"a transfer did not end within {PATIENCE_S} s")
            numbers = self._rng.permutation(self._ledger.num_keys)[: int(self._rng.integers(1, BATCH_MAX + 1))]
            numbers = numbers[[number not in self._busy for number in numbers.tolist()]]
            if not len(numbers):
                return None
            self._busy.update(numbers.tolist())
            return numbers, self._free.pop()[: len(numbers)]

    def _give_back(self, numbers: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> None:
        with self._changed:
            self._busy.difference_update(numbers.tolist())
            first = int(rows[0]) // BATCH_MAX * BATCH_MAX
            self._free.append(np.arange(BATCH_MAX) + first)
            self._changed.notify_all()

    def _begin_store(self) -> None:
        taken = self._take()
        if taken is None:
            return
        numbers, rows = taken
        # A key that may still be there keeps its version: a store passes over what it has.
        versions = self._ledger.acked[numbers].copy()
        new = versions == 0
        versions[new] = self._ledger.intend(numbers[new])
        self._memory.rows[rows] = values_of(seed_of(numbers, versions), self._size)

        def done(transfer: Transfer) -> None:
            good = transfer.statuses == OK
            if not set(transfer.statuses.tolist()) <= {OK, FULL}:
                self._wrong.append(f"storing {numbers.tolist()} answers {transfer.statuses.tolist()}")
            self._ledger.ack(numbers[good], versions[good])
            gone = numbers[good][~self._store._tier.lookup(self._keys[numbers[good]])]  # noqa: SLF001
            self._ledger.expose(gone)  # given up again within the batch
            self._give_back(numbers, rows)

        self._store.submit(Transfer(STORE, self._keys[numbers], self._addresses[rows], done))

    def _begin_load(self) -> None:
        taken = self._take()
        if taken is None:
            return
        numbers, rows = taken
        versions = self._ledger.acked[numbers].copy()

        def done(transfer: Transfer) -> None:
            found = versions_in(self._memory.rows[rows], numbers)
            good, missing = transfer.statuses == OK, transfer.statuses == MISSING
            if (found[good] != versions[good]).any():
                self._wrong.append(f"keys {numbers[good].tolist()} have {found[good].tolist()}, not {versions[good]}")
            if not (good | missing).all() or (missing & ~self._ledger.may_miss[numbers]).any():
                self._wrong.append(f"loading {numbers.tolist()} answers {transfer.statuses.tolist()}")
            self._ledger.add("verified_bytes", int(good.sum()) * self._size)
            self._give_back(numbers, rows)

        self._store.submit(Transfer(LOAD, self._keys[numbers], self._addresses[rows], done))

    def _drop(self) -> None:
        taken = self._take()
        if taken is None:
            return
        numbers, rows = taken
        self._ledger.expose(numbers)
        self._store.drop(self._keys[numbers])
        if self._store.has(self._keys[numbers]).any():
            self._wrong.append(f"keys {numbers.tolist()} were dropped and are there")
        self._ledger.acked[numbers] = 0
        self._give_back(numbers, rows)

    def _pin(self) -> None:
        """What is pinned stays while others come and go."""
        numbers = self._rng.permutation(self._ledger.num_keys)[:6]
        numbers = numbers[[number not in self._busy for number in numbers.tolist()]]
        kept = self._store.pin(self._keys[numbers])
        for _ in range(3):
            self._begin_store()
        self._drain()
        if not self._store.has(self._keys[numbers[kept]]).all():
            self._wrong.append(f"keys {numbers[kept].tolist()} were pinned and are gone")
        self._store.unpin(self._keys[numbers[kept]])

    def _touch(self) -> None:
        self._store.touch(self._keys[self._rng.permutation(self._ledger.num_keys)[:5]])

    def _list(self) -> None:
        numbers = self._numbers(self._store.keys())
        assert len(np.unique(numbers)) == len(numbers) <= self._num_slots
