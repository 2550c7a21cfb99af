"""The remote tier on a real server: foreign, short, stale and flipped values, a server that dies, hangs or is full."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from inprocess import kvtide
from kvhelp import Walker, small_cache, small_layout
from kvtide.blocks import KEY
from kvtide.errors import ConfigError
from kvtide.io.ops import address_of, aligned_buffer
from kvtide.spec import SlotLayout
from kvtide.tiers.breaker import Breaker
from kvtide.tiers.client import Values
from kvtide.tiers.contract import CORRUPT, FAILED, FULL, MISSING, OK
from kvtide.tiers.dial import dial, without_secrets
from kvtide.tiers.envelope import PIECE_BYTES
from kvtide.tiers.memory import MemoryTier
from kvtide.tiers.remote import RemoteTier
from kvtide.tiers.stacked import StackedTier
from remotes import Redis, free_port, mooncake, redis, remote_tier
from simkv import Groups, group_key

pytest.importorskip("valkey")
KEYS = [group_key(number) for number in range(4)]
TOKENS = np.random.default_rng(3).integers(0, 1000, 93).tolist()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    """A server for tests that leave it running."""
    with redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared: Redis) -> Iterator[Redis]:
    shared.plain().flushall()  # a sender that was given up may have come late
    yield shared
    shared.plain().flushall()


def one(server: Redis, layout: SlotLayout | None = None, more: str = "") -> tuple[RemoteTier, Groups]:
    layout = layout or small_layout()
    return remote_tier(server.url + more, layout), Groups(layout)


def as_keys(keys: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(keys), KEY)


def name_of(tier: RemoteTier, key: bytes, what: str) -> str:
    return tier.envelope.manifest_names(as_keys([key]))[0][:-1] + what


# What lies under our names


def flip(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


@pytest.mark.parametrize("is_fresh", [False, True], ids=["own", "other process"])
@pytest.mark.parametrize(
    ("what", "change", "expected"),
    [
        ("1", lambda raw: flip(raw, len(raw) - 1), CORRUPT),
        ("1", lambda raw: flip(raw, 100), CORRUPT),
        ("1", lambda raw: flip(raw, 0), MISSING),  # without the magic it is not ours
        ("1", lambda raw: raw[:-1], MISSING),
        ("1", lambda raw: raw[:64], MISSING),
        ("1", lambda _: b"somebody else's", MISSING),
        ("1", lambda _: b"", MISSING),
        ("1", lambda _: None, MISSING),
        ("m", lambda raw: flip(raw, 150), MISSING),
        ("m", lambda _: b"foreign", MISSING),
    ],
)
def test_wrong_values_are_misses_and_go(
    server: Redis, what: str, change: Any, expected: int, *, is_fresh: bool
) -> None:
    tier, groups = one(server)
    groups.write(tier, KEYS, [1] * 4)
    plain, name = server.plain(), name_of(tier, KEYS[0], what)
    value = change(plain.get(name))
    plain.delete(name) if value is None else plain.set(name, value)
    tier = one(server)[0] if is_fresh else tier
    statuses, _ = groups.read_group(tier, KEYS[0])
    if what == "m":
        assert set(statuses) == ({expected} if is_fresh else {OK})  # a manifest that was read before is known
    else:
        assert statuses == [OK, expected, OK]
        assert tier.lookup(as_keys(KEYS)).tolist() == [False, True, True, True]
        assert tier.stats().num_corrupt == (expected == CORRUPT)
    assert groups.write(tier, KEYS[:1], [2]) == [OK]
    statuses, parts = groups.read_group(tier, KEYS[0])
    assert groups.version_of(KEYS[0], parts, [1, 2]) == 2


def test_a_value_of_another_kind_group_or_fragment_is_a_miss(server: Redis) -> None:
    tier, groups = one(server)
    groups.write(tier, KEYS, [1] * 4)
    plain = server.plain()
    plain.delete(name_of(tier, KEYS[0], "0"))
    plain.rpush(name_of(tier, KEYS[0], "0"), "a list")
    plain.copy(name_of(tier, KEYS[2], "0"), name_of(tier, KEYS[1], "0"), replace=True)
    plain.copy(name_of(tier, KEYS[2], "1"), name_of(tier, KEYS[2], "2"), replace=True)
    pairs = [(row, part) for row in range(4) for part in range(3)]
    statuses, _ = groups.read(tier, KEYS, pairs)
    assert statuses == [MISSING, OK, OK, MISSING, OK, OK, OK, OK, MISSING, OK, OK, OK]
    assert tier.lookup(as_keys(KEYS)).tolist() == [False, False, False, True]


def test_identities_do_not_meet(server: Redis) -> None:
    tier, groups = one(server)
    groups.write(tier, KEYS, [1] * 4)
    other, _ = one(server, small_layout(split="kv"))
    assert not other.lookup(as_keys(KEYS)).any()


def test_of_two_writers_one_is_read_whole_or_none(server: Redis) -> None:
    (first, groups), (second, _), (reader, _) = (one(server) for _ in range(3))
    assert groups.write(first, KEYS[:1], [1]) == [OK]
    assert reader.find(as_keys(KEYS)).keys.tolist() == KEYS[:1]
    assert groups.write(second, KEYS[:1], [2]) == [OK]
    statuses, parts = groups.read_group(reader, KEYS[0])  # with the manifest of the first one in mind
    assert statuses == [OK] * 3
    assert groups.version_of(KEYS[0], parts, [1, 2]) == 2
    plain, name = server.plain(), name_of(first, KEYS[0], "1")
    theirs = plain.get(name)
    groups.write(first, KEYS[:1], [1])
    plain.set(name, theirs)  # as if the second had written its piece late
    statuses, _ = groups.read_group(reader, KEYS[0])
    assert statuses[1] == MISSING
    assert not reader.lookup(as_keys(KEYS[:1]))[0]


def test_large_fragments_go_in_pieces_and_compressed_values_are_read_by_all(server: Redis) -> None:
    layout = small_layout(block_tokens=64, group_blocks=64)
    assert layout.fragment_padded_bytes[0] > PIECE_BYTES
    packing, groups = one(server, layout, "?zstd=3")
    assert groups.write(packing, KEYS, [1] * 4) == [OK] * 4
    assert packing.stats().written_bytes < layout.slot_bytes
    plain, _ = one(server, layout)
    statuses, parts = groups.read_group(plain, KEYS[2])
    assert statuses == [OK] * 3
    assert groups.version_of(KEYS[2], parts, [1]) == 1
    raw = server.plain()
    raw.set(name_of(plain, KEYS[2], "1"), flip(raw.get(name_of(plain, KEYS[2], "1")), 140))
    assert groups.read_group(plain, KEYS[2])[0][0] == CORRUPT


# Servers that fail


def test_a_full_server_says_so_and_keeps_no_halves(tmp_path: Path) -> None:
    layout = small_layout(block_tokens=16, group_blocks=16)
    with redis(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server:
        tier, groups = one(server, layout)
        keys = [group_key(number) for number in range(24)]
        statuses = groups.write(tier, keys, [1] * len(keys))
        assert set(statuses) == {OK, FULL}
        names = {name.split(b":")[2] for name in server.plain().scan_iter("kvtide:*")}
        assert len(names) == statuses.count(OK)
        assert tier.lookup(as_keys(keys)).tolist() == [status == OK for status in statuses]
        assert tier.stats().num_full == statuses.count(FULL)
        assert not tier.breaker.is_open


def test_killed_server_is_left_alone_and_found_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvtide.remote")
    with redis(tmp_path) as server:
        tier, groups = one(server)
        groups.write(tier, KEYS, [1] * 4)
        server.kill()
        assert not tier.lookup(as_keys(KEYS)).any()
        assert tier.breaker.is_open
        assert set(groups.read_group(tier, KEYS[0])[0]) == {MISSING}
        assert groups.write(tier, KEYS, [1] * 4) == [FAILED] * 4
        tier.drop(as_keys(KEYS))
        server.start()
        wait_for(tier)
        assert not tier.lookup(as_keys(KEYS)).any()  # it lost them
        assert set(groups.read_group(tier, KEYS[0])[0]) == {MISSING}
        assert groups.write(tier, KEYS, [2] * 4) == [OK] * 4
        assert groups.read_group(tier, KEYS[0])[0] == [OK] * 3
    said = [record.message for record in caplog.records]
    assert len(said) == 2
    assert "going on without it" in said[0]
    assert "answers again" in said[1]


def wait_for(tier: RemoteTier) -> None:
    """Ask until the remote is no longer left alone."""
    for _ in range(2000):
        tier.lookup(as_keys(KEYS[:1]))
        if not tier.breaker.is_open:
            return
        tier.breaker._until_ns = 0
    raise AssertionError("the remote did not come back")


def test_a_restart_between_two_calls_goes_unnoticed(tmp_path: Path) -> None:
    with redis(tmp_path) as server:
        tier, groups = one(server)
        groups.write(tier, KEYS, [1] * 4)
        server.kill()
        server.start()
        assert groups.write(tier, KEYS, [2] * 4) == [OK] * 4
        assert tier.breaker.num_opened == 0


def test_hung_server_is_asked_once_a_rest(tmp_path: Path) -> None:
    """Calls are counted, not timed: one time-out, then nothing before the rest is over."""
    now, asked = [0], []
    with redis(tmp_path) as server:
        layout = small_layout()
        dialled = dial(server.url + "?timeout_s=0.05")
        tier = RemoteTier(dialled.connect, layout, b"\0" * 32, now_ns=lambda: now[0])
        groups = Groups(layout)
        groups.write(tier, KEYS, [1] * 4)
        guarded = tier._client._guarded
        tier._client._guarded = lambda call: (asked.append(1), guarded(call))[1]
        server.hang()
        assert not tier.lookup(as_keys(KEYS)).any()
        for _ in range(50):
            assert groups.write(tier, KEYS, [2] * 4) == [FAILED] * 4
            assert not tier.lookup(as_keys(KEYS)).any()
        assert len(asked) == 1
        now[0] += 1_500_000_000
        assert not tier.lookup(as_keys(KEYS)).any()  # one probe
        assert not tier.lookup(as_keys(KEYS)).any()
        assert len(asked) == 2
        server.wake()
        now[0] += 10_000_000_000
        assert groups.read_group(tier, KEYS[3])[0] == [OK] * 3
        assert not tier.breaker.is_open


def test_rests_grow_to_a_cap_and_begin_anew() -> None:
    now = [0]
    breaker = Breaker("remote", lambda: now[0], rest_ns=10, rest_ns_max=45)
    for rest in (10, 20, 40, 45, 45):
        breaker.fail("gone")
        now[0] += rest - 1
        assert breaker.is_resting()
        now[0] += 1
        assert not breaker.is_resting()
    breaker.succeed()
    breaker.fail("gone")
    now[0] += 10
    assert not breaker.is_resting()
    assert breaker.num_opened == 2


def test_a_server_that_refuses_is_left_alone(tmp_path: Path) -> None:
    with redis(tmp_path, "--requirepass", "secret") as server:
        tier, groups = one(server)
        assert groups.write(tier, KEYS[:1], [1]) == [FAILED]
        assert tier.breaker.is_open
        tier, groups = one(server, more="?password=secret")
        assert groups.write(tier, KEYS[:1], [1]) == [OK]


def test_tls_is_spoken_and_a_stranger_is_not_trusted(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed: no certificate can be made")
    key, certificate, port = tmp_path / "key", tmp_path / "certificate", free_port()
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
               "-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost",
               "-addext", "subjectAltName=IP:127.0.0.1"]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    tls = ("--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key))
    with redis(tmp_path, *tls, "--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no"):
        layout = small_layout()
        url = f"valkeys://127.0.0.1:{port}/0"
        tier = remote_tier(f"{url}?ssl_ca_certs={certificate}", layout)
        assert Groups(layout).write(tier, KEYS, [1] * 4) == [OK] * 4
        assert Groups(layout).read_group(tier, KEYS[1])[0] == [OK] * 3
        stranger = remote_tier(url, layout)
        assert not stranger.lookup(as_keys(KEYS)).any()
        assert stranger.breaker.is_open


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://host", "no scheme known"),
        ("valkey://", "no host"),
        ("unix://", "no path"),
        ("valkey://host:port", "no URL"),
        ("valkey://host/0?timeout_s=0", "timeout_s"),
        ("valkey://host/0?colour=red", "colour"),
        ("valkey://host/0?zstd=23", "zstd"),
        ("mooncake://host", "port"),
        ("mooncake://host:1", "metadata"),
    ],
)
def test_a_url_that_means_nothing_says_what_to_type(url: str, says: str) -> None:
    if url.startswith("mooncake"):
        pytest.importorskip("mooncake")
    with pytest.raises(ConfigError, match=says) as refused:
        dial(url)
    assert "type " in str(refused.value)


def test_no_secret_is_shown() -> None:
    url = "valkey://me:secret@host:1/0?timeout_s=1&password=secret"
    assert dial(url).name == "valkey://host:1/0"
    shown = without_secrets(f"kvtide run --remote {url} --ask 'me@home?'")
    assert shown == "kvtide run --remote valkey://host:1/0?timeout_s=1&password= --ask 'me@home?'"


# The cache over it


def walk(server_url: str, near: bool, tokens: list[int], *, tier: StackedTier | None = None) -> tuple[int, Any]:
    """Run `tokens` through a new cache with nothing local; how many were matched, and the use of its tiers."""
    layout = small_layout()
    tier = tier or StackedTier(
        MemoryTier(layout, 64 * layout.slot_bytes) if near else None, remote_tier(server_url, layout)
    )
    cache = small_cache(layout, tier, tokens=256)
    walker = Walker(cache)
    sequence = cache.open(tokens)
    matched = sequence.matched
    at = sequence.num_tokens
    while at < len(tokens):
        walker.step([sequence], [tokens[at : at + 31]])
        at = sequence.num_tokens
    cache.release(sequence)
    cache.close()
    tier.far.close()
    assert matched.remote_bytes + matched.dram_bytes == matched.num_tokens * layout.shape.bytes_per_token
    return matched.num_tokens, cache.usage()


@pytest.mark.parametrize("near", [False, True], ids=["remote alone", "over a near tier"])
def test_what_one_cache_writes_another_reads(server: Redis, near: bool) -> None:
    assert walk(server.url, near, TOKENS)[0] == 0
    assert walk(server.url, near, [*TOKENS, 7])[0] == len(TOKENS)  # the unfilled tail too
    assert walk(server.url, near, [*TOKENS, 7, 8, 9])[0] == len(TOKENS) + 1
    assert walk(server.url, near, TOKENS[:50] + [1001] * 30)[0] == 48
    assert walk(server.url, near, TOKENS[:41])[0] == 40
    assert walk(server.url, near, [1002] * 20)[0] == 0


def test_what_is_there_is_not_written_again(server: Redis) -> None:
    walk(server.url, near=True, tokens=TOKENS)
    _, usage = walk(server.url, near=True, tokens=[*TOKENS, 7])
    assert usage["remote"].num_groups <= 13
    assert usage["remote"].num_writes == 4  # the tail that grew: three pieces and a manifest


def test_lying_manifests_are_not_believed(server: Redis) -> None:
    layout = small_layout()
    walk(server.url, near=False, tokens=TOKENS)
    tier = remote_tier(server.url, layout)
    plain = server.plain()
    names = sorted(name for name in plain.scan_iter("kvtide:*m"))
    values = [plain.get(name) for name in names]
    for name, value in zip(names, values[1:] + values[:1], strict=True):
        plain.set(name, value)  # each says what is true of another group
    assert walk(server.url, near=False, tokens=[*TOKENS, 7])[0] == 0
    tier.close()


@pytest.mark.parametrize("when", ["before", "during"])
def test_an_outage_costs_nothing_but_the_matches(tmp_path: Path, when: str) -> None:
    layout = small_layout()
    with redis(tmp_path) as server:
        walk(server.url, near=True, tokens=TOKENS)
        near = MemoryTier(layout, 64 * layout.slot_bytes)
        far = remote_tier(server.url, layout, rest_ns=3_600_000_000_000)
        tier = StackedTier(near, far)
        if when == "during":
            assert far.lookup(np.zeros(1, KEY)).tolist() == [False]
        server.kill()
        assert walk("", near=True, tokens=TOKENS, tier=tier)[0] == 0
        assert near.stats().num_groups == 12, "the near tier has everything"
        assert far.breaker.num_opened == 1


def test_kv_lost_on_the_remote_is_computed_again(server: Redis) -> None:
    from kvtide.cache import LostKv

    layout = small_layout()
    walk(server.url, near=False, tokens=TOKENS)
    cache = small_cache(layout, StackedTier(None, remote_tier(server.url, layout)), tokens=256)
    walker, sequence = Walker(cache), cache.open([*TOKENS, 7])
    assert sequence.num_tokens == len(TOKENS)
    for name in server.plain().scan_iter("kvtide:*:1"):
        server.plain().delete(name)
    num_lost = 0
    while sequence.num_tokens <= len(TOKENS):
        try:
            walker.step([sequence], [[*TOKENS, 7][sequence.num_tokens :][:31]])
        except LostKv:
            num_lost += 1
            assert num_lost <= 3
            cache.heal(sequence)
    assert num_lost > 0
    cache.release(sequence)
    cache.close()
    assert walk(server.url, near=False, tokens=[*TOKENS, 7, 8])[0] == len(TOKENS) + 1


def test_what_was_read_far_is_near_from_then_on(server: Redis) -> None:
    layout = small_layout()
    walk(server.url, near=True, tokens=TOKENS)
    near, far = MemoryTier(layout, 64 * layout.slot_bytes), remote_tier(server.url, layout)
    cache = small_cache(layout, StackedTier(near, far), tokens=256, dram_groups=16)
    sequence = cache.open([*TOKENS, 7])
    assert sequence.matched.remote_bytes > 0
    Walker(cache).step([sequence], [[7]])
    assert near.stats().num_groups == 0
    cache.close()
    assert near.stats().num_groups >= 12
    assert cache.num_refused == 0
    far.close()


def test_a_full_near_tier_gives_up_near_groups_not_far_ones(server: Redis) -> None:
    layout = small_layout()
    walk(server.url, near=True, tokens=TOKENS)
    near, far = MemoryTier(layout, 6 * layout.slot_bytes), remote_tier(server.url, layout)
    cache = small_cache(layout, StackedTier(near, far), tokens=256, dram_groups=14)
    assert cache.match(TOKENS).num_tokens == len(TOKENS)  # known, and least recently used
    walker = Walker(cache)
    for start in (3000, 4000):
        sequence = cache.open(list(range(start, start + 40)))
        walker.step([sequence], [list(range(start, start + 40))])
        cache.drain()
        cache.release(sequence)
    cache.flush()
    assert cache.num_refused == 0
    assert near.stats().num_groups == 6
    cache.close()
    far.close()


def test_units_of_far_groups_make_room_for_others(server: Redis) -> None:
    layout = small_layout()
    other = [token + 2000 for token in TOKENS]
    for tokens in (TOKENS, other):
        walk(server.url, near=False, tokens=tokens)
    far = remote_tier(server.url, layout, num_groups=8)
    cache = small_cache(layout, StackedTier(None, far), tokens=256, dram_groups=4)
    for tokens in (TOKENS, other, TOKENS, other):
        assert cache.match(tokens).num_tokens == len(TOKENS)
    cache.close()


def test_reads_come_from_near_and_the_rest_from_far(server: Redis) -> None:
    layout = small_layout()
    near, groups = MemoryTier(layout, 3 * layout.slot_bytes), Groups(layout)
    tier = StackedTier(near, remote_tier(server.url, layout))
    assert groups.write(tier, KEYS, [1] * 4) == [OK, OK, OK, FULL]
    tier.drain()
    assert tier.lookup(as_keys(KEYS)).tolist() == [True] * 3 + [False], "who has no room makes some and comes again"
    near.drop(as_keys(KEYS[:1]))
    assert groups.write(tier, KEYS[3:], [1]) == [OK]
    tier.drain()
    near.drop(as_keys(KEYS[3:]))
    assert tier.lookup(as_keys([*KEYS, group_key(9)])).tolist() == [True] * 4 + [False]
    far_reads = tier.far.stats().num_reads
    statuses, parts = groups.read(tier, KEYS, [(row, part) for row in (1, 0, 3, 2) for part in range(3)])
    assert statuses == [OK] * 12
    for at, key in enumerate((KEYS[1], KEYS[0], KEYS[3], KEYS[2])):
        assert groups.version_of(key, parts[3 * at : 3 * at + 3], [1]) == 1
    assert tier.far.stats().num_reads == far_reads + 6
    tier.drop(as_keys(KEYS))
    assert tier.lookup(as_keys(KEYS)).all(), "what is forgotten here stays there for others"
    server.plain().flushall()
    assert groups.read_group(tier, KEYS[3])[0] == [MISSING] * 3
    assert groups.write(tier, KEYS[:3], [2] * 3) == [OK] * 3
    assert {name: stats.num_groups for name, stats in tier.by_tier().items()} == {"file": 3, "remote": 3}


# Mooncake


def test_mooncake_keeps_the_contract_and_carries_a_cache() -> None:
    with mooncake() as url:
        layout = small_layout()
        tier, groups = remote_tier(url, layout), Groups(layout)
        assert groups.write(tier, KEYS, [1] * 4) == [OK] * 4
        assert groups.write(tier, KEYS[:1], [2]) == [OK]
        assert tier.lookup(as_keys([*KEYS, group_key(9)])).tolist() == [True] * 4 + [False]
        for key, version in zip(KEYS, (2, 1, 1, 1), strict=True):
            statuses, parts = groups.read_group(tier, key)
            assert statuses == [OK] * 3
            assert groups.version_of(key, parts, [1, 2]) == version
        tier.drop(as_keys(KEYS[:2]))
        assert tier.lookup(as_keys(KEYS)).tolist() == [False, False, True, True]
        store = tier._client._store
        store.remove(name_of(tier, KEYS[2], "1"), True)
        store.put(name_of(tier, KEYS[2], "1"), b"foreign")
        assert groups.read_group(tier, KEYS[2])[0] == [OK, MISSING, OK]
        tier.close()
        hung = remote_tier(url + "&timeout_s=0.3", layout)
        assert hung.lookup(as_keys(KEYS)).tolist() == [False, False, False, True]
        masters = [one for one in psutil.Process().children(recursive=True) if "mooncake_master" in one.name()]
        suspend(masters[-1])
        assert not hung.lookup(as_keys(KEYS)).any()
        assert hung.breaker.is_open
        assert groups.write(hung, KEYS[:1], [3]) == [FAILED]
        masters[-1].resume()
        while hung.breaker.is_open:  # the late call comes back, then a probe goes well
            time.sleep(0.01)
            hung.lookup(as_keys(KEYS))
        assert groups.read_group(hung, KEYS[3])[0] == [OK] * 3
        hung.close()
        assert walk(url, near=False, tokens=TOKENS)[0] == 0
        assert walk(url, near=True, tokens=[*TOKENS, 7])[0] == len(TOKENS)


def test_mooncake_moves_thousands_of_small_values_and_leaves_no_ports_taken() -> None:
    num, size = 3000, 512  # of one call: more transfers than the library takes at once
    with mooncake() as url:
        client = dial(url).connect()
        names, memory = [f"small-{number}" for number in range(num)], aligned_buffer(2 * num * size)
        stored, got = memory.reshape(2, num, size)
        stored[:] = np.random.default_rng(1).integers(0, 256, (num, size), np.uint8)
        lengths, waiting = np.full(num, size, np.int64), ports_waiting()
        at = [address_of(rows) + size * np.arange(num, dtype=np.uint64) for rows in (stored, got)]
        assert (client.put(names, Values(np.zeros((num, 8), np.uint8), at[0], lengths)) == OK).all()
        assert (client.get(names, Values(np.zeros((num, 8), np.uint8), at[1], lengths)) == OK).all()
        client.close()
        assert (got == stored).all()
        assert ports_waiting() - waiting < num / 10


def suspend(process: psutil.Process) -> None:
    """Stop a process, and wait until each of its threads is: one that works may answer once more."""
    process.suspend()
    tasks = Path(f"/proc/{process.pid}/task")
    while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.iterdir()):
        time.sleep(0.005)


def test_a_master_that_is_stopped_is_killed_with_those_who_started_it() -> None:
    with mooncake():
        (master,) = [one for one in psutil.Process().children(recursive=True) if "mooncake_master" in one.name()]
        suspend(master)
    assert not master.is_running()


def ports_waiting() -> int:
    """Return how many ports this machine holds back after a connection was closed."""
    return sum(line.split()[3] == "06" for line in Path("/proc/net/tcp").read_text().splitlines()[1:])


# The command


def test_check_says_how_fast_and_whether_equal(server: Redis) -> None:
    words = ("remote", "check", server.url, "--size", "2MiB", "--fragment", "64KiB")
    done = kvtide(*words, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["equal"] is True
    assert report["groups"] * report["group_bytes"] == 2 << 20
    assert report["put_bytes_per_s"] > 0
    assert report["get_bytes_per_s"] > 0
    assert not list(server.plain().scan_iter("kvtide:*")), "nothing is left behind"
    assert "bytes equal" in kvtide(*words).stdout


def test_check_of_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = kvtide("remote", "check", f"unix://{tmp_path}/none", "--json")
    assert done.returncode == 1
    assert "does not answer" in done.stderr
    for words in (("check", "ftp://host"), ("up", "redis"), ("check", "unix:///s", "--size", "1KiB")):
        done = kvtide("remote", *words)
        assert done.returncode == 2
        assert "type " in done.stderr
