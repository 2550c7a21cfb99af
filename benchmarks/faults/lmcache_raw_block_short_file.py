"""LMCache's adapter raw_block: a value beyond the end of a cut device is listed for ever: not loaded, not stored again.

Uses only LMCache. Exits with 1 while the fault is there, with 0 when it is not.

Confirms: lmcache-raw-block damage-truncated, damage-emptied
"""

import os
import tempfile
from pathlib import Path

import torch
from _disk import SIZE, exit_code, leave
from _lmcache import INDEX_BYTES, L2, adapter_raw_block, told

faults = {}
for name, length in {"cut off in the value": INDEX_BYTES + SIZE // 2, "emptied": 0}.items():
    with tempfile.TemporaryDirectory() as folder:
        store, page = L2(adapter_raw_block(folder)), torch.full((SIZE,), 0x11, dtype=torch.uint8)
        key = store.key([1] * 16)
        store.put(key, page)
        os.truncate(Path(folder, "device"), length)
        told(device=name, look_up_says=store.has(key, page), load_says=store.get(key, torch.zeros_like(page)))
        told(stored_again=store.put(key, page), then_load_says=(found := store.get(key, torch.zeros_like(page))))
        told(listed=(listed := store.has(key, page)))
        faults[name] = listed and not found
        store.close()
leave(exit_code(faults))
