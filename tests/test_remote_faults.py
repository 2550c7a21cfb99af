"""Clients of a remote that fail in ways of their own: none harms a run, leaks a thread, or shows a secret."""

from __future__ import annotations

import ctypes
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvhelp import Walker, small_cache, small_identity, small_layout
from kvtide.blocks import KEY
from kvtide.cache import TieredCache
from kvtide.cli_remote import measure
from kvtide.errors import ConfigError
from kvtide.io.drive import SimDrive
from kvtide.io.ops import PAGE_BYTES
from kvtide.tiers.client import RemoteDown
from kvtide.tiers.contract import CORRUPT, FAILED, MISSING, OK, Statuses
from kvtide.tiers.dial import dial, without_secrets
from kvtide.tiers.file import FileTier
from kvtide.tiers.mooncake import MooncakeClient, MooncakeOptions
from kvtide.tiers.remote import RemoteOptions, RemoteTier
from kvtide.tiers.stacked import StackedTier
from simkv import MODEL, Groups, group_key, sim_tier

KEYS = [group_key(number) for number in range(4)]


class HangingStore:
    """A store whose set-up comes back when it is let go."""

    may_return = threading.Event()

    def setup(self, *_: object) -> int:
        self.may_return.wait()
        return 0


class RefusingStore:
    def setup(self, *_: object) -> int:
        return -1


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvtide-mooncake"]


def connect(monkeypatch: pytest.MonkeyPatch, store: type[Any]) -> None:
    package = SimpleNamespace(MooncakeDistributedStore=store)
    monkeypatch.setitem(sys.modules, "mooncake", SimpleNamespace(store=package))
    monkeypatch.setitem(sys.modules, "mooncake.store", package)
    MooncakeClient(MooncakeOptions("host:1", "http://host/metadata", timeout_s=0.01))


def test_connects_that_fail_leave_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = workers()
    with pytest.raises(RemoteDown, match="code -1"):
        connect(monkeypatch, RefusingStore)
    with pytest.raises(RemoteDown, match="no answer"):
        connect(monkeypatch, HangingStore)
    for _ in range(3):
        with pytest.raises(RemoteDown, match="has not come back"):
            connect(monkeypatch, HangingStore)
    HangingStore.may_return.set()
    for thread in set(workers()) - set(before):
        thread.join(10)
    assert set(workers()) <= set(before)
    with pytest.raises(RemoteDown, match="code -1"):  # asked again
        connect(monkeypatch, RefusingStore)


