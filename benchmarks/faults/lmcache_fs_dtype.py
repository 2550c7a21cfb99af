"""LMCache's L2 adapters fs and raw_block: an object stored as fp8 e4m3 is loaded as fp8 e5m2. ObjectKey has no dtype.

Uses only LMCache. Exits with 1 while the fault is there, with 0 when it is not.

Confirms: lmcache-fs identity-dtype
Confirms: lmcache-raw-block identity-dtype
"""

import tempfile

import torch
from _disk import exit_code, leave
from _lmcache import L2, adapter_fs, adapter_raw_block, told

faults = {}
for name, adapter in {"fs": adapter_fs, "raw_block": adapter_raw_block}.items():
    with tempfile.TemporaryDirectory() as folder:
        store = L2(adapter(folder))
        key = store.key([1] * 16)
        stored = torch.full((4096,), 1.5, dtype=torch.float8_e4m3fn)
        store.put(key, stored)
        loaded = torch.zeros(4096, dtype=torch.float8_e5m2)
        found = store.get(key, loaded)
        store.close()
    told(adapter=name, stored=f"{stored.dtype} {stored[:3].float().tolist()}", found=found)
    told(loaded=f"{loaded.dtype} {loaded[:3].float().tolist()}")
    faults[name] = found and loaded[0].float().item() != 1.5
leave(exit_code(faults))
