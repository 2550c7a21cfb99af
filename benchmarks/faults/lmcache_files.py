"""LMCache's fs and local disk: all objects are files of one directory; what a killed writer left stays (fs).

ext4 refuses more files of a directory long before the disk is full: SGLang#28653 is the same of another engine.
Uses only LMCache. Exits with 1 while all faults are there, with 0 when none is.

Confirms: lmcache-fs flat-directory, orphans
Confirms: lmcache-disk flat-directory
"""

import sys
import tempfile

import torch
from _disk import exit_code, files_of, kill_writers, leave, most_in_one_directory
from _lmcache import L2, Disk, adapter_fs, told

NUM, LARGE = 400, 8 << 20


def write(folder: str, number: str) -> None:
    """Write large objects until somebody ends this."""
    store, values = L2(adapter_fs(folder)), torch.zeros(LARGE, dtype=torch.uint8)
    print("begins", flush=True)
    for index in range(1 << 20):
        store.put(store.key([int(number) << 20 | index] * 16), values)
        for path in files_of(folder):
            if path.suffix != ".tmp":
                path.unlink()  # the disk has an end


if len(sys.argv) > 1:
    write(*sys.argv[2:])
found = {}
with tempfile.TemporaryDirectory() as folder:
    store = L2(adapter_fs(folder))
    for index in range(NUM):
        store.put(store.key([index] * 16), torch.full((512,), 0x11, dtype=torch.uint8))
    most = most_in_one_directory(folder)
    told(objects=NUM, most_files_of_one_directory_of_fs=most)
    found["fs flat directory"] = most == NUM
    store.close()
with tempfile.TemporaryDirectory() as folder:
    kill_writers(__file__, folder)
    again = L2(adapter_fs(folder))
    left = [path for path in files_of(folder) if path.suffix == ".tmp"]
    told(kills=3, files_left={path.name: path.stat().st_size for path in left})
    found["fs orphans"] = bool(left)
    again.close()
with tempfile.TemporaryDirectory() as folder:
    disk = Disk(folder, disk_mib=256)
    for index in range(100):
        disk.put(disk.key([index] * 16), 0x11)
    most = most_in_one_directory(folder)
    told(objects=100, most_files_of_one_directory_of_disk=most)
    found["disk flat directory"] = most == 100
leave(exit_code(found))  # the manager's threads do not end
