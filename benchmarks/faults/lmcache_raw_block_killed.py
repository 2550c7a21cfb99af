"""LMCache's adapter raw_block: what was told as stored is not found after SIGKILL.

Its index is written every 60 s, by default, and when it is closed; the headers of slots are not searched.
Uses only LMCache. Exits with 1 while the fault is there, with 0 when it is not.

Confirms: lmcache-raw-block killed
"""

import subprocess
import sys
import tempfile

import torch
from _disk import SIZE, leave
from _lmcache import L2, adapter_raw_block, told

NUM = 16


def write(folder: str) -> None:
    """Store values, say how many were told as stored, and wait to be killed."""
    store, page = L2(adapter_raw_block(folder)), torch.full((SIZE,), 0x11, dtype=torch.uint8)
    print(sum(store.put(store.key([index] * 16), page) for index in range(NUM)), flush=True)
    sys.stdin.read()


if len(sys.argv) > 1:
    write(sys.argv[1])
with tempfile.TemporaryDirectory() as folder:
    asked = [sys.executable, __file__, folder]
    child = subprocess.Popen(asked, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    stored = int(child.stdout.readline())
    child.kill()
    child.wait()
    store, page = L2(adapter_raw_block(folder)), torch.zeros(SIZE, dtype=torch.uint8)
    found = sum(store.has(store.key([index] * 16), page) for index in range(NUM))
    told(told_as_stored=stored, found_after_sigkill=found)
    store.close()
leave(2 if stored < NUM else int(found < NUM))
