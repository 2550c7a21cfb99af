"""How alike two vectors are, in arrays. Pure. Next: parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvtide.recall.records import Ids, Vectors

Metric = Literal["cosine", "dot", "l2"]
METRICS = ("cosine", "dot", "l2")


@dataclass(frozen=True, slots=True)
class Hits:
    """The best rows. Shapes: ids, scores [q, k]; -1 and -inf where there are fewer."""

    ids: Ids
    scores: npt.NDArray[np.float32]


def factors(metric: Metric, vectors: Vectors) -> npt.NDArray[np.float32]:
    """Return what is kept of each vector to score it: for cosine 1 / length (0: a zero vector), for l2 length squared.

    Shapes: [n, D] to [n].
    """
    if metric == "dot":
        return np.ones(len(vectors), np.float32)
    squares = np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64)
    if metric == "l2":
        return squares.astype(np.float32)
    lengths = np.sqrt(squares)
    return np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0).astype(np.float32)


def score(metric: Metric, queries: Vectors, vectors: Vectors, kept: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return how alike queries and vectors are, the more the higher: of l2 the squared distance, negative.

    Shapes: queries [q, D]; vectors [n, D]; kept [n], as `factors` gave it; returns [q, n].
    """
    products = queries @ vectors.T
    if metric == "dot":
        return products
    own = factors(metric, queries)
    if metric == "cosine":
        products *= kept
        products *= own[:, None]
        return products
    products *= 2
    products -= kept
    products -= own[:, None]
    return products


def top(ids: Ids, scores: npt.NDArray[np.float32], k: int) -> Hits:
    """Return the best `k` of each row, best first; equal scores by id. Shapes: [q, n] each to [q, min(k, n)]."""
    if scores.shape[1] > k:
        kept = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        ids, scores = np.take_along_axis(ids, kept, 1), np.take_along_axis(scores, kept, 1)
    order = np.lexsort((ids, -scores), axis=1)
    ids, scores = np.take_along_axis(ids, order, 1), np.take_along_axis(scores, order, 1)
    return Hits(np.where(np.isneginf(scores), -1, ids), scores)


def join(hits: list[Hits], k: int) -> Hits:
    """Return the best `k` of several parts. Shapes: [q, up to k]."""
    return top(np.concatenate([one.ids for one in hits], 1), np.concatenate([one.scores for one in hits], 1), k)
