"""A program made to be killed while it stores chunks. `tests/test_chunks.py` runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from engines import Memory, keys
from kvtide.chunks import ChunkOptions, ChunkStore

SIZE, NUM = 20480, 300


def options(root: Path) -> ChunkOptions:
    return ChunkOptions(root, 200 * (SIZE + 4096) + 4096, SIZE, "killed")


def content(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 256, SIZE, np.uint8)


def main() -> None:
    """Store chunks over and over until somebody ends it."""
    store, memory, named = ChunkStore(options(Path(sys.argv[1]))), Memory(NUM, SIZE), keys(NUM)
    for index in range(NUM):
        memory.rows[index] = content(index)
    print("ready", flush=True)
    rng = np.random.default_rng(int(sys.argv[2]))
    while True:
        picked = rng.permutation(NUM)[:50]
        store.store(named[picked], memory.addresses[picked])


if __name__ == "__main__":
    main()
