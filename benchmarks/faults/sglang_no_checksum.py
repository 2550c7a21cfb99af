"""SGLang's HiCacheFile: bytes that changed on the disk are given as they are. It claims no checksum.

A file of two is flipped in one bit, torn (its second half zeros), given the other's second half, or filled with noise.
`one-missing` and `flipped-reads` of the check come down to a torn file and a flipped bit.
Uses only SGLang. Exits with 1 while every fault is there, with 0 when none is.

Confirms: sglang-file damage-flipped, damage-torn, damage-swapped, damage-senseless, flipped-reads, one-missing
"""

import sys
import tempfile

import torch
from _disk import DAMAGE, SIZE, exit_code, files_of, told_bytes
from _sglang import KEY, backend, told

wrong = {}
for name, damage in DAMAGE.items():
    with tempfile.TemporaryDirectory() as folder:
        store, page = backend(folder), torch.zeros(SIZE, dtype=torch.uint8)
        store.set(KEY, torch.full((SIZE,), 0x11, dtype=torch.uint8))
        store.set("11" * 32, torch.full((SIZE,), 0x22, dtype=torch.uint8))
        one, other = files_of(folder)
        one.write_bytes(damage(one.read_bytes(), other.read_bytes()))
        found = store.get(KEY, page) is not None
        told(damage=name, stored=f"{SIZE} x 0x11", found=found, given=told_bytes(page.numpy().tobytes()))
        wrong[name] = found and bool((page != 0x11).any())
sys.exit(exit_code(wrong))
