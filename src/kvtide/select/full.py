"""All tokens, always: exact attention. Pure. Next: quest."""

from __future__ import annotations

from kvtide.select.contract import Floats, Heads, Keys, Reach, Selection


class Full:
    """Attends to everything; keeps nothing."""

    unit = 1
    is_ahead = False

    def __init__(self, heads: Heads) -> None:
        del heads

    def on_prefill(self, layer: int, keys: Keys, queries: Floats) -> None:
        pass

    def on_append(self, layer: int, keys: Keys) -> None:
        pass

    def select(self, layer: int, query: Floats, reach: Reach) -> Selection:
        del layer, query
        return Selection.everything(reach.num_tokens)

    def fast_bytes(self) -> int:
        return 0
