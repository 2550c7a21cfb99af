"""Pages that one process stored through SGLang's storage interface are restored by another, through kvtide.

Runs SGLang's own factory and classes in-process, with a host pool of K and V in page-first layout. No GPU, no server.

    python examples/sglang_storage.py [--pages 256] [--json]
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.machinery
import json
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

PAGE_TOKENS, ROW_BYTES = 64, 2048  # a page of K is 128 KiB, and so is one of V


def main() -> int:
    """Store in one process, load in another."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--pages", type=int, default=256)
    made.add_argument("--json", action="store_true")
    made.add_argument("--directory", help=argparse.SUPPRESS)
    made.add_argument("--one", choices=["store", "load"], help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.one:
        print(json.dumps(move(args.one, args.directory, args.pages)))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, __file__, "--pages", str(args.pages), "--directory", scratch, "--one"]
        found = {}
        for one in ("store", "load"):
            done = subprocess.run([*command, one], stdout=subprocess.PIPE, text=True, check=True)
            found[one] = json.loads(done.stdout.splitlines()[-1])
    num = found["load"]["right"]
    found["is_right"] = found["store"]["right"] == num == args.pages
    stored, loaded = found["store"]["mib_per_s"], found["load"]["mib_per_s"]
    verdict = "bytes are equal" if found["is_right"] else "WRONG: see --json"
    told = f"stored {stored} MiB/s, loaded by another process {loaded} MiB/s, {num} of {args.pages} pages: {verdict}"
    print(json.dumps(found, indent=1) if args.json else told)
    return 0 if found["is_right"] else 1


def move(one: str, directory: str, num: int) -> dict[str, Any]:
    """Store the pages, or load and compare them, in this process."""
    skip_frontend()
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    extra = {
        "backend_name": "kvtide",
        "module_path": "kvtide.integrations.sglang",
        "class_name": "KvtideStorage",
        "interface_v1": 1,
        "directory": str(Path(directory, "kv")),
        "capacity": "1GiB",
    }
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="example",
        extra_config=extra,
    )
    wanted, pool = host_pool(num, seed=1), host_pool(num, seed=1 if one == "store" else None)
    storage = StorageBackendFactory.create_backend("dynamic", config, pool)
    storage.register_mem_pool_host(pool)
    storage.on_host_pools_registered()
    keys = [hashlib.sha256(str(index).encode()).hexdigest() for index in range(num)]
    indices = torch.arange(num * PAGE_TOKENS)
    began = time.perf_counter()
    if one == "store":
        good = storage.batch_set_v1(keys, indices)
    else:
        good = storage.batch_get_v1(keys[: storage.batch_exists(keys)], indices)
    seconds = time.perf_counter() - began
    storage.close()
    return {
        "right": sum(good) if torch.equal(pool.kv, wanted.kv) else 0,
        "mib_per_s": round(pool.kv.numel() / (1 << 20) / seconds, 1),
    }


def host_pool(num: int, seed: int | None) -> Any:
    """Return a host pool of `num` pages as SGLang's page-first one hands them out: first all of K, then all of V."""
    import torch

    kv = torch.zeros(2, num * PAGE_TOKENS, ROW_BYTES, dtype=torch.uint8)
    if seed is not None:
        kv.random_(0, 256, generator=torch.Generator().manual_seed(seed))

    class Pool:
        page_size, dtype, layout = PAGE_TOKENS, torch.bfloat16, "page_first"

        def __init__(self) -> None:
            self.kv = kv

        def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
            firsts = indices.tolist()[::PAGE_TOKENS]
            at = [part.data_ptr() + first * ROW_BYTES for first in firsts for part in self.kv]
            return at, [PAGE_TOKENS * ROW_BYTES] * len(at)

    return Pool()


def skip_frontend() -> None:
    """Let SGLang's modules be imported without its language for prompts, which needs much of what a server needs."""
    spec = importlib.machinery.PathFinder.find_spec("sglang")
    if spec is None:
        sys.exit("SGLang is not installed here: make test-engines installs it")
    bare = types.ModuleType("sglang")
    bare.__path__, bare.__spec__ = list(spec.submodule_search_locations or []), spec
    sys.modules["sglang"] = bare


if __name__ == "__main__":
    sys.exit(main())
