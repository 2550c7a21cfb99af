"""Chunks by their mean key; keys rebuilt from low-rank factors, only values read (ShadowKV, ICML 2025,
arXiv 2410.21465). Pure. Next: retrieval.

Keys before RoPE have low rank: factors U [T, r] and a basis rebuild them, and RoPE of their positions turns them. A
chunk's landmark is the mean of its keys after RoPE; chunks that their mean describes badly (*outliers*) are attended
always, and counted in the budget. Score: softmax over landmarks of each query head, the highest of a KV head's.

The paper's rank 160 is of 1,024 numbers a token; the ratio is kept here, since 160 of SmolLM2's 192 would save nothing.
The scale is that of the model (the paper's code has sqrt(128) in it). Outliers are 3 of 16 of the budget, as 48 chunks
of 8 are of 2,048 tokens.
"""

from __future__ import annotations

import numpy as np

from kvtide.select.choose import Rows, softmax, top
from kvtide.select.contract import Floats, Heads, Ids, Keys, Reach, Selection
from kvtide.select.rope import Rope
from kvtide.select.spectrum import basis

CHUNK_TOKENS = 8
RANK_RATIO = 160 / 1024
OUTLIER_SHARE = 48 * 8 / 2048


class ShadowKv:
    """Landmarks of chunks, and factors that rebuild keys. `is_exact_keys` reads keys too, and rebuilds none."""

    is_ahead = False

    def __init__(
        self,
        heads: Heads,
        *,
        unit: int = CHUNK_TOKENS,
        rank_ratio: float = RANK_RATIO,
        outlier_share: float = OUTLIER_SHARE,
        is_exact_keys: bool = False,
    ) -> None:
        self.unit, self._heads, self._outlier_share = unit, heads, outlier_share
        self._is_exact_keys = is_exact_keys
        self._rank = max(1, round(heads.num_kv * heads.dim * rank_ratio))
        num = heads.num_layers
        self._landmarks = [Rows((heads.num_kv, heads.dim)) for _ in range(num)]
        self._misfit = [Rows((heads.num_kv,)) for _ in range(num)]  # how badly its landmark describes a chunk
        self._factors = [Rows((self._rank,)) for _ in range(num)]
        self._bases: dict[int, Floats] = {}
        self._open = [np.zeros((0, heads.num_kv, heads.dim), np.float32) for _ in range(num)]
        self._rope: Rope | None = None

    def on_prefill(self, layer: int, keys: Keys, queries: Floats) -> None:
        del queries
        heads = self._heads
        self._landmarks[layer], self._misfit[layer] = Rows((heads.num_kv, heads.dim)), Rows((heads.num_kv,))
        self._open[layer] = self._open[layer][:0]
        if not self._is_exact_keys:
            flat = heads.flat(keys.before_rope())
            self._rope = keys.rope
            self._bases[layer] = basis(flat, self._rank)
            self._factors[layer] = Rows((self._rank,))
            self._factors[layer].append(flat @ self._bases[layer])
        self._take_in_chunks(layer, keys)

    def on_append(self, layer: int, keys: Keys) -> None:
        if not self._is_exact_keys:
            self._factors[layer].append(self._heads.flat(keys.before_rope()) @ self._bases[layer])
        self._take_in_chunks(layer, keys)

    def _take_in_chunks(self, layer: int, keys: Keys) -> None:
        """Keep the landmarks of chunks that became whole, and how well they are described."""
        tokens = np.concatenate([self._open[layer], keys.post])
        num = len(tokens) // self.unit
        chunks = tokens[: num * self.unit].reshape(num, self.unit, self._heads.num_kv, self._heads.dim)
        self._open[layer] = tokens[num * self.unit :].copy()
        means = chunks.mean(axis=1)
        cosines = np.einsum("nthd,nhd->nth", chunks, means)
        cosines /= np.linalg.norm(chunks, axis=3) * np.linalg.norm(means, axis=2)[:, None] + 1e-9
        self._landmarks[layer].append(means)
        self._misfit[layer].append(-cosines.min(axis=1))

    def select(self, layer: int, query: Floats, reach: Reach) -> Selection:
        landmarks = self._landmarks[layer].rows
        first, last, num = reach.bounds(self.unit, len(landmarks))
        if reach.is_everything or last - first <= num:
            return Selection.everything(reach.num_tokens)
        logits = self._heads.by_kv(query) @ landmarks[first:last].transpose(1, 2, 0) * self._heads.scaling
        scores = softmax(logits).max(axis=1)
        outliers = top(self._misfit[layer].rows[first:last].T, int(self._outlier_share * num))
        np.put_along_axis(scores, outliers, 2.0, axis=1)  # above any probability
        ids = top(scores, num) + first
        return Selection(self.unit, ids, first, last, reach.num_tokens, "kv" if self._is_exact_keys else "v")

    def keys(self, layer: int, tokens: Ids) -> Floats:
        """Return rebuilt keys, after RoPE. Shapes: tokens [n]; returns [n, Hkv, D]."""
        assert self._rope is not None, "keys are rebuilt after prefill"
        flat = self._factors[layer].rows[tokens] @ self._bases[layer].T
        return self._rope.turn_at(flat.reshape(len(tokens), self._heads.num_kv, self._heads.dim), tokens)

    def fast_bytes(self) -> int:
        grown = (*self._landmarks, *self._misfit, *self._factors)
        return sum(rows.num_bytes for rows in grown) + sum(one.nbytes for one in (*self._bases.values(), *self._open))
