"""Low-rank bases of keys and queries by their Gram matrices. Pure. Next: kvswap, shadowkv, infinigen.

The right singular vectors of a tall matrix [T, d] are the eigenvectors of its d x d Gram matrix: T d^2 work and a small
eigenproblem, where a full SVD of 100k tokens would take minutes.
"""

from __future__ import annotations

import numpy as np

from kvtide.select.contract import Floats


def basis(rows: Floats, rank: int) -> Floats:
    """Return the `rank` leading right singular vectors of `rows` as columns. Shapes: [T, d] to [d, min(rank, d)]."""
    gram = rows.T @ rows
    _, vectors = np.linalg.eigh(gram.astype(np.float64))
    leading: Floats = np.ascontiguousarray(vectors[:, ::-1][:, :rank], np.float32)
    return leading
