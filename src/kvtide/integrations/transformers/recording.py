"""Recording what attention meets: queries of each layer, those the layer before predicts, and what is kept of a text.
Next: comparing.

Changes nothing of a run. Queries are computed again from the input of each attention module, as the module does it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from kvtide.cache.sequence import Sequence
from kvtide.cache.tiered import TieredCache
from kvtide.integrations.transformers.gather import FrameView
from kvtide.integrations.transformers.wiring import Wiring, as_floats
from kvtide.select.contract import Floats
from kvtide.select.replay import LayerTrace, Trace


class Recording:
    """Queries of the steps that run while it is open, after RoPE.

    Shapes: queries[layer], ahead[layer]: lists of [m, Hq, D], one a step; ahead[0] stays empty.
    """

    def __init__(self, wiring: Wiring) -> None:
        self.queries: list[list[Floats]] = [[] for _ in wiring.modules]
        self.ahead: list[list[Floats]] = [[] for _ in wiring.modules]
        self._wiring = wiring
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        self._hooks = [
            module.register_forward_pre_hook(lambda module, _args, kwargs: self._note(module, kwargs), with_kwargs=True)
            for module in self._wiring.modules
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _note(self, module: Any, kwargs: dict[str, Any]) -> None:
        layer, hidden, rotation = int(module.layer_idx), kwargs["hidden_states"], kwargs.get("position_embeddings")
        self.queries[layer].append(self._wiring.query(layer, hidden, rotation))
        if layer + 1 < len(self.ahead):
            self.ahead[layer + 1].append(self._wiring.ahead(layer, hidden, rotation))


def make_trace(
    earlier: Recording, latest: Recording, wiring: Wiring, cache: TieredCache, sequence: Sequence, *, num_queries: int
) -> Trace:
    """Return the first `num_queries` queries of `latest` with all KV of `sequence` up to them.

    `latest` must have recorded the last tokens of `sequence`, `earlier` those before them.
    Raises: LostKv if KV cannot be read; IoError if DRAM has no room for a layer.
    """
    num_all = sum(map(len, latest.queries[0]))
    num_tokens = sequence.num_tokens - num_all + num_queries
    dtype = wiring.modules[0].q_proj.weight.dtype
    view = FrameView(cache, wiring.heads, dtype, torch.device("cpu"))
    layers = []
    for index in range(len(wiring.modules)):
        keys, values = _read(cache, view, sequence, index)
        ahead = latest.ahead[index]
        layers.append(
            LayerTrace(
                keys=keys[:num_tokens],
                values=values[:num_tokens],
                queries=np.concatenate(latest.queries[index])[:num_queries],
                ahead=np.concatenate(ahead)[:num_queries] if ahead else None,
                earlier=np.concatenate(earlier.queries[index]),
            )
        )
    return Trace(wiring.heads, layers, wiring.rope(), element_bytes=dtype.itemsize)


def _read(cache: TieredCache, view: FrameView, sequence: Sequence, layer: int) -> tuple[Floats, Floats]:
    """Return all KV of one layer. Shapes: [T, Hkv, D] twice."""
    num, parts = len(sequence.units), cache.layout.parts_per_layer
    places = np.repeat(np.arange(num), parts)
    fragments = np.tile(np.arange(layer * parts, (layer + 1) * parts), num)
    pick = cache.picker.begin(sequence, layer, places, fragments, cause="decode-read")
    try:
        frames = cache.picker.finish(pick).reshape(num, parts)
        keys, values = view.keys(frames), view.values(frames)
    finally:
        cache.picker.release(pick)
    return as_floats(keys.transpose(0, 1)), as_floats(values.transpose(0, 1))
