"""The releases of LMCache this was tried with. Next: forms."""

from __future__ import annotations

from kvtide.errors import UnsupportedError
from kvtide.integrations.versions import engine_version

TESTED = "0.5.6"
_LEAST = 0, 5


def check_version() -> str:
    """Return the version of LMCache.

    Raises: UnsupportedError where there is none, it is too old, or its adapters are gone from where they were.
    """
    version = engine_version(("lmcache",), "LMCache", TESTED, _LEAST)
    try:
        from lmcache.v1.distributed.internal_api import L2StoreResult
        from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
    except ImportError as error:
        raise UnsupportedError(
            f"LMCache {version} keeps its L2 adapters elsewhere than {TESTED} does ({error}): pip install "
            f"'lmcache=={TESTED}', or a newer kvtide"
        ) from None
    del L2StoreResult, AdapterUsage, L2AdapterInterface
    return version
