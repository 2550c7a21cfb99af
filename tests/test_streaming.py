"""Layers handed over while later ones are computed: order, faults in mid-stream, and tokens as of one process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvtide.cli_handing import Handing
from kvtide.integrations.transformers import KvStore
from kvtide.integrations.transformers.turns import Conversation
from kvtide.tiers.client import RemoteDown
from kvtide.tiers.contract import Statuses
from kvtide.tiers.remote import RemoteOptions, RemoteTier
from test_handing import DOCUMENT, answer, nothing
from test_remote_faults import DictClient
from test_transformers import options
from test_turns import model

LAST = 3


class Wire(DictClient):
    """What both roles share: notes of layers are told in `events`; some are held back, lost or flipped."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.attended = threading.Event()
        self.dies_at = self.flips_at = -1

    def put(self, names: list[str], values: Any) -> Statuses:
        layer = int(names[0].rpartition(":l")[2]) if ":l" in names[0] else -1
        if layer == LAST and self.dies_at < 0:
            assert self.attended.wait(60)
        if 0 <= self.dies_at <= layer:
            raise MemoryError("killed")
        found = super().put(names, values)
        if layer >= 0:
            self.events.append(f"published {layer}")
        if layer >= 0 and layer == self.flips_at:
            piece = next(name for name in self.values if name.endswith(f":{layer}"))
            self.values[piece] = self.values[piece][:-1] + bytes([self.values[piece][-1] ^ 1])
        return found


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    client = Wire()

    def opened(_url: str, layout: Any, digest: bytes, *, cipher: Any) -> RemoteTier:
        return RemoteTier(lambda: client, layout, digest, RemoteOptions(rest_ns=3_600_000_000_000), cipher=cipher)

    monkeypatch.setattr("kvtide.integrations.transformers.places.open_remote", opened)
    monkeypatch.setattr("kvtide.tiers.streams.STALL_S", 0.3)
    return client


def prefill(loaded: Any) -> None:
    with KvStore(loaded, options(None, remote="x")) as store:
        Handing("prefill", store, "").begin(Conversation(loaded, DOCUMENT), "why", wait_s=0, on_progress=nothing)


def decode(loaded: Any, wire: Wire) -> tuple[Any, Any]:
    with KvStore(loaded, options(None, remote="x")) as store:
        layer = store.cache.layer

        def told(sequences: Any, index: int, **how: Any) -> Any:
            window = layer(sequences, index, **how)
            if index == 1 and not wire.attended.is_set():
                wire.events.append("attended 0")
                wire.attended.set()
            return window

        store.cache.layer = told  # type: ignore[method-assign]
        handing = Handing("decode", store, "")
        handing.begin(Conversation(loaded, DOCUMENT), "why", wait_s=30, on_progress=nothing)
        turn = answer(loaded, store)
        return turn, handing.report([turn])["handed"]


def both(wire: Wire) -> tuple[Any, Any, Any]:
    loaded, other = model("llama"), model("llama")
    with KvStore(loaded, options(None)) as store:
        alone = answer(loaded, store)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            prefill(other)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    turn, handed = decode(loaded, wire)
    wire.attended.set()
    thread.join(60)
    if wire.flips_at < 0:
        assert bool(failed) == (wire.dies_at >= 0), failed
    # What arrives corrupt is dropped: a prefill that asks for it after that says that it is not there.
    assert all(isinstance(error, (RemoteDown, MemoryError)) for error in failed), failed
    return alone, turn, handed


def test_decode_begins_before_the_last_layer_is_published(wire: Wire) -> None:
    alone, turn, handed = both(wire)
    assert turn.answer == alone.answer
    assert turn.matched_tokens == turn.prompt_tokens - 1
    assert turn.num_lost == 0
    assert wire.events.index("attended 0") < wire.events.index(f"published {LAST}")
    assert handed["overlapped_share"] > 0.4


def test_notes_of_a_prefill_that_died_stop_nobody_again(wire: Wire) -> None:
    wire.dies_at = 1
    both(wire)
    assert not [name for name in wire.values if ":l" in name]


def test_encrypted_groups_go_whole(wire: Wire, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    key_file = tmp_path / "key"
    key_file.write_bytes(bytes(range(32)))
    key_file.chmod(0o600)
    loaded, how = model("llama"), options(None, remote="x", key_file=key_file)
    with KvStore(loaded, options(None)) as store:
        alone = answer(loaded, store)
    with KvStore(loaded, how) as store:
        Handing("prefill", store, "").begin(Conversation(loaded, DOCUMENT), "why", wait_s=0, on_progress=nothing)
    with KvStore(loaded, how) as store:
        Handing("decode", store, "").begin(Conversation(loaded, DOCUMENT), "why", wait_s=0, on_progress=nothing)
        turn = answer(loaded, store)
    assert turn.answer == alone.answer
    assert turn.matched_tokens == turn.prompt_tokens - 1
    assert wire.values
    assert not [name for name in wire.values if ":l" in name]


@pytest.mark.parametrize("dies_at", [1, 3])
def test_a_prefill_that_dies_in_mid_stream(wire: Wire, dies_at: int, caplog: pytest.LogCaptureFixture) -> None:
    wire.dies_at = dies_at
    alone, turn, _ = both(wire)
    assert turn.answer == alone.answer
    assert caplog.text.count("the KV that was handed over ends") == 1


def test_a_corrupt_layer_in_mid_stream(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    wire.flips_at = 2
    alone, turn, _ = both(wire)
    assert turn.answer == alone.answer
    assert caplog.text.count("the KV that was handed over ends") == 1
