"""Which memory a name means: a directory of this machine, or a collection of Milvus. Next: kvtide.cli_memory."""

from __future__ import annotations

from kvtide.recall.contract import VectorMemory
from kvtide.recall.memory import Memory
from kvtide.recall.milvus import MilvusMemory
from kvtide.recall.scores import Metric

MILVUS = "milvus:"


def open_memory(where: str, dim: int, *, metric: Metric = "cosine") -> VectorMemory:
    """Open the memory `milvus:URI` (a server's address, or a file for Milvus Lite), or else that in a directory.

    Raises: as `Memory.open` and `MilvusMemory`.
    """
    if where.startswith(MILVUS):
        return MilvusMemory(where.removeprefix(MILVUS), dim, metric=metric)
    return Memory.open(where, dim, metric=metric)
