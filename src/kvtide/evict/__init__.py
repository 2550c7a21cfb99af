"""What a tier gives up when it is full, and what it lets in. Pure: arrays of ids in, arrays of ids out."""

from kvtide.evict.contract import NEVER, NO_FACTS, Evictor, Expecting, Facts, Ids
from kvtide.evict.names import EVICTOR_NAMES, make_evictor
from kvtide.evict.recency import Fifo, Lip, LookAhead, Lru, Slru
from kvtide.evict.scanproof import Arc, S3Fifo
from kvtide.evict.values import Belady, Gdsf, Lfu

__all__ = [
    "EVICTOR_NAMES",
    "NEVER",
    "NO_FACTS",
    "Arc",
    "Belady",
    "Evictor",
    "Expecting",
    "Facts",
    "Fifo",
    "Gdsf",
    "Ids",
    "Lfu",
    "Lip",
    "LookAhead",
    "Lru",
    "S3Fifo",
    "Slru",
    "make_evictor",
]
