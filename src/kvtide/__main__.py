"""Where the `kvtide` command starts: so early that Ctrl-C is quiet even while the rest is imported. Next: cli."""

from __future__ import annotations

import signal
import sys
import threading

AGAIN_S = 0.01


def main() -> None:
    """Run the command line; leave with 130 when interrupted while it is imported, or on the way out."""
    sys.unraisablehook = _lost
    try:
        from kvtide.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # Python remembers that Ctrl-C ended code run from a string (dataclasses are made so), also where it was caught,
        # and `python -m` then dies by SIGINT whatever the exit code. The next such code makes it forget.
        exec("")  # noqa: S102


def _lost(what: sys.UnraisableHookArgs) -> None:
    """Interrupt again, soon, where Ctrl-C came in a finalizer or a callback: Python drops it there, and goes on."""
    if what.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(what)
        return
    if sys.is_finalizing():  # no thread starts any more
        return
    again = threading.Timer(AGAIN_S, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    again.daemon = True
    again.start()


if __name__ == "__main__":
    main()
