"""Keeps a head's last selection while its query stays close (CLO, arXiv 2511.14510). Pure. Next: pmr.

Wraps any selector. A head whose query has cosine `threshold` or more with the query of its last selection keeps that
selection: nothing is scored and nothing new is read. Else it is selected anew. The paper adapts thresholds to the
importance of a head without saying how; here all have the same. A KV head is judged by the least similar of its query
heads, and KV heads that share one list together.

A kept selection attends to what came since as far as the budget goes, to the oldest of it last; where not even the
recent tokens fit any more, all heads are selected anew.
"""

from __future__ import annotations

import numpy as np

from kvtide.select.contract import Floats, Heads, Keys, Reach, RebuildsKeys, Selection, Selector

THRESHOLD = 0.8


class Clo:
    """Reuses the selections of an inner selector."""

    def __init__(self, heads: Heads, inner: Selector, *, threshold: float = THRESHOLD) -> None:
        self.unit, self.is_ahead = inner.unit, inner.is_ahead
        self._heads, self._inner, self._threshold = heads, inner, threshold
        if isinstance(inner, RebuildsKeys):
            self.keys = inner.keys
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
        kept = None if last is None else self._kept(last[1], reach)
        if last is None or kept is None:
            return self._remember(layer, query, self._inner.select(layer, query, reach))
        old_query, old = last
        keeps = self._cosines(query, old_query) >= self._threshold
        if len(old.ids) == 1:
            keeps[:] = keeps.all()
        self.num_kept += int(keeps.sum())
        if keeps.all():
            return kept
        new = self._inner.select(layer, query, reach)
        is_mixable = not new.is_everything and new.ids.shape == old.ids.shape and new.last >= old.last
        if not keeps.any() or not is_mixable:
            return self._remember(layer, query, new)
        ids = np.where(keeps[:, None], old.ids, new.ids)
        by_kv = np.where(keeps[:, None, None], self._heads.by_kv(old_query), self._heads.by_kv(query))
        mixed = Selection(new.unit, ids, new.first, new.last, reach.num_tokens, new.need)
        return self._remember(layer, by_kv.reshape(query.shape), mixed)

    def fast_bytes(self) -> int:
        kept = sum(query.nbytes + selection.ids.nbytes for query, selection in self._last.values())
        return self._inner.fast_bytes() + kept

    def _kept(self, old: Selection, reach: Reach) -> Selection | None:
        """Return `old` for the tokens there are now; None if it left nothing out, or fits no more."""
        if old.is_everything or reach.is_everything:
            return None
        first, latest, _ = reach.bounds(old.unit)
        num_tail = reach.budget - (first + old.ids.shape[1]) * old.unit
        last = max(old.last, -(-(reach.num_tokens - num_tail) // old.unit))
        if first != old.first or last > latest:
            return None
        return Selection(old.unit, old.ids, first, last, reach.num_tokens, old.need)

    def _remember(self, layer: int, query: Floats, selection: Selection) -> Selection:
        self._last[layer] = query.copy(), selection
        return selection

    def _cosines(self, query: Floats, old: Floats) -> Floats:
        """Return the least cosine of the query heads of each KV head. Shapes: [Hq, D] twice to [Hkv]."""
        dots = np.einsum("hd,hd->h", query, old)
        dots /= np.linalg.norm(query, axis=1) * np.linalg.norm(old, axis=1) + 1e-9
        cosines: Floats = dots.reshape(self._heads.num_kv, self._heads.group).min(axis=1)
        return cosines
