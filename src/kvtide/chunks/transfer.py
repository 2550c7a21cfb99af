"""One job of a chunk store: chunks to write or to read, and what became of each. Next: store."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KeyArray
from kvtide.errors import ConfigError
from kvtide.tiers.contract import FAILED, GroupRecords, Statuses
from kvtide.tiers.file import Reading, Writing

Kind = Literal["store", "load"]
_log = logging.getLogger("kvtide.chunks")
_making_event = threading.Lock()
STORE: Kind = "store"
LOAD: Kind = "load"


@dataclass(eq=False, slots=True)
class Transfer:
    """Chunks on their way. `statuses` are those of `tiers.contract`; they are right once `done`.

    `on_done` is called on the worker's thread, or at once where there are no keys. `began_ns` and `ended_ns` are of
    `time.perf_counter_ns`; the first is 0 until bytes begin to move.
    Shapes: keys, statuses [n]; addresses [n, P], one a piece of each chunk; [n] is taken for [n, 1]. The memory at
    `addresses` must stay as it is until the transfer is done.
    """

    kind: Kind
    keys: KeyArray
    addresses: npt.NDArray[np.uint64]
    on_done: Callable[[Transfer], object] | None = None
    statuses: Statuses = field(init=False)
    num_taken: int = 0  # chunks the store has begun with
    num_left: int = field(init=False)
    num_good: int = 0  # chunks that arrived
    began_ns: int = 0
    ended_ns: int = 0
    _event: threading.Event | None = None  # made by who waits: it costs as much as all the rest

    def __post_init__(self) -> None:
        self.addresses = self.addresses.reshape(len(self.keys), -1 if len(self.keys) else 1)
        self.statuses = np.empty(len(self.keys), np.uint8)
        self.statuses.fill(FAILED)
        self.num_left = len(self.keys)

    def check_pieces(self, num_pieces: int) -> None:
        """Raise ConfigError unless there is an address for each of the `num_pieces` of a chunk."""
        num = self.addresses.shape[1]
        if num != num_pieces and len(self.keys):
            raise ConfigError(f"addresses of {num} pieces a chunk; chunks here have {num_pieces}: give one for each")

    @property
    def done(self) -> bool:
        """Whether nothing of it moves any more."""
        return bool(self.ended_ns)

    @property
    def is_good(self) -> bool:
        """Whether every chunk arrived."""
        return self.num_good == len(self.keys)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return when it is done, or False when `timeout_s` has gone by."""
        if self.done:
            return True
        with _making_event:
            self._event = event = self._event or threading.Event()
        return self.done or event.wait(timeout_s)  # in this order: `finish` says first that it is done

    def result(self) -> Statuses:
        """Wait, and return what became of each chunk. Shapes: returns [n]."""
        self.wait()
        return self.statuses

    def take(self, num_max: int) -> slice:
        """Return the next chunks to move, at most `num_max`."""
        rows = slice(self.num_taken, min(len(self.keys), self.num_taken + num_max))
        self.num_taken = rows.stop
        self.began_ns = self.began_ns or time.perf_counter_ns()
        return rows

    def end(self, rows: slice, statuses: Statuses) -> bool:
        """Note what became of some chunks; say whether those were the last."""
        self.statuses[rows] = statuses
        self.num_good += len(statuses) - int(np.count_nonzero(statuses))  # OK is 0
        self.num_left -= len(statuses)
        return not self.num_left

    def finish(self) -> None:
        """Let those who wait go on."""
        self.ended_ns = time.perf_counter_ns()
        if self._event is not None:
            self._event.set()
        if self.on_done is not None:
            self.on_done(self)


def take_some(queue: deque[Transfer], num_max: int) -> list[tuple[Transfer, slice]]:
    """Return what to move next, `num_max` chunks at most; transfers with none left leave the queue."""
    taken = []
    while queue and num_max > 0:
        rows = queue[0].take(num_max)
        num_max -= rows.stop - rows.start
        taken.append((queue[0], rows))
        if rows.stop == len(queue[0].keys):
            queue.popleft()
    return taken


@dataclass(slots=True)
class Storing:
    """What was begun of chunks to store, and which of them are being written, if any.

    Shapes: last [n], of the last chunk with the same key; rows [m], of those that are written.
    """

    last: npt.NDArray[np.intp]
    rows: npt.NDArray[np.intp]
    records: GroupRecords
    writing: Writing | None = None


class Move:
    """Chunks that move at once, of one or more transfers of one kind.

    `slots` and `reading` are of a load that began, `storing` is of a store that did.
    Shapes: keys, slots [n]; addresses [n, P].
    """

    def __init__(self, taken: list[tuple[Transfer, slice]]) -> None:
        self.kind, self._taken = taken[0][0].kind, taken
        self.keys: KeyArray = np.concatenate([transfer.keys[rows] for transfer, rows in taken])
        self.addresses = np.concatenate([transfer.addresses[rows] for transfer, rows in taken])
        self.slots = np.empty(0, np.int64)
        self.reading: Reading | None = None
        self.storing: Storing | None = None

    def parts(self, statuses: Statuses) -> Iterator[tuple[Transfer, slice, Statuses]]:
        """Yield the transfers, which of their chunks these were, and what became of those. Shapes: statuses [n]."""
        start = 0
        for transfer, rows in self._taken:
            end = start + rows.stop - rows.start
            yield transfer, rows, statuses[start:end]
            start = end


def tell(what: str, answer: Callable[[], object]) -> None:
    """Call back into the engine, whose faults must not stop the worker."""
    try:
        answer()
    except Exception:
        _log.exception("kvtide: the engine's answer to %s failed", what)
