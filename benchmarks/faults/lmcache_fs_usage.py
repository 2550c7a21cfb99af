"""LMCache's L2 adapter `fs`: what it says it uses starts at 0 in a directory that holds objects (as LMCache#4564).

The adapter declares no capacity, so nothing evicts by this figure; its quotas by salt count from it.

Uses only LMCache. Exits with 1 while the fault is there, with 0 when it is not.

Confirms: lmcache-fs restart, restart-bound
"""

import sys
import tempfile

import torch
from _lmcache import L2, adapter_fs, told

with tempfile.TemporaryDirectory() as folder:
    used = []
    for name in ("first", "after_a_restart"):
        store, page = L2(adapter_fs(folder)), torch.full((65536,), 0x11, dtype=torch.uint8)
        key = store.key([1] * 16)
        if name == "first":
            store.put(key, page)
        used.append(store.adapter.get_usage().total_bytes_used)
        told(**{name: f"{used[-1]} bytes in use; look-up says {store.has(key, page)}"})
        store.close()
sys.exit(int(used[0] != used[1]))
