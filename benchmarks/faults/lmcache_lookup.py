"""LMCache's adapter `fs` asks the file system for each key, from Python: beside threads that compute it takes minutes.

Reported for vLLM's tier: vLLM#45765. 100 keys that are not there are looked up alone, and beside four threads that hold
the interpreter.
Uses only LMCache. Exits with 1 while a key takes more than 1 ms beside them, with 0 when none does.

Confirms: lmcache-fs lookup
"""

import tempfile
import threading
import time

import torch
from _disk import leave
from _lmcache import L2, adapter_fs, told

NUM, SPINNING = 100, 4


def spin() -> None:
    """Compute for ever."""
    while True:
        sum(range(10_000))


with tempfile.TemporaryDirectory() as folder:
    adapter, value = L2(adapter_fs(folder)), torch.zeros(4096, dtype=torch.uint8)
    keys = [adapter.key(list(range(one, one + 16))) for one in range(NUM)]
    begun = time.monotonic()
    adapter.num_there(keys, value)
    alone = time.monotonic() - begun
    for _ in range(SPINNING):
        threading.Thread(target=spin, daemon=True).start()
    begun = time.monotonic()
    adapter.num_there(keys, value)
    beside = time.monotonic() - begun
    told(keys=NUM, ms_alone=round(1000 * alone, 1), ms_beside_threads=round(1000 * beside, 1))
leave(int(beside > NUM * 0.001))
