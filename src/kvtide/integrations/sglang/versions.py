"""The releases of SGLang this was tried with. Next: pages."""

from __future__ import annotations

from kvtide.errors import UnsupportedError
from kvtide.integrations.versions import engine_version

TESTED = "0.5.23"
_LEAST = 0, 5


def check_version() -> str:
    """Return the version of SGLang.

    Raises: UnsupportedError where there is none, it is too old, or its storage interface is gone from where it was.
    """
    version = engine_version(("sglang",), "SGLang", TESTED, _LEAST)
    try:
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult
    except ImportError as error:
        raise UnsupportedError(
            f"SGLang {version} keeps its storage interface elsewhere than {TESTED} does ({error}): pip install "
            f"'sglang=={TESTED}', or a newer kvtide"
        ) from None
    if "restorable_prefix_pages" not in PoolTransferResult.__dataclass_fields__:
        raise UnsupportedError(
            f"SGLang {version} has an older interface for hybrid models than kvtide knows: pip install "
            f"'sglang=={TESTED}'"
        )
    del HiCacheStorage
    return version
