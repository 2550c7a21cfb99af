"""LMCache's adapter raw_block: bytes of a value that changed on the device are given as they are.

Its index and the headers of its slots are checked when it is opened, values never. One checksum was asked for:
LMCache#4533. A slot's value of two is flipped in one bit, torn (its second half zeros: also what a lost write leaves in
a new slot, and `one-missing`) or given the other's second half. Headers and index stay as they are.
Uses only LMCache. Exits with 1 while every fault is there, with 0 when none is.

Confirms: lmcache-raw-block damage-flipped, damage-torn, damage-swapped, flipped-reads, one-missing, lost-writes
"""

import tempfile
from pathlib import Path

import torch
from _disk import DAMAGE, SIZE, exit_code, leave, told_bytes
from _lmcache import L2, adapter_raw_block, told

wrong = {}
for name in ("flipped", "torn", "swapped"):
    with tempfile.TemporaryDirectory() as folder:
        store, into = L2(adapter_raw_block(folder)), torch.zeros(SIZE, dtype=torch.uint8)
        keys = [store.key([number] * 16) for number in (1, 2)]
        for key, byte in zip(keys, (0x11, 0x22), strict=True):
            store.put(key, torch.full((SIZE,), byte, dtype=torch.uint8))
        device = Path(folder, "device").read_bytes()
        one, other = (byte * SIZE for byte in (b"\x11", b"\x22"))
        with Path(folder, "device").open("r+b") as file:
            file.seek(device.index(one))
            file.write(DAMAGE[name](one, other))
        found, value = store.get(keys[0], into), into.numpy().tobytes()
        told(damage=name, stored=f"{SIZE} x 0x11", load_says=found, given=told_bytes(value))
        wrong[name] = found and value != one
        store.close()
leave(exit_code(wrong))
