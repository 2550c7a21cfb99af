"""Being here, this file puts `tests` on the import path, where the shared helpers lie."""

from __future__ import annotations

import signal

# A shell that starts the tests in the background has their programs ignore Ctrl-C; those that test it need it.
signal.signal(signal.SIGINT, signal.default_int_handler)
