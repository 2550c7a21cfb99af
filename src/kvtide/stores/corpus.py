"""Vectors and queries that every process draws alike. Pure.

Embeddings lie near a surface of far fewer dimensions than they have: here 32, and a little noise. All have length 1, so
that cosine, dot product and distance agree on the neighbours.
"""

from __future__ import annotations

import numpy as np

from kvtide.stores.engines.contract import Ids, Vectors

LATENT, NOISE = 32, 0.1
BLOCK = 4096  # rows drawn together, so that any part can be drawn alone


def vectors_of(first: int, num: int, dim: int, *, seed: int) -> Vectors:
    """Return rows `first` to `first + num` of the corpus. Shapes: [num, dim]."""
    surface = np.random.default_rng([seed, 0]).standard_normal((min(LATENT, dim), dim), dtype=np.float32)
    blocks = range(first // BLOCK, (first + num - 1) // BLOCK + 1) if num else range(0)
    drawn = [_block(block, surface, seed) for block in blocks]
    whole = np.concatenate(drawn) if drawn else np.zeros((0, dim), np.float32)
    start = first % BLOCK
    return np.ascontiguousarray(whole[start : start + num])


def queries_of(num: int, dim: int, *, seed: int) -> Vectors:
    """Return queries: drawn as rows are, but none of them. Shapes: [num, dim]."""
    return vectors_of(1 << 40, num, dim, seed=seed)


def _block(block: int, surface: Vectors, seed: int) -> Vectors:
    rng = np.random.default_rng([seed, 1, block])
    inner = rng.standard_normal((BLOCK, len(surface)), dtype=np.float32)
    rows = inner @ surface / np.float32(np.sqrt(len(surface)))
    rows += np.float32(NOISE) * rng.standard_normal(rows.shape, dtype=np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows.astype(np.float32)


def exact(queries: Vectors, num: int, k: int, *, seed: int) -> Ids:
    """Return the true neighbours of each query among the first `num` rows. Shapes: queries [q, D]; result [q, k]."""
    best = np.zeros((len(queries), 0), np.float32)
    ids = np.zeros((len(queries), 0), np.int64)
    for first in range(0, num, 8 * BLOCK):
        count = min(8 * BLOCK, num - first)
        scores = queries @ vectors_of(first, count, queries.shape[1], seed=seed).T
        best = np.concatenate([best, scores], axis=1)
        rows = np.broadcast_to(np.arange(first, first + count), scores.shape)
        ids = np.concatenate([ids, rows], axis=1)
        order = np.argsort(-best, axis=1)[:, :k]
        best, ids = np.take_along_axis(best, order, 1), np.take_along_axis(ids, order, 1)
    return ids


def recall_of(found: Ids, true: Ids) -> float:
    """Return the share of true neighbours that were found, all queries together. Shapes: [q, k]."""
    hits = (found[:, :, None] == true[:, None, :]).any(axis=1)
    return float(hits.mean()) if hits.size else 0.0
