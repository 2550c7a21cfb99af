"""Encryption at rest: what a store's files and a remote's values hold, what still comes back, and what does not."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inprocess import kvtide
from kvhelp import small_identity
from kvtide import ConfigError
from kvtide.blocks import KEY
from kvtide.chunks import ChunkOptions, ChunkStore
from kvtide.errors import UnsupportedError
from kvtide.io.ops import PAGE_BYTES, address_of, aligned_buffer
from kvtide.spec import Dtype, Identity, KVShape, LayerShape, SlotLayout
from kvtide.tiers.cipher import MasterKey
from kvtide.tiers.contract import CORRUPT, MISSING, OK
from kvtide.tiers.inspect import list_namespaces
from kvtide.tiers.namespace import OpenNamespace, cipher_for, open_namespace
from kvtide.tiers.remote import RemoteOptions, RemoteTier
from kvtide.tiers.verify import verify_namespace
from simkv import Groups, group_bytes, group_key
from test_remote_faults import DictClient

LAYER = LayerShape(k_bytes=256, v_bytes=256, num_heads=2)
SHAPE = KVShape(dtype=Dtype.BF16, layers=(LAYER,) * 3, layer_index=(0, 1, 2))
LAYOUT = SlotLayout(SHAPE, 4, 2, is_encrypted=True)
MASTER, OTHER = MasterKey(bytes(range(32))), MasterKey(bytes(32))
GROUPS = Groups(LAYOUT)
KEYS = [group_key(name) for name in range(5)]


def identity(master: MasterKey | None = MASTER) -> Identity:
    return replace(small_identity(LAYOUT), encryption=master.name if master else "")


def open_encrypted(root: Path, master: MasterKey = MASTER, *, is_packed: bool = False) -> OpenNamespace:
    capacity = PAGE_BYTES + 8 * LAYOUT.slot_bytes
    return open_namespace(
        root, identity(master), LAYOUT, capacity_bytes=capacity, master=master, is_packed=is_packed, engine="threads"
    )


def all_bytes(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file())


def check_whole(tier, keys=KEYS):
    for key in keys:
        statuses, parts = GROUPS.read_group(tier, key)
        assert statuses == [OK] * 3
        assert GROUPS.version_of(key, parts, [0]) == 0


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_clean", [False, True])
def test_what_is_stored_comes_back_and_nothing_of_it_is_in_the_files(tmp_path, is_packed, is_clean):
    opened = open_encrypted(tmp_path / "s", is_packed=is_packed)
    assert GROUPS.write(opened.tier, KEYS, [0] * 5) == [OK] * 5
    check_whole(opened.tier)
    opened.close()
    if not is_clean:
        (opened.path / "checkpoint.kvt").unlink()
    stored = all_bytes(tmp_path)
    for key in KEYS:
        assert not any(group_bytes(LAYOUT, key, 0, part).tobytes()[:32] in stored for part in range(3))
    assert list_namespaces(tmp_path / "s")[0].num_groups == 5
    assert MASTER.name in kvtide("store", "ls", str(tmp_path / "s")).stdout
    assert verify_namespace(opened.path).is_fine  # checksums tell flipped bits without the key
    again = open_encrypted(tmp_path / "s")
    check_whole(again.tier)
    again.close()


def test_no_two_writes_share_a_key(tmp_path):
    """The same group twice: once again in one opening, and once in another."""
    seen = []
    for _ in range(2):
        opened = open_encrypted(tmp_path / "s")
        for _ in range(2):
            assert GROUPS.write(opened.tier, KEYS[:1], [0]) == [OK]
            slot = int(opened.tier.slots_of(np.frombuffer(KEYS[0], KEY))[0])
            at = PAGE_BYTES + slot * LAYOUT.slot_bytes + LAYOUT.header_bytes
            seen.append((opened.path / "data.kvt").read_bytes()[at : at + LAYOUT.slot_bytes - LAYOUT.header_bytes])
        opened.close()
    assert len(set(seen)) == 4


def test_a_slot_put_in_the_place_of_another_does_not_decrypt(tmp_path, caplog):
    opened = open_encrypted(tmp_path / "s")
    GROUPS.write(opened.tier, KEYS[:2], [0, 0])
    opened.close()
    (opened.path / "checkpoint.kvt").unlink()
    file = opened.path / "data.kvt"
    raw, size = bytearray(file.read_bytes()), LAYOUT.slot_bytes
    first, second = slice(PAGE_BYTES, PAGE_BYTES + size), slice(PAGE_BYTES + size, PAGE_BYTES + 2 * size)
    raw[first], raw[second] = raw[second], raw[first]
    file.write_bytes(raw)
    again = open_encrypted(tmp_path / "s")
    with caplog.at_level(logging.WARNING):
        for key in KEYS[:2]:
            assert GROUPS.read_group(again.tier, key)[0] == [CORRUPT] * 3
            assert GROUPS.read_group(again.tier, key)[0] == [MISSING] * 3
    assert sum("does not decrypt" in record.message for record in caplog.records) == 1
    again.close()


def test_a_header_that_somebody_altered_does_not_decrypt(tmp_path):
    """Its checksum is made right again: anybody can. What it says of the group is authenticated with the fragments."""
    opened = open_encrypted(tmp_path / "s")
    GROUPS.write(opened.tier, KEYS[:1], [0])
    opened.tier.table.parents[0] = opened.tier.table.keys[0]
    assert GROUPS.read_group(opened.tier, KEYS[0])[0] == [CORRUPT] * 3
    GROUPS.write(opened.tier, KEYS[:1], [0])
    slot = opened.tier.slots_of(np.frombuffer(KEYS[0], KEY))
    opened.tier.table.num_tokens[slot] -= 1
    assert GROUPS.read_group(opened.tier, KEYS[0])[0] == [CORRUPT] * 3
    opened.close()


def test_another_key_finds_nothing_says_so_once_and_harms_nothing(tmp_path, caplog):
    opened = open_encrypted(tmp_path / "s")
    GROUPS.write(opened.tier, KEYS, [0] * 5)
    opened.close()
    with caplog.at_level(logging.WARNING):
        other = open_encrypted(tmp_path / "s", OTHER)
        assert GROUPS.read_group(other.tier, KEYS[0])[0] == [MISSING] * 3
        other.close()
        open_encrypted(tmp_path / "s", OTHER).close()
    assert [MASTER.name in record.message for record in caplog.records] == [True]
    again = open_encrypted(tmp_path / "s")
    check_whole(again.tier)
    again.close()


def test_a_key_that_the_identity_does_not_name_is_refused():
    for named, given in ((MASTER, OTHER), (MASTER, None), (None, MASTER)):
        with pytest.raises(ConfigError, match="--key-file"):
            cipher_for(identity(named), given)


def test_keys_of_blocks_cannot_be_guessed_without_the_key():
    digest = identity().digest()
    assert len({MASTER.root(digest), OTHER.root(digest), digest}) == 3


# Key files


def write_key(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_key_files(tmp_path):
    raw = os.urandom(32)
    made = MasterKey.read(write_key(tmp_path / "raw", raw))
    told = MasterKey.read(write_key(tmp_path / "hex", raw.hex().encode() + b"\n"))
    assert made.name == told.name
    assert raw.hex() not in made.name
    (tmp_path / "link").symlink_to(tmp_path / "raw")  # as secrets are mounted
    assert MasterKey.read(tmp_path / "link").name == made.name


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (b"", 0o600, "holds no key"),
        (b"x" * 31, 0o600, "holds no key"),
        (b"g" * 64, 0o600, "holds no key"),
        (b"0" * 5000, 0o600, "holds no key"),
        (b"k" * 32, 0o640, "chmod 600"),
        (b"k" * 32, 0o604, "chmod 600"),
    ],
)
def test_key_files_that_are_none(tmp_path, content, mode, words):
    with pytest.raises(ConfigError, match=words):
        MasterKey.read(write_key(tmp_path / "key", content, mode))


def test_no_key_file(tmp_path):
    with pytest.raises(ConfigError, match="umask 077"):
        MasterKey.read(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="no regular file"):
        MasterKey.read(tmp_path / "pipe")


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cryptography.exceptions", None)
    with pytest.raises(UnsupportedError, match=r"kvtide\[encrypt\]"):
        MasterKey(bytes(32))


# Remotes


def remote(client: DictClient, master: MasterKey = MASTER) -> RemoteTier:
    one = identity(master)
    return RemoteTier(lambda: client, LAYOUT, one.digest(), cipher=cipher_for(one, master))


def test_values_of_a_remote_are_encrypted_and_come_back_elsewhere():
    client = DictClient()
    assert GROUPS.write(remote(client), KEYS, [0] * 5) == [OK] * 5
    stored = b"".join(client.values.values())
    assert not any(group_bytes(LAYOUT, key, 0, part).tobytes()[:32] in stored for key in KEYS for part in range(3))
    check_whole(remote(client))
    assert GROUPS.read_group(remote(client, OTHER), KEYS[0])[0] == [MISSING] * 3


def test_encrypted_values_are_not_compressed():
    with pytest.raises(ConfigError, match="zstd"):
        RemoteTier(DictClient, LAYOUT, bytes(32), RemoteOptions(zstd_level=3), cipher=cipher_for(identity(), MASTER))


# Chunks of engines


def test_chunks_of_engines_are_encrypted(tmp_path):
    made = ChunkOptions(tmp_path, 1 << 20, 6000, "model", piece_bytes=(2000, 4000), master=MASTER)
    source, keys = aligned_buffer(8192), np.frombuffer(KEYS[0], KEY)
    source[:6000] = np.frombuffer(os.urandom(6000), np.uint8)
    addresses = np.array([[address_of(source), address_of(source) + 2000]], np.uint64)
    store = ChunkStore(made)
    assert store.store(keys, addresses).tolist() == [OK]
    store.close()
    assert source[:32].tobytes() not in all_bytes(tmp_path)
    again, wanted = ChunkStore(made), source.copy()
    source[:] = 0
    assert again.load(keys, addresses).tolist() == [OK]
    np.testing.assert_array_equal(source[:6000], wanted[:6000])
    again.close()


@pytest.mark.parametrize("master", [None, MASTER])
@pytest.mark.parametrize("pieces", [(1000, 1000, 1000), (2000, 4000), (4096, 8192), (5000,)])
def test_chunks_of_any_pieces_are_found_by_who_looks_and_left_there(tmp_path, pieces, master):
    """Who looks knows the identity alone: the slots that follow from it are those of the store that wrote them."""
    made = ChunkOptions(tmp_path, 1 << 20, sum(pieces), "model", piece_bytes=pieces, master=master)
    assert made.identity().slot() == made.slot_layout()
    source, keys = aligned_buffer(16384), np.frombuffer(KEYS[0], KEY)
    starts = np.cumsum(pieces) - pieces
    store = ChunkStore(made)
    assert store.store(keys, (address_of(source) + starts).astype(np.uint64)[None]).tolist() == [OK]
    store.close()
    assert list_namespaces(tmp_path)[0].num_groups == 1
    assert verify_namespace(store.path).num_ok == 1
    again = ChunkStore(made)
    assert again.num_chunks == 1
    again.close()
