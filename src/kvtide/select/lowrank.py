"""Groups by low-rank keys in the basis that queries see, one layer ahead: kvtide's own, and the default. Pure.
Next: clo.

What matters of a key is its dot product with queries, not its length. So keys of a head are compressed in the metric of
its queries: with C the second moment of the queries, the basis is that of K C^1/2, whose truncation loses least of q.k
over all queries seen (plain SVD of K, as others use it, loses least of K). Eight numbers a head do better here than 64
of the plain ones. Softmax is taken a query head before heads are added up, so a head that is sure of one token is not
averaged away; a group's score is the sum of its tokens': the attention mass it is expected to hold. One list of groups
for all heads, so one read a group; asked with the query that the layer before predicts, so the read overlaps compute.

Source: the pieces are KVSwap's (one list, ahead), InfiniGen's (queries decide which columns matter) and ShadowKV's
(softmax before reduction); figures of all of them side by side are in docs/selection.md.
"""

from __future__ import annotations

import numpy as np

from kvtide.select.choose import Rows, best, total_mass
from kvtide.select.contract import Floats, Heads, Keys, Reach, Selection
from kvtide.select.spectrum import basis

GROUP_TOKENS = 16
RANK_RATIO = 1 / 8  # of a head's dimensions
PRIOR_QUERIES = 32.0  # weight of "queries point anywhere", in queries: few queries say little


class LowRank:
    """Compressed keys of every token and KV head."""

    is_ahead = True

    def __init__(self, heads: Heads, *, unit: int = GROUP_TOKENS, rank_ratio: float = RANK_RATIO) -> None:
        self.unit, self._heads = unit, heads
        self._rank = max(1, min(round(heads.dim * rank_ratio), heads.dim))
        shape = (heads.num_layers, heads.num_kv, heads.dim, heads.dim)
        self._moments, self._num_queries = np.zeros(shape, np.float32), np.zeros(heads.num_layers)
        self._of_keys = np.zeros((*shape[:3], self._rank), np.float32)
        self._of_queries = np.zeros_like(self._of_keys)
        self._rows = [self._empty() for _ in range(heads.num_layers)]

    def on_prefill(self, layer: int, keys: Keys, queries: Floats) -> None:
        heads = self._heads
        by_kv = (
            queries.reshape(-1, heads.num_kv, heads.group, heads.dim)
            .transpose(1, 0, 2, 3)
            .reshape(heads.num_kv, -1, heads.dim)
        )
        self._moments[layer] += by_kv.transpose(0, 2, 1) @ by_kv
        self._num_queries[layer] += by_kv.shape[1]
        for head in range(heads.num_kv):
            root, inverse = self._roots(layer, head)
            directions = basis(keys.post[:, head] @ root, self._rank)
            self._of_keys[layer, head] = root @ directions
            self._of_queries[layer, head] = inverse @ directions
        self._rows[layer] = self._empty()
        self.on_append(layer, keys)

    def on_append(self, layer: int, keys: Keys) -> None:
        self._rows[layer].append(np.matmul(keys.post.transpose(1, 0, 2), self._of_keys[layer]).transpose(1, 0, 2))

    def select(self, layer: int, query: Floats, reach: Reach) -> Selection:
        if reach.is_everything:
            return Selection.everything(reach.num_tokens)
        heads, rows = self._heads, self._rows[layer].rows
        num = min(reach.bounds(self.unit)[1], len(rows) // self.unit)  # what is behind takes no part in any softmax
        short = np.matmul(heads.by_kv(query), self._of_queries[layer])  # [Hkv, G, rank]
        logits = (short * heads.scaling) @ rows[: num * self.unit].transpose(1, 2, 0)
        mass = total_mass(logits.reshape(heads.num_q, -1))
        return best(mass.reshape(1, num, self.unit).sum(axis=2), reach, self.unit)

    def fast_bytes(self) -> int:
        kept = (self._moments, self._of_keys, self._of_queries)
        return sum(rows.num_bytes for rows in self._rows) + sum(array.nbytes for array in kept)

    def _roots(self, layer: int, head: int) -> tuple[Floats, Floats]:
        """Return C^1/2 and C^-1/2 of the queries' second moment. Shapes: [D, D] each."""
        moment, num, dim = self._moments[layer, head], self._num_queries[layer], self._heads.dim
        size = float(np.trace(moment)) / dim / max(num, 1)
        blended = (moment + PRIOR_QUERIES * size * np.eye(dim)) / (num + PRIOR_QUERIES)
        values, vectors = np.linalg.eigh(blended)
        roots = np.sqrt(np.maximum(values, 1e-12))
        return ((vectors * roots) @ vectors.T).astype(np.float32), ((vectors / roots) @ vectors.T).astype(np.float32)

    def _empty(self) -> Rows:
        return Rows((self._heads.num_kv, self._rank))
