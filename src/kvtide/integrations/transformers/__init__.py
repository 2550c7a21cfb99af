"""KV of Hugging Face transformers models in tiers."""

from kvtide.integrations.transformers.kvcache import TieredKv
from kvtide.integrations.transformers.models import DEFAULT_MODEL, LoadedModel, load
from kvtide.integrations.transformers.store import PREFILL_TOKENS, KvStore, Session, StoreOptions, next_prefill_end

__all__ = [
    "DEFAULT_MODEL",
    "PREFILL_TOKENS",
    "KvStore",
    "LoadedModel",
    "Session",
    "StoreOptions",
    "TieredKv",
    "load",
    "next_prefill_end",
]
