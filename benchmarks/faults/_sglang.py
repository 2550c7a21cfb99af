"""What the scripts about SGLang share: its file backend, as its configuration makes it."""

# ruff: noqa: E402 - what is imported below is found only then

import importlib.machinery
import logging
import sys
import types
from importlib.metadata import version
from typing import Any

_found = importlib.machinery.PathFinder.find_spec("sglang")
if _found is None:
    sys.exit(print("SGLang is not installed here", file=sys.stderr) or 2)
_bare = types.ModuleType("sglang")  # without its language for prompts, which needs much of what a server needs
_bare.__path__, _bare.__spec__ = list(_found.submodule_search_locations or []), _found
sys.modules["sglang"] = _bare

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

logging.disable(logging.ERROR)
KEY = "00" * 32


def told(**said: object) -> None:
    """Print what was stored or what came back."""
    for name, value in said.items():
        print(f"sglang {version('sglang')}: {name}: {value}")


def backend(folder: str, *, dtype: torch.dtype = torch.bfloat16, layout: str = "page_first") -> HiCacheFile:
    """Return the backend `file` over a host pool of this dtype and layout."""
    ranks: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
    }
    config = HiCacheStorageConfig(
        **ranks,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=layout == "page_first",
        model_name="some/model",
        extra_config={},
    )
    made = HiCacheFile(config, folder)
    made.register_mem_pool_host(types.SimpleNamespace(dtype=dtype, layout=layout))
    return made
