"""Metrics as Prometheus sees them: scraped over HTTP while a cache runs, and read with its own parser."""

from __future__ import annotations

import json
import re
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kvhelp import Walker, open_small, small_cache, small_layout
from kvtide.chunks import ChunkOptions, ChunkStore, fold
from kvtide.errors import ConfigError
from kvtide.io.ops import address_of, aligned_buffer
from kvtide.metrics import METRICS, CacheSource, open_endpoint, parse_address, recorder_for, serve_chunks
from kvtide.metrics.dashboard import dashboard
from kvtide.metrics.endpoint import CONNECTIONS_MAX
from kvtide.metrics.events import EventSums, Histogram
from kvtide.metrics.sources import Sample
from kvtide.trace.record import OP_EVENT, Recorder

ROOT = Path(__file__).parent.parent
NAMES = {metric.name for metric in METRICS}


def scrape(url: str) -> dict[tuple[str, ...], float]:
    """Every sample by its name and labels, but for the store's."""
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - our own endpoint
        text = answer.read().decode()
    labels_of = {metric.name.removesuffix("_total"): metric.labels for metric in METRICS}
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [sample.labels[name] for name in labels_of[family.name]]
            found[sample.name, *labels] = sample.value
    return found


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_a_cache_tells_its_figures_while_it_runs(tmp_path: Path) -> None:
    layout, recorder = small_layout(), Recorder(1 << 12)
    space = open_small(tmp_path / "store", layout, num_slots=4, recorder=recorder)
    cache = small_cache(layout, space.tier, dram_groups=4, recorder=recorder)
    walker = Walker(cache)
    source = CacheSource(cache, store="s1", model='odd"name\n', integration="test", recorder=recorder)
    with open_endpoint(0, source) as endpoint:
        before = scrape(endpoint.url)
        assert before["kvtide_asked_total", "tokens"] == 0
        for first in (0, 100, 200, 300, 0):
            tokens = [first + index for index in range(16)]
            sequence = cache.open([*tokens, 1])
            walker.step([sequence], [tokens[sequence.num_tokens :] or [1]])
            cache.release(sequence)
            cache.drain()
        cache.flush()
        found = scrape(endpoint.url)
        again = scrape(endpoint.url)
    assert found["kvtide_store_info", "test", 'odd"name\n', "0.1.0"] == 1
    assert found["kvtide_requests_total",] == 5
    assert found["kvtide_asked_total", "tokens"] == 5 * 17
    assert found["kvtide_hit_total", "tokens"] == cache.asked.used_tokens
    assert sum(value for key, value in found.items() if key[0] == "kvtide_decisions_total") == 5
    stats = space.tier.stats()
    assert found["kvtide_tier_bytes_total", "file", "write"] == stats.written_bytes > 0
    assert found["kvtide_dropped_total", "file", "evicted"] == stats.dropped["evicted"] > 0
    assert found["kvtide_capacity_bytes", "file"] == stats.capacity_bytes
    assert found["kvtide_used_bytes", "dram"] == cache.usage()["dram"].used_bytes
    moved = {key[2:]: value for key, value in found.items() if key[:2] == ("kvtide_moved_bytes_total", "file")}
    assert sum(value for (direction, _), value in moved.items() if direction == "write") == stats.written_bytes
    assert sum(value for (direction, _), value in moved.items() if direction == "read") == stats.read_bytes
    counted = sum(value for key, value in found.items() if key[0] == "kvtide_operation_seconds_count")
    assert counted == stats.num_reads + stats.num_writes == recorder.ops.num_seen
    assert found == again, "nothing ran between the two"
    cache.close()
    space.close()


def test_a_chunk_store_tells_its_figures(tmp_path: Path) -> None:
    recorder = recorder_for("127.0.0.1:0")
    store = ChunkStore(ChunkOptions(tmp_path / "store", 4096 + 4 * 8192, 4096, "m"), recorder=recorder)
    buffer = aligned_buffer(6 * 4096)
    at = address_of(buffer) + np.arange(6, dtype=np.uint64) * np.uint64(4096)
    keys = fold([b"%d" % number for number in range(6)])
    endpoint = serve_chunks(store, 0, integration="vllm", recorder=recorder)
    assert endpoint is not None
    with endpoint:
        for index in range(6):
            store.store(keys[index : index + 1], at[index : index + 1])
        assert store.has(keys).sum() == 4
        store.load(keys[4:], at[4:])
        found = scrape(endpoint.url)
    store.close()
    assert found["kvtide_asked_total", "chunks"] == 6 + 2
    assert found["kvtide_hit_total", "chunks"] == 2
    assert found["kvtide_dropped_total", "file", "evicted"] == 2
    assert found["kvtide_groups", "file"] == 4
    assert found["kvtide_hit_bytes_total", "file"] == 2 * 4096
    assert found["kvtide_operation_bytes_count", "read", "restore"] >= 1


def test_every_source_speaks_only_of_what_is_listed() -> None:
    layout = small_layout()
    cache = small_cache(layout)
    labels = {metric.name: len(metric.labels) for metric in METRICS}
    assert len(labels) == len(METRICS)
    for sample in CacheSource(cache, store="", model="", integration="").samples():
        assert isinstance(sample, Sample)
        assert len(sample.labels) == labels[sample.name]
    cache.close()


