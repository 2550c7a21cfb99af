"""LMCache's fs and local disk: bytes that changed on the disk are given as they are. It claims no checksum.

One was asked for: LMCache#4533. A file of two is flipped in one bit, torn (its second half zeros), given the other's
second half, or filled with noise. `one-missing` and `flipped-reads` of the check come down to a torn file and a flipped
bit.
Uses only LMCache. Exits with 1 while every fault is there, with 0 when none is.

Confirms: lmcache-fs damage-flipped, damage-torn, damage-swapped, damage-senseless, flipped-reads, one-missing
Confirms: lmcache-disk damage-flipped, damage-torn, damage-swapped, flipped-reads, one-missing
"""

import tempfile
from collections.abc import Callable

import torch
from _disk import DAMAGE, SIZE, exit_code, files_of, leave, told_bytes
from _lmcache import L2, Disk, adapter_fs, told

Damage = Callable[[bytes, bytes], bytes]


def change(folder: str, damage: Damage) -> None:
    """Damage the file that was written first."""
    one, other = files_of(folder)
    one.write_bytes(damage(one.read_bytes(), other.read_bytes()))


def of_fs(folder: str, damage: Damage) -> bytes | None:
    """Return what the adapter `fs` gives."""
    store, into = L2(adapter_fs(folder)), torch.zeros(SIZE, dtype=torch.uint8)
    one, other = store.key([1] * 16), store.key([2] * 16)
    store.put(one, torch.full((SIZE,), 0x11, dtype=torch.uint8))
    store.put(other, torch.full((SIZE,), 0x22, dtype=torch.uint8))
    change(folder, damage)
    found = store.get(one, into)
    store.close()
    return into.numpy().tobytes() if found else None


def of_disk(folder: str, damage: Damage) -> bytes | None:
    """Return what the local disk gives."""
    disk = Disk(folder)
    one, other = disk.key([1] * 16), disk.key([2] * 16)
    disk.put(one, 0x11)
    disk.put(other, 0x22)
    change(folder, damage)
    return disk.get([one])[0]


wrong = {}
for kind, read in {"fs": of_fs, "disk": of_disk}.items():
    for name, damage in DAMAGE.items():
        with tempfile.TemporaryDirectory() as folder:
            value = read(folder, damage)
            told(store=kind, damage=name, stored=f"{SIZE} x 0x11", given=value and told_bytes(value))
            wrong[f"{kind} {name}"] = value is not None and value != b"\x11" * SIZE
leave(exit_code(wrong))  # the manager's threads do not end
