"""Which chunks must not give way for others, and how often that was asked. Next: store."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KEY, KeyArray


class Pins:
    """Counts pins by key. Hold `lock` to choose among what `keys` does not name. Threads: any may call."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._counts: collections.Counter[bytes] = collections.Counter()

    def __len__(self) -> int:
        return len(self._counts)

    def keys(self) -> KeyArray:
        """Return what is pinned. Hold `lock`. Shapes: returns [n]."""
        return np.frombuffer(b"".join(self._counts), KEY)

    def add(
        self, keys: KeyArray, lookup: Callable[[KeyArray], npt.NDArray[np.bool_]], num_max: int
    ) -> npt.NDArray[np.bool_]:
        """Pin those of `keys` that are there, up to `num_max` in all; say which. Shapes: keys, result [n]."""
        with self.lock:
            kept = lookup(keys)
            for row in np.flatnonzero(kept).tolist():
                key = keys[row].tobytes()
                if key in self._counts or len(self._counts) < num_max:
                    self._counts[key] += 1
                else:
                    kept[row] = False
        return kept

    def remove(self, keys: KeyArray) -> None:
        """Undo one `add` of each key; of keys that are not pinned, nothing."""
        with self.lock:
            for key in keys.tolist():
                if self._counts[key] > 1:
                    self._counts[key] -= 1
                else:
                    del self._counts[key]
