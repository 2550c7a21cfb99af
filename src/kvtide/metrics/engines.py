"""Metrics of a plug-in for an engine: the one place that reads its configuration key `metrics_port`.

Every plug-in does the same, whatever its engine:

    recorder = recorder_for(config.get("metrics_port"))
    store = ChunkStore(options, recorder=recorder)
    endpoint = serve_chunks(store, config.get("metrics_port"), integration="sglang", recorder=recorder)
    ...
    if endpoint is not None:
        endpoint.close()

Where there are several stores, `StoresMetrics` serves them all. SGLang passes the key in
`hicache_storage_backend_extra_config`, LMCache in `adapter_params`. An engine of several ranks runs a
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
    return _listen(metrics_port, rank, ChunkSource(store, integration=integration, recorder=recorder))


class StoresMetrics:
    """Metrics of stores that are opened one after the other, at one endpoint; None as `metrics_port`: nowhere.

    Raises: ConfigError if `metrics_port` is no address. Where it cannot be opened there is a warning.
    """

    def __init__(self, metrics_port: str | int | None, *, integration: str, rank: int = 0) -> None:
        self._port, self._integration = metrics_port, integration
        self._endpoint = None if metrics_port is None else _listen(metrics_port, rank)

    @property
    def endpoint(self) -> Endpoint | None:
        """Where they are served."""
        return self._endpoint

    def recorder(self) -> Recorder | None:
        """Return what the next store must record into, None where nobody would read it."""
        return recorder_for(self._port) if self._endpoint is not None else None

    def add(self, store: ChunkStore, recorder: Recorder | None) -> None:
        """Tell of one more store."""
        if self._endpoint is not None:
            self._endpoint.add(ChunkSource(store, integration=self._integration, recorder=recorder))

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._endpoint is not None:
            self._endpoint.close()


def _listen(metrics_port: str | int, rank: int, *sources: ChunkSource) -> Endpoint | None:
    host, port = parse_address(metrics_port, option=OPTION)
    where = f"[{host}]" if ":" in host else host
    try:
        return open_endpoint(f"{where}:{port + rank if port else 0}", *sources, option=OPTION)
    except (ConfigError, IoError) as error:
        _log.warning("kvtide: there are no metrics: %s", error)
        return None
