"""What is known of every unit (one group of blocks): keys, tokens, and where its copies are. Next: traffic.

Pure bookkeeping in arrays: no byte moves here, no lock is taken; callers hold the cache's lock. A unit is *open* while
a sequence may append to it, *clean* when the tier below holds all its tokens, *busy* while it is being stored, *sent*
while a copy of it is on its way to a remote, *own* when it holds KV that only the sequence which made it can use.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KEY, KeyArray, PrefixIndex, UnitPool
from kvtide.evict import Facts, Lru, make_evictor
from kvtide.spec import SlotLayout
from kvtide.tiers.contract import GroupRecords
from kvtide.tiers.memory import FramePool

Ids = npt.NDArray[np.int64]


class Ledger:
    """State of all units and of the DRAM frames that hold their fragments.

    Shapes: per unit [num_units]; frames [num_units, F], -1 where a fragment is not in DRAM.
    """

    def __init__(self, layout: SlotLayout, *, num_units: int, frame_pool: FramePool, evictor: str) -> None:
        self.layout = layout
        group = layout.group_blocks
        self.pool, self.index = UnitPool(num_units), PrefixIndex()
        self.recency = Lru(num_units)
        self.uid = np.full(num_units, -1, np.int64)
        self.num_tokens = np.zeros(num_units, np.int64)
        self.num_blocks = np.zeros(num_units, np.int64)
        self.key, self.parent = np.zeros(num_units, KEY), np.zeros(num_units, KEY)
        self.block_keys = np.zeros((num_units, group), KEY)
        self.stored_key = np.zeros(num_units, KEY)
        self.stored_tokens = np.zeros(num_units, np.int64)  # 0: the tier below has nothing of it
        self.is_far = np.zeros(num_units, np.bool_)  # what the tier below has of it lies on a remote alone
        self.stores_far = False  # what is stored from now on lies there
        self.opener = np.full(num_units, -1, np.int64)  # the sequence that appends to it; -1: none
        self.is_busy = np.zeros(num_units, np.bool_)
        self.is_sent = np.zeros(num_units, np.bool_)
        self.is_own = np.zeros(num_units, np.bool_)
        self.was_refused = np.zeros(num_units, np.bool_)  # the tier below did not take it
        self.frames = np.full((num_units, layout.num_fragments), -1, np.int64)
        self.frame_pool, num_frames = frame_pool, frame_pool.num_frames
        self.frame_evictor = make_evictor(evictor, num_frames)
        self.frame_unit = np.full(num_frames, -1, np.int64)
        self.frame_fragment = np.zeros(num_frames, np.int64)
        self.pins = np.zeros(num_frames, np.int32)
        self.num_evicted = 0  # fragments that gave way to others
        self._next_uid = 0
        self._holders: dict[bytes, set[int]] = {}  # units whose copy below is the group with this key

    @property
    def is_open(self) -> npt.NDArray[np.bool_]:
        """Which units a sequence appends to. Shapes: [num_units]."""
        return self.opener >= 0

    # Units

    def begin(self, units: Ids) -> None:
        """Start the life of units just taken from the pool."""
        self.uid[units] = np.arange(self._next_uid, self._next_uid + len(units))
        self._next_uid += len(units)
        self.num_tokens[units] = self.num_blocks[units] = self.stored_tokens[units] = 0
        self.is_busy[units] = self.is_sent[units] = self.is_own[units] = self.was_refused[units] = False
        self.opener[units] = -1
        self.recency.admit(units)

    def dispose(self, units: Ids) -> KeyArray:
        """End the life of idle units; return the keys of what the tier below now holds for nobody."""
        for unit in units.tolist():
            self.index.discard(unit)
        self.free_frames(self.frames[units].ravel())
        self.recency.forget(units)
        self.uid[units] = -1
        self.is_sent[units] = False  # what is on its way is nobody's by now
        self.pool.recycle(units)
        return _as_keys(self._unlink(units))

    def adopt(self, records: GroupRecords, *, is_far: bool = False) -> None:
        """Make idle units of what the tier below already holds, oldest first. There is room for all of them."""
        units = self.pool.take(len(records))
        assert len(units) == len(records), "fewer units than slots"
        self.begin(units)
        self.key[units], self.parent[units], self.block_keys[units] = records.keys, records.parents, records.block_keys
        self.num_tokens[units], self.num_blocks[units] = records.num_tokens, records.num_blocks
        self.note_stored(units)
        self.is_far[units] = is_far
        for unit in units.tolist():
            self.register(unit, 0)
        self.pool.release(units)

    def register(self, unit: int, first_block: int) -> None:
        """Let prefixes find the blocks of `unit` from `first_block` on."""
        num = int(self.num_blocks[unit])
        covered = np.minimum(np.arange(first_block + 1, num + 1) * self.layout.block_tokens, int(self.num_tokens[unit]))
        self.index.add(self.block_keys[unit, first_block:num], unit=unit, tokens=covered)

    def set_blocks(self, unit: int, first_block: int, keys: KeyArray, parent: npt.NDArray[np.void]) -> None:
        """Note the keys of the blocks of `unit` from `first_block` on, and register them."""
        num = first_block + len(keys)
        self.block_keys[unit, first_block:num] = keys
        self.num_blocks[unit] = num
        self.key[unit] = keys[-1]
        if first_block == 0:
            self.parent[unit] = parent
        self.register(unit, first_block)
        rivals = self.index.get(keys)[0]
        is_below = (rivals != unit) & ~self.is_resident(rivals)
        if is_below.any() and self.is_resident(np.array([unit]))[0]:  # computed again: no need to load the old one
            self.index.prefer(keys[is_below], unit=unit)

    def records(self, units: Ids) -> GroupRecords:
        """Return the records under which `units` are stored now."""
        return GroupRecords(
            self.key[units], self.parent[units], self.num_tokens[units], self.num_blocks[units], self.block_keys[units]
        )

    def is_clean(self, units: Ids | slice = slice(None)) -> npt.NDArray[np.bool_]:
        """Say which units the tier below holds to their last token."""
        stored = self.stored_tokens[units]
        return (stored > 0) & (stored == self.num_tokens[units]) & (self.opener[units] < 0)

    def is_resident(self, units: Ids | slice = slice(None)) -> npt.NDArray[np.bool_]:
        """Say which units have every fragment in DRAM."""
        resident: npt.NDArray[np.bool_] = np.all(self.frames[units] >= 0, axis=1)
        return resident

    def storable(self, units: Ids | slice = slice(None)) -> npt.NDArray[np.bool_]:
        """Say which units could be written to the tier below now."""
        storable = (self.uid[units] >= 0) & (self.num_blocks[units] > 0) & ~self.is_open[units]
        is_stored = self.is_clean(units) & (~self.is_far[units] | self.stores_far)  # what lies far gets a near copy
        storable &= ~is_stored & ~self.is_busy[units] & ~self.is_sent[units] & ~self.was_refused[units]
        if self.stores_far:
            storable &= ~self.is_own[units]
        few = np.flatnonzero(storable)  # asking for every fragment of every unit would take long in a large store
        storable[few] = self.is_resident(np.arange(len(self.uid))[units][few])
        return storable

    def disposable(self) -> npt.NDArray[np.bool_]:
        """Say which units no sequence holds and no job uses."""
        pinned = np.zeros(len(self.uid), np.bool_)
        owners = self.frame_unit[self.pins > 0]
        pinned[owners[owners >= 0]] = True
        return (self.uid >= 0) & (self.pool.counts() == 0) & ~self.is_busy & ~pinned

    # What the tier below holds. Units with one key share one group there.

    def note_stored(self, units: Ids) -> KeyArray:
        """Note that the tier below holds `units` as they are now; return the keys it now holds for nobody."""
        return self._link(units, self.records(units), is_far=self.stores_far)

    def _link(self, units: Ids, records: GroupRecords, *, is_far: bool) -> KeyArray:
        """Note that the tier below holds `units` as `records` say; return the keys it now holds for nobody."""
        old = self._unlink(units)
        self.stored_key[units], self.stored_tokens[units] = records.keys, records.num_tokens
        self.is_far[units] = is_far
        for unit, key in zip(units.tolist(), records.keys.tolist(), strict=True):
            self._holders.setdefault(key, set()).add(unit)
        return _as_keys([key for key in old if key not in self._holders])

    def note_sent(self, units: Ids, uids: Ids, records: GroupRecords, good: npt.NDArray[np.bool_]) -> KeyArray:
        """Note what became of units that were sent, as `records`, to a remote; return the keys nobody needs there.

        Units that live no more, which `uids` tells, are passed over. Shapes: units, uids, records, good [n].
        """
        alive = self.uid[units] == uids
        self.is_sent[units[alive]] = False
        self.was_refused[units[alive & ~good]] = True
        rows = alive & good
        return self._link(units[rows], records.take(rows), is_far=True)

    def note_far(self, keys: list[bytes]) -> None:
        """Note that groups lie on a remote alone now: they take no slot, and get a near copy again."""
        for key in keys:
            self.is_far[list(self._holders.get(key, ()))] = True

    def is_known(self, units: Ids) -> npt.NDArray[np.bool_]:
        """Say for which of `units` the tier below holds an equal group already, stored for another unit."""
        return np.array([key in self._holders for key in self.key[units].tolist()], np.bool_)

    def lose(self, units: Ids) -> KeyArray:
        """Note that the copies of `units` below are gone, for all who share them; return their keys.

        What is not whole in DRAM is of no use any more: no prefix may find it, and its frames go back.
        """
        if not len(units):
            return _as_keys([])
        stored = units[self.stored_tokens[units] > 0]
        shared = [self._holders[key] for key in self.stored_key[stored].tolist()]
        everyone = np.array(sorted(set(units.tolist()).union(*shared)), np.int64)
        keys = self._unlink(everyone)
        broken = everyone[~self.is_resident(everyone)]
        for unit in broken.tolist():
            self.index.discard(unit)
        frames = self.frames[broken].ravel()
        self.free_frames(frames[(frames >= 0) & (self.pins[frames] == 0)])
        self.was_refused[:] = False
        return _as_keys(keys)

    def _unlink(self, units: Ids) -> list[bytes]:
        gone = []
        for unit in units[self.stored_tokens[units] > 0].tolist():
            key = self.stored_key[unit].tobytes()
            self._holders[key].discard(unit)
            if not self._holders[key]:
                del self._holders[key]
                gone.append(key)
        self.stored_tokens[units] = 0
        return gone

    def reached(self, units: Ids | Seq[int]) -> None:
        """Note a use of a prefix: earlier units count as used later, since the later ones are of no use without."""
        self.recency.touch(np.asarray(units, np.int64)[::-1])

    # Frames

    def pin(self, frames: Ids, step: int) -> None:
        """Pin frames once more, or, with `step` -1, once less; -1 stands for none. Any thread may, with the lock."""
        frames = frames[frames >= 0]
        np.add.at(self.pins, frames, step)
        assert (self.pins[frames] >= 0).all(), "a frame was unpinned more often than pinned"

    def bind(self, frames: Ids, units: Ids, fragments: Ids) -> None:
        """Let `frames` hold the fragments (unit, fragment)."""
        self.frames[units, fragments] = frames
        self.frame_unit[frames], self.frame_fragment[frames] = units, fragments
        # Frames are reused for other content, which evictors with a memory tell apart by key.
        keys = (self.uid[units] * self.layout.num_fragments + fragments).astype(np.uint64)
        self.frame_evictor.admit(frames, Facts(keys=keys))

    def free_frames(self, frames: Ids) -> None:
        """Give frames back; -1 stands for none."""
        frames = frames[frames >= 0]
        self.frames[self.frame_unit[frames], self.frame_fragment[frames]] = -1
        self.frame_unit[frames] = -1
        self.frame_evictor.forget(frames)
        self.frame_pool.give(frames)

    def fits(self, num_frames: int, tail: int, *, reserve: int) -> bool:
        """Say whether `num_frames` new fragments may come beside those that cannot go, and `tail` (-1: none) stay.

        `reserve` frames are kept from them, so that there always are some to read into.
        """
        frames = np.flatnonzero(self.frame_unit >= 0)
        owners = self.frame_unit[frames]
        can_go = self.is_clean(owners) & (owners != tail) & (self.pins[frames] == 0)
        num_stuck = len(owners) - int(np.sum(can_go))
        return num_stuck + num_frames + reserve <= self.frame_pool.num_frames

    def take_frames(self, num: int, *, keep_unit: int = -1) -> Ids:
        """Return up to `num` frames, dropping clean fragments by the evictor's choice, but none of `keep_unit`."""
        missing = num - self.frame_pool.num_free
        if missing > 0:
            owner = self.frame_unit
            evictable = (owner >= 0) & (owner != keep_unit) & (self.pins == 0)
            evictable[evictable] = self.is_clean(owner[evictable])
            victims = self.frame_evictor.victims(missing, evictable)
            self.num_evicted += len(victims)
            self.free_frames(victims)
        return self.frame_pool.take(num)

    def used_bytes(self) -> int:
        """Return the bytes of the frames in use."""
        pool = self.frame_pool
        return (pool.num_frames - pool.num_free) * pool.frame_bytes


def _as_keys(keys: list[bytes]) -> KeyArray:
    return np.frombuffer(b"".join(keys), KEY)
