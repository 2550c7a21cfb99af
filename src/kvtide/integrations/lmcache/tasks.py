"""Tasks of LMCache's controllers: several transfers each, one answer, asked for by number. Next: adapter."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.chunks.transfer import Kind

Rows = npt.NDArray[np.intp]


@dataclass(eq=False, slots=True)
class Task:
    """One task: `keys` as LMCache gave them, and which of them arrived. `num_parts` transfers are not done yet."""

    id: int
    kind: Kind
    keys: Sequence[Any]
    num_parts: int
    good: npt.NDArray[np.bool_] = field(init=False)
    num_bytes: int = 0  # that moved
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.good = np.zeros(len(self.keys), np.bool_)

    def end_part(self, rows: Rows, good: npt.NDArray[np.bool_], num_bytes: int) -> bool:
        """Note what became of some keys; say whether those were the last."""
        with self._lock:
            self.good[rows] = good
            self.num_bytes += num_bytes
            self.num_parts -= 1
            return self.num_parts == 0
