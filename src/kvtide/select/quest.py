"""Pages by an upper bound of any of their dot products (Quest, arXiv 2406.10774). Pure. Next: kvswap.

Per page and KV head it keeps the smallest and the largest K of every dimension. For a query q the page's score is
sum_d max(q_d * min_d, q_d * max_d): no key of the page can score higher, so a page with a strong key is never missed
for its weak ones. GQA: a KV head's score is the highest of its query heads'.
"""

from __future__ import annotations

import numpy as np

from kvtide.select.choose import Rows, best
from kvtide.select.contract import Floats, Heads, Keys, Reach, Selection

PAGE_TOKENS = 16
DENSE_LAYERS = 2  # the first layers attend widely: the paper's code leaves them in full


class Quest:
    """Min and max of every page. `dense_layers` leading layers attend to everything."""

    is_ahead = False

    def __init__(self, heads: Heads, *, unit: int = PAGE_TOKENS, dense_layers: int = DENSE_LAYERS) -> None:
        self.unit, self._heads, self._dense_layers = unit, heads, dense_layers
        self._bounds = [PageBounds(heads, unit) for _ in range(heads.num_layers)]

    def on_prefill(self, layer: int, keys: Keys, queries: Floats) -> None:
        del queries
        self._bounds[layer] = PageBounds(self._heads, self.unit)
        self._bounds[layer].append(keys.post)

    def on_append(self, layer: int, keys: Keys) -> None:
        self._bounds[layer].append(keys.post)

    def select(self, layer: int, query: Floats, reach: Reach) -> Selection:
        if layer < self._dense_layers:
            return Selection.everything(reach.num_tokens)
        return best(self._bounds[layer].score(query).max(axis=1), reach, self.unit)

    def fast_bytes(self) -> int:
        return sum(bounds.num_bytes for bounds in self._bounds)


class PageBounds:
    """Element-wise bounds of the keys of whole pages of one layer, and the keys of the page that is not whole yet."""

    def __init__(self, heads: Heads, unit: int) -> None:
        self._heads, self._unit = heads, unit
        tail = (heads.num_kv, heads.dim)
        self._low, self._high = Rows(tail), Rows(tail)
        self._open: Floats = np.zeros((0, *tail), np.float32)

    def append(self, keys: Floats) -> None:
        """Take in keys. Shapes: [T, Hkv, D]."""
        tokens = np.concatenate([self._open, keys])
        num = len(tokens) // self._unit
        pages = tokens[: num * self._unit].reshape(num, self._unit, self._heads.num_kv, self._heads.dim)
        self._open = tokens[num * self._unit :].copy()
        self._low.append(pages.min(axis=1))
        self._high.append(pages.max(axis=1))

    def score(self, query: Floats) -> Floats:
        """Return the bound of q.k for every whole page. Shapes: query [Hq, D]; returns [Hkv, G, pages]."""
        by_kv = self._heads.by_kv(query)
        low, high = self._low.rows.transpose(1, 2, 0), self._high.rows.transpose(1, 2, 0)
        above: Floats = np.maximum(by_kv, np.float32(0))
        below: Floats = np.minimum(by_kv, np.float32(0))
        return above @ high + below @ low

    @property
    def num_bytes(self) -> int:
        """Bytes in fast memory."""
        return self._low.num_bytes + self._high.num_bytes + self._open.nbytes
