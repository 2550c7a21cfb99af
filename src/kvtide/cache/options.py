"""The knobs of a cache, and the least memory it works with. Next: tiered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvtide.cache.choice import REUSES, Reuse
from kvtide.errors import ConfigError
from kvtide.spec import SlotLayout
from kvtide.units import format_bytes

SPARE_FRAMES = 8  # never filled with what cannot go, so that there are always some to read into


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Knobs of a cache. None changes results; all change speed and room.

    Raises: ConfigError for unknown names.
    """

    dram_bytes: int
    write_policy: Literal["through", "back"] = "through"
    evictor: str = "lip"
    is_prefetching: bool = True
    reuse: Reuse = "auto"  # of what is kept below DRAM: if loading is faster than computing, or always, or never

    def __post_init__(self) -> None:
        if self.reuse not in REUSES:
            raise ConfigError(f"unknown reuse {self.reuse!r}; type {', '.join(REUSES)}")
        if self.write_policy not in {"through", "back"}:
            raise ConfigError(f"unknown write policy {self.write_policy!r}; type through or back")


def spare_frames(layout: SlotLayout) -> int:
    """Return how many frames are never filled with what cannot go: a layer of a group can always be read into them."""
    return max(SPARE_FRAMES, layout.parts_per_layer)


def check_dram(layout: SlotLayout, dram_bytes: int) -> None:
    """Raise ConfigError unless `dram_bytes` are enough for a cache to work with."""
    least_bytes = (2 * layout.num_fragments + spare_frames(layout)) * max(layout.fragment_padded_bytes)
    if dram_bytes < least_bytes:
        raise ConfigError(
            f"DRAM of {format_bytes(dram_bytes)} is too small: two groups of every layer are needed, "
            f"{format_bytes(least_bytes)}; type --dram {-(-least_bytes // 2**20)}MiB or more, "
            f"or a smaller --group-blocks"
        )
