"""LMCache's L2 adapter `fs`: an object whose file was cut off is listed for ever: not loaded, never stored again.

Uses only LMCache. Exits with 1 while the fault is there, with 0 when it is not.

Confirms: lmcache-fs damage-truncated, damage-emptied
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
from _lmcache import L2, adapter_fs, told

with tempfile.TemporaryDirectory() as folder:
    store, page = L2(adapter_fs(folder)), torch.full((65536,), 0x11, dtype=torch.uint8)
    key = store.key([1] * 16)
    store.put(key, page)
    (path,) = Path(folder).iterdir()
    os.truncate(path, 1024)
    told(look_up_says=store.has(key, page), load_says=store.get(key, torch.zeros_like(page)))
    told(stored_again=store.put(key, page), then_load_says=(found := store.get(key, torch.zeros_like(page))))
    told(listed=(listed := store.has(key, page)))
    store.close()
sys.exit(int(listed and not found))
