"""Where the `kvtide` command starts: so early that Ctrl-C is quiet even while the rest is imported. Next: cli."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; leave with 130 when interrupted while it is imported, or on the way out."""
    try:
        from kvtide.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # Python remembers that Ctrl-C ended code run from a string (dataclasses are made so), also where it was caught,
        # and `python -m` then dies by SIGINT whatever the exit code. The next such code makes it forget.
        exec("")  # noqa: S102


if __name__ == "__main__":
    main()
