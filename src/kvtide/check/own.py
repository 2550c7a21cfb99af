"""kvtide's own tiers as targets: the file tier, the tier in DRAM, and the store of engines' chunks. Next: remotes."""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

import kvtide
from kvtide.blocks import KEY, KeyArray, chain_keys, chain_root
from kvtide.check.contract import FACTS, MODEL, Reported, Setup, Traits
from kvtide.chunks import LOAD, STORE, ChunkOptions, ChunkStore, Transfer, fold
from kvtide.io.ops import PAGE_BYTES, address_of, aligned_buffer
from kvtide.spec import Dtype, Identity, Layout
from kvtide.tiers.contract import OK, READ_REQUEST, GroupRecords, Tier
from kvtide.tiers.memory import FramePool, MemoryTier
from kvtide.tiers.namespace import open_namespace

CHUNK_TOKENS, NUM_LAYERS = 16, 2
ROOM_BYTES = 256 << 20  # where a setup bounds nothing
STAGING_BYTES = 64 << 20
_LAYOUTS = {"layer-first": Layout.LAYER_MAJOR, "page-first": Layout.BLOCK_FIRST}


TIER_TRAITS = Traits(
    *("tier", "kvtide", kvtide.__version__),
    has_memory=True,
    can_overwrite=True,
    facts=tuple(FACTS),
    has_salt=True,
    chunk_tokens=CHUNK_TOKENS,
    value_multiple=CHUNK_TOKENS * NUM_LAYERS * 2,
)
"""What every target over a tier has; each says what is its own."""


