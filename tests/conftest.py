"""Being here, this file puts `tests` on the import path, where the shared helpers lie."""

from __future__ import annotations

import signal
import threading

import pytest


@pytest.fixture(autouse=True)
def _ctrl_c() -> None:
    """Let Ctrl-C do what it does, for programs that a test starts, too.

    A shell that starts the tests in the background has their programs ignore it, and so has a test before that ended
    the command line by Ctrl-C.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
