"""The tiered cache of KV."""

from kvtide.cache.options import CacheOptions
from kvtide.cache.sequence import Match, Sequence
from kvtide.cache.tiered import TieredCache
from kvtide.cache.traffic import LostKv
from kvtide.cache.windows import CpuArena

__all__ = ["CacheOptions", "CpuArena", "LostKv", "Match", "Sequence", "TieredCache"]
