"""Keeps a head's last selection while its query stays close (CLO, arXiv 2511.14510). Pure. Next: pmr.

Wraps any selector. A head whose query has cosine `threshold` or more with the query of its last selection keeps that
selection: nothing is scored and nothing new is read. Else it is selected anew. Important heads are stricter: the
threshold of a head lies between `threshold` and 1, the closer to 1 the more of its selections changed when they were
made anew (the paper adapts to head importance without saying how; this is our reading). The thresholds meet the inner
selector's one query: KV heads that share one list are judged together, by the least similar.
"""

from __future__ import annotations

import numpy as np

from kvtide.select.contract import Floats, Heads, Keys, Reach, Selection, Selector

THRESHOLD = 0.8


class Clo:
    """Reuses the selections of an inner selector."""

    def __init__(self, heads: Heads, inner: Selector, *, threshold: float = THRESHOLD) -> None:
        self.unit, self.is_ahead = inner.unit, inner.is_ahead
        self._heads, self._inner, self._threshold = heads, inner, threshold
        self._last: dict[int, tuple[Floats, Selection]] = {}
        self.num_kept = self.num_asked = 0

    def on_prefill(self, layer: int, keys: Keys, queries: Floats) -> None:
        self._last.pop(layer, None)
        self._inner.on_prefill(layer, keys, queries)

    def on_append(self, layer: int, keys: Keys) -> None:
        self._inner.on_append(layer, keys)

    def select(self, layer: int, query: Floats, reach: Reach) -> Selection:
        num_kv = self._heads.num_kv
        self.num_asked += num_kv
        last = self._last.get(layer)
        if last is None or last[1].is_everything or reach.is_everything:
            return self._remember(layer, query, self._inner.select(layer, query, reach))
        old_query, old = last
        keeps = self._cosines(query, old_query) >= self._threshold
        if len(old.ids) == 1:
            keeps[:] = keeps.all()
        self.num_kept += int(keeps.sum())
        if keeps.all():
            return Selection(old.unit, old.ids, old.first, old.last, reach.num_tokens, old.need)
        new = self._inner.select(layer, query, reach)
        if not keeps.any() or new.is_everything or new.ids.shape != old.ids.shape:
            return self._remember(layer, query, new)
        ids = np.where(keeps[:, None], old.ids, new.ids)
        by_kv = np.where(keeps[:, None, None], self._heads.by_kv(old_query), self._heads.by_kv(query))
        mixed = Selection(new.unit, ids, new.first, min(old.last, new.last), reach.num_tokens, new.need)
        return self._remember(layer, by_kv.reshape(query.shape), mixed)

    def fast_bytes(self) -> int:
        kept = sum(query.nbytes + selection.ids.nbytes for query, selection in self._last.values())
        return self._inner.fast_bytes() + kept

    def _remember(self, layer: int, query: Floats, selection: Selection) -> Selection:
        self._last[layer] = query.copy(), selection
        return selection

    def _cosines(self, query: Floats, old: Floats) -> Floats:
        """Return the least cosine of the query heads of each KV head. Shapes: [Hq, D] twice to [Hkv]."""
        dots = np.einsum("hd,hd->h", query, old)
        dots /= np.linalg.norm(query, axis=1) * np.linalg.norm(old, axis=1) + 1e-9
        cosines: Floats = dots.reshape(self._heads.num_kv, self._heads.group).min(axis=1)
        return cosines
