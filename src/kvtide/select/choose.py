"""Scores to units: what every selector shares. Pure. Next: quest."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.select.contract import Floats, Ids, Reach, Selection


def best(scores: Floats, reach: Reach, unit: int) -> Selection:
    """Return the units with the highest scores that the budget has room for.

    Shapes: scores [h, units], of all whole units from the first token on; h is 1 or the KV heads.
    """
    first, last, num = reach.bounds(unit, scores.shape[1])
    if reach.is_everything or last - first <= num:
        return Selection.everything(reach.num_tokens)
    return Selection(unit, top(scores[:, first:last], num) + first, first, last, reach.num_tokens)


def top(scores: Floats, num: int) -> Ids:
    """Return the places of the `num` highest scores of each row, in order of place. Shapes: [h, n] to [h, num]."""
    if num <= 0:
        return np.zeros((len(scores), 0), np.int64)
    if num >= scores.shape[1]:
        return np.tile(np.arange(scores.shape[1]), (len(scores), 1))
    places = np.argpartition(scores, scores.shape[1] - num, axis=1)[:, -num:]
    return np.sort(places, axis=1)


def softmax(logits: Floats) -> Floats:
    """Softmax over the last axis."""
    out: Floats = np.exp(logits - logits.max(axis=-1, keepdims=True))
    out /= out.sum(axis=-1, keepdims=True)
    return out


def total_mass(logits: Floats) -> Floats:
    """Return the softmax of every row, added up over rows. It overwrites `logits`. Shapes: [h, n] to [n]."""
    np.subtract(logits, logits.max(axis=1, keepdims=True), out=logits)
    np.exp(logits, out=logits)
    mass: Floats = (1 / logits.sum(axis=1)) @ logits  # one product instead of a division and a sum of everything
    return mass


class Rows:
    """An array that grows at its first axis. `rows` is what was put in, without a copy."""

    def __init__(self, tail: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> None:
        self._store: npt.NDArray[Any] = np.zeros((0, *tail), dtype)
        self._num = 0

    @property
    def rows(self) -> npt.NDArray[Any]:
        """What it holds. Shapes: [n, *tail]."""
        return self._store[: self._num]

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Add rows at the end. Shapes: [n, *tail]."""
        end = self._num + len(rows)
        if end > len(self._store):
            room = max(end, len(self._store) * 5 // 4 + 64)
            grown = np.zeros((room, *self._store.shape[1:]), self._store.dtype)
            grown[: self._num] = self.rows
            self._store = grown
        self._store[self._num : end] = rows
        self._num = end

    @property
    def num_bytes(self) -> int:
        """Bytes it occupies, with the room to grow."""
        return self._store.nbytes
