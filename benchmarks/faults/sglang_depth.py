"""SGLang's HiCacheFile reads the pages of one batch one after the other: an SSD needs tens of reads at once.

Reported for its host-to-disk path: SGLang#21880. Eight pages become pipes that hold up whoever reads them; how many the
batch has open is how many it reads at once.
Uses only SGLang. Exits with 1 while the fault is there, with 0 when it is not.

Confirms: sglang-file depth
"""

import tempfile

import torch
from _disk import SIZE, depth_code, files_of, leave, most_read_at_once
from _sglang import backend, told

NUM = 8
with tempfile.TemporaryDirectory() as folder:
    store, keys = backend(folder), [f"{index:064x}" for index in range(NUM)]
    for key in keys:
        store.set(key, torch.full((SIZE,), 0x11, dtype=torch.uint8))
    pages = [torch.zeros(SIZE, dtype=torch.uint8) for _ in keys]
    most = most_read_at_once(files_of(folder), lambda: store.batch_get(keys, pages))
    told(pages_of_the_batch=NUM, read_at_once=most)
leave(depth_code(most))
