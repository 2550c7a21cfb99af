"""Objects that one process stored through LMCache's L2 interface are restored by another, through kvtide.

Runs LMCache's own factory, keys and memory objects in-process; no GPU and no server.

    python examples/lmcache_adapter.py [--objects 64] [--json]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPE = (2, 30, 64, 192)  # K and V of 64 tokens of a model of 30 layers: 1.4 MiB in bfloat16


def main() -> int:
    """Store in one process, load in another."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--objects", type=int, default=64)
    made.add_argument("--json", action="store_true")
    made.add_argument("--directory", help=argparse.SUPPRESS)
    made.add_argument("--one", choices=["store", "load"], help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.one:
        print(json.dumps(move(args.one, args.directory, args.objects)))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, __file__, "--objects", str(args.objects), "--directory", scratch, "--one"]
        found = {}
        for one in ("store", "load"):
            done = subprocess.run([*command, one], stdout=subprocess.PIPE, text=True, check=True)
            found[one] = json.loads(done.stdout.splitlines()[-1])
    num = found["load"]["right"]
    found["is_right"] = found["store"]["right"] == num == args.objects
    stored, loaded = found["store"]["mib_per_s"], found["load"]["mib_per_s"]
    verdict = "bytes are equal" if found["is_right"] else "WRONG: see --json"
    told = (
        f"stored {stored} MiB/s, loaded by another process {loaded} MiB/s, {num} of {args.objects} objects: {verdict}"
    )
    print(json.dumps(found, indent=1) if args.json else told)
    return 0 if found["is_right"] else 1


def move(one: str, directory: str, num: int) -> dict[str, Any]:
    """Store the objects, or look them up, load and compare them, in this process."""
    import torch
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

    config = PluginL2AdapterConfig.from_dict(
        {
            "type": "plugin",
            "module_path": "kvtide.integrations.lmcache",
            "class_name": "KvtideL2Adapter",
            "adapter_params": {"directory": str(Path(directory, "kv")), "capacity": "1GiB"},
        }
    )
    wanted, objects = made_objects(num, seed=1), made_objects(num, seed=1 if one == "store" else None)
    adapter = create_l2_adapter_from_registry(config, None)
    adapter.set_backend_identity("plugin")
    rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
    keys = [ObjectKey(hashlib.sha256(str(index).encode()).digest(), "example", rank) for index in range(num)]
    began = time.perf_counter()
    if one == "store":
        task = adapter.submit_store_task(keys, objects)
        done = answer(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
        right = num if done[task].is_successful() else 0
    else:
        task = adapter.submit_lookup_and_lock_task(keys, {})
        locked = answer(
            adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task)
        ).get_indices_list()
        task = adapter.submit_load_task([keys[row] for row in locked], [objects[row] for row in locked])
        loaded = answer(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task)).get_indices_list()
        adapter.submit_unlock([keys[row] for row in locked])
    seconds = time.perf_counter() - began
    if one == "load":
        right = sum(torch.equal(objects[locked[row]].raw_data, wanted[locked[row]].raw_data) for row in loaded)
    adapter.close()
    return {"right": right, "mib_per_s": round(num * objects[0].get_size() / (1 << 20) / seconds, 1)}


def made_objects(num: int, seed: int | None) -> list[Any]:
    """Return memory objects of LMCache, filled from `seed` or empty."""
    import torch
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    size, shape = torch.Size(SHAPE).numel() * 2, torch.Size(SHAPE)
    step = -(-size // 4096) * 4096
    arena = torch.zeros(num * step + 4096, dtype=torch.uint8)
    first = -arena.data_ptr() % 4096
    rows = [arena[first + index * step :][:size] for index in range(num)]
    if seed is not None:  # wherever the arena came to lie, the objects are the same
        for index, row in enumerate(rows):
            row.random_(0, 256, generator=torch.Generator().manual_seed(seed + index))
    return [
        TensorMemoryObj(
            row,
            MemoryObjMetadata(
                shape, torch.bfloat16, 0, size, 1, fmt=MemoryFormat.KV_2LTD, shapes=[shape], dtypes=[torch.bfloat16]
            ),
            None,
        )
        for row in rows
    ]


def answer(fd: int, ask: Any) -> Any:
    """Return what `ask` has to say, once the event `fd` was signalled."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while not (found := ask()):
        if not poll.poll(60_000):
            sys.exit("no answer within a minute")
        os.eventfd_read(fd)
    return found


if __name__ == "__main__":
    sys.exit(main())
