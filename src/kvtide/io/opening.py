"""Choosing an engine by name. Knows which are there and which stands in for which. Next: sim."""

from __future__ import annotations

from kvtide.errors import ConfigError, UnsupportedError
from kvtide.io.threads import ThreadEngine
from kvtide.io.uring import UringEngine

NAMES = ("auto", "uring", "threads")
THREADS_DEPTH_MAX = 32  # of the stand-in: more threads than this take turns at the interpreter lock


def open_engine(name: str = "auto", *, depth_max: int = 128) -> UringEngine | ThreadEngine:
    """Return the engine called `name`; `auto` is io_uring, or threads where the kernel refuses it.

    An engine that stands in for another says why in `fallback_reason`, which is empty otherwise. Its `depth_max` may
    be smaller than asked for.

    Raises: ConfigError for another name; UnsupportedError if `uring` was asked for by name and is refused.
    """
    if name not in NAMES:
        raise ConfigError(f"engine is {name!r}; choose one of {', '.join(NAMES)}")
    if name == "threads":
        return ThreadEngine(depth_max=depth_max)
    try:
        return UringEngine(depth_max=depth_max)
    except UnsupportedError as refused:
        if name == "uring":
            raise
        return ThreadEngine(depth_max=min(depth_max, THREADS_DEPTH_MAX), fallback_reason=str(refused))
