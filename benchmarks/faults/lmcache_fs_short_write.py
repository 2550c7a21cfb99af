"""LMCache's L2 adapter `fs` with O_DIRECT: a write that the system cuts short is published and told as stored.

RLIMIT_FSIZE is half of an object, so that the system writes half of it and says so.

Uses only LMCache. Exits with 1 while the fault is there, with 0 when it is not.

Confirms: lmcache-fs short-write, failed-store, full-disk
"""

import resource
import signal
import sys
import tempfile
from pathlib import Path

import torch
from _lmcache import L2, adapter_fs, page_aligned, told

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with tempfile.TemporaryDirectory() as folder:
    store = L2(adapter_fs(folder, direct=True))
    key, values = store.key([1] * 16), page_aligned(65536)
    values.fill_(0x11)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (32768, hard))
    is_stored = store.put(key, values)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    sizes = [path.stat().st_size for path in Path(folder).iterdir()]
    into = page_aligned(65536)
    told(object_bytes=65536, store_says=is_stored, file_bytes=sizes, look_up_says=store.has(key, values))
    told(load_says=store.get(key, into), right=bool(torch.equal(values, into)))
    told(stored_again=store.put(key, values), then_load_says=store.get(key, into))
    store.close()
sys.exit(int(is_stored))
