"""LMCache's L2 adapter `fs`: an object stored as fp8 e4m3 is loaded as fp8 e5m2. ObjectKey has no dtype.

Uses only LMCache. Exits with 1 while the fault is there, with 0 when it is not.

Confirms: lmcache-fs identity-dtype
Confirms: lmcache-raw-block identity-dtype
"""

import sys
import tempfile

import torch
from _lmcache import L2, adapter_fs, told

with tempfile.TemporaryDirectory() as folder:
    store = L2(adapter_fs(folder))
    key = store.key([1] * 16)
    stored = torch.full((4096,), 1.5, dtype=torch.float8_e4m3fn)
    store.put(key, stored)
    loaded = torch.zeros(4096, dtype=torch.float8_e5m2)
    found = store.get(key, loaded)
    store.close()
told(stored=f"{stored.dtype} {stored[:3].float().tolist()}", found=found)
told(loaded=f"{loaded.dtype} {loaded[:3].float().tolist()}")
sys.exit(int(found and loaded[0].float().item() != 1.5))
