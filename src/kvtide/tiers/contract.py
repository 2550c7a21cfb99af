"""What every tier below DRAM must do, and the arrays it speaks in. Next: memory, then file.

A tier keeps *groups*: the KV of a few consecutive blocks of one chain, in fragments: one a layer, or more where layers
are split. It is asked in arrays and answers in arrays; a miss, a full tier and a refused write are values. It decides
nothing about what to keep.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KeyArray

Cause = Literal["prefill-write", "decode-read", "restore", "prefetch", "demote", "metadata"]

# The answers of read and write, one an item.
OK, MISSING, CORRUPT, FAILED, FULL = 0, 1, 2, 3, 4

Reason = Literal["evicted", "replaced", "corrupt", "unreadable", "full", "failed", "refused", "dropped"]
"""Why a group is not there: given up for newer ones; stored again with more tokens; a checksum differed; a read failed;
the tier was full; a write failed; admission kept it out; somebody asked to forget it."""
# In journals a reason is its place in here: new ones come last.
REASONS: tuple[Reason, ...] = (
    *("evicted", "replaced", "corrupt", "unreadable", "full", "failed", "refused", "dropped"),
)  # fmt: skip

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

    def valid_block_keys(self) -> KeyArray:
        """Return the keys of all blocks, group by group. Shapes: [sum of num_blocks]."""
        return self.block_keys[np.arange(self.block_keys.shape[1]) < self.num_blocks[:, None]]

    def join(self, more: GroupRecords) -> GroupRecords:
        """Return these records, then `more`."""
        pairs = zip(self._columns(), more._columns(), strict=True)
        return GroupRecords(*(np.concatenate(pair) for pair in pairs))

    def _columns(self) -> tuple[npt.NDArray[Any], ...]:
        return self.keys, self.parents, self.num_tokens, self.num_blocks, self.block_keys

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
    `dropped` counts groups that were dropped, by reason.
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
    dropped: dict[str, int] = field(default_factory=dict)

    def note_dropped(self, num: int, reason: Reason) -> None:
        """Count groups that were dropped."""
        if num:
            self.dropped[reason] = self.dropped.get(reason, 0) + num


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

    def drop(self, keys: KeyArray, *, reason: Reason = "dropped") -> None:
        """Forget groups, for `reason`. Keys that are not there are no error."""

    def stats(self) -> TierStats:
        """Return counters and fill, exact to the byte."""


@runtime_checkable
class Remembers(Protocol):
    """A tier that can tell later why a group is not there. Those it drops it notes by itself."""

    def note(self, records: GroupRecords, reason: Reason) -> None:
        """Remember that groups were not let in, and why."""
