"""Targets by name. Decides where the class of a name is; imports it only in the process that runs it. Next: wire."""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING

from kvtide.errors import ConfigError

if TYPE_CHECKING:
    from kvtide.check.contract import Target

TARGETS = {
    "file": "kvtide.check.own:FileTarget",
    "chunks": "kvtide.check.own:ChunksTarget",
    "memory": "kvtide.check.own:MemoryTarget",
    "valkey": "kvtide.check.remotes:ValkeyTarget",
    "mooncake": "kvtide.check.remotes:MooncakeTarget",
    "vllm-fs": "kvtide.check.foreign.vllm:VllmFsTarget",
    "sglang-file": "kvtide.check.foreign.sglang:SglangFileTarget",
    "lmcache-fs": "kvtide.check.foreign.lmcache:LmcacheFsTarget",
    "lmcache-disk": "kvtide.check.foreign.lmcache:LmcacheDiskTarget",
    "lmcache-raw-block": "kvtide.check.foreign.lmcache:LmcacheRawBlockTarget",
}
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def path_of(name: str) -> str:
    """Return `module:Class` for a target's name, or for what is that already.

    Raises: ConfigError for a name there is not.
    """
    if name in TARGETS:
        return TARGETS[name]
    if _PATH.fullmatch(name):
        return name
    raise ConfigError(f"no target is named {name!r}; type one of {', '.join(TARGETS)}, or module:Class of your own")


def load_target(name: str) -> type[Target]:
    """Import the class of a target.

    Raises: ConfigError if there is no such class; ImportError if what it stands on is not installed.
    """
    module, _, cls = path_of(name).partition(":")
    found = getattr(importlib.import_module(module), cls, None)
    if not isinstance(found, type) or not hasattr(found, "traits"):
        raise ConfigError(f"{module} has no class {cls} with `traits`; write one as docs/check.md shows")
    return found
