"""KV of Hugging Face transformers models in tiers."""

from kvtide.integrations.transformers.kvcache import TieredKv
from kvtide.integrations.transformers.models import DEFAULT_MODEL, LoadedModel, load
from kvtide.integrations.transformers.store import KvStore, Session, StoreOptions

__all__ = [
    "DEFAULT_MODEL",
    "KvStore",
    "LoadedModel",
    "Session",
    "StoreOptions",
    "TieredKv",
    "load",
]
