"""What every tier below DRAM must do, and the arrays it speaks in. Next: memory, then file.

A tier keeps *groups*: the KV of a few consecutive blocks of one chain, in fragments: one a layer, or more where layers
are split. It is asked in arrays and answers in arrays; a miss, a full tier and a refused write are values. It decides
nothing about what to keep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KeyArray

Cause = Literal["prefill-write", "decode-read", "restore", "prefetch", "demote", "metadata"]

# The answers of read and write, one an item.
OK, MISSING, CORRUPT, FAILED, FULL = 0, 1, 2, 3, 4

READ_REQUEST = np.dtype([("row", "<u4"), ("fragment", "<u4"), ("address", "<u8")])
"""One fragment of the group `keys[row]`, to be put at `address` (page-aligned, the fragment's padded bytes).

`fragment` counts as `SlotLayout` does: layer * parts a layer + part.
"""

Statuses = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GroupRecords:
    """What is known of n groups beside their KV.

    Shapes: keys, parents [n]; num_tokens [n]; block_keys [n, G], of which row i holds `num_blocks[i]` valid keys,
    the last of them of a block that may not be full.
    """

    keys: KeyArray
    parents: KeyArray
    num_tokens: npt.NDArray[np.int64]
    num_blocks: npt.NDArray[np.int64]
    block_keys: KeyArray

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, rows: npt.NDArray[np.integer] | npt.NDArray[np.bool_] | slice) -> GroupRecords:
        """Return the records of some rows."""
        return GroupRecords(
            self.keys[rows], self.parents[rows], self.num_tokens[rows], self.num_blocks[rows], self.block_keys[rows]
        )


@dataclass(slots=True)
class TierStats:
    """Counters of one tier since it was opened, and its fill now.

    `num_reads` and `num_writes` count operations. `gap_bytes` are those of `read_bytes` that lay between what was
    wanted and were read only to join two reads. `num_failed` counts fragments that could not be read, groups that
    could not be written and headers that could not be read; `num_full` counts groups refused for want of room.
    """

    capacity_bytes: int = 0
    used_bytes: int = 0
    num_groups: int = 0
    num_reads: int = 0
    num_writes: int = 0
    read_bytes: int = 0
    gap_bytes: int = 0
    written_bytes: int = 0
    num_corrupt: int = 0
    num_failed: int = 0
    num_full: int = 0


class Tier(Protocol):
    """Keeps groups by key.

    Threads: one thread at a time.
    """

    def lookup(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """Say for each key whether its whole group can be read."""

    def read(self, keys: KeyArray, requests: npt.NDArray[np.void], *, cause: Cause) -> Statuses:
        """Fill every request's buffer with verified bytes, or say why not.

        A fragment whose checksum differs is `CORRUPT`: its group is dropped and counted before this returns.
        Shapes: requests [r] READ_REQUEST; returns [r].
        """

    def write(self, records: GroupRecords, addresses: npt.NDArray[np.uint64], *, cause: Cause) -> Statuses:
        """Store groups from one buffer a fragment. A group is found by lookup only once it is whole.

        Shapes: addresses [n, F]; returns [n]: OK, FULL (nothing changed) or FAILED (nothing visible).
        """

    def drop(self, keys: KeyArray) -> None:
        """Forget groups. Keys that are not there are no error."""

    def stats(self) -> TierStats:
        """Return counters and fill, exact to the byte."""
