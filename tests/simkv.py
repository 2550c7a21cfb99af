"""The file tier on a drive in memory, groups whose bytes follow from their key, and checks that nothing is lost."""

from __future__ import annotations

import hashlib

import numpy as np

from kvhelp import small_identity
from kvtide.blocks import KEY
from kvtide.cache import TieredCache
from kvtide.cache.sequence import Sequence
from kvtide.io.drive import DeviceModel, SimDrive
from kvtide.io.ops import PAGE_BYTES, address_of, aligned_buffer
from kvtide.io.sim import NO_FAULTS, Faults, SimEngine, VirtualClock
from kvtide.spec import SlotLayout
from kvtide.tiers.contract import READ_REQUEST, GroupRecords, Tier
from kvtide.tiers.file import FileTier
from kvtide.trace.record import Recorder

MODEL = DeviceModel(
    read_latency_ns=80_000,
    write_latency_ns=20_000,
    sync_latency_ns=50_000,
    iops_max=500_000,
    read_bytes_per_s=6_000_000_000,
    write_bytes_per_s=3_000_000_000,
    parallelism=16,
)


def sim_tier(
    drive: SimDrive,
    layout: SlotLayout,
    num_slots: int,
    faults: Faults = NO_FAULTS,
    *,
    seed: int = 0,
    gap_bytes_max: int = 0,
    is_packed: bool = False,
    recorder: Recorder | None = None,
) -> FileTier:
    """Open the drive's one file as a process does after a crash: by scanning."""
    fd = drive.open("data", size_bytes=PAGE_BYTES + num_slots * layout.slot_bytes, direct=True)
    engine = SimEngine(drive, VirtualClock(), faults, seed=seed)
    digest = small_identity(layout).digest()
    made = {"recorder": recorder, "gap_bytes_max": gap_bytes_max, "is_packed": is_packed}
    tier = FileTier(engine, fd, layout, digest, num_slots, **made)
    tier.scan()
    return tier


def group_key(name: int) -> bytes:
    return hashlib.sha256(b"key %d" % name).digest()


