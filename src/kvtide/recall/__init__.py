"""Long-term memory: vectors with payloads, durable when added, searched, without small writes."""

from kvtide.recall.contract import MemoryOptions, VectorMemory
from kvtide.recall.memory import Memory

__all__ = ["Memory", "MemoryOptions", "VectorMemory"]
