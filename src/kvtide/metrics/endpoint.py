"""Where Prometheus scrapes: one small HTTP server for all sources of a process. The one file that knows its client.

It answers `GET /metrics` and nothing else, on loopback unless it is told another host. Connections are few and may not
idle; where there are too many, the oldest ends, so nobody keeps others out. Closing leaves no thread and no socket.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvtide.errors import ConfigError, IoError
from kvtide.metrics.events import Histogram
from kvtide.metrics.names import METRICS
from kvtide.metrics.sources import Sample, Source
from kvtide.units import printable

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

LOOPBACK = "127.0.0.1"
IDLE_S_MAX = 10.0  # for a client that says nothing, or takes nothing
CONNECTIONS_MAX = 16  # a scrape takes milliseconds, and few scrape
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", re.ASCII)


def parse_address(text: str | int, *, option: str = "--metrics") -> tuple[str, int]:
    """Return host and port of `PORT`, `HOST:PORT` or `[IPV6]:PORT`; port 0 is any free one.

    Raises: ConfigError that names `option`.
    """
    host, colon, port = str(text).strip().rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 1 << 16
    host = host if colon else LOOPBACK
    if host.startswith("[") and host.endswith("]"):
        try:
            host, is_host = str(ipaddress.IPv6Address(host[1:-1])), True
        except ValueError:
            is_host = False
    else:
        is_host = bool(_HOST.fullmatch(host))
    if not (is_port and is_host):
        shown = printable(str(text))[:60]
        raise ConfigError(f"{option} is {shown!r}; type a port of 0 to 65535, or HOST:PORT, as in 9464 or 0.0.0.0:9464")
    return host, int(port)


class Endpoint:
    """A server that is listening.

    Threads: any may call.
    """

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="kvtide-metrics", daemon=True)
        self._is_closed = False
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Where to scrape."""
        host = str(self._server.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

    def add(self, source: Source) -> None:
        """Tell of `source` too, from the next scrape on."""
        self._server.sources = (*self._server.sources, source)

    def close(self) -> None:
        """Stop listening, end what is being answered. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._server.shutdown()
        self._thread.join()
        self._server.hang_up()
        self._server.server_close()  # joins the threads of connections

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_endpoint(address: str | int, *sources: Source, option: str = "--metrics") -> Endpoint:
    """Listen at `address`, as `parse_address` reads it, and tell of `sources`.

    This is the one function that every integration opens its metrics with.
    Raises: ConfigError for an address that is none, is taken or is not of this machine; IoError if the system refuses.
    """
    host, port = parse_address(address, option=option)
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return Endpoint(_Server(where, family, sources))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        what = f"{option}: cannot listen at {host}:{port}: {reason}"
        if isinstance(error, socket.gaierror) or getattr(error, "errno", 0) in {98, 99}:  # EADDRINUSE, EADDRNOTAVAIL
            raise ConfigError(f"{what}; type another port, or 0 for any free one") from None
        raise IoError(getattr(error, "errno", 0) or 0, what) from None


class _Server(ThreadingHTTPServer):
    """Serves the figures of `sources`."""

    daemon_threads = False  # joined when it closes
    request_queue_size = CONNECTIONS_MAX
    allow_reuse_address = True  # a port whose last connections are still dying is free

    def __init__(self, where: Any, family: socket.AddressFamily, sources: tuple[Source, ...]) -> None:
        self.address_family = family
        self.sources = sources
        self._open: list[socket.socket] = []  # oldest first
        self._guard = threading.Lock()
        super().__init__(where, _Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # that of HTTPServer asks the name service for a name that nobody needs

    def verify_request(self, request: Any, client_address: Any) -> bool:
        del client_address
        with self._guard:
            if len(self._open) >= CONNECTIONS_MAX:
                _end(self._open.pop(0))
            self._open.append(request)
        return True

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            if request in self._open:
                self._open.remove(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        """End every connection."""
        with self._guard:
            for connection in self._open:
                _end(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away."""


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is gone already
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    timeout = IDLE_S_MAX
    server: _Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "type /metrics")
            return
        from prometheus_client.exposition import choose_encoder

        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        body = encode(_Registry(self.server.sources))
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as its parent calls it
        """Stay silent."""


class _Registry:
    """What the client's encoders take for a registry."""

    def __init__(self, sources: tuple[Source, ...]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Family]:
        """Yield every metric with the figures of all sources."""
        from prometheus_client import core

        makers = {
            "counter": core.CounterMetricFamily,
            "gauge": core.GaugeMetricFamily,
            "histogram": core.HistogramMetricFamily,
        }
        by_name: dict[str, list[tuple[str, Sample]]] = {}
        for source in self._sources:
            for sample in source.samples():
                by_name.setdefault(sample.name, []).append((source.store, sample))
        for metric in METRICS:
            family: Any = makers[metric.kind](metric.name, metric.about, labels=("store", *metric.labels))
            for store, sample in by_name.pop(metric.name, ()):
                labels = (store, *sample.labels)
                if isinstance(sample.value, Histogram):
                    family.add_metric(labels, buckets=sample.value.cumulative(), sum_value=sample.value.total)
                else:
                    family.add_metric(labels, sample.value)
            yield family
        assert not by_name, f"metrics that are not in the list: {sorted(by_name)}"
