"""Options of `kvtide run` that are checked before anything is loaded. Next: cli_run."""

from __future__ import annotations

import os
from pathlib import Path

from kvtide.cache.choice import REUSES
from kvtide.errors import ConfigError
from kvtide.io.opening import NAMES
from kvtide.spec.layout import BLOCK_TOKENS_MAX, GROUP_BLOCKS_MAX
from kvtide.units import parse_option_bytes, printable


def option_size(name: str, text: str | None) -> int | None:
    """Return the bytes `text` means, None for none given.

    Raises: ConfigError that names the option; only the file tier may be left out with 0.
    """
    if text is None:
        return None
    size = parse_option_bytes(name, text)
    if not size and name != "--disk":
        raise ConfigError(f"{name} is 0, but this tier is always needed; leave {name} out for a default")
    return size


def check_choices(
    group_blocks: str, block_tokens: int, write_policy: str, engine: str, reuse: str, trace: Path | None
) -> None:
    """Refuse what cannot be.

    Raises: ConfigError that names the option.
    """
    check_groups(group_blocks, block_tokens)
    if engine not in NAMES:
        raise ConfigError(f"--engine is {printable(engine)!r}; type {', '.join(NAMES)}")
    if write_policy not in {"through", "back"}:
        raise ConfigError(f"--write-policy is {printable(write_policy)!r}; type through or back")
    if reuse not in REUSES:
        raise ConfigError(f"--reuse is {printable(reuse)!r}; type {', '.join(REUSES)}")
    if trace is not None and not trace.absolute().parent.is_dir():
        raise ConfigError(f"--trace: {trace.absolute().parent} is no directory; make it, or type another file")
    if trace is not None and os.path.lexists(trace) and not trace.is_file():  # a device would be replaced by a file
        raise ConfigError(f"--trace: {trace} is no regular file; type another one")
    if trace is not None and not os.access(trace.absolute().parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--trace: {trace.absolute().parent} may not be written to; type another file")


def check_groups(group_blocks: str, block_tokens: int) -> None:
    """Raise ConfigError for blocks or groups of a size that is none."""
    is_number = group_blocks.isascii() and group_blocks.isdigit() and len(group_blocks) < 9
    if group_blocks != "auto" and not (is_number and 1 <= int(group_blocks) <= GROUP_BLOCKS_MAX):
        shown = printable(group_blocks)[:40]
        raise ConfigError(f"--group-blocks is {shown!r}; type a whole number from 1 to {GROUP_BLOCKS_MAX}, or auto")
    if not 1 <= block_tokens <= BLOCK_TOKENS_MAX:
        raise ConfigError(f"--block-tokens is {block_tokens}; type a whole number from 1 to {BLOCK_TOKENS_MAX}")