def identity_of(setup: Setup) -> Identity:
    """Return kvtide's identity of what a setup says."""
    told = setup.identity
    row = setup.value_bytes // (CHUNK_TOKENS * NUM_LAYERS)
    return Identity(
        model=MODEL,
        weights_digest=told["weights"],
        tokenizer_digest="0" * 64,
        revision=told["revision"],
        adapter=told["adapter"],
        rope=(("text", told["rope"]),),
        dtype=Dtype.parse(told["dtype"]),
        layout=_LAYOUTS[told["layout"]],
        block_tokens=CHUNK_TOKENS,
        group_blocks=1,
        tp_rank=0,
        tp_size=int(told["tp"]),
        layers=tuple((layer, row // 2, row - row // 2, 1, 0) for layer in range(NUM_LAYERS)),
        facts=(("build", told["build"]),),
    )


class TierTarget:
    """A target over a `kvtide.tiers` tier: a group of one block is a value, its layers are fragments.

    Decides what the cache decides above a tier: which group gives way, and that values pass through frames of bounded
    memory. Subclasses open the tier.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup, self._identity = setup, identity_of(setup)
        self._layout = self._identity.slot()
        self._lock = threading.Lock()
        self._order: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        num = max(1, (setup.memory_bytes or STAGING_BYTES) // self._layout.slot_bytes)
        self._frames = FramePool(num, self._layout.slot_bytes)
        self._tier = self._open()
        self._last = [0.0, 0.0]

    def _open(self) -> Tier:
        raise NotImplementedError

    def _num_slots(self) -> int:
        return (self._setup.capacity_bytes or ROOM_BYTES) // self._layout.slot_bytes

    def keys(self, chains: Sequence[Sequence[int]]) -> list[bytes]:
        root = chain_root(self._identity.digest(), self._setup.salt)
        return [chain_keys(chain, block_tokens=CHUNK_TOKENS, parent=root)[-1].tobytes() for chain in chains]

    def put(self, keys: Sequence[bytes], values: Sequence[bytes]) -> list[bool]:
        with self._lock:
            begun, good = time.perf_counter(), list[bool]()
            for part in self._parts(len(keys)):
                good += self._put(keys[part], values[part])
            self._last[1] = time.perf_counter() - begun
        return good

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return self._tier.lookup(_array(keys)).tolist()

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._lock:
            found = list[bytes | None]()
            for part in self._parts(len(keys)):
                found += self._get(keys[part])
        return found

    def drop(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._order.pop(key, None)
            self._tier.drop(_array(keys))

    def reported(self) -> Reported:
        stats = self._tier.stats()
        return Reported(stats.read_bytes, stats.written_bytes, stats.used_bytes, stats.num_groups)

    def close(self) -> None:
        """Give up what `_open` took."""

    def _parts(self, num: int) -> Iterator[slice]:
        """Cut `num` keys into runs that fit the frames."""
        step = self._frames.num_frames
        return (slice(start, start + step) for start in range(0, num, step))

    def _rows(self, frames: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        offsets = np.array(self._layout.fragment_offset, np.uint64) - np.uint64(self._layout.fragment_offset[0])
        return self._frames.addresses(frames)[:, None] + offsets

    def _cuts(self) -> list[tuple[slice, slice]]:
        """Return which part of a frame holds which part of a value."""
        first, cuts, start = self._layout.fragment_offset[0], [], 0
        for offset, size in zip(self._layout.fragment_offset, self._layout.fragment_bytes, strict=True):
            cuts.append((slice(offset - first, offset - first + size), slice(start, start + size)))
            start += size
        return cuts

    def _put(self, keys: Sequence[bytes], values: Sequence[bytes]) -> list[bool]:
        place = {key: row for row, key in enumerate(keys)}  # of one key named twice the last counts
        rows = sorted(place.values())
        frames = self._frames.take(len(rows))
        try:
            for frame, row in zip(frames.tolist(), rows, strict=True):
                value = np.frombuffer(values[row], np.uint8)
                for at, of in self._cuts():
                    self._frames.rows[frame, at] = value[of]
            good = self._write(_array([keys[row] for row in rows]), self._rows(frames))
        finally:
            self._frames.give(frames)
        told = {keys[row]: one for row, one in zip(rows, good, strict=True)}
        return [told[key] for key in keys]

    def _write(self, keys: KeyArray, addresses: npt.NDArray[np.uint64]) -> list[bool]:
        self._make_room(len(keys))
        ones = np.ones(len(keys), np.int64)
        records = GroupRecords(keys, np.zeros(len(keys), KEY), ones * CHUNK_TOKENS, ones, keys[:, None])
        good = (self._tier.write(records, addresses, cause="demote") == OK).tolist()
        for key, is_good in zip(keys.tolist(), good, strict=True):
            if is_good:
                self._order[key] = None
                self._order.move_to_end(key)
        return good

    def _make_room(self, num: int) -> None:
        """Drop what was not used for the longest time until `num` groups fit."""
        victims = list(itertools.islice(self._order, max(0, len(self._order) + num - self._num_slots())))
        for key in victims:
            del self._order[key]
        if victims:
            self._tier.drop(_array(victims), reason="evicted")

    def _get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        frames = self._frames.take(len(keys))
        try:
            num = self._layout.num_fragments
            requests = np.zeros(len(keys) * num, READ_REQUEST)
            requests["row"] = np.repeat(np.arange(len(keys)), num)
            requests["fragment"] = np.tile(np.arange(num), len(keys))
            requests["address"] = self._rows(frames).ravel()
            statuses = self._tier.read(_array(keys), requests, cause="restore").reshape(len(keys), num).max(axis=1)
            found = list[bytes | None]()
            for key, frame, status in zip(keys, frames.tolist(), statuses.tolist(), strict=True):
                found.append(
                    b"".join(self._frames.rows[frame, at].tobytes() for at, _ in self._cuts()) if status == OK else None
                )
                if status == OK and key in self._order:
                    self._order.move_to_end(key)
            self._forget([key for key, status in zip(keys, statuses.tolist(), strict=True) if status != OK])
        finally:
            self._frames.give(frames)
        return found

    def _forget(self, keys: list[bytes]) -> None:
        """Forget groups that could not be read, or they would be asked for for ever."""
        self._tier.drop(_array(keys), reason="unreadable")
        for key in keys:
            self._order.pop(key, None)


class FileTarget(TierTarget):
    """`kvtide.tiers.FileTier` over one preallocated file."""

    traits: ClassVar[Traits] = replace(
        TIER_TRAITS,
        name="file",
        is_bounded=True,
        is_durable=True,
        is_on_disk=True,
        is_checksummed=True,
        can_be_direct=True,
        note="the file tier, written in three steps, the group not used for the longest time gives way",
    )

    def _open(self) -> Tier:
        capacity = self._num_slots() * self._layout.slot_bytes + PAGE_BYTES
        if self._setup.capacity_bytes is not None:
            capacity = self._setup.capacity_bytes
        self._space = open_namespace(self._setup.directory, self._identity, self._layout, capacity_bytes=capacity)
        self._order.update(dict.fromkeys(self._space.tier.inventory().keys.tolist()))
        return self._space.tier

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        held = self._space.tier.held  # what any thread may ask at any time
        return [key in held for key in keys]

    def _num_slots(self) -> int:
        return self._space.tier.num_slots if hasattr(self, "_space") else super()._num_slots()

    def close(self) -> None:
        self._space.close()


class MemoryTarget(TierTarget):
    """`kvtide.tiers.MemoryTier`, held in DRAM."""

    traits: ClassVar[Traits] = replace(TIER_TRAITS, name="memory", is_bounded=True, note="the tier in DRAM")

    def _open(self) -> Tier:
        return MemoryTier(self._layout, self._setup.capacity_bytes or ROOM_BYTES)


class ChunksTarget:
    """`kvtide.chunks.ChunkStore`, what the plug-ins for engines stand on."""

    traits: ClassVar[Traits] = Traits(
        *("chunks", "kvtide", kvtide.__version__),
        is_bounded=True,
        is_durable=True,
        is_on_disk=True,
        is_checksummed=True,
        can_be_direct=True,
        has_memory=True,
        facts=tuple(FACTS),
        has_salt=True,
        note="the store of engines' chunks, written packed; the engine's keys are SHA-256 chains of tokens",
    )

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        facts = {**setup.identity, "salt": setup.salt}
        options = ChunkOptions(setup.directory, ROOM_BYTES, setup.value_bytes, MODEL, facts, setup.identity["weights"])
        slot_bytes = options.slot_layout().slot_bytes
        capacity = setup.capacity_bytes or PAGE_BYTES + ROOM_BYTES // slot_bytes * slot_bytes
        self._store = ChunkStore(replace(options, capacity_bytes=capacity))
        self._num = max(1, (setup.memory_bytes or STAGING_BYTES) // setup.value_bytes)
        self._jobs: dict[int, tuple[Transfer, npt.NDArray[np.uint8]]] = {}
        self._numbers = itertools.count()
        self._ended: collections.deque[int] = collections.deque()
        self._ready = threading.Condition()

    def keys(self, chains: Sequence[Sequence[int]]) -> list[bytes]:
        return [chain_keys(chain, block_tokens=16, parent=b"engine")[-1].tobytes() for chain in chains]

    def put(self, keys: Sequence[bytes], values: Sequence[bytes]) -> list[bool]:
        good = list[bool]()
        for start in range(0, len(keys), self._num):
            part = slice(start, start + self._num)
            rows = self._rows(values[part])
            good += (self._store.store(fold(list(keys[part])), self._addresses(rows)) == OK).tolist()
        return good

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return self._store.has(fold(list(keys))).tolist()

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        found = list[bytes | None]()
        for start in range(0, len(keys), self._num):
            folded = fold(list(keys[start : start + self._num]))
            rows = self._lend(len(folded))
            statuses = self._store.load(folded, self._addresses(rows))
            found += _values(rows, statuses, self._setup.value_bytes)
        return found

    def close(self) -> None:
        self._store.close()

    def drop(self, keys: Sequence[bytes]) -> None:
        self._store.drop(fold(list(keys)))

    def reported(self) -> Reported:
        stats = self._store.stats()
        return Reported(stats.read_bytes, stats.written_bytes, stats.used_bytes, stats.num_groups)

    def begin(self, kind: Literal["put", "get"], keys: Sequence[bytes], values: Sequence[bytes]) -> int:
        rows = self._rows(values) if kind == "put" else self._lend(len(keys))
        number = next(self._numbers)
        transfer = Transfer(
            STORE if kind == "put" else LOAD, fold(list(keys)), self._addresses(rows), lambda _: self._note(number)
        )
        self._jobs[number] = (transfer, rows)
        self._store.submit(transfer)
        return number

    def finish(self, timeout_s: float) -> dict[int, list[bool] | list[bytes | None]]:
        found = dict[int, list[bool] | list[bytes | None]]()
        with self._ready:
            self._ready.wait_for(lambda: self._ended, timeout_s)
            while self._ended:
                number = self._ended.popleft()
                transfer, rows = self._jobs.pop(number)
                if transfer.kind == STORE:
                    found[number] = (transfer.statuses == OK).tolist()
                else:
                    found[number] = _values(rows, transfer.statuses, self._setup.value_bytes)
        return found

    def _note(self, number: int) -> None:
        with self._ready:
            self._ended.append(number)
            self._ready.notify_all()

    def _lend(self, num: int) -> npt.NDArray[np.uint8]:
        step = -(-self._setup.value_bytes // PAGE_BYTES) * PAGE_BYTES
        return aligned_buffer(max(1, num) * step).reshape(-1, step)[:num]

    def _rows(self, values: Sequence[bytes]) -> npt.NDArray[np.uint8]:
        rows = self._lend(len(values))
        for row, value in zip(rows, values, strict=True):
            row[: len(value)] = np.frombuffer(value, np.uint8)
        return rows

    def _addresses(self, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
        if not len(rows):
            return np.zeros(0, np.uint64)
        return np.arange(len(rows), dtype=np.uint64) * np.uint64(rows.shape[1]) + np.uint64(address_of(rows))


def _values(rows: npt.NDArray[np.uint8], statuses: npt.NDArray[np.uint8], size: int) -> list[bytes | None]:
    good = (statuses == OK).tolist()
    return [row[:size].tobytes() if is_good else None for row, is_good in zip(rows, good, strict=True)]


def _array(keys: Sequence[bytes]) -> KeyArray:
    return np.frombuffer(b"".join(keys), KEY)
