"""Which releases of an engine a plug-in was tried with. Next: the plug-ins."""

from __future__ import annotations

import re
from importlib import metadata

from kvtide.errors import UnsupportedError


def engine_version(packages: tuple[str, ...], engine: str, tested: str, least: tuple[int, int]) -> str:
    """Return the version of the first of `packages` that is installed.

    Raises: UnsupportedError if none is, or if it is older than `least` (major, minor); the message names `tested`.
    """
    for package in packages:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
        if numbers < least:
            raise UnsupportedError(
                f"{engine} {version} has no interface for storage tiers that kvtide knows; {engine} "
                f"{least[0]}.{least[1]} or later is needed, tested is {tested}: pip install '{package}=={tested}'"
            )
        return version
    raise UnsupportedError(f"{engine} is not installed: pip install '{packages[0]}=={tested}'")
