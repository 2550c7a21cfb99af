"""Polars, imported so that Ctrl-C still does what it did. Knows no trace.

Polars puts a handler of its own before Python's, and asks the kernel to restart what it interrupted: a read of a pipe
or a wait for a thread would go on as if nobody had typed Ctrl-C (polars 2.1, at import). While it works, that handler
raises KeyboardInterrupt, whatever handler the program has set: a program that only counts would lose what it does.
Import `pl` from here, and only where it is needed: it takes long to load.
"""

from __future__ import annotations

import signal
import threading

import polars as pl

_own = signal.getsignal(signal.SIGINT)
if _own not in (None, signal.default_int_handler) and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, _own)  # the program's, before polars' again
signal.siginterrupt(signal.SIGINT, True)  # noqa: FBT003 - it takes no name

__all__ = ["pl"]
