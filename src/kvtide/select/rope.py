"""Rotary position embedding, done and undone on arrays. Pure. Next: contract.

The halves convention of LLaMA-like models: dimension i turns with i + rotated/2. Dimensions behind the rotated ones
pass unchanged (partial rotary). Scaled variants differ in their tables only.
Source: RoFormer, arXiv 2104.09864.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rope:
    """Tables of one model.

    Shapes: cos, sin [positions, rotated dimensions], each half repeated, with any scaling of the model in them.
    """

    cos: Floats
    sin: Floats

    def apply(self, rows: Floats, start: int) -> Floats:
        """Turn rows of positions from `start` on. Shapes: rows [T, H, D]."""
        cos, sin = self._tables(len(rows), start)
        return self._turn(rows, cos, sin)

    def undo(self, rows: Floats, start: int) -> Floats:
        """Turn rows back: the inverse of `apply`. Shapes: rows [T, H, D]."""
        cos, sin = self._tables(len(rows), start)
        scale: Floats = cos * cos + sin * sin  # not 1 where a model scales its tables
        back: tuple[Floats, Floats] = cos / scale, -sin / scale
        return self._turn(rows, *back)

    def turn_at(self, rows: Floats, positions: npt.NDArray[np.int64]) -> Floats:
        """Turn rows of any positions. Shapes: rows [T, H, D]; positions [T]."""
        return self._turn(rows, self.cos[positions][:, None, :], self.sin[positions][:, None, :])

    def _tables(self, num: int, start: int) -> tuple[Floats, Floats]:
        span = slice(start, start + num)
        return self.cos[span][:, None, :], self.sin[span][:, None, :]

    def _turn(self, rows: Floats, cos: Floats, sin: Floats) -> Floats:
        turned, half = self.cos.shape[1], self.cos.shape[1] // 2
        part = rows[..., :turned]
        out = rows.copy()
        out[..., :turned] = part * cos
        out[..., :half] -= part[..., half:] * sin[..., :half]
        out[..., half:turned] += part[..., :half] * sin[..., half:]
        return out
