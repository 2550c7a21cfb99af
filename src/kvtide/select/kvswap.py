"""Groups by low-rank keys of all heads together, one layer ahead (KVSwap, arXiv 2511.11907). Pure. Next: infinigen.

A fixed adapter A [Hkv * D, r] compresses the keys of a token, all heads jointly, to r numbers. The query, predicted
from the input of the layer before, is averaged over the query heads and KV heads in the compressed space. One list of
groups of adjacent tokens for all heads, scored by their best token: so one read a group.

Here A is fitted on the keys of the first prompt (the paper: on a calibration text), and kept. GQA: the query heads of a
KV head are averaged, as in the paper.
"""

from __future__ import annotations

from kvtide.select.choose import Rows, best
from kvtide.select.contract import Floats, Heads, Keys, Reach, Selection
from kvtide.select.spectrum import basis

GROUP_TOKENS = 4  # on NVMe in the paper, where that is 16 KiB
RANK_RATIO = 1.0  # of a head's dimensions: r = 128 for Llama-3.1-8B


class KvSwap:
    """Compressed keys of every token."""

    is_ahead = True

    def __init__(self, heads: Heads, *, unit: int = GROUP_TOKENS, rank_ratio: float = RANK_RATIO) -> None:
        self.unit, self._heads = unit, heads
        self._rank = max(1, min(int(heads.dim * rank_ratio), heads.num_kv * heads.dim))
        self._adapters: dict[int, Floats] = {}
        self._rows = [Rows((self._rank,)) for _ in range(heads.num_layers)]

    def on_prefill(self, layer: int, keys: Keys, queries: Floats) -> None:
        del queries
        if layer not in self._adapters:
            self._adapters[layer] = basis(self._heads.flat(keys.post), self._rank)
        self._rows[layer] = Rows((self._rank,))
        self.on_append(layer, keys)

    def on_append(self, layer: int, keys: Keys) -> None:
        self._rows[layer].append(self._heads.flat(keys.post) @ self._adapters[layer])

    def select(self, layer: int, query: Floats, reach: Reach) -> Selection:
        mean = self._heads.by_kv(query).mean(axis=1).reshape(-1)  # [Hkv * D]
        scores = self._rows[layer].rows @ (mean @ self._adapters[layer])
        num = len(scores) // self.unit
        groups = scores[: num * self.unit].reshape(num, self.unit).max(axis=1)
        return best(groups[None], reach, self.unit)

    def fast_bytes(self) -> int:
        return sum(rows.num_bytes for rows in self._rows) + sum(a.nbytes for a in self._adapters.values())
