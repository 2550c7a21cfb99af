"""LMCache's local disk: a file that was cut off is read as whole. What is missing of it is what the memory held before.

A disk that keeps half of a new file's bytes and says that it wrote all leaves such a file as well.
Uses only LMCache. Exits with 1 while the fault is there, with 0 when it is not.

Confirms: lmcache-disk damage-truncated, damage-emptied, short-read, lost-writes
"""

import os
import tempfile
from pathlib import Path

from _disk import leave
from _lmcache import Disk, told

with tempfile.TemporaryDirectory() as folder:
    disk = Disk(folder, dram_mib=1)
    keys = [disk.key([number] * 16) for number in (1, 2)]
    told(stored=[disk.put(key, byte) for key, byte in zip(keys, (0x11, 0x22), strict=True)])
    disk.get(keys)
    cut = next(path for path in Path(folder).iterdir() if b"\x22" in path.read_bytes()[:1])
    os.truncate(cut, 1024)
    (value,) = disk.get(keys[1:])
    found = None if value is None else {f"{byte:#x}": value.count(byte) for byte in set(value)}
    told(file_bytes=1024, given_of_key_2=found)
leave(int(value is not None and value != b"\x22" * 65536))
