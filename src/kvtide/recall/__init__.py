"""Long-term memory: vectors with payloads, durable when added, searched, without small writes."""

from kvtide.recall.contract import MemoryOptions, VectorMemory
from kvtide.recall.memory import Memory
from kvtide.recall.opening import open_memory

__all__ = ["Memory", "MemoryOptions", "VectorMemory", "open_memory"]