class DictClient:
    """A client over a dict; `broken` is raised by every call, `failing` names cannot be given."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.failing: set[str] = set()
        self.broken: Exception | None = None

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken

    def exists(self, names: list[str]) -> np.ndarray:
        self._check()
        return np.array([name in self.values for name in names])

    def put(self, names: list[str], values: Any) -> Statuses:
        self._check()
        for index, name in enumerate(names):
            payload = ctypes.string_at(int(values.addresses[index]), int(values.lengths[index]))
            self.values[name] = values.headers[index].tobytes() + payload
        return np.full(len(names), OK, np.uint8)

    def get(self, names: list[str], values: Any) -> Statuses:
        self._check()
        statuses = np.full(len(names), MISSING, np.uint8)
        width = values.headers.shape[1]
        for index, name in enumerate(names):
            raw = self.values.get(name)
            if name in self.failing:
                statuses[index] = FAILED
            elif raw is not None and len(raw) == width + int(values.lengths[index]):
                values.headers[index] = np.frombuffer(raw[:width], np.uint8)
                ctypes.memmove(int(values.addresses[index]), raw[width:], len(raw) - width)
                statuses[index] = OK
        return statuses

    def remove(self, names: list[str]) -> None:
        self._check()
        for name in names:
            self.values.pop(name, None)

    def close(self) -> None: ...


def over(client: DictClient, *, zstd_level: int = 0) -> tuple[RemoteTier, Groups]:
    layout = small_layout(block_tokens=64, group_blocks=16)
    options = RemoteOptions(zstd_level=zstd_level, rest_ns=0)
    return RemoteTier(lambda: client, layout, bytes(32), options), Groups(layout)


def as_keys(keys: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(keys), KEY)


def test_only_what_is_corrupt_is_removed_as_corrupt() -> None:
    client = DictClient()
    tier, groups = over(client)
    assert groups.write(tier, KEYS, [1] * 4) == [OK] * 4
    names = [tier.envelope.manifest_names(as_keys([key]))[0][:-1] + "1" for key in KEYS]
    client.values[names[0]] = client.values[names[0]][:-1] + b"?"
    del client.values[names[1]]
    client.failing = {names[2]}
    pairs = [(row, 1) for row in range(4)]
    assert groups.read(tier, KEYS, pairs)[0] == [CORRUPT, MISSING, FAILED, OK]
    assert tier.lookup(as_keys(KEYS)).tolist() == [False, False, True, True]
    stats = tier.stats()
    assert (stats.num_corrupt, stats.num_failed) == (1, 2)
    assert stats.dropped == {"corrupt": 1, "evicted": 1}
    client.failing.clear()
    assert groups.read(tier, KEYS, pairs)[0] == [MISSING, MISSING, OK, OK]


def test_values_that_cannot_be_unpacked_here_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zstandard")
    client = DictClient()
    packing, groups = over(client, zstd_level=3)
    assert groups.write(packing, KEYS[:2], [1] * 2) == [OK] * 2
    tier, _ = over(client)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    before = dict(client.values)
    assert not len(tier.find(as_keys(KEYS[:2])))
    assert groups.read_group(tier, KEYS[0])[0] == [MISSING] * 3
    assert client.values == before
    assert tier.stats().num_failed > 0
    assert not tier.breaker.is_open
    assert groups.write(tier, KEYS[:1], [2]) == [OK]
    assert groups.read_group(tier, KEYS[0])[0] == [OK] * 3


def test_no_error_of_a_client_comes_out(caplog: pytest.LogCaptureFixture) -> None:
    client = DictClient()
    tier, groups = over(client)
    groups.write(tier, KEYS, [1] * 4)
    client.get = None  # type: ignore[assignment]
    client.broken = TypeError("an unexpected argument")
    tier.lookup(as_keys(KEYS))
    assert "TypeError: an unexpected argument" in caplog.text
    client.broken = None  # the probe goes well, what follows does not
    assert groups.read_group(tier, group_key(9))[0] == [MISSING] * 3
    assert not len(tier.find(as_keys(KEYS)))
    client.put = None  # type: ignore[assignment]
    assert groups.write(tier, KEYS, [1] * 4) == [FAILED] * 4
    client.remove = None  # type: ignore[assignment]
    tier.drop(as_keys(KEYS))
    assert tier.breaker.is_open
    refused = RemoteTier(lambda: int("no client"), small_layout(), bytes(32))  # type: ignore[arg-type,return-value]
    assert not refused.lookup(as_keys(KEYS)).any()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("valkey://host?db=abc", "database"),
        ("valkey://host/abc", "database"),
        ("valkey://host/0?ssl_ca_certs=/x", "type valkeys://"),
        ("unix:///s?ssl_cert_reqs=none", "type valkeys://"),
        ("valkeys://host/0?ssl_cert_reqs=maybe", "type none, optional"),
    ],
)
def test_knobs_are_read_before_anything_connects(url: str, says: str) -> None:
    pytest.importorskip("valkey")
    with pytest.raises(ConfigError, match=says):
        dial(url)


@pytest.mark.parametrize("password", ["sec/ret", "12/ret", "sec@ret", "1?ret=ret", "1?ret", "1#ret", "sec/@ret", "ret"])
def test_no_part_of_a_password_is_shown(password: str) -> None:
    pytest.importorskip("valkey")
    url = f"valkey://me:{password}@host:1/0"
    try:
        shown = dial(url).name
    except ConfigError as error:
        shown = str(error)
        assert "%2F" in shown
    assert "ret" not in shown
    assert "sec" not in shown
    assert without_secrets(f"run --remote {url} --ask me@home") == "run --remote valkey://host:1/0 --ask me@home"


class SlowClient(DictClient):
    """Times out on every get, and then on probes, if there are any that shall fail."""

    num_probes, is_late = 0, False

    def get(self, names: list[str], values: Any) -> Statuses:
        del names, values
        self.is_late = True
        raise RemoteDown("no answer in time")

    def exists(self, names: list[str]) -> np.ndarray:
        if self.is_late and self.num_probes:
            raise RemoteDown("no answer in time")
        return super().exists(names)


@pytest.mark.parametrize("num_probes", [0, 1], ids=["answers again", "stays down"])
def test_a_check_that_timed_out_leaves_nothing_or_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], num_probes: int
) -> None:
    client = SlowClient()
    client.num_probes = num_probes

    def opened(_url: str, layout: Any, digest: bytes, *, num_groups: int) -> RemoteTier:
        return RemoteTier(lambda: client, layout, digest, RemoteOptions(num_groups, rest_ns=1_000_000))

    monkeypatch.setattr("kvtide.cli_remote.open_remote", opened)
    assert not measure("", 64 << 10, 4096).equal
    said = capsys.readouterr().err
    if num_probes:
        assert client.values
        prefix = next(iter(client.values)).partition("{")[0]
        assert f"remove the names {prefix}*" in said
    else:
        assert not client.values
        assert not said


def test_a_near_group_that_was_lost_lies_far_and_gets_a_near_copy_again() -> None:
    drive, layout, client, tokens = SimDrive(MODEL), small_layout(), DictClient(), list(range(60))

    def opened() -> tuple[FileTier, TieredCache]:
        near = sim_tier(drive, layout, 12)
        tier = StackedTier(near, RemoteTier(lambda: client, layout, small_identity(layout).digest()))
        return near, small_cache(layout, tier, tokens=256, dram_groups=16)

    _, cache = opened()
    Walker(cache).step([cache.open(tokens)], [tokens])
    cache.close()
    near, cache = opened()
    num, unit = near.stats().num_groups, cache.match(tokens).units[1]
    slot = near._slot_of[cache.ledger.stored_key[unit].tobytes()]
    file = drive.lookup(near._io._fd).file
    at = PAGE_BYTES + slot * layout.slot_bytes + layout.fragment_offset[1] + 10
    file.write(at, bytes([file.read(at, 1)[0] ^ 1]))
    sequence = cache.open([*tokens, 60])
    Walker(cache).step([sequence], [[60]])  # nothing is lost: the far tier has it
    assert near.stats().num_corrupt == 1
    assert cache.ledger.is_far[sequence.table.units].tolist() == [index == 1 for index in range(len(sequence.units))]
    cache.flush()
    assert not cache.ledger.is_far[sequence.table.units].any()
    assert near.stats().num_groups == num
    cache.close()


def test_small_commands_are_sent_together_and_nothing_is_moved() -> None:
    from kvtide.tiers.valkey import SEND_BYTES_MAX, _together

    view = memoryview(bytes(5))
    pieces = [b"ab", b"cd", view, b"ef", b"x" * SEND_BYTES_MAX, b"gh"]
    found = _together(list(pieces))
    assert [len(one) for one in found] == [4, 5, 2, SEND_BYTES_MAX, 2]
    assert found[1] is view
    assert b"".join(found) == b"".join(pieces)
    assert _together([]) == []
