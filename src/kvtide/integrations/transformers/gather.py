"""DRAM frames as tensors: K and V of the groups that were picked. Next: selecting.

One gathering copy puts the picked groups side by side, which matrix products want; each layout of a slot is one view.
"""

from __future__ import annotations

import torch

from kvtide.cache.ledger import Ids
from kvtide.cache.tiered import TieredCache
from kvtide.select.contract import Heads


class FrameView:
    """The frames of a cache, seen as rows of numbers. Views only; it holds no frame."""

    def __init__(self, cache: TieredCache, heads: Heads, dtype: torch.dtype, device: torch.device) -> None:
        self._rows = torch.from_numpy(cache.ledger.frame_pool.rows).view(dtype)
        self._split, self._tokens = cache.layout.split, cache.layout.tokens_per_group
        self._heads, self._device = heads, device
        shape = cache.layout.shape.layers[0]
        self._dim_v = shape.v_bytes // heads.num_kv // self._rows.element_size()

    def keys(self, frames: Ids) -> torch.Tensor:
        """Return K of the groups in `frames`. Shapes: frames [n, parts of a layer]; returns [Hkv, n * T, D]."""
        return self._part(frames, 0, 0, self._heads.dim)

    def values(self, frames: Ids) -> torch.Tensor:
        """Return V of the groups in `frames`. Shapes: as `keys`, D that of V."""
        return self._part(frames, min(1, frames.shape[1] - 1), self._heads.dim, self._dim_v)

    def _part(self, frames: Ids, part: int, behind: int, dim: int) -> torch.Tensor:
        heads, tokens = self._heads.num_kv, self._tokens
        if self._split == "head":
            start = tokens * behind
            rows = self._rows[:, start : start + tokens * dim][torch.from_numpy(frames.reshape(-1))]
            found = rows.view(len(frames), heads, tokens, dim).permute(1, 0, 2, 3).reshape(heads, -1, dim)
        else:
            start = tokens * heads * behind if self._split == "none" else 0
            index = torch.from_numpy(frames[:, part if self._split == "kv" else 0].copy())
            rows = self._rows[:, start : start + tokens * heads * dim].index_select(0, index)
            found = rows.view(len(frames) * tokens, heads, dim).permute(1, 0, 2)
        return found.to(self._device)
