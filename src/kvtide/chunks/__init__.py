"""Chunks of other engines, opaque bytes of one size, kept in a file tier. What every plug-in stands on."""

from kvtide.chunks.keys import fold, fold_one
from kvtide.chunks.options import ChunkOptions
from kvtide.chunks.several import SeveralStores
from kvtide.chunks.store import ChunkStore
from kvtide.chunks.transfer import LOAD, STORE, Transfer

__all__ = ["LOAD", "STORE", "ChunkOptions", "ChunkStore", "SeveralStores", "Transfer", "fold", "fold_one"]
