"""A bounded, checksummed, restart-safe store of other engines' chunks: one file, one worker, the oldest gives way.

Look-ups ask memory alone and never wait. Bytes move on the worker: loads before stores, what waits in the queue is
moved together, so that many small jobs reach the drive as a few large operations. Where chunks are whole pages and lie
on page boundaries they move straight from and to the engine's memory; else through a buffer of our own.
Next: kvtide.integrations.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import hashlib
import itertools
import logging
import threading
import time
from collections.abc import KeysView, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KEY, KeyArray
from kvtide.chunks.transfer import LOAD, STORE, Kind, Transfer
from kvtide.errors import ConfigError, IoError
from kvtide.evict import Lru
from kvtide.evict.admission import make_admission
from kvtide.io.ops import PAGE_BYTES, address_of, aligned_buffer
from kvtide.spec import Dtype, Identity, Layout, SlotLayout
from kvtide.tiers.contract import FAILED, FULL, OK, READ_REQUEST, GroupRecords, Statuses, TierStats
from kvtide.tiers.namespace import OpenNamespace, open_namespace
from kvtide.trace.record import Recorder
from kvtide.units import format_bytes

BATCH_BYTES = 32 << 20  # moved at once: keeps any drive busy, and a load waits for no more than this of a store
_CHUNK_BYTES_MAX = 1 << 30
_log = logging.getLogger("kvtide.chunks")


@dataclass(frozen=True, slots=True)
class ChunkOptions:
    """Where chunks lie and how many. `facts` are what the bytes depend on: chunks of other facts are never found.

    A store has one owner. Of several processes with equal facts each gets a store of its own, up to `replicas_max`, and
    each may fill `capacity_bytes`.
    """

    directory: Path
    capacity_bytes: int
    chunk_bytes: int
    model: str
    facts: Mapping[str, str] = field(default_factory=dict)
    weights_digest: str = ""
    engine: str = "auto"
    admission: str = "always"  # which chunks are worth writing: a name of `kvtide.evict.admission`
    bytes_per_day: int = 0  # what admission by endurance may write
    replicas_max: int = 8

    def identity(self, replica: int = 0) -> Identity:
        """Return the identity of these chunks, as of KV of one layer and one token.

        Raises: ConfigError for sizes out of range.
        """
        if not 1 <= self.chunk_bytes <= _CHUNK_BYTES_MAX:
            raise ConfigError(
                f"chunks of {self.chunk_bytes} bytes; 1 byte to {format_bytes(_CHUNK_BYTES_MAX)} are kept"
            )
        facts = dict(self.facts) | ({"replica": str(replica)} if replica else {})
        return Identity(
            model=self.model,
            weights_digest=self.weights_digest or hashlib.sha256(self.model.encode()).hexdigest(),
            tokenizer_digest="0" * 64,
            revision="",
            adapter="",
            rope=(),
            dtype=Dtype.FP8_E4M3,
            layout=Layout.LAYER_MAJOR,
            block_tokens=1,
            group_blocks=1,
            tp_rank=0,
            tp_size=1,
            layers=((0, self.chunk_bytes, 0, 1, 0),),
            facts=tuple(sorted((name, told[:256]) for name, told in facts.items())),
        )


@dataclass(slots=True)
class ChunkCounts:
    """Chunks since the store was opened; `known` ones were to be stored and were there, `missed` ones to be loaded.

    `refused` ones were not taken, for want of room or by admission.
    """

    stored: int = 0
    loaded: int = 0
    known: int = 0
    evicted: int = 0
    missed: int = 0
    failed: int = 0
    refused: int = 0


class ChunkStore:
    """Chunks by key.

    Threads: any may call.
    Raises: ConfigError, FormatError, IoError as `open_namespace` does.
    """

    def __init__(self, options: ChunkOptions, *, recorder: Recorder | None = None) -> None:
        layout = SlotLayout(options.identity().shape(), block_tokens=1, group_blocks=1)
        num_keys = max(1, 2 * options.capacity_bytes // layout.slot_bytes)  # as many again as there is room for
        admission = make_admission(options.admission, num_keys=num_keys, bytes_per_day=options.bytes_per_day)
        self._space = _open(options, layout, recorder)
        self.layout, self.counts, self.path = layout, ChunkCounts(), self._space.path
        self.chunk_bytes, self.model = options.chunk_bytes, options.model
        self._tier = self._space.tier
        self._admission = admission
        self._lru = Lru(self._tier.num_slots)
        self._lru.admit(self._tier.slots_of(self._tier.inventory().keys))
        self._touched: collections.deque[KeyArray] = collections.deque()
        self._bounce = np.empty(0, np.uint8)
        self._queues: dict[Kind, collections.deque[Transfer]] = {LOAD: collections.deque(), STORE: collections.deque()}
        self._ready = threading.Condition()
        self._num_open, self._is_closed = 0, False
        self._worker = threading.Thread(target=self._run, name="kvtide-chunks", daemon=True)
        self._worker.start()

    @property
    def num_chunks(self) -> int:
        """Chunks there are."""
        return self._tier.stats().num_groups

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

    def has(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """Say which chunks can be loaded. Never waits. Shapes: keys [n]; returns [n]."""
        return self._tier.lookup(keys)

    @property
    def held(self) -> KeysView[bytes]:
        """Keys of the chunks that can be loaded, as `fold_one` makes them. To ask what is in it never waits."""
        return self._tier.held

    def touch(self, keys: KeyArray) -> None:
        """Note that chunks are wanted, so that they are given up last. Never waits."""
        self._touched.append(keys)

    def submit(self, transfer: Transfer) -> Transfer:
        """Begin to move chunks between the store and memory. Never waits.

        At each of the transfer's addresses lie `chunk_bytes`.
        Raises: IoError after `close`.
        """
        with self._ready:
            if self._is_closed:
                raise IoError(0, f"the store {self.path} is closed; open it again")
            self._num_open += 1
            self._queues[transfer.kind].append(transfer)
            self._ready.notify_all()
        return transfer

    def store(self, keys: KeyArray, addresses: npt.NDArray[np.uint64]) -> Statuses:
        """Write chunks and wait; return what became of each. Shapes: [n] each."""
        return self._now(Transfer(STORE, keys, addresses))

    def load(self, keys: KeyArray, addresses: npt.NDArray[np.uint64]) -> Statuses:
        """Read chunks and wait; return what became of each. Shapes: [n] each."""
        return self._now(Transfer(LOAD, keys, addresses))

    def _now(self, transfer: Transfer) -> Statuses:
        self.submit(transfer).wait()
        return transfer.statuses

    def drop(self, keys: KeyArray) -> None:
        """Forget chunks, when nothing moves."""
        with self._ready:
            self._ready.wait_for(lambda: not self._num_open)
            slots = self._tier.slots_of(keys)
            self._lru.forget(slots[slots >= 0])
            self._tier.drop(keys)

    def drain(self) -> None:
        """Return when every transfer is done."""
        with self._ready:
            self._ready.wait_for(lambda: not self._num_open)

    def close(self) -> None:
        """Finish what was begun, then give up file and lock. Idempotent."""
        with self._ready:
            self._is_closed = True
            self._ready.notify_all()
        self._worker.join()
        self._space.close()

    # The worker

    def _run(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._is_closed or any(self._queues.values()))
                if not any(self._queues.values()):
                    return
                taken = self._take()
            self._move(taken)

    def _take(self) -> list[tuple[Transfer, slice]]:
        """Return what to move next, all of one kind: loads if there are any."""
        queue = self._queues[LOAD] or self._queues[STORE]
        room = max(1, BATCH_BYTES // self.chunk_bytes)
        taken = []
        while queue and room > 0:
            rows = queue[0].take(room)
            room -= rows.stop - rows.start
            taken.append((queue[0], rows))
            if rows.stop == len(queue[0].keys):
                queue.popleft()
        return taken

    def _move(self, taken: list[tuple[Transfer, slice]]) -> None:
        """Move chunks, and end the transfers whose last ones these were."""
        keys = np.concatenate([transfer.keys[rows] for transfer, rows in taken])
        addresses = np.concatenate([transfer.addresses[rows] for transfer, rows in taken])
        try:
            statuses = (self._load if taken[0][0].kind == LOAD else self._store)(keys, addresses)
        except Exception as error:  # the engine goes on without these chunks
            _log.warning("kvtide: %d chunks were given up: %s", len(keys), error)
            statuses = np.full(len(keys), FAILED, np.uint8)
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

    def _load(self, keys: KeyArray, addresses: npt.NDArray[np.uint64]) -> Statuses:
        own = self._bounced(addresses)
        requests = np.zeros(len(keys), READ_REQUEST)
        requests["row"], requests["address"] = np.arange(len(keys)), addresses if own is None else own
        slots = self._tier.slots_of(keys)
        statuses = self._tier.read(keys, requests, cause="restore")
        good = statuses == OK
        self._tier.drop(keys[statuses == FAILED], reason="unreadable")  # or the engine would ask for them for ever
        self._lru.forget(slots[~good & (slots >= 0)])
        self._lru.touch(slots[good])
        if own is not None:
            self._copy(own[good], addresses[good])
        self.counts.loaded += int(good.sum())
        self.counts.missed += int((~good).sum())
        return statuses

    def _store(self, keys: KeyArray, addresses: npt.NDArray[np.uint64]) -> Statuses:
        statuses = np.full(len(keys), OK, np.uint8)
        is_new = ~self._tier.lookup(keys)
        place = {key: row for row, key in enumerate(keys.tolist())}  # of one key named twice, once is enough
        is_last = np.zeros(len(keys), np.bool_)
        is_last[list(place.values())] = True
        rows = np.flatnonzero(is_new & is_last)
        self.counts.known += len(keys) - len(rows)
        if not len(rows):
            return statuses
        rows = self._let_in(keys, rows)
        statuses[is_new] = FULL
        if not len(rows):
            return statuses
        self._make_room(len(rows))
        at = addresses[rows]
        own = self._bounced(at)
        if own is not None:
            self._copy(at, own)
        records = _records(keys[rows])
        wrote = self._tier.write(records, (at if own is None else own)[:, None], cause="demote")
        statuses[rows] = wrote
        statuses[is_new & ~is_last] = np.where(self._tier.lookup(keys[is_new & ~is_last]), OK, FAILED)
        if (wrote != OK).any():
            self._tier.note(records.take(wrote == FULL), "full")
            self._tier.note(records.take(wrote == FAILED), "failed")
        self._lru.admit(self._tier.slots_of(keys[rows[wrote == OK]]))
        self.counts.refused += int((wrote != OK).sum())
        self.counts.stored += int((wrote == OK).sum())
        return statuses

    def _let_in(self, keys: KeyArray, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return those of `rows` that are worth writing; the others are noted as refused."""
        short = np.ascontiguousarray(keys[rows]).view("<u8").reshape(len(rows), -1)[:, 0]
        good = self._admission.admits(short, num_bytes=self.chunk_bytes, now_ns=time.monotonic_ns())
        if not good.all():
            self._tier.note(_records(keys[rows[~good]]), "refused")
            self.counts.refused += int((~good).sum())
        return rows[good]

    def _make_room(self, num: int) -> None:
        """Give up the chunks that were not used for the longest time, until `num` fit."""
        while self._touched:
            slots = self._tier.slots_of(self._touched.popleft())
            self._lru.touch(slots[slots >= 0])
        num_free = self._tier.num_slots - self._tier.stats().num_groups
        if num > num_free:
            victims = self._lru.victims(num - num_free, self._tier.table.used)
            self._lru.forget(victims)
            self._tier.drop(self._tier.table.keys[victims], reason="evicted")
            self.counts.evicted += len(victims)

    # Memory that direct I/O cannot use

    def _bounced(self, addresses: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64] | None:
        """Return addresses of our own to use instead; None where the engine's will do."""
        if self.chunk_bytes % PAGE_BYTES == 0 and not (addresses % PAGE_BYTES).any():
            return None
        step = self.layout.fragment_padded_bytes[0]
        if len(self._bounce) < step * len(addresses):
            self._bounce = aligned_buffer(step * len(addresses))
        return np.arange(len(addresses), dtype=np.uint64) * np.uint64(step) + np.uint64(address_of(self._bounce))

    def _copy(self, sources: npt.NDArray[np.uint64], targets: npt.NDArray[np.uint64]) -> None:
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            ctypes.memmove(target, source, self.chunk_bytes)


def _open(options: ChunkOptions, layout: SlotLayout, recorder: Recorder | None) -> OpenNamespace:
    """Open the first store of these facts that no other process owns.

    Raises: IoError(EBUSY) if every one is owned; what `open_namespace` raises.
    """
    for replica in range(options.replicas_max):
        try:
            space = open_namespace(
                options.directory,
                options.identity(replica),
                layout,
                capacity_bytes=options.capacity_bytes,
                engine=options.engine,
                recorder=recorder,
                gap_bytes_max=layout.header_bytes,
                is_packed=True,
            )
        except IoError as error:
            if error.errno != errno.EBUSY or replica == options.replicas_max - 1:
                raise
            _log.info("kvtide: %s; this process takes a store of its own", error)
        else:
            return space
    raise ConfigError(f"replicas_max is {options.replicas_max}; 1 or more are needed")


def _records(keys: KeyArray) -> GroupRecords:
    ones = np.ones(len(keys), np.int64)
    return GroupRecords(keys, np.zeros(len(keys), KEY), ones, ones, keys[:, None])
