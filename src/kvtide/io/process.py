"""Whose an open thing is: the process that opened it. After a fork the child has a copy it must not use. Next: sim.

A copy of a ring, a lock or a table shares what lies behind it with its original: used from two processes, one takes the
other's answers, or believes what the other has changed. So who opened something keeps this, and asks it before use.
"""

from __future__ import annotations

import errno
import os

from kvtide.errors import IoError


class Opener:
    """The process that made it."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self.pid

    def check(self, what: str) -> None:
        """Raise IoError(EPERM) in a process that was forked from it; `what` was opened."""
        here = os.getpid()
        if here != self.pid:
            raise IoError(
                errno.EPERM,
                f"{what} was opened by process {self.pid}, and this is process {here}, forked from it; "
                f"open a store of its own in this process, after the fork",
            )
