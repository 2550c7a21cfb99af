"""What a chunk store counts, and how a chunk is written down. Next: store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtide.blocks import KEY, KeyArray
from kvtide.tiers.contract import GroupRecords


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


def records_of(keys: KeyArray) -> GroupRecords:
    """Return the records of chunks as of groups of one block and one token. Shapes: keys [n]."""
    ones = np.ones(len(keys), np.int64)
    return GroupRecords(keys, np.zeros(len(keys), KEY), ones, ones, keys[:, None])
