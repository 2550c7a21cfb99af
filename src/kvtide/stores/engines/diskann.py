"""DiskANN: a graph on disk that is built once and searched with direct I/O. Next: databases.

The library takes no rows one by one, so they wait in a file, and `finish` builds the index.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from kvtide.stores.engines.contract import EngineOptions, Ids, Vectors

DEGREE, BUILD_LIST, SEARCH_LIST, BEAM = 32, 64, 64, 4


class DiskAnn:
    """Rows are appended to `rows.bin`: id and vector."""

    beam = BEAM

    def __init__(self, options: EngineOptions) -> None:
        self._folder, self._is_durable = options.folder / "diskann", options.is_durable
        self._folder.mkdir(exist_ok=True)
        self._row = np.dtype([("id", "<i8"), ("vector", "<f4", (options.dim,))])
        self._fd = os.open(self._folder / "rows.bin", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._index: Any = None
        if (self._folder / "ann_disk.index").exists():
            self._load()

    def _load(self) -> None:
        import diskannpy

        self._known = np.load(self._folder / "ids.npy")
        self._index = diskannpy.StaticDiskIndex(
            str(self._folder), num_threads=2, num_nodes_to_cache=0, index_prefix="ann"
        )

    def insert(self, ids: Ids, vectors: Vectors) -> None:
        rows = np.zeros(len(ids), self._row)
        rows["id"], rows["vector"] = ids, vectors
        os.write(self._fd, rows.tobytes())
        if self._is_durable:
            os.fdatasync(self._fd)

    def _rows(self) -> np.ndarray[Any, Any]:
        size = os.fstat(self._fd).st_size // self._row.itemsize * self._row.itemsize
        return np.frombuffer(os.pread(self._fd, size, 0), self._row)

    def finish(self) -> None:
        import diskannpy

        rows = self._rows()
        np.save(self._folder / "ids.npy", rows["id"])
        diskannpy.build_disk_index(
            np.ascontiguousarray(rows["vector"]),
            "l2",
            str(self._folder),
            complexity=BUILD_LIST,
            graph_degree=DEGREE,
            search_memory_maximum=0.05,
            build_memory_maximum=1.0,
            num_threads=2,
            pq_disk_bytes=0,
            vector_dtype=np.float32,
            index_prefix="ann",
        )

    def search(self, queries: Vectors, k: int) -> Ids:
        if self._index is None:
            self._load()
        found = [
            self._index.search(query, k_neighbors=k, complexity=SEARCH_LIST, beam_width=self.beam).identifiers
            for query in queries
        ]
        return self._known[np.stack(found).astype(np.int64)]

    def ids(self) -> Ids:
        return self._rows()["id"]

    def close(self) -> None:
        self._index = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class DiskAnnBeam1(DiskAnn):
    """The same with one read at a time."""

    beam = 1
