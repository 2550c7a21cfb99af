"""LMCache's adapter fs reads the objects of one task one after the other: an SSD needs tens of reads at once.

Eight objects become pipes that hold up whoever reads them; how many the task has open is how many it reads at once.
Uses only LMCache. Exits with 1 while the fault is there, with 0 when it is not.

Confirms: lmcache-fs depth
"""

import tempfile

import torch
from _disk import SIZE, depth_code, files_of, leave, most_read_at_once
from _lmcache import L2, adapter_fs, told

NUM = 8
with tempfile.TemporaryDirectory() as folder:
    store = L2(adapter_fs(folder))
    keys = [store.key([index] * 16) for index in range(NUM)]
    for key in keys:
        store.put(key, torch.full((SIZE,), 0x11, dtype=torch.uint8))
    rooms = [torch.zeros(SIZE, dtype=torch.uint8) for _ in keys]
    most = most_read_at_once(files_of(folder), lambda: store.get_all(keys, rooms))
    told(objects_of_the_task=NUM, read_at_once=most)
leave(depth_code(most))
