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


if __name__ == "__main__":
    main()
