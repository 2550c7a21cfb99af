"""SGLang's HiCacheFile: all pages are files of one directory, and what a killed writer left is never removed.

ext4 refuses more files of a directory long before the disk is full: SGLang#28653.
Uses only SGLang. Exits with 1 while both faults are there, with 0 when none is.

Confirms: sglang-file flat-directory, orphans
"""

import sys
import tempfile

import torch
from _disk import exit_code, files_of, kill_writers, most_in_one_directory
from _sglang import backend, told

NUM, LARGE = 400, 8 << 20


def write(folder: str, number: str) -> None:
    """Write large pages until somebody ends this."""
    store, page = backend(folder), torch.zeros(LARGE, dtype=torch.uint8)
    print("begins", flush=True)
    for index in range(1 << 20):
        key = f"{int(number) << 32 | index:064x}"
        store.set(key, page)
        (next(path for path in files_of(folder) if key in path.name)).unlink()  # the disk has an end


if len(sys.argv) > 1:
    write(*sys.argv[2:])
with tempfile.TemporaryDirectory() as folder:
    store = backend(folder)
    for index in range(NUM):
        store.set(f"{index:064x}", torch.full((512,), 0x11, dtype=torch.uint8))
    most = most_in_one_directory(folder)
    told(pages=NUM, most_files_of_one_directory=most)
with tempfile.TemporaryDirectory() as folder:
    kill_writers(__file__, folder)
    again = backend(folder)
    left = [path for path in files_of(folder) if path.suffix != ".bin"]
    told(kills=3, files_left={path.name: path.stat().st_size for path in left})
sys.exit(exit_code({"flat directory": most == NUM, "orphans": bool(left)}))
