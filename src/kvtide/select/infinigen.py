"""Tokens a head by a few skewed key columns, one layer ahead (InfiniGen, OSDI 2024, arXiv 2406.19707). Pure.
Next: shadowkv.

An orthogonal matrix from the SVD of a head's queries turns queries and keys alike, which changes no dot product, but
gathers what matters in few columns. Those (by the sum of absolute queries and keys) of the keys are kept; the query
predicted from the input of the layer before scores them. A head wants the tokens whose score is above its highest minus
`alpha`; all heads take the same number, the mean of what they want, at most `share_max` of all tokens.

For models with RoPE the skew applies after it. GQA: one skew a KV head, from all its query heads; a token's score is
the highest of its query heads'. Layer 0 has no layer before it: it uses its own query.
"""

from __future__ import annotations

import numpy as np

from kvtide.select.choose import Rows, top
from kvtide.select.contract import Floats, Heads, Keys, Reach, Selection
from kvtide.select.spectrum import basis

COLUMN_RATIO = 0.3
ALPHA = 5.0  # Llama-2 in the paper; 4 for OPT
SHARE_MAX = 0.2


class InfiniGen:
    """Some columns of skewed keys, every token and KV head."""

    unit = 1
    is_ahead = True

    def __init__(
        self,
        heads: Heads,
        *,
        column_ratio: float = COLUMN_RATIO,
        alpha: float = ALPHA,
        share_max: float = SHARE_MAX,
    ) -> None:
        self._heads, self._alpha, self._share_max = heads, alpha, share_max
        self._num_columns = max(1, round(heads.dim * column_ratio))
        self._skew: dict[int, Floats] = {}  # [Hkv, D, columns]
        self._rows = [self._empty() for _ in range(heads.num_layers)]

    def on_prefill(self, layer: int, keys: Keys, queries: Floats) -> None:
        asked = self._heads.all_by_kv(queries)
        self._skew[layer] = np.stack([self._columns(asked[at], keys.post[:, at]) for at in range(self._heads.num_kv)])
        self._rows[layer] = self._empty()
        self.on_append(layer, keys)

    def on_append(self, layer: int, keys: Keys) -> None:
        self._rows[layer].append(np.matmul(keys.post.transpose(1, 0, 2), self._skew[layer]).transpose(1, 0, 2))

    def select(self, layer: int, query: Floats, reach: Reach) -> Selection:
        first, last, num = reach.bounds(1, len(self._rows[layer].rows))
        partial = np.matmul(self._heads.by_kv(query), self._skew[layer])  # [Hkv, G, columns]
        scores = (partial @ self._rows[layer].rows.transpose(1, 2, 0)).max(axis=1) * self._heads.scaling
        if reach.is_everything or last - first <= num:
            return Selection.everything(reach.num_tokens)
        scores = scores[:, first:last]
        wanted = int((scores > scores.max(axis=1, keepdims=True) - self._alpha).sum(axis=1).mean())
        num = max(1, min(wanted, num, int(self._share_max * reach.num_tokens)))
        return Selection(1, top(scores, num) + first, first, last, reach.num_tokens)

    def fast_bytes(self) -> int:
        return sum(rows.num_bytes for rows in self._rows) + sum(skew.nbytes for skew in self._skew.values())

    def _empty(self) -> Rows:
        return Rows((self._heads.num_kv, self._num_columns))

    def _columns(self, queries: Floats, keys: Floats) -> Floats:
        """Return the turned axes that matter most to one head. Shapes: [n, D], [T, D] to [D, columns]."""
        turn = basis(queries, self._heads.dim)
        weight = np.abs(queries @ turn).mean(axis=0) + np.abs(keys @ turn).mean(axis=0)
        return turn[:, np.sort(np.argsort(weight)[-self._num_columns :])]
