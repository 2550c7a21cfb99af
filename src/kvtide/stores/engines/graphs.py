"""Index libraries without a log: usearch, hnswlib, faiss. What they hold is on disk when it is saved. Next: diskann."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvtide.stores.engines.contract import EngineOptions, Ids, Vectors

DEGREE, BUILD_LIST, SEARCH_LIST = 16, 128, 64
SAVED_EACH = 1000  # rows, for hnswlib
TRAINED_ROWS, LISTS, PROBES = 1000, 32, 8


class Usearch:
    """HNSW; a saved index is opened as a mapped file."""

    def __init__(self, options: EngineOptions) -> None:
        from usearch.index import Index

        self._path = options.folder / "index.usearch"
        self._index: Any = Index(
            ndim=options.dim,
            metric="ip",
            dtype="f32",
            connectivity=DEGREE,
            expansion_add=BUILD_LIST,
            expansion_search=SEARCH_LIST,
        )
        if self._path.exists():
            self._index.view(str(self._path))

    def insert(self, ids: Ids, vectors: Vectors) -> None:
        self._index.add(ids.astype(np.uint64), vectors, threads=1)

    def finish(self) -> None:
        self._index.save(str(self._path))

    def search(self, queries: Vectors, k: int) -> Ids:
        found = [self._index.search(query, k, threads=1).keys.astype(np.int64) for query in queries]
        return np.stack([np.pad(row, (0, k - len(row)), constant_values=-1) for row in found])

    def ids(self) -> Ids:
        return np.array(list(self._index.keys), np.int64)

    def close(self) -> None:
        self._index.reset()


class Hnswlib:
    """HNSW in memory, saved as a whole each so many rows."""

    def __init__(self, options: EngineOptions) -> None:
        import hnswlib

        self._path = options.folder / "index.bin"
        self._index: Any = hnswlib.Index(space="ip", dim=options.dim)
        if self._path.exists():
            self._index.load_index(str(self._path), max_elements=1 << 14)
        else:
            self._index.init_index(max_elements=1 << 14, ef_construction=BUILD_LIST, M=DEGREE)
        self._index.set_ef(SEARCH_LIST)
        self._index.set_num_threads(1)

    def insert(self, ids: Ids, vectors: Vectors) -> None:
        before = self._index.get_current_count()
        if before + len(ids) > self._index.get_max_elements():
            self._index.resize_index(2 * self._index.get_max_elements() + len(ids))
        self._index.add_items(vectors, ids, num_threads=1)
        if (before + len(ids)) // SAVED_EACH > before // SAVED_EACH:
            self.finish()

    def finish(self) -> None:
        self._index.save_index(str(self._path))

    def search(self, queries: Vectors, k: int) -> Ids:
        found, _ = self._index.knn_query(queries, k=min(k, self._index.get_current_count()))
        return np.pad(found.astype(np.int64), ((0, 0), (0, k - found.shape[1])), constant_values=-1)

    def ids(self) -> Ids:
        return np.array(self._index.get_ids_list(), np.int64)

    def close(self) -> None:
        self._index = None


class Faiss:
    """Inverted lists in a mapped file; the first rows train it."""

    def __init__(self, options: EngineOptions) -> None:
        self._folder, self._dim = options.folder, options.dim
        self._path = options.folder / "index.faiss"
        self._waiting: list[tuple[Ids, Vectors]] = []
        self._index: Any = None
        if self._path.exists():
            import faiss

            self._index = faiss.read_index(str(self._path))
            self._index.nprobe = PROBES

    def insert(self, ids: Ids, vectors: Vectors) -> None:
        if self._index is not None:
            self._index.add_with_ids(vectors, ids)
            return
        self._waiting.append((ids, vectors))
        if sum(len(each) for each, _ in self._waiting) >= TRAINED_ROWS:
            self._train()

    def _train(self) -> None:
        import faiss

        ids = np.concatenate([each for each, _ in self._waiting])
        vectors = np.concatenate([each for _, each in self._waiting])
        self._waiting = []
        lists = max(1, min(LISTS, len(ids) // 39))  # faiss asks for 39 rows a list
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(self._dim), self._dim, lists, faiss.METRIC_INNER_PRODUCT)
        index.train(vectors)
        stored = faiss.OnDiskInvertedLists(lists, index.code_size, str(self._lists()))
        index.replace_invlists(stored, False)  # noqa: FBT003
        self._keep = (index.quantizer, stored)
        self._index = index
        self._index.nprobe = PROBES
        self._index.add_with_ids(vectors, ids)

    def _lists(self) -> Path:
        return self._folder / "lists.ivfdata"

    def finish(self) -> None:
        import faiss

        if self._waiting:
            self._train()
        faiss.write_index(self._index, str(self._path))

    def search(self, queries: Vectors, k: int) -> Ids:
        return self._index.search(queries, k)[1]

    def ids(self) -> Ids:
        import faiss

        if self._index is None:
            return np.zeros(0, np.int64)
        lists = self._index.invlists
        found = [
            faiss.rev_swig_ptr(lists.get_ids(at), lists.list_size(at)).copy()
            for at in range(lists.nlist)
            if lists.list_size(at)
        ]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def close(self) -> None:
        self._index = None
