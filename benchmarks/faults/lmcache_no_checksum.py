"""LMCache's fs and local disk: bytes that changed on the disk are given as they are. It claims no checksum.

One was asked for: LMCache#4533.

Uses only LMCache. Exits with 1 while the fault is there, with 0 when it is not.

Confirms: lmcache-fs damage-flipped, damage-torn, damage-swapped, damage-senseless
Confirms: lmcache-fs lost-writes, flipped-reads, one-missing
Confirms: lmcache-disk damage-flipped, damage-torn, damage-swapped, lost-writes, flipped-reads, one-missing
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
from _lmcache import L2, Disk, adapter_fs, told


def flip(folder: str) -> None:
    """Turn one bit in the middle of the only file."""
    (path,) = Path(folder).iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


wrong = 0
with tempfile.TemporaryDirectory() as folder:
    store = L2(adapter_fs(folder))
    key, into = store.key([1] * 16), torch.zeros(65536, dtype=torch.uint8)
    store.put(key, torch.full((65536,), 0x11, dtype=torch.uint8))
    flip(folder)
    found = store.get(key, into)
    told(
        fs_stored="65536 x 0x11", fs_found=found, fs_given={hex(one): int((into == one).sum()) for one in into.unique()}
    )
    wrong += found and bool((into != 0x11).any())
    store.close()
with tempfile.TemporaryDirectory() as folder:
    disk = Disk(folder)
    named = disk.key([1] * 16)
    disk.put(named, 0x11)
    flip(folder)
    (value,) = disk.get([named])
    told(disk_stored="65536 x 0x11", disk_given=value and {hex(one): value.count(one) for one in set(value)})
    wrong += value is not None and value != b"\x11" * 65536
    sys.stdout.flush()
    os._exit(int(wrong > 0))
