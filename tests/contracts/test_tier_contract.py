"""What every tier promises: whole groups or nothing, right bytes or a status, exact accounts, never over capacity."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvhelp import open_small, small_layout
from kvtide.blocks import KEY
from kvtide.errors import UnsupportedError
from kvtide.io.drive import SimDrive
from kvtide.io.uring import UringEngine
from kvtide.spec import SPLITS, Dtype, KVShape, LayerShape, SlotLayout, Split
from kvtide.tiers.contract import FULL, MISSING, OK, READ_REQUEST, Tier
from kvtide.tiers.memory import MemoryTier
from kvtide.tiers.remote import RemoteTier
from remotes import redis, remote_tier
from simkv import MODEL, Groups, check_slots, group_bytes, group_key, sim_tier

NUM_SLOTS = 12
GAP_BYTES = 3 * 4096  # wider than a fragment of the small layout and a header


@dataclass
class Place:
    tier: Tier
    groups: Groups
    num_slots: int = NUM_SLOTS


def uneven_layout() -> SlotLayout:
    """Layers of different size, one without V, none a whole number of pages."""
    layers = (
        LayerShape(k_bytes=256, v_bytes=256, num_heads=2),
        LayerShape(k_bytes=1152, v_bytes=0, num_heads=1),
        LayerShape(k_bytes=64, v_bytes=32, num_heads=1),
    )
    return SlotLayout(KVShape(dtype=Dtype.BF16, layers=layers, layer_index=(0, 2, 5)), 5, 3)


def parted_layout(split: Split) -> SlotLayout:
    """Keys longer than values, so that the parts of a layer differ; none a whole number of pages."""
    layer = LayerShape(k_bytes=480, v_bytes=96, num_heads=3)
    return SlotLayout(KVShape(dtype=Dtype.BF16, layers=(layer, layer), layer_index=(0, 1)), 5, 3, split)


KINDS = ["memory", "sim", "sim-uneven", "uring", "threads", "uring-shm", "threads-shm"]
KINDS += ["sim-gap", "uring-gap", "threads-gap"]
KINDS += [f"{kind}-{split}" for kind in ("memory", "sim", "uring") for split in ("kv", "head")]
KINDS += ["valkey", "valkey-head", "valkey-zstd"]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    kind, layout = request.param, small_layout()
    split = kind.split("-")[-1]
    if split in SPLITS:
        layout = parted_layout(split) if kind.startswith("sim") else small_layout(split=split)
    if kind.startswith("memory"):
        yield Place(MemoryTier(layout, NUM_SLOTS * layout.slot_bytes + 100), Groups(layout))
    elif kind.startswith("valkey"):
        with tempfile.TemporaryDirectory() as folder, redis(Path(folder)) as server:
            url = server.url + ("?zstd=1" if kind.endswith("-zstd") else "")
            tier = remote_tier(url, layout)
            yield Place(tier, Groups(layout), num_slots=64)
            tier.close()
    elif kind.startswith("sim"):
        layout = uneven_layout() if kind == "sim-uneven" else layout
        gap_bytes_max = GAP_BYTES if kind == "sim-gap" else 0
        yield Place(sim_tier(SimDrive(MODEL), layout, NUM_SLOTS, gap_bytes_max=gap_bytes_max), Groups(layout))
    else:
        engine = kind.split("-")[0]
        if engine == "uring":
            try:
                UringEngine(depth_max=1).close()
            except UnsupportedError as refused:
                pytest.skip(str(refused))
        if kind.endswith("-shm") and not os.access("/dev/shm", os.W_OK):  # noqa: S108
            pytest.skip("there is no writable /dev/shm")
        with tempfile.TemporaryDirectory(dir="/dev/shm" if kind.endswith("-shm") else tmp_path) as folder:  # noqa: S108
            gap_bytes_max = GAP_BYTES if kind.endswith("-gap") else 0
            space = open_small(Path(folder) / "store", layout, NUM_SLOTS, engine, gap_bytes_max)
            assert space.engine_name == engine
            yield Place(space.tier, Groups(layout))
            check_slots(space.tier)
            space.close()


def names(*numbers: int) -> list[bytes]:
    return [group_key(number) for number in numbers]


def as_keys(keys: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(keys), KEY)


def assert_holds(place: Place, key: bytes, version: int) -> None:
    statuses, parts = place.groups.read_group(place.tier, key)
    assert statuses == [OK] * place.groups.layout.num_fragments
    assert place.groups.version_of(key, parts, [version]) == version


def test_what_was_written_reads_back(place: Place) -> None:
    keys = names(*range(NUM_SLOTS))
    assert place.groups.write(place.tier, keys, [7] * NUM_SLOTS) == [OK] * NUM_SLOTS
    assert place.tier.lookup(as_keys(keys)).all()
    for key in keys:
        assert_holds(place, key, 7)


def test_one_call_reads_one_fragment_several_or_all_of_many_groups(place: Place) -> None:
    layout, keys = place.groups.layout, names(*range(NUM_SLOTS))
    place.groups.write(place.tier, keys, [0] * NUM_SLOTS)
    rng = np.random.default_rng(5)
    everything = [(row, part) for row in range(NUM_SLOTS) for part in range(layout.num_fragments)]
    one_of_each = [(row, 1) for row in range(NUM_SLOTS)]
    some = [everything[index] for index in rng.permutation(len(everything))[:17]]
    for pairs in (one_of_each, some, everything, everything[::-1], [(3, 2), (3, 2), (3, 0)], []):
        statuses, parts = place.groups.read(place.tier, keys, pairs)
        assert statuses == [OK] * len(pairs)
        for (row, fragment), part in zip(pairs, parts, strict=True):
            np.testing.assert_array_equal(part, group_bytes(layout, keys[row], 0, fragment))


def test_a_miss_is_a_value_and_leaves_the_others_alone(place: Place) -> None:
    keys = names(1, 2, 3)
    place.groups.write(place.tier, [keys[0], keys[2]], [0, 0])
    assert place.tier.lookup(as_keys(keys)).tolist() == [True, False, True]
    statuses, parts = place.groups.read(place.tier, keys, [(0, 0), (1, 0), (2, 1), (1, 2)])
    assert statuses == [OK, MISSING, OK, MISSING]
    np.testing.assert_array_equal(parts[2], group_bytes(place.groups.layout, keys[2], 0, 1))
    assert not parts[1].any(), "the buffer of a miss is not written to"


def test_dropped_groups_are_gone_and_their_room_is_back(place: Place) -> None:
    keys = names(*range(NUM_SLOTS))
    place.groups.write(place.tier, keys, [0] * NUM_SLOTS)
    place.tier.drop(as_keys([*keys[:5], keys[0], group_key(99)]))
    assert place.tier.lookup(as_keys(keys)).tolist() == [False] * 5 + [True] * (NUM_SLOTS - 5)
    assert place.groups.read_group(place.tier, keys[0])[0] == [MISSING] * place.groups.layout.num_fragments
    more = names(*range(100, 105))
    assert place.groups.write(place.tier, more, [3] * 5) == [OK] * 5
    for key in more:
        assert_holds(place, key, 3)
    for key in keys[5:]:
        assert_holds(place, key, 0)


def test_what_was_dropped_is_counted_by_its_reason(place: Place) -> None:
    keys = names(*range(4))
    place.groups.write(place.tier, keys, [0] * 4)
    place.tier.drop(as_keys(keys[:1]), reason="evicted")
    place.tier.drop(as_keys([*keys[:3], group_key(99)]))
    assert place.tier.stats().dropped == {"evicted": 1, "dropped": 2}


def test_a_full_tier_says_so_and_changes_nothing(place: Place) -> None:
    if isinstance(place.tier, RemoteTier):
        pytest.skip("a remote's room is its own affair; tests/test_remote.py fills one")
    keys = names(*range(NUM_SLOTS + 3))
    statuses = place.groups.write(place.tier, keys, [0] * len(keys))
    assert sorted(statuses) == [OK] * NUM_SLOTS + [FULL] * 3
    assert place.tier.lookup(as_keys(keys)).tolist() == [status == OK for status in statuses]
    assert place.groups.write(place.tier, names(200), [0]) == [FULL]
    assert place.tier.stats().num_full == 4
    for key, status in zip(keys, statuses, strict=True):
        if status == OK:
            assert_holds(place, key, 0)


def test_writing_a_key_again_replaces_it(place: Place) -> None:
    keys = names(1, 2)
    place.groups.write(place.tier, keys, [0, 0])
    for version in range(1, 3 * NUM_SLOTS):
        assert place.groups.write(place.tier, keys[:1], [version]) == [OK]
        assert_holds(place, keys[0], version)
    assert_holds(place, keys[1], 0)
    assert place.tier.stats().num_groups == 2
    assert place.groups.write(place.tier, [keys[1], keys[1]], [5, 6]) == [OK, OK]
    assert_holds(place, keys[1], 6)
    assert place.tier.stats().num_groups == 2


def test_accounts_are_exact(place: Place) -> None:
    tier, layout = place.tier, place.groups.layout
    group = sum(layout.fragment_padded_bytes)
    assert tier.stats().capacity_bytes == place.num_slots * layout.slot_bytes
    assert (tier.stats().used_bytes, tier.stats().num_groups) == (0, 0)
    before = tier.stats().written_bytes
    place.groups.write(tier, names(1, 2, 3), [0] * 3)
    headers = 0 if isinstance(tier, MemoryTier) else 3 * layout.header_bytes
    if isinstance(tier, RemoteTier):
        headers = 3 * (128 * (layout.num_fragments + 1) + tier.envelope.manifest.itemsize)
    written = tier.stats().written_bytes - before
    is_packed = isinstance(tier, RemoteTier) and tier._packer._level > 0
    assert (written < group) if is_packed else (written == 3 * group + headers)
    assert (tier.stats().used_bytes, tier.stats().num_groups) == (3 * layout.slot_bytes, 3)
    before = tier.stats().read_bytes
    place.groups.read(tier, names(1, 9), [(0, 0), (0, 2), (1, 0)])
    wanted = layout.fragment_padded_bytes[0] + layout.fragment_padded_bytes[2]
    if isinstance(tier, RemoteTier):
        wanted += 2 * 128
    if not is_packed:
        assert tier.stats().read_bytes - tier.stats().gap_bytes - before == wanted
    tier.drop(as_keys(names(2)))
    assert (tier.stats().used_bytes, tier.stats().num_groups) == (2 * layout.slot_bytes, 2)
    assert (tier.stats().num_corrupt, tier.stats().num_failed, tier.stats().num_full) == (0, 0, 0)


def test_nothing_is_a_fine_amount(place: Place) -> None:
    none = np.zeros(0, KEY)
    assert place.tier.lookup(none).tolist() == []
    assert place.tier.read(none, np.zeros(0, READ_REQUEST), cause="restore").tolist() == []
    assert place.groups.write(place.tier, [], []) == []
    place.tier.drop(none)
    assert place.tier.stats().num_groups == 0


def test_random_traffic_agrees_with_a_dict(place: Place) -> None:
    rng, held = np.random.default_rng(11), dict[bytes, int]()
    for version in range(60):
        keys = list(dict.fromkeys(group_key(int(n)) for n in rng.integers(0, 20, int(rng.integers(1, 6)))))
        if rng.random() < 0.3:
            place.tier.drop(as_keys(keys))
            for key in keys:
                held.pop(key, None)
        else:
            statuses = place.groups.write(place.tier, keys, [version] * len(keys))
            held.update({key: version for key, status in zip(keys, statuses, strict=True) if status == OK})
        assert place.tier.lookup(as_keys(keys)).tolist() == [key in held for key in keys]
        assert place.tier.stats().num_groups == len(held) <= place.num_slots
    for key, version in held.items():
        assert_holds(place, key, version)
