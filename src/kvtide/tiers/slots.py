"""What is known in memory of every slot of a data file. Decides nothing: the file tier fills it. Next: file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KEY, KeyArray
from kvtide.spec import SlotLayout
from kvtide.tiers.contract import GroupRecords


@dataclass(slots=True)
class SlotTable:
    """What is known of every slot. Shapes: one row a slot; checksums [num_slots, F]; block_keys [num_slots, G];
    proofs [num_slots, proof_bytes].
    """

    used: npt.NDArray[np.bool_]
    has_header: npt.NDArray[np.bool_]  # a valid header may lie in the file, though the slot is free
    keys: KeyArray
    parents: KeyArray
    num_tokens: npt.NDArray[np.int64]
    num_blocks: npt.NDArray[np.int64]
    block_keys: KeyArray
    sequences: npt.NDArray[np.uint64]
    checksums: npt.NDArray[np.uint64]
    proofs: npt.NDArray[np.uint8]  # of encrypted slots; no columns in plain ones

    @classmethod
    def empty(cls, num_slots: int, layout: SlotLayout) -> SlotTable:
        """Return a table of free slots."""
        return cls(
            np.zeros(num_slots, np.bool_),
            np.zeros(num_slots, np.bool_),
            np.zeros(num_slots, KEY),
            np.zeros(num_slots, KEY),
            np.zeros(num_slots, np.int64),
            np.zeros(num_slots, np.int64),
            np.zeros((num_slots, layout.group_blocks), KEY),
            np.zeros(num_slots, np.uint64),
            np.zeros((num_slots, layout.num_fragments), np.uint64),
            np.zeros((num_slots, layout.proof_bytes), np.uint8),
        )

    def records(self, slots: npt.NDArray[np.int64]) -> GroupRecords:
        """Return the records of `slots`."""
        return GroupRecords(self.keys, self.parents, self.num_tokens, self.num_blocks, self.block_keys).take(slots)

    def fill(
        self,
        slots: npt.NDArray[np.int64],
        records: GroupRecords,
        sequences: npt.NDArray[np.uint64],
        checksums: npt.NDArray[np.uint64],
        proofs: npt.NDArray[np.uint8],
    ) -> None:
        """Note that `slots` hold `records`, on the medium and in the table."""
        self.used[slots] = self.has_header[slots] = True
        self.keys[slots], self.parents[slots] = records.keys, records.parents
        self.num_tokens[slots], self.num_blocks[slots] = records.num_tokens, records.num_blocks
        self.block_keys[slots], self.sequences[slots], self.checksums[slots] = records.block_keys, sequences, checksums
        self.proofs[slots] = proofs
