"""SGLang's HiCacheFile: a page whose file was cut off is listed for ever: reading raises, and storing is skipped.

Uses only SGLang. Exits with 1 while the fault is there, with 0 when it is not.

Confirms: sglang-file damage-truncated, damage-emptied
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
from _sglang import KEY, backend, told

with tempfile.TemporaryDirectory() as folder:
    store, page = backend(folder), torch.full((65536,), 0x11, dtype=torch.uint8)
    store.set(KEY, page)
    (path,) = Path(folder).iterdir()
    os.truncate(path, 1024)
    for action in ("read", "read again", "store, then read"):
        if action.startswith("store"):
            told(store_says=store.set(KEY, page))
        try:
            found = store.get(KEY, torch.zeros_like(page)) is not None
        except OSError as problem:
            found = False
            told(**{action.replace(" ", "_"): f"{type(problem).__name__}: {problem}"})
        told(listed=(listed := store.exists(KEY)))
sys.exit(int(listed and not found))
