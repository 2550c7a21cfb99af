"""A near tier over a far one, seen as one tier: the file of this machine over a remote that others share. Next: cache.

Decides which of the two is asked and told. What is written goes to both, to the far one by way of the outbox: a far
tier that fails or hangs neither fails nor delays a near one. Forgetting is near only: what this machine needs no more,
others may. The far tier makes room by itself, or by age.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KEY, KeyArray
from kvtide.io.ops import address_of, aligned_buffer
from kvtide.tiers.contract import (
    FAILED,
    FULL,
    MISSING,
    OK,
    READ_REQUEST,
    Cause,
    GroupRecords,
    Reason,
    Remembers,
    Statuses,
    Tier,
    TierStats,
)
from kvtide.tiers.file import FileTier
from kvtide.tiers.outbox import CLOSE_S, OUTBOX_BYTES, OnDone, Outbox
from kvtide.tiers.pieces import CALL_BYTES_MAX
from kvtide.tiers.remote import RemoteTier
from kvtide.tiers.streams import Arrival


class StackedTier:
    """A `Tier` of `near` (None: there is none) over `far`.

    `is_patient`: what is written waits for room in the outbox instead of being refused. Set while nobody waits for KV.
    Threads: one at a time.
    """

    def __init__(self, near: Tier | None, far: RemoteTier, *, outbox_bytes: int = OUTBOX_BYTES) -> None:
        self.near, self.far, self.layout = near, far, far.layout
        self.outbox = Outbox(far, outbox_bytes)
        self.is_patient = False
        self.arrival: Arrival | None = None  # what another process hands over just now
        self._strays: set[bytes] = set()

    def lookup(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        found = self._near_has(keys)
        absent = np.flatnonzero(~found)
        found[absent] = self.far.lookup(keys[absent])
        return found

    def find(self, keys: KeyArray) -> GroupRecords:
        """Return the records of those of `keys` that the far tier holds or gets just now, in the order asked for."""
        found = self.far.find(keys)
        if self.arrival is None:
            return found
        coming = self.arrival.records
        is_asked = self.arrival.holds(coming.keys) & np.isin(coming.keys, keys) & ~np.isin(coming.keys, found.keys)
        return found.join(coming.take(is_asked))

    def inventory(self) -> GroupRecords:
        """Return the records of every near group, oldest write first; the far ones are found when asked for."""
        if isinstance(self.near, FileTier):
            return self.near.inventory()
        none, zeros = np.zeros(0, KEY), np.zeros(0, np.int64)
        return GroupRecords(none, none, zeros, zeros, np.zeros((0, self.layout.group_blocks), KEY))

    def read(self, keys: KeyArray, requests: npt.NDArray[np.void], *, cause: Cause) -> Statuses:
        statuses = np.full(len(requests), MISSING, np.uint8)
        is_near = self._near_has(keys)[requests["row"]]
        if self.near is not None and is_near.any():
            statuses[is_near] = self.near.read(keys, requests[is_near], cause=cause)
            failed = keys[np.unique(requests["row"][is_near & (statuses != OK)])]
            self._strays.update(failed[~self._near_has(failed)].tolist())
        rest = np.flatnonzero(statuses != OK)  # what the near tier turned out to have lost, too
        if len(rest) and self.arrival is not None:
            coming = rest[self.arrival.holds(keys)[requests["row"][rest]]]
            if len(coming):
                statuses[coming] = self.arrival.read(keys, requests[coming])
                rest = np.setdiff1d(rest, coming)
        if len(rest):
            statuses[rest] = self.far.read(keys, requests[rest], cause=cause)
        return statuses

    def take_strays(self) -> list[bytes]:
        """Return the keys of groups that the near tier turned out to have lost since this was last asked."""
        strays, self._strays = list(self._strays), set()
        return strays

    def write(
        self,
        records: GroupRecords,
        addresses: npt.NDArray[np.uint64],
        *,
        cause: Cause,
        is_own: npt.NDArray[np.bool_] | None = None,
    ) -> Statuses:
        """Store groups in the near tier and send them to the far one; without a near tier, or where it fails, wait.

        Groups that are `is_own` are of use to this process alone, and stay near.
        """
        shared = np.flatnonzero(~is_own) if is_own is not None else np.arange(len(records))
        if self.near is None:  # room is the remote's own affair: nothing dropped here would make any
            far = np.full(len(records), FAILED, np.uint8)
            far[shared] = self.outbox.write(records.take(shared), addresses[shared], cause=cause)
            return np.where(far == FULL, FAILED, far).astype(np.uint8)
        near = self.near.write(records, addresses, cause=cause)
        failed, stored = shared[near[shared] == FAILED], shared[near[shared] == OK]
        near[failed] = self.outbox.write(records.take(failed), addresses[failed], cause=cause)
        near[failed[near[failed] != OK]] = FAILED
        self._send(records.take(stored), addresses[stored], cause)
        return near

    def _send(self, records: GroupRecords, addresses: npt.NDArray[np.uint64], cause: Cause) -> None:
        """Send what there is room for, or, being patient, all; count the rest."""
        start = 0
        while start < len(records):
            rest = slice(start, None)
            num = self.outbox.send(records.take(rest), addresses[rest], cause=cause, is_patient=self.is_patient)
            start += num
            if not num or not self.is_patient:
                break
        self.outbox.note_refused(len(records) - start)

    def begin(self, records: GroupRecords, addresses: npt.NDArray[np.uint64], on_done: OnDone, *, cause: Cause) -> int:
        """Send the first of some groups without waiting; return how many, for which `on_done` gets the statuses.

        `on_done` is called on another thread. Shapes: addresses [n, F].
        """
        return self.outbox.send(records, addresses, cause=cause, is_patient=self.is_patient, on_done=on_done)

    def stop_waiting(self) -> None:
        """Let no read wait for KV that is still to arrive."""
        if self.arrival is not None:
            self.arrival.stop()

    def drain(self) -> None:
        """Return when nothing is on its way to the far tier any more, or that took too long."""
        self.outbox.drain(CLOSE_S)

    def close(self) -> None:
        """Send what is queued, as long as that may take, and give the rest up. Idempotent."""
        self.stop_waiting()
        self.outbox.close()

    def push(self, keys: KeyArray, records: GroupRecords, *, cause: Cause) -> Statuses:
        """Write groups that either tier holds under `keys` to the far one, as `records`, of as many tokens or fewer.

        Shapes: keys [n]; returns [n]: OK, FULL, or FAILED where one could not be read or written.
        """
        layout, num_fragments = self.layout, self.layout.num_fragments
        ends = np.cumsum(np.array(layout.fragment_padded_bytes, np.uint64))
        step = min(max(1, CALL_BYTES_MAX // int(ends[-1])), max(1, len(records)))
        memory, statuses = aligned_buffer(step * int(ends[-1])), np.full(len(records), FAILED, np.uint8)
        slots = np.uint64(address_of(memory)) + np.arange(step, dtype=np.uint64)[:, None] * ends[-1]
        addresses = slots + np.append(np.uint64(0), ends[:-1])
        for start in range(0, len(records), step):
            some = keys[start : start + step]
            requests = np.zeros(len(some) * num_fragments, READ_REQUEST)
            requests["row"] = np.repeat(np.arange(len(some)), num_fragments)
            requests["fragment"] = np.tile(np.arange(num_fragments), len(some))
            requests["address"] = addresses[: len(some)].ravel()
            is_read = (self.read(some, requests, cause=cause) == OK).reshape(len(some), num_fragments).all(axis=1)
            good = np.flatnonzero(is_read)
            statuses[start + good] = self.outbox.write(records.take(start + good), addresses[good], cause=cause)
        return statuses

    def drop(self, keys: KeyArray, *, reason: Reason = "dropped") -> None:
        if self.near is not None:
            self.near.drop(keys, reason=reason)

    def note(self, records: GroupRecords, reason: Reason) -> None:
        """Remember that groups were not let in, and why."""
        if isinstance(self.near, Remembers):
            self.near.note(records, reason)

    def stats(self) -> TierStats:
        """Return the near tier's counters, with the capacity of both."""
        far = self.far.stats()
        near = self.near.stats() if self.near is not None else TierStats()
        return replace(near, capacity_bytes=near.capacity_bytes + far.capacity_bytes)

    def by_tier(self) -> dict[str, TierStats]:
        """Return the counters of each."""
        near = {"file": self.near.stats()} if self.near is not None else {}
        return near | {"remote": self.far.stats()}

    def _near_has(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        return self.near.lookup(keys) if self.near is not None else np.zeros(len(keys), np.bool_)
