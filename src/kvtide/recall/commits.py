"""Group commit: who adds waits a bounded time, so that rows share a write and a sync. Next: place.

One thread takes what is pending, has it made durable, and lets go whoever waits. Knows no file: how a group becomes
durable is given.

A group is taken at once where nobody else could join it (every thread that added of late waits for it), else when its
oldest row has waited for the delay, or when there is a group's worth of bytes. What is taken: all that is due, and of
the rest as much as fills the pages best.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError, IoError
from kvtide.recall.contract import GROUP_BYTES_MAX
from kvtide.recall.records import Vectors

RECENT_DELAYS = 10  # a thread that added within so many delays may add again: it is waited for
RECENT_THREADS_MAX = 1024


@dataclass(slots=True, eq=False)
class Ticket:
    """Rows on their way to the log, kept or lost together. Shapes: rows [n] ROW; vectors [puts, D]; payloads [n]."""

    rows: npt.NDArray[np.void]
    vectors: Vectors
    payloads: list[bytes]
    num_bytes: int
    commits: Commits
    arrived_ns: int = 0
    is_awaited: bool = False
    is_done: bool = False
    error: BaseException | None = field(default=None)

    def wait(self) -> None:
        """Return when the rows are durable and found by a search.

        Raises: IoError, with ENOSPC where the file system is full: then none of them is kept.
        """
        self.commits.wait(self)


class Commits:
    """What is pending, and the thread that commits it."""

    def __init__(
        self,
        commit: Callable[[list[Ticket]], None],
        written_bytes: Callable[[list[Ticket]], int],
        *,
        delay_ms: float,
        pending_bytes_max: int,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Start the thread. `written_bytes` says what a group would write, `commit` makes one durable or raises."""
        self._commit, self._written_bytes, self._clock_ns = commit, written_bytes, clock_ns
        self._delay_ns, self._pending_bytes_max = int(delay_ms * 1e6), pending_bytes_max
        self._changed = threading.Condition()
        self._pending: deque[Ticket] = deque()
        self._pending_bytes = self._num_awaited = self._num_flushing = 0
        self._recent: dict[int, int] = {}  # thread: when it added last
        self._is_closed = self._is_committing = False
        self._thread = threading.Thread(target=self._run, name="kvtide-memory", daemon=True)
        self._thread.start()

    def put(self, ticket: Ticket, *, wait: bool) -> None:
        """Take rows; with `wait` return when they are durable.

        Raises: ConfigError once closed; what `Ticket.wait` raises.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._pending_bytes < self._pending_bytes_max or self._is_closed)
            if self._is_closed:
                raise ConfigError("this memory is closed; open it again with Memory.open")
            ticket.arrived_ns = self._clock_ns()
            ticket.is_awaited = wait
            self._num_awaited += wait
            self._note_thread(ticket.arrived_ns)
            self._pending.append(ticket)
            self._pending_bytes += ticket.num_bytes
            if wait or len(self._pending) == 1 or self._pending_bytes >= GROUP_BYTES_MAX:
                self._changed.notify_all()
            if not wait:
                return
        self.wait(ticket)

    def wait(self, ticket: Ticket) -> None:
        """Return when `ticket` is durable; see `Ticket.wait`."""
        with self._changed:
            if not ticket.is_done and not ticket.is_awaited:
                ticket.is_awaited = True
                self._num_awaited += 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: ticket.is_done)
        if isinstance(ticket.error, IoError):
            raise IoError(ticket.error.errno or 0, str(ticket.error.strerror or ticket.error)) from ticket.error
        if ticket.error is not None:
            raise ticket.error

    def flush(self) -> None:
        """Return when everything that was taken so far is durable, or has failed."""
        with self._changed:
            last = self._pending[-1] if self._pending else None
            self._num_flushing += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: (last is None or last.is_done) and not self._is_committing)
            self._num_flushing -= 1

    def close(self) -> None:
        """Commit what is pending and end the thread. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _note_thread(self, now_ns: int) -> None:
        self._recent[threading.get_ident()] = now_ns
        if len(self._recent) > RECENT_THREADS_MAX:
            self._recent = {threading.get_ident(): now_ns}

    def _run(self) -> None:
        while group := self._take():
            error: BaseException | None = None
            try:
                self._commit(group)
            except BaseException as failed:  # those who wait get it
                error = failed
            with self._changed:
                self._is_committing = False
                for ticket in group:
                    ticket.error, ticket.is_done = error, True
                    self._num_awaited -= ticket.is_awaited
                    self._pending_bytes -= ticket.num_bytes
                self._changed.notify_all()

    def _take(self) -> list[Ticket]:
        """Wait for a group; an empty one means that the memory was closed."""
        with self._changed:
            while not self._pending or (wait_ns := self._wait_ns()) > 0:
                if not self._pending and self._is_closed:
                    return []
                self._changed.wait(wait_ns / 1e9 if self._pending else None)
            group = self._best()
            for _ in group:
                self._pending.popleft()
            self._is_committing = True
            return group

    def _wait_ns(self) -> int:
        """Return how long the oldest row may still wait; at most 0: commit now."""
        if self._is_closed or self._num_flushing or self._pending_bytes >= GROUP_BYTES_MAX:
            return 0
        now_ns = self._clock_ns()
        if self._num_awaited:
            since_ns = now_ns - RECENT_DELAYS * self._delay_ns
            if self._num_awaited >= sum(at_ns >= since_ns for at_ns in self._recent.values()):
                return 0
        return self._pending[0].arrived_ns + self._delay_ns - now_ns

    def _best(self) -> list[Ticket]:
        """Return the tickets to commit now, oldest first: those that are due, and as many more as fill pages best."""
        if not self._delay_ns:
            return [self._pending[0]]
        due_ns = self._clock_ns() - self._delay_ns
        is_forced = self._is_closed or self._num_flushing
        group: list[Ticket] = []
        size = num_due = 0
        for ticket in self._pending:
            if group and size + ticket.num_bytes > GROUP_BYTES_MAX:
                break
            group.append(ticket)
            size += ticket.num_bytes
            num_due += is_forced or ticket.is_awaited or ticket.arrived_ns <= due_ns
        wasted = [self._written_bytes(group[:num]) / sum(one.num_bytes for one in group[:num]) for num in _tried(group)]
        best = min(range(len(wasted)), key=lambda at: (wasted[at], -at)) if wasted else 0
        return group[: max(num_due, _tried(group)[best])]


def _tried(group: list[Ticket]) -> range:
    """Return the sizes of a group that are looked at: at most 32 of the largest, whose waste differs by a page."""
    return range(max(1, len(group) - 31), len(group) + 1)