def test_closing_leaves_no_thread_and_no_socket() -> None:
    before = threads()
    endpoint = open_endpoint(0)
    port = endpoint.port
    idle = socket.create_connection(("127.0.0.1", port))  # a client that says nothing
    scrape(endpoint.url)
    with pytest.raises(urllib.error.HTTPError) as told:
        urllib.request.urlopen(endpoint.url.replace("/metrics", "/secrets"), timeout=10)  # noqa: S310 - ours
    told.value.close()
    endpoint.close()
    endpoint.close()
    assert threads() == before
    idle.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    open_endpoint(port).close()


def test_many_idle_clients_do_not_keep_others_out() -> None:
    with open_endpoint(0) as endpoint:
        idle = [socket.create_connection(("127.0.0.1", endpoint.port)) for _ in range(CONNECTIONS_MAX)]
        assert scrape(endpoint.url) == {}
    for one in idle:
        one.settimeout(10)
        assert one.recv(1) == b"", "each is hung up on"
        one.close()


def test_openmetrics_is_spoken_to_who_asks_for_it() -> None:
    cache = small_cache(small_layout())
    with open_endpoint(0, CacheSource(cache, store="s", model="m", integration="test")) as endpoint:
        asked = urllib.request.Request(endpoint.url, headers={"Accept": "application/openmetrics-text"})  # noqa: S310
        with urllib.request.urlopen(asked, timeout=10) as answer:  # noqa: S310 - our own endpoint
            text = answer.read().decode()
    cache.close()
    families = list(openmetrics.text_string_to_metric_families(text))
    assert {family.name for family in families} == {name.removesuffix("_total") for name in NAMES}


def test_ranks_of_an_engine_serve_side_by_side(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = ChunkStore(ChunkOptions(tmp_path / "store", 1 << 20, 4096, "m"))
    assert recorder_for(None) is None
    assert serve_chunks(store, None, integration="vllm") is None
    with pytest.raises(ConfigError, match="metrics_port is 'x'"):
        recorder_for("x")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        assert serve_chunks(store, port - 1, integration="vllm", rank=1) is None  # the engine starts all the same
    assert f"metrics_port: cannot listen at 127.0.0.1:{port}" in caplog.text
    store.close()


def test_a_client_that_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.metrics.endpoint._Handler.timeout", 0.05)
    with open_endpoint(0) as endpoint, socket.create_connection(("127.0.0.1", endpoint.port), timeout=10) as one:
        assert one.recv(1) == b""


def test_a_taken_port_is_an_error_that_says_so() -> None:
    with open_endpoint(0) as endpoint, pytest.raises(ConfigError, match=rf"{endpoint.port}.*in use.*0 for any"):
        open_endpoint(endpoint.port)
    with pytest.raises(ConfigError, match="metrics_port: cannot listen at no-such-host"):
        open_endpoint("no-such-host.invalid:0", option="metrics_port")


@pytest.mark.parametrize(
    ("text", "address"),
    [("9464", ("127.0.0.1", 9464)), ("a.b:0", ("a.b", 0)), ("[::1]:80", ("::1", 80)), (7, ("127.0.0.1", 7))],
)
def test_addresses(text: str | int, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "x", "-1", "65536", ":80", "a b:80", "::1:80", "[::x]:80", "host:", "\x1b:1"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--metrics is .*HOST:PORT"):
        parse_address(text)


def test_histograms_count_on_the_right_side_of_their_bounds() -> None:
    one = Histogram(np.array([1.0, 2.0, np.inf]))
    one.add(np.array([0.5, 1.0, 1.5, 2.0, 9.0]))
    assert one.cumulative() == [("1", 2.0), ("2", 4.0), ("+Inf", 5.0)]
    assert one.total == 14.0


def test_events_that_were_overwritten_are_counted_as_lost() -> None:
    recorder = Recorder(max_events=8)
    sums = EventSums(recorder)
    total = 0
    for num in (3, 5, 20, 1, 0, 8):
        rows = np.zeros(num, OP_EVENT)
        rows["length"] = 10
        recorder.record_ops(rows)
        total += num
        sums.update()
    assert sums.lost["op"] == 12
    assert sums.moved["file", "read", "prefill-write"] == 10 * (total - 12)


# The dashboard


def test_the_dashboard_is_that_of_the_metrics() -> None:
    text = (ROOT / "docs" / "grafana.json").read_text()
    assert json.loads(text) == dashboard(), "type python -m kvtide.metrics.dashboard > docs/grafana.json"
    known = NAMES | {f"{one.name}_bucket" for one in METRICS if one.kind == "histogram"}
    asked = set(re.findall(r"kvtide_\w+", " ".join(re.findall(r'"(?:expr|query)": "(.*)"', text))))
    assert asked == {f"{one.name}_bucket" if one.kind == "histogram" else one.name for one in METRICS}
    assert asked <= known


def test_no_two_panels_lie_on_one_another() -> None:
    taken = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_the_document_lists_every_metric() -> None:
    told = (ROOT / "docs" / "metrics.md").read_text()
    for metric in METRICS:
        assert f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.about} |" in told
