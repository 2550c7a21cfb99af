"""Store files that somebody damaged or forged: right bytes, a miss or a named error; no crash, no hang, no growth."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostile import FILES, HostileStore
from kvtide.errors import KvtideError
from kvtide.io.ops import PAGE_BYTES
from kvtide.tiers.checkpoint import _HEAD
from kvtide.tiers.departures import RECORD
from kvtide.tiers.envelope import HEADER, HEADER_BYTES
from kvtide.tiers.namespace import _SUPER, cipher_for
from kvtide.tiers.remote import RemoteTier
from test_remote_faults import DictClient

NUMBERS = (0, 1, 2**15, 2**31 - 1, 2**32 - 1, 2**48, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@functools.cache
def store(*, is_encrypted: bool, is_clean: bool = True) -> HostileStore:
    return HostileStore(is_encrypted=is_encrypted, is_clean=is_clean)


def put(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


def fields_of(one: HostileStore):
    """File, offset and size of every field there is, the first slot, record and header for all of them."""
    for name in _SUPER.names:
        yield "data.kvt", _SUPER.fields[name][1], _SUPER.fields[name][0].itemsize
    header = one.codec._dtype
    for name in header.names:
        size = header.fields[name][0].itemsize
        if size:
            yield "data.kvt", PAGE_BYTES + header.fields[name][1], size
            yield "checkpoint.kvt", 24 + 8 + 24 + header.fields[name][1], size
    for name in _HEAD.names:
        yield "checkpoint.kvt", _HEAD.fields[name][1], _HEAD.fields[name][0].itemsize
    for at in (24, 32, 40):  # how many slots, and the first two of their numbers
        yield "checkpoint.kvt", at, 8
    for name in RECORD.names:
        yield "departures.kvt", RECORD.fields[name][1], RECORD.fields[name][0].itemsize


@pytest.mark.parametrize(("is_encrypted", "is_forged"), [(False, False), (False, True), (True, True)])
def test_every_field_of_every_file(is_encrypted, is_forged):
    rng = np.random.default_rng(5)
    for file, at, size in fields_of(store(is_encrypted=is_encrypted)):
        one = store(is_encrypted=is_encrypted, is_clean=file != "data.kvt")
        number = NUMBERS[int(rng.integers(len(NUMBERS)))]
        new = (number % (1 << 8 * min(size, 8))).to_bytes(min(size, 8), "little")
        one.check(one.files | {file: put(one.files[file], at, new)}, is_forged=is_forged)


@QUICK
@given(st.data())
def test_any_damage_to_any_file(data):
    one = store(is_encrypted=data.draw(st.booleans()), is_clean=data.draw(st.booleans()))
    files = dict(one.files)
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(FILES))
        content = files.get(name, b"")
        how = data.draw(st.sampled_from(("bytes", "number", "cut", "longer", "gone", "all")))
        at = data.draw(st.integers(0, min(len(content), 2 * PAGE_BYTES)))
        if how == "bytes":
            files[name] = put(content, at, data.draw(st.binary(min_size=1, max_size=16)))
        elif how == "number":
            files[name] = put(content, at // 4 * 4, data.draw(st.sampled_from(NUMBERS)).to_bytes(8, "little"))
        elif how == "cut":
            files[name] = content[:at]
        elif how == "longer":
            files[name] = content + bytes(at)
        elif how == "gone":
            files.pop(name, None)
        else:
            files[name] = data.draw(st.binary(max_size=64))
    one.check(files, is_forged=data.draw(st.booleans()))


@pytest.mark.parametrize(
    "change",
    [
        {"layers": [[0, 1 << 32, 1 << 32, 1, 0]]},
        {"layers": [[n, 1 << 31, 0, 1, 0] for n in range(512)], "block_tokens": 1 << 16, "group_blocks": 64},
        {"model": "../../etc/passwd"},
        {"model": "\x1b[2J<script>alert(1)</script>"},
        {"facts": {str(n): "x" for n in range(4_000)}},
        {"layers": [[0, "9" * 400, 0, 1, 0]]},
        {"encryption": "aes-256-gcm key ../../../../../"},
        {"encryption": ["aes-256-gcm"]},
        {"facts": {"kind": 3}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_identities_that_promise_the_impossible(change):
    """Told under the namespace's own name, and under the name that the lie itself has."""
    one = store(is_encrypted=False)
    told = json.loads(one.files["identity.json"]) | change
    one.check(one.files | {"identity.json": json.dumps(told).encode()}, is_forged=True)
    try:
        lie = type(one.identity).from_json(json.dumps(told))
    except KvtideError:
        return
    twin = HostileStore(is_encrypted=False)
    twin.name = lie.digest().hex()[:32]
    row = np.frombuffer(one.files["data.kvt"][: _SUPER.itemsize], _SUPER).copy()
    row["header_bytes"], row["slot_bytes"] = lie.slot().header_bytes, min(lie.slot().slot_bytes, 2**63)
    row["num_slots"], row["identity"] = 1 << 40, np.frombuffer(lie.digest(), "V32")
    data = put(one.files["data.kvt"], 0, row.tobytes())
    twin.check(one.files | {"identity.json": json.dumps(told).encode(), "data.kvt": data}, is_forged=True)


def test_a_superblock_of_more_slots_than_the_disk_has():
    one = store(is_encrypted=False, is_clean=False)
    at = _SUPER.fields["num_slots"][1]
    for number in (1 << 40, 1 << 50, 2**63 - 1):
        one.check(
            one.files | {"data.kvt": put(one.files["data.kvt"], at, number.to_bytes(8, "little"))}, is_forged=True
        )


# Values of a remote


@QUICK
@given(st.data())
def test_any_value_of_a_remote(data):
    is_encrypted = data.draw(st.booleans())
    one, client = store(is_encrypted=is_encrypted), DictClient()

    def tier():
        return RemoteTier(
            lambda: client, one.layout, one.identity.digest(), cipher=cipher_for(one.identity, one.master)
        )

    key = b"k" * 32
    assert one.groups.write(tier(), [key], [0]) == [0]
    for _ in range(data.draw(st.integers(1, 2))):
        name = data.draw(st.sampled_from(sorted(client.values)))
        content = client.values[name]
        how = data.draw(st.sampled_from(("field", "bytes", "cut", "longer", "other")))
        if how == "field":
            kind, at = HEADER.fields[data.draw(st.sampled_from(HEADER.names))]
            new = data.draw(st.sampled_from(NUMBERS)).to_bytes(8, "little")[: kind.itemsize]
            content = put(content, at, new)
        elif how == "bytes":
            at = data.draw(st.integers(0, min(max(0, len(content) - 1), HEADER_BYTES + 256)))
            content = put(content, at, data.draw(st.binary(min_size=1, max_size=8)))[: len(content)]
        elif how == "cut":
            content = content[: data.draw(st.integers(0, max(0, len(content) - 1)))]
        elif how == "longer":
            content += bytes(data.draw(st.integers(1, 4096)))
        else:
            content = client.values[data.draw(st.sampled_from(sorted(client.values)))]
        client.values[name] = content
    statuses, parts = one.groups.read_group(tier(), key)
    if statuses == [0] * len(statuses):
        assert one.groups.version_of(key, parts, [0]) == 0
