"""Polars, imported so that Ctrl-C still ends a wait. Knows no trace.

Polars puts a handler of its own before Python's, and asks the kernel to restart what it interrupted: a read of a pipe
or a wait for a thread would go on as if nobody had typed Ctrl-C (polars 2.1, at import).
Import `pl` from here, and only where it is needed: it takes long to load.
"""

from __future__ import annotations

import signal

import polars as pl

signal.siginterrupt(signal.SIGINT, True)  # noqa: FBT003 - it takes no name

__all__ = ["pl"]
