"""What is on its way to a far tier: copies of groups in bounded memory, sent by a thread of their own. Next: stacked.

Whoever hands a group over waits for a copy in memory, never for the remote. Where there is no room the group is refused
and counted: a near tier has it, or it is offered again. The thread lives while there is something to send.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.io.ops import address_of, aligned_buffer, copy_bytes
from kvtide.io.process import Opener
from kvtide.tiers.contract import FAILED, OK, Cause, GroupRecords, Statuses
from kvtide.tiers.remote import RemoteTier

OUTBOX_BYTES = 64 << 20  # a network of 1 GB/s needs 64 ms for it: time to go on computing
CLOSE_S = 10.0  # more than two time-outs of a remote: then what is queued is given up
LOG = logging.getLogger("kvtide.remote")

Addresses = npt.NDArray[np.uint64]
OnDone = Callable[[Statuses], object]


@dataclass(frozen=True, slots=True)
class _Parcel:
    """Groups that are sent together: where their copies lie. Shapes: places [n]."""

    places: npt.NDArray[np.int64]
    records: GroupRecords
    cause: Cause
    on_done: OnDone | None


class Outbox:
    """Sends groups to `far`, in the order they came.

    `held_bytes` never exceeds `bytes_max`, or one group where that is larger.
    Threads: any may call; `on_done` is called on the sending thread, and must not wait for it.
    """

    def __init__(self, far: RemoteTier, bytes_max: int = OUTBOX_BYTES) -> None:
        self._far, self._layout = far, far.layout
        lengths = far.layout.fragment_padded_bytes
        self._starts = np.append(0, np.cumsum(np.array(lengths, np.int64))).astype(np.uint64)
        self.group_bytes = int(self._starts[-1])
        self._lengths = np.array(lengths, np.int64)
        self._num_places = max(1, bytes_max // self.group_bytes)
        self._memory: npt.NDArray[np.uint8] | None = None
        self._opener = Opener()
        self._free = list(range(self._num_places - 1, -1, -1))
        self._parcels: deque[_Parcel] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = self._is_over = self._is_registered = False
        self.num_refused = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of KV that are on their way."""
        return (self._num_places - len(self._free)) * self.group_bytes

    def send(
        self,
        records: GroupRecords,
        addresses: Addresses,
        *,
        cause: Cause,
        is_patient: bool = False,
        on_done: OnDone | None = None,
    ) -> int:
        """Copy groups to be sent, the first ones of those for which there is room; return how many those are.

        With `is_patient` wait for room for at least one. `on_done` gets the statuses of those taken, if there are any.
        Shapes: addresses [n, F].
        Raises: IoError in a forked child.
        """
        self._opener.check(self._far.name)
        with self._changed:
            if is_patient:
                self._changed.wait_for(lambda: self._free or self._is_closed)
            num = 0 if self._is_closed else min(len(records), len(self._free))
            places = np.array([self._free.pop() for _ in range(num)], np.int64)
            if num and self._memory is None:
                self._memory = aligned_buffer(self._num_places * self.group_bytes)
        if not num:
            return 0
        parcel = _Parcel(places, records.take(slice(num)), cause, on_done)
        try:
            self._copy(addresses[:num], self._addresses(places))
            with self._changed:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="kvtide-outbox", daemon=True)
                    thread.start()  # and waits for what is held here
                    self._thread = thread
                self._parcels.append(parcel)
        except BaseException:
            self._give_back(places)
            raise
        return num

    def note_refused(self, num: int) -> None:
        """Count groups that will not be sent, and say so the first time."""
        if not num:
            return
        if not self.num_refused:
            LOG.warning("%s: KV is made faster than it takes it; %d groups were not sent", self._far.name, num)
        self.num_refused += num

    def write(self, records: GroupRecords, addresses: Addresses, *, cause: Cause) -> Statuses:
        """Send groups and wait for what becomes of them. Shapes: addresses [n, F]; returns [n]."""
        statuses, start, num_ended = np.full(len(records), FAILED, np.uint8), 0, 0

        def arrived(at: int, found: Statuses) -> None:
            nonlocal num_ended
            with self._changed:
                statuses[at : at + len(found)] = found
                num_ended += len(found)
                self._changed.notify_all()

        while start < len(records):
            rest, on_done = slice(start, None), functools.partial(arrived, start)
            num = self.send(records.take(rest), addresses[rest], cause=cause, is_patient=True, on_done=on_done)
            if not num:
                break  # closed
            start += num
        with self._changed:
            self._changed.wait_for(lambda: num_ended == start)
        return statuses

    def drain(self, timeout_s: float | None = None) -> bool:
        """Return when nothing is on its way any more, or time is up; say whether nothing is."""
        if not self._opener.is_here:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what is queued, for `timeout_s` at most, and give the rest up; nothing in a forked child. Idempotent."""
        if not self._opener.is_here:
            return
        until = time.monotonic() + timeout_s
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self.drain(timeout_s):
            return
        with self._changed:
            self._is_over = True
            num = sum(len(parcel.records) for parcel in self._parcels)
        LOG.warning("%s: %d groups were not sent in %g s, and are given up", self._far.name, num, timeout_s)
        self.drain(max(1.0, until - time.monotonic()))  # the call that runs ends with its own time-out

    # The thread

    def _run(self) -> None:
        if self._memory is not None and not self._is_registered:
            self._is_registered = True
            self._far.register(self._memory)
        while True:
            with self._changed:
                if not self._parcels:
                    self._thread = None
                    self._changed.notify_all()
                    return
                parcel = self._parcels.popleft()
            statuses = np.full(len(parcel.records), FAILED, np.uint8)
            try:
                if not self._is_over:
                    statuses = self._deliver(parcel)
            except Exception:  # the next parcels are still to be sent
                LOG.exception("%s: KV that was on its way is given up", self._far.name)
            try:
                if parcel.on_done is not None:
                    parcel.on_done(statuses)
            except Exception:
                LOG.exception("%s: the answer to KV that was sent failed", self._far.name)
            self._give_back(parcel.places)

    def _deliver(self, parcel: _Parcel) -> Statuses:
        """Write what the far tier lacks: another machine may have written it; that a name exists is not enough."""
        addresses = self._addresses(parcel.places)
        there = self._far.find(parcel.records.keys, is_last=True).keys
        absent = np.flatnonzero(~np.isin(parcel.records.keys, there))
        statuses = np.full(len(parcel.records), OK, np.uint8)
        statuses[absent] = self._far.write(parcel.records.take(absent), addresses[absent], cause=parcel.cause)
        return statuses

    def _give_back(self, places: npt.NDArray[np.int64]) -> None:
        with self._changed:
            self._free.extend(places.tolist())
            self._changed.notify_all()

    # Bytes

    def _addresses(self, places: npt.NDArray[np.int64]) -> Addresses:
        """Return where the fragments of the groups at `places` lie. Shapes: [n]; returns [n, F]."""
        assert self._memory is not None, "places without memory"
        bases = address_of(self._memory) + places * self.group_bytes
        found: Addresses = bases.astype(np.uint64)[:, None] + self._starts[:-1]
        return found

    def _copy(self, sources: Addresses, targets: Addresses) -> None:
        copy_bytes(sources, targets, np.broadcast_to(self._lengths, sources.shape).ravel().tolist())
