"""What waits for a store's worker: loads, stores, and what is to happen when nothing moves. Next: store."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

from kvtide.chunks.transfer import LOAD, STORE, Kind, Transfer, take_some
from kvtide.errors import IoError

Action = Callable[[], object]


class Work:
    """The queues, and how many transfers are not done. Threads: any may call; one takes."""

    def __init__(self, num_loads_max: int) -> None:
        """Make queues; of loads at most `num_loads_max` chunks are taken at once."""
        self._num_loads_max = num_loads_max
        self._actions: list[Action] = []
        self._queues: dict[Kind, collections.deque[Transfer]] = {LOAD: collections.deque(), STORE: collections.deque()}
        self._changed = threading.Condition()
        self._is_closed = False
        self.num_open = 0

    def put(self, transfer: Transfer) -> None:
        """Let a transfer wait for its turn; one without chunks is done at once. Raises: IoError after `close`."""
        with self._changed:
            self._check_open()
            if len(transfer.keys):
                self.num_open += 1
                self._queues[transfer.kind].append(transfer)
                self._changed.notify_all()
                return
        transfer.finish()

    def between(self, action: Action) -> None:
        """Have `action` done when nothing moves, wait for it, pass on what it raises. Raises: IoError after `close`."""
        done, raised = threading.Event(), []

        def run() -> None:
            try:
                action()
            except BaseException as error:  # raised where it was asked for
                raised.append(error)
            finally:
                done.set()

        with self._changed:
            self._check_open()
            self._actions.append(run)
            self._changed.notify_all()
        done.wait()
        if raised:
            raise raised[0]

    def take(self, num_stores_max: int, *, can_wait: bool) -> tuple[list[Action], list[tuple[Transfer, slice]]] | None:
        """Return actions, else chunks to move; None where there is nothing, and no waiting or all is closed."""
        with self._changed:
            if can_wait:
                self._changed.wait_for(lambda: self._is_closed or self._actions or any(self._queues.values()))
            if self._actions:
                actions, self._actions = self._actions, []
                return actions, []
            kind = LOAD if self._queues[LOAD] else STORE
            taken = take_some(self._queues[kind], self._num_loads_max if kind == LOAD else num_stores_max)
            return ([], taken) if taken else None

    def note_done(self, num: int) -> None:
        """Say that `num` transfers that were taken are done."""
        with self._changed:
            self.num_open -= num
            if not self.num_open:
                self._changed.notify_all()

    def drain(self) -> None:
        """Return when every transfer is done."""
        with self._changed:
            self._changed.wait_for(lambda: not self.num_open)

    def close(self) -> None:
        """Take in nothing more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._is_closed:
            raise IoError(0, "the store is closed; open it again")
