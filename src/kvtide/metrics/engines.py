"""Metrics of a plug-in for an engine: the one place that reads its configuration key `metrics_port`.

Every plug-in does the same, whatever its engine:

    recorder = recorder_for(config.get("metrics_port"))
    store = ChunkStore(options, recorder=recorder)
    endpoint = serve_chunks(store, config.get("metrics_port"), integration="sglang", recorder=recorder)
    ...
    if endpoint is not None:
        endpoint.close()

SGLang passes it in `hicache_storage_backend_extra_config`, LMCache in `extra_config`. An engine of several ranks runs a
plug-in in each of their processes, so it adds its `rank`: rank r serves at `metrics_port` + r.
"""

from __future__ import annotations

import logging

from kvtide.chunks import ChunkStore
from kvtide.errors import ConfigError, IoError
from kvtide.metrics.endpoint import Endpoint, open_endpoint, parse_address
from kvtide.metrics.sources import ChunkSource
from kvtide.trace.record import Recorder

OPTION = "metrics_port"
_log = logging.getLogger("kvtide.metrics")
EVENTS_MAX = 1 << 16  # between two scrapes: a minute at 1,000 operations a second


def recorder_for(metrics_port: str | int | None) -> Recorder | None:
    """Return what a store must record into for its metrics to tell of operations; None where there are no metrics.

    Raises: ConfigError if `metrics_port` is no address.
    """
    if metrics_port is None:
        return None
    parse_address(metrics_port, option=OPTION)
    return Recorder(EVENTS_MAX)


def serve_chunks(
    store: ChunkStore,
    metrics_port: str | int | None,
    *,
    integration: str,
    recorder: Recorder | None = None,
    rank: int = 0,
) -> Endpoint | None:
    """Serve the figures of `store` at `metrics_port`, a port or `HOST:PORT`, plus `rank`; None: nowhere.

    Port 0 is any free one, on every rank. Whoever opens it closes it, before the store or after. Where it cannot be
    opened there is a warning, and None: an engine starts without its metrics rather than not at all.
    """
    if metrics_port is None:
        return None
    host, port = parse_address(metrics_port, option=OPTION)
    where = f"[{host}]" if ":" in host else host
    source = ChunkSource(store, integration=integration, recorder=recorder)
    try:
        return open_endpoint(f"{where}:{port + rank if port else 0}", source, option=OPTION)
    except (ConfigError, IoError) as error:
        _log.warning("kvtide: there are no metrics: %s", error)
        return None
