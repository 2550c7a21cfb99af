"""What a running kvtide tells Prometheus: the same names in every integration."""

from kvtide.metrics.endpoint import Endpoint, open_endpoint, parse_address
from kvtide.metrics.engines import StoresMetrics, recorder_for, serve_chunks
from kvtide.metrics.names import METRICS, Metric
from kvtide.metrics.sources import CacheSource, ChunkSource, Source

__all__ = [
    "METRICS",
    "CacheSource",
    "ChunkSource",
    "Endpoint",
    "Metric",
    "Source",
    "StoresMetrics",
    "open_endpoint",
    "parse_address",
    "recorder_for",
    "serve_chunks",
]
