"""Tokens a head by approximate nearest neighbours, aware of where queries lie (RetrievalAttention, arXiv 2409.10516).
Pure, but for the library. Next: pmr.

Queries and keys of a head come from different distributions, so a graph over keys alone is entered at the wrong places
and searched for long. The paper links keys that answer the same prefill queries. Here the same knowledge is kept as a
list: the exact best keys of a sample of the latest prefill queries. A query asks a graph of the keys (HNSW, usearch),
and the sampled queries it is closest to; what either names is ranked by exact inner product.

The paper attends always to the first 128 and the last 512 tokens. Here it is the `Reach` that says what is kept always,
as for every method, and that counts against the budget. GQA: a KV head takes what any of its query heads finds, and
ranks it by the highest product. A head that finds fewer than the others is filled up with its latest tokens.

Keys are held in full beside the graph: like the paper's, the method wants fast memory of the size of the keys, and
saves the reading of values and the products with most keys.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from kvtide.errors import UnsupportedError
from kvtide.select.choose import Rows, top
from kvtide.select.contract import Floats, Heads, Ids, Keys, Reach, Selection

NUM_TOKENS = 100  # a head, in the paper
SAMPLE_QUERIES = 256  # of a KV head, the latest: 100 neighbours of each are 100 KiB
NEAR_QUERIES = 4  # sampled queries whose neighbours are taken, a query head


class Retrieval:
    """Every key, a graph over them, and the best keys of some queries, each KV head its own.

    Raises: UnsupportedError without the library of the graph.
    """

    unit = 1
    is_ahead = False

    def __init__(self, heads: Heads, *, num_tokens: int = NUM_TOKENS, sample_queries: int = SAMPLE_QUERIES) -> None:
        self._new_index = _index_of(heads.dim)
        self._heads, self._num_tokens, self._sample = heads, num_tokens, sample_queries
        self._layers: list[list[_Head]] = [[] for _ in range(heads.num_layers)]

    def on_prefill(self, layer: int, keys: Keys, queries: Floats) -> None:
        self._layers[layer] = [_Head(self._new_index(), self._heads.dim) for _ in range(self._heads.num_kv)]
        self.on_append(layer, keys)
        by_kv = self._heads.all_by_kv(queries)[:, -self._sample :]
        for head, sample in zip(self._layers[layer], by_kv, strict=True):
            head.learn(sample, self._num_tokens)

    def on_append(self, layer: int, keys: Keys) -> None:
        for head, rows in zip(self._layers[layer], keys.post.transpose(1, 0, 2), strict=True):
            head.append(rows)

    def select(self, layer: int, query: Floats, reach: Reach) -> Selection:
        heads = self._layers[layer]
        first, last, room = reach.bounds(1, len(heads[0].keys))
        num = min(room, self._num_tokens)
        if reach.is_everything or last - first <= num:
            return Selection.everything(reach.num_tokens)
        by_kv = zip(heads, self._heads.by_kv(query), strict=True)
        ids = np.stack([head.find(queries, num, first, last) for head, queries in by_kv])
        return Selection(1, ids, first, last, reach.num_tokens)

    def fast_bytes(self) -> int:
        return sum(head.num_bytes for heads in self._layers for head in heads)


class _Head:
    """What is kept of one KV head of one layer."""

    def __init__(self, index: Any, dim: int) -> None:
        self._index, self._rows = index, Rows((dim,))
        self._directions: Floats = np.zeros((0, dim), np.float32)
        self._best = np.zeros((0, 0), np.int32)  # [queries, neighbours]

    @property
    def keys(self) -> Floats:
        """All keys so far. Shapes: [T, D]."""
        return self._rows.rows

    def __deepcopy__(self, memo: dict[int, object]) -> _Head:
        """Return a copy that grows by itself; the library's index is copied its own way."""
        twin = _Head(self._index.copy(), self._rows.rows.shape[1])
        twin._rows.append(self._rows.rows)
        twin._directions, twin._best = copy.deepcopy((self._directions, self._best), memo)
        return twin

    @property
    def num_bytes(self) -> int:
        """Bytes it occupies: of the graph what is in it.

        The library reserves far more than it touches: `memory_usage` is 16.8 MB for 2,000 keys of 64 numbers, where
        the process grows by 1.1 MB (usearch 2.26.6).
        """
        return int(self._index.serialized_length) + self._rows.num_bytes + self._directions.nbytes + self._best.nbytes

    def append(self, keys: Floats) -> None:
        """Take in keys. Shapes: [T, D]."""
        start = len(self.keys)
        self._rows.append(keys)
        numbers = np.arange(start, start + len(keys), dtype=np.uint64)
        if len(keys):
            self._index.add(numbers, self.keys[start:], threads=1)  # one thread: the graph is the same every time

    def learn(self, queries: Floats, num: int) -> None:
        """Note the exact best keys of `queries`. Shapes: [n, D]."""
        self._directions = queries / (np.linalg.norm(queries, axis=1, keepdims=True) + np.float32(1e-9))
        self._best = top(queries @ self.keys.T, num).astype(np.int32)

    def find(self, queries: Floats, num: int, first: int, last: int) -> Ids:
        """Return `num` tokens from `first` on, before `last`, in order. Shapes: queries [G, D]; returns [num]."""
        num_kept = len(self.keys) - (last - first)  # the best ones may all be among what is attended anyway
        found = np.unique(np.concatenate([self._by_graph(queries, num + num_kept), self._by_queries(queries)]))
        found = found[(found >= first) & (found < last)]
        scores = (queries @ self.keys[found].T).max(axis=0, keepdims=True)
        ids: Ids = found[top(scores, num)[0]]
        if len(ids) < num:
            latest = np.setdiff1d(np.arange(max(first, last - num), last), ids)
            ids = np.sort(np.concatenate([ids, latest[len(ids) - num :]]))
        return ids

    def _by_graph(self, queries: Floats, num: int) -> Ids:
        found = [self._index.search(query, num, threads=1).keys for query in queries]
        return np.concatenate(found).astype(np.int64)

    def _by_queries(self, queries: Floats) -> Ids:
        near = top(queries @ self._directions.T, NEAR_QUERIES)
        return self._best[near].astype(np.int64).ravel()


def _index_of(dim: int) -> Any:
    """Return what makes an empty graph over keys of `dim` numbers.

    Raises: UnsupportedError where the library is missing.
    """
    try:
        from usearch.index import Index
    except ImportError:
        raise UnsupportedError(
            "--select retrieval needs usearch, which is not installed: pip install 'kvtide[transformers]', or choose "
            "another --select"
        ) from None
    return lambda: Index(ndim=dim, metric="ip", dtype="f16")  # ranking is by the keys kept in full
