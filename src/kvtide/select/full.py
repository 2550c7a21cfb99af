"""All tokens, always: exact attention. Pure. Next: quest."""

from __future__ import annotations

from kvtide.select.contract import Floats, Heads, Keys, Reach, Selection


class KeepsNothing:
    """What selectors share that need no summary."""

    unit = 1
    is_ahead = False

    def __init__(self, heads: Heads) -> None:
        del heads

    def on_prefill(self, layer: int, keys: Keys, queries: Floats) -> None:
        """Take in nothing."""

    def on_append(self, layer: int, keys: Keys) -> None:
        """Take in nothing."""

    def fast_bytes(self) -> int:
        """Return 0."""
        return 0


class Full(KeepsNothing):
    """Attends to everything."""

    def select(self, layer: int, query: Floats, reach: Reach) -> Selection:
        del layer, query
        return Selection.everything(reach.num_tokens)
