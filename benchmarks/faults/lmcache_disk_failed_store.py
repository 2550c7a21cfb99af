"""LMCache's local disk: a store whose write fails is under way for ever, keeps its memory and its share of the bound.

The write fails with EFBIG: RLIMIT_FSIZE is below the size of a value. Then the limit is lifted and the same key stored
again.

Uses only LMCache. Exits with 1 while the fault is there, with 0 when it is not.

Confirms: lmcache-disk failed-store, full-disk, inodes, enospc-write, eio-write, eio-open, short-write
"""

import resource
import signal
import tempfile

from _disk import leave
from _lmcache import Disk, told

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with tempfile.TemporaryDirectory() as folder:
    disk = Disk(folder)
    key = disk.key([1] * 16)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (32768, hard))
    told(first_store=disk.put(key, 0x11))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    told(still_under_way=disk.backend.exists_in_put_tasks(key), bytes_counted=disk.backend.current_cache_size)
    again = disk.put(key, 0x11, wait_s=5.0)
    told(second_store=again)
leave(int(not again))
