"""Values that follow from key and version, and a ledger of what a store was told, which outlives who told it."""

from __future__ import annotations

import hashlib
import itertools
import mmap

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KEY, KeyArray
from kvtide.io.ops import address_of, aligned_buffer
from kvtide.spec import SlotLayout
from kvtide.tiers.contract import OK, READ_REQUEST, GroupRecords, Tier

COUNTERS = (
    *("operations", "verified_bytes", "reopened", "checks", "faults", "forks", "refused", "cycles", "checked_life"),
)  # fmt: skip
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64


def keys_of(num: int, label: str = "key") -> KeyArray:
    """Return keys 0 to `num`. Shapes: returns [num]."""
    return np.frombuffer(b"".join(hashlib.sha256(f"{label} {n}".encode()).digest() for n in range(num)), KEY)


def seed_of(
    numbers: npt.NDArray[np.integer], versions: npt.NDArray[np.integer], part: int | npt.NDArray[np.integer] = 0
) -> npt.NDArray[np.uint64]:
    """Return what the value of a key's number, version and part begins with."""
    wide = np.asarray(numbers, np.uint64) << np.uint64(40)
    return wide | np.asarray(versions, np.uint64) << np.uint64(8) | np.asarray(part, np.uint64)


def values_of(seeds: npt.NDArray[np.uint64], num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return `num_bytes` a seed: the seed, then SplitMix64's numbers from it. Shapes: [n]; returns [n, bytes]."""
    words = seeds[:, None] * np.uint64(_GOLDEN) + np.arange(-(-num_bytes // 8), dtype=np.uint64) * np.uint64(_GOLDEN)
    words = (words ^ words >> np.uint64(30)) * np.uint64(_FIRST)
    words = (words ^ words >> np.uint64(27)) * np.uint64(_SECOND)
    words ^= words >> np.uint64(31)
    words[:, 0] = seeds
    return words.view(np.uint8)[:, :num_bytes]


def versions_in(rows: npt.NDArray[np.uint8], numbers: npt.NDArray[np.integer], part: int = 0) -> npt.NDArray[np.int64]:
    """Return which version of each key its row is, byte for byte; -1 for none. Shapes: rows [n, bytes]; returns [n]."""
    seeds = np.ascontiguousarray(rows[:, :8]).view(np.uint64)[:, 0]
    versions = (seeds >> np.uint64(8) & np.uint64(0xFFFFFFFF)).astype(np.int64)
    good = (seeds == seed_of(numbers, versions, part)) & (values_of(seeds, rows.shape[1]) == rows).all(axis=1)
    return np.where(good, versions, -1)


class WrongStoreError(AssertionError):
    """A store has what it must not have, or lacks what it must have."""


class Ledger:
    """What one store was told, in memory that a child shares with whoever forked it.

    `acked` is the version whose write came back as done, `ever` the newest that was begun; `may_miss` is set before a
    key is dropped, or may give way.
    """

    def __init__(self, num_keys: int) -> None:
        self.num_keys = num_keys
        memory = mmap.mmap(-1, 16 * num_keys + 8 * len(COUNTERS) + num_keys)
        self.acked = np.frombuffer(memory, np.int64, num_keys)
        self.ever = np.frombuffer(memory, np.int64, num_keys, 8 * num_keys)
        self.counts = np.frombuffer(memory, np.int64, len(COUNTERS), 16 * num_keys)
        self.may_miss = np.frombuffer(memory, np.bool_, num_keys, 16 * num_keys + 8 * len(COUNTERS))

    def add(self, name: str, num: int = 1) -> None:
        """Count."""
        self.counts[COUNTERS.index(name)] += num

    def count(self, name: str) -> int:
        """Return what was counted."""
        return int(self.counts[COUNTERS.index(name)])

    def intend(self, numbers: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Return the next version of each key, noted before it is written."""
        self.ever[numbers] += 1
        return self.ever[numbers]

    def ack(self, numbers: npt.NDArray[np.integer], versions: npt.NDArray[np.integer]) -> None:
        """Note that versions were written."""
        self.acked[numbers] = versions
        self.may_miss[numbers] = False

    def expose(self, numbers: npt.NDArray[np.integer]) -> None:
        """Note that keys may be gone from here on."""
        self.may_miss[numbers] = True

    def judge(
        self, numbers: npt.NDArray[np.integer], versions: npt.NDArray[np.integer], *, is_lossy: bool = False
    ) -> dict[int, int]:
        """Compare what a store has after it was opened again with what it was told; go on from what it has.

        `is_lossy`: the medium itself lost or changed bytes, so a value may be gone, but none may be wrong.
        Raises: WrongStoreError.
        """
        wrong = numbers[(versions < 1) | (versions > self.ever[numbers])]
        if len(wrong):
            raise WrongStoreError(f"keys {wrong.tolist()} have bytes that were never written there")
        found = np.zeros(self.num_keys, np.int64)
        found[numbers] = versions
        due = ~self.may_miss & (self.acked > 0)
        lost, stale = np.flatnonzero(due & (found == 0)), np.flatnonzero((found > 0) & due & (found < self.acked))
        if (len(lost) or len(stale)) and not is_lossy:
            raise WrongStoreError(
                f"keys {lost.tolist()} were written and are gone; "
                f"{stale.tolist()} are {found[stale].tolist()}, though {self.acked[stale].tolist()} were written"
            )
        self.acked[:], self.may_miss[:] = found, found == 0
        self.add("checks")
        return dict(zip(numbers.tolist(), versions.tolist(), strict=True))


class Book:
    """Writes and reads whole groups of a tier, with values of the oracle."""

    def __init__(self, layout: SlotLayout, num_keys: int) -> None:
        self.layout, group = layout, layout.group_blocks
        self.keys = keys_of(num_keys)
        blocks = keys_of(num_keys * group, "block").reshape(num_keys, group)
        tokens, num_blocks = np.full(num_keys, layout.tokens_per_group), np.full(num_keys, group)
        self._records = GroupRecords(self.keys, keys_of(num_keys, "parent"), tokens, num_blocks, blocks)
        self._number_of = {key: number for number, key in enumerate(self.keys.tolist())}
        self._starts = np.concatenate([[0], np.cumsum(layout.fragment_padded_bytes)]).astype(np.uint64)

    def numbers_of(self, keys: KeyArray) -> npt.NDArray[np.int64]:
        """Return the numbers of keys; -1 for those that are none. Shapes: [n]; returns [n]."""
        return np.array([self._number_of.get(key, -1) for key in keys.tolist()], np.int64)

    def _room(self, num: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64]]:
        size = int(self._starts[-1])
        rows = aligned_buffer(max(1, num) * size).reshape(-1, size)
        bases = np.uint64(address_of(rows)) + np.arange(num, dtype=np.uint64)[:, None] * np.uint64(size)
        return rows, bases + self._starts[:-1]

    def _parts(self, rows: npt.NDArray[np.uint8]) -> list[npt.NDArray[np.uint8]]:
        bounds = self._starts.astype(int).tolist()
        return [rows[:, first:last] for first, last in itertools.pairwise(bounds)]

    def write(
        self, tier: Tier, numbers: npt.NDArray[np.integer], versions: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.uint8]:
        """Write groups; return their statuses. Shapes: [n]; returns [n]."""
        rows, addresses = self._room(len(numbers))
        for part, place in enumerate(self._parts(rows)):
            place[:] = values_of(seed_of(numbers, versions, part), place.shape[1])
        return tier.write(self._records.take(numbers), addresses, cause="demote")

    def read(
        self, tier: Tier, numbers: npt.NDArray[np.integer]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], int]:
        """Return the worst status of each group, the version its bytes are (-1: none), and the bytes compared."""
        rows, addresses = self._room(len(numbers))
        requests = np.zeros(addresses.shape, READ_REQUEST)
        requests["row"], requests["fragment"] = np.arange(len(numbers))[:, None], np.arange(addresses.shape[1])
        requests["address"] = addresses
        answers = tier.read(self.keys[numbers], requests.ravel(), cause="restore").reshape(requests.shape)
        found = [versions_in(part, numbers, index) for index, part in enumerate(self._parts(rows))]
        versions = np.where(np.all([one == found[0] for one in found], axis=0), found[0], -1)
        statuses = answers.max(axis=1, initial=0)
        return statuses, versions, int((statuses == OK).sum()) * rows.shape[1]
