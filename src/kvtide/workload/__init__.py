"""Requests to judge a cache by: read from published logs, or drawn by seeded generators. Begin with requests."""

from __future__ import annotations

from kvtide.workload.formats import AUTO, load_workload
from kvtide.workload.formats import NAMES as FORMAT_NAMES
from kvtide.workload.requests import Malformed, Workload, make_workload
from kvtide.workload.synthetic import NAMES as SYNTHETIC_NAMES
from kvtide.workload.synthetic import agentic, batch, make, multi_turn, rag
from kvtide.workload.tokens import tokens_of

__all__ = [
    "AUTO",
    "FORMAT_NAMES",
    "SYNTHETIC_NAMES",
    "Malformed",
    "Workload",
    "agentic",
    "batch",
    "load_workload",
    "make",
    "make_workload",
    "multi_turn",
    "rag",
    "tokens_of",
]
