"""SGLang's HiCacheFile: bytes that changed on the disk are given as they are. It claims no checksum.

Uses only SGLang. Exits with 1 while the fault is there, with 0 when it is not.

Confirms: sglang-file damage-flipped, damage-torn, damage-swapped, damage-senseless
Confirms: sglang-file lost-writes, flipped-reads, one-missing
"""

import sys
import tempfile
from pathlib import Path

import torch
from _sglang import KEY, backend, told

with tempfile.TemporaryDirectory() as folder:
    store, page = backend(folder), torch.zeros(65536, dtype=torch.uint8)
    store.set(KEY, torch.full((65536,), 0x11, dtype=torch.uint8))
    (path,) = Path(folder).iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    found = store.get(KEY, page) is not None
    told(stored="65536 x 0x11", found=found, given={hex(byte): int((page == byte).sum()) for byte in page.unique()})
sys.exit(int(found and bool((page != 0x11).any())))
