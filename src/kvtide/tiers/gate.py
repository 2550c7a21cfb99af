"""One at a time, and those who wait for KV before those who only send some. Next: remote."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """A lock with two kinds of users: nobody enters by `last` while somebody waits in `first`.

    Threads: any; nobody enters twice.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_first, self._is_taken, self._holder = 0, False, 0

    @contextmanager
    def first(self) -> Iterator[None]:
        """Hold the gate, before all who come by `last`."""
        with self._changed:
            self._check_outside()
            self._num_first += 1
            try:
                self._changed.wait_for(lambda: not self._is_taken)
                self._is_taken, self._holder = True, threading.get_ident()
            finally:
                self._num_first -= 1
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def last(self) -> Iterator[None]:
        """Hold the gate once nobody else wants it."""
        with self._changed:
            self._check_outside()
            self._changed.wait_for(lambda: not self._is_taken and not self._num_first)
            self._is_taken, self._holder = True, threading.get_ident()
        try:
            yield
        finally:
            self._leave()

    def _check_outside(self) -> None:
        assert not self._is_taken or self._holder != threading.get_ident(), "entered again by who holds the gate"

    def _leave(self) -> None:
        with self._changed:
            self._is_taken = False
            self._changed.notify_all()
