"""What a chunk store counts, and how a chunk is written down. Next: store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KEY, KeyArray
from kvtide.tiers.contract import GroupRecords


@dataclass(slots=True)
class ChunkCounts:
    """Chunks since the store was opened. Each that was to be stored is `stored`, `known` (it was there), `refused` (for
    want of room, or by admission) or `failed`; each that was to be loaded is `loaded` or `missed`, and `failed` beside
    where the drive did not give it.
    """

    stored: int = 0
    loaded: int = 0
    known: int = 0
    evicted: int = 0
    missed: int = 0
    failed: int = 0
    refused: int = 0


def records_of(keys: KeyArray) -> GroupRecords:
    """Return the records of chunks as of groups of one block and one token. Shapes: keys [n]."""
    ones = np.ones(len(keys), np.int64)
    return GroupRecords(keys, np.zeros(len(keys), KEY), ones, ones, keys[:, None])


def last_of(keys: KeyArray) -> npt.NDArray[np.intp]:
    """Return for each of `keys` where the same key stands last. Shapes: keys [n]; returns [n]."""
    names = keys.tolist()
    place = dict(zip(names, range(len(names)), strict=True))
    return np.fromiter(map(place.__getitem__, names), np.intp, len(names))
