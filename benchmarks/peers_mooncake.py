"""kvtide's store of chunks against Mooncake Store, which keeps them in another process's memory, over loopback TCP.

    .venv/bin/python benchmarks/peers_mooncake.py

Mooncake writes nothing to a disk. Processor time is that of this process: the one that holds Mooncake's memory takes
its own. Mooncake keeps its connections, without which it runs out of ports, and gets batches of 1,024 chunks: those are
its fastest, and of larger ones transfers fail. Needs kvtide[mooncake].
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "1")

try:
    from mooncake.store import MooncakeDistributedStore
except ImportError:
    sys.exit(print("peers_mooncake: skipped, Mooncake is not here: pip install 'kvtide[mooncake]'", file=sys.stderr))

from _peers import Rows, Tiered, chunk_key, run_peers
from kvtide.chunks import LOAD, STORE, ChunkOptions, ChunkStore, Transfer, fold
from kvtide.io.ops import address_of
from kvtide.tiers.contract import OK

MEMORY = "5GiB"  # of Mooncake: more than the chunks of all rounds, since what was read is leased and stays
LOCAL_BYTES = 64 << 20  # of the library's own
BATCH_CHUNKS = 1024


class Mooncake:
    """Mooncake Store, from and to memory it was told of."""

    is_direct = True

    def __init__(self, url: str, label: str, rows: Rows) -> None:
        parts = urlsplit(url)
        (metadata,) = parse_qs(parts.query)["metadata"]
        self._rows = rows
        self._keys = [f"{label}-{chunk_key(number).hex()}" for number in range(len(rows))]
        self._store: Any = MooncakeDistributedStore()
        code = self._store.setup("127.0.0.1", metadata, 0, LOCAL_BYTES, "tcp", "", parts.netloc)
        assert code == 0, f"set-up failed with code {code}"
        assert self._store.register_buffer(address_of(rows), rows.nbytes) == 0

    def store(self, jobs: list[range]) -> None:
        for batch in self._batches(jobs):
            codes = self._store.batch_put_from(*batch)
            assert not any(codes), f"codes {sorted(set(codes))}"

    def load(self, jobs: list[range]) -> None:
        for batch in self._batches(jobs):
            sizes = set(self._store.batch_get_into(*batch))
            assert sizes == {self._rows.shape[1]}, f"sizes {sorted(sizes)}"

    def close(self) -> None:
        self._store.batch_remove(self._keys, True)  # noqa: FBT003  # a lease is no reason to keep it
        self._store.unregister_buffer(address_of(self._rows))
        self._store.close()

    def _batches(self, jobs: list[range]) -> Iterator[tuple[list[str], list[int], list[int]]]:
        numbers = [number for job in jobs for number in job]
        size = self._rows.shape[1]
        base = address_of(self._rows)
        for start in range(0, len(numbers), BATCH_CHUNKS):
            some = numbers[start : start + BATCH_CHUNKS]
            yield [self._keys[one] for one in some], [base + one * size for one in some], [size] * len(some)


class Chunks:
    """kvtide's store, on disk, with room for all chunks and a tenth more."""

    is_direct = True

    def __init__(self, directory: Path, rows: Rows) -> None:
        num, size = rows.shape
        capacity = int(rows.size * 1.1) + num * 4096 + (1 << 20)
        self._store = ChunkStore(ChunkOptions(directory, capacity, size, "benchmark"))
        self._keys = fold([chunk_key(number) for number in range(num)])
        self._addresses = np.uint64(address_of(rows)) + np.arange(num, dtype=np.uint64) * np.uint64(size)

    def store(self, jobs: list[range]) -> None:
        self._move(STORE, jobs)

    def load(self, jobs: list[range]) -> None:
        self._move(LOAD, jobs)

    def close(self) -> None:
        self._store.close()

    def _move(self, kind: Any, jobs: list[range]) -> None:
        parts = [slice(job.start, job.stop) for job in jobs]
        begun = [self._store.submit(Transfer(kind, self._keys[part], self._addresses[part])) for part in parts]
        for transfer in begun:
            transfer.wait()
            assert (transfer.statuses == OK).all(), transfer


@contextmanager
def running_mooncake() -> Iterator[str]:
    """Run a master, and a process with memory; yield their URL."""
    command = [sys.executable, "-m", "kvtide", "remote", "up", "mooncake", "--json", "--memory", MEMORY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()  # a background job may have been told to ignore SIGINT


def main() -> int:
    """Run both in turn."""
    with running_mooncake() as url:

        def mooncake(directory: Path, rows: Rows) -> Tiered:
            return Mooncake(url, directory.name, rows)

        return run_peers("peers_mooncake", __doc__ or "", {"kvtide": Chunks, "mooncake": mooncake})


if __name__ == "__main__":
    sys.exit(main())
