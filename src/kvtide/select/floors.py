"""What a method must beat, and what none can: sinks and window alone, chance, and the oracle. Pure. Next: names.

They are for comparison: `oracle` keeps all keys.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from kvtide.select.choose import Rows, best, softmax
from kvtide.select.contract import Floats, Heads, Keys, Reach, Selection
from kvtide.select.full import KeepsNothing


class WindowOnly(KeepsNothing):
    """Sinks and as many recent tokens as the budget holds."""

    def select(self, layer: int, query: Floats, reach: Reach) -> Selection:
        del layer, query
        if reach.is_everything:
            return Selection.everything(reach.num_tokens)
        last = max(reach.sinks, reach.num_tokens - (reach.budget - reach.sinks))
        return Selection(1, np.zeros((1, 0), np.int64), reach.sinks, last, reach.num_tokens)


class RandomUnits(KeepsNothing):
    """Units drawn at random, anew for every query."""

    def __init__(self, heads: Heads, *, unit: int = 1, seed: int = 0) -> None:
        super().__init__(heads)
        self.unit, self._rng = unit, np.random.default_rng(seed)

    def select(self, layer: int, query: Floats, reach: Reach) -> Selection:
        del layer, query
        scores = self._rng.random((1, reach.num_tokens // self.unit), np.float32)
        return best(scores, reach, self.unit)


class Oracle:
    """The units with the most attention mass: each KV head its own, or one list for all."""

    is_ahead = False

    def __init__(self, heads: Heads, *, unit: int = 1, sharing: Literal["head", "all"] = "head") -> None:
        self.unit, self._heads, self._sharing = unit, heads, sharing
        self._rows = [Rows((heads.num_kv, heads.dim)) for _ in range(heads.num_layers)]

    def on_prefill(self, layer: int, keys: Keys, queries: Floats) -> None:
        del queries
        self._rows[layer] = Rows((self._heads.num_kv, self._heads.dim))
        self.on_append(layer, keys)

    def on_append(self, layer: int, keys: Keys) -> None:
        self._rows[layer].append(keys.post)

    def select(self, layer: int, query: Floats, reach: Reach) -> Selection:
        logits = self._heads.by_kv(query) @ self._rows[layer].rows.transpose(1, 2, 0) * self._heads.scaling
        mass = softmax(logits).sum(axis=1)
        if self._sharing == "all":
            mass = mass.sum(axis=0, keepdims=True)
        num = mass.shape[1] // self.unit
        return best(mass[:, : num * self.unit].reshape(len(mass), num, self.unit).sum(axis=2), reach, self.unit)

    def fast_bytes(self) -> int:
        return sum(rows.num_bytes for rows in self._rows)