def group_bytes(layout: SlotLayout, key: bytes, version: int, fragment: int) -> np.ndarray:
    """One padded fragment that no other key, version or number has."""
    seed = hashlib.sha256(key + b"%d %d" % (version, fragment)).digest()
    length = layout.fragment_padded_bytes[fragment]
    return np.frombuffer((seed * (length // len(seed) + 1))[:length], np.uint8)


class Groups:
    """Writes and reads whole groups of any tier."""

    def __init__(self, layout: SlotLayout) -> None:
        self.layout = layout

    def records(self, keys: list[bytes]) -> GroupRecords:
        num, group = len(keys), self.layout.group_blocks
        array = np.frombuffer(b"".join(keys), KEY)
        blocks = np.frombuffer(b"".join(hashlib.sha256(key).digest() for key in keys for _ in range(group)), KEY)
        tokens = np.full(num, self.layout.tokens_per_group)
        parents = np.frombuffer(b"".join(hashlib.sha256(b"parent" + key).digest() for key in keys), KEY)
        return GroupRecords(array, parents, tokens, np.full(num, group), blocks.reshape(num, group))

    def write(self, tier: Tier, keys: list[bytes], versions: list[int]) -> list[int]:
        layout = self.layout
        buffer = aligned_buffer(len(keys) * sum(layout.fragment_padded_bytes))
        addresses, at = np.zeros((len(keys), layout.num_fragments), np.uint64), 0
        for row, (key, version) in enumerate(zip(keys, versions, strict=True)):
            for fragment, length in enumerate(layout.fragment_padded_bytes):
                buffer[at : at + length] = group_bytes(layout, key, version, fragment)
                addresses[row, fragment] = address_of(buffer) + at
                at += length
        return tier.write(self.records(keys), addresses, cause="demote").tolist()

    def read(self, tier: Tier, keys: list[bytes], pairs: list[tuple[int, int]]) -> tuple[list[int], list[np.ndarray]]:
        """Read fragments (row of keys, fragment); return statuses and bytes."""
        size = max(self.layout.fragment_padded_bytes)
        buffer = aligned_buffer(max(1, len(pairs)) * size).reshape(-1, size)
        requests = np.zeros(len(pairs), READ_REQUEST)
        for index, (row, fragment) in enumerate(pairs):
            requests[index] = (row, fragment, address_of(buffer) + index * size)
        statuses = tier.read(np.frombuffer(b"".join(keys), KEY), requests, cause="restore").tolist()
        lengths = [self.layout.fragment_padded_bytes[fragment] for _, fragment in pairs]
        return statuses, [row[:length] for row, length in zip(buffer, lengths, strict=False)]

    def read_group(self, tier: Tier, key: bytes) -> tuple[list[int], list[np.ndarray]]:
        return self.read(tier, [key], [(0, fragment) for fragment in range(self.layout.num_fragments)])

    def version_of(self, key: bytes, parts: list[np.ndarray], versions: list[int]) -> int | None:
        """Say which of `versions` of the group these bytes are; None if they are none of them."""
        for version in versions:
            wanted = [group_bytes(self.layout, key, version, part) for part in range(self.layout.num_fragments)]
            if all(np.array_equal(part, want) for part, want in zip(parts, wanted, strict=True)):
                return version
        return None


def check_slots(tier: FileTier) -> None:
    """Every slot is free or owned by exactly one key, and the counters say so."""
    owned = list(tier._slot_of.values())
    assert len(set(owned)) == len(owned)
    used = np.zeros(tier.num_slots, np.bool_)
    used[owned] = True
    np.testing.assert_array_equal(tier._free, ~used)
    np.testing.assert_array_equal(tier.table.used, used)
    stats = tier.stats()
    assert stats.num_groups == len(owned)
    assert stats.used_bytes == len(owned) * tier.layout.slot_bytes
    assert stats.capacity_bytes == tier.num_slots * tier.layout.slot_bytes


def check_cache(cache: TieredCache, live: list[Sequence]) -> None:
    """Frames and units are free or in use exactly once, nothing is pinned, and the tier holds what the ledger says."""
    cache.drain()
    ledger = cache.ledger
    pool = ledger.frame_pool
    free, bound = pool._free[: pool.num_free], ledger.frames[ledger.frames >= 0]
    np.testing.assert_array_equal(np.sort(np.concatenate([free, bound])), np.arange(pool.num_frames))
    units, fragments = np.nonzero(ledger.frames >= 0)
    np.testing.assert_array_equal(ledger.frame_unit[ledger.frames[units, fragments]], units)
    np.testing.assert_array_equal(ledger.frame_fragment[ledger.frames[units, fragments]], fragments)
    assert (ledger.frame_unit[free] == -1).all()
    assert not ledger.pins.any()
    assert not ledger.is_busy.any()
    holders = np.zeros(len(ledger.uid), np.int64)
    for sequence in live:
        np.add.at(holders, np.array(sequence.table.units, np.int64), 1)
    np.testing.assert_array_equal(ledger.pool.counts(), holders)
    assert ledger.pool.num_free == int((ledger.uid < 0).sum())
    usage = cache.usage()
    assert usage["dram"].used_bytes == len(bound) * pool.frame_bytes
    assert usage["device"].used_bytes <= usage["device"].capacity_bytes
    tier = cache._tier
    if isinstance(tier, FileTier):
        check_slots(tier)
        assert usage["file"].used_bytes == len(tier._slot_of) * tier.layout.slot_bytes
        stored = ledger.stored_key[ledger.stored_tokens > 0]
        assert set(stored.tolist()) == set(tier._slot_of)
    complete = (ledger.uid >= 0) & ~ledger.is_open & (ledger.num_blocks > 0)
    blocks = -(-ledger.num_tokens[complete] // cache.layout.block_tokens)
    np.testing.assert_array_equal(ledger.num_blocks[complete], blocks)
