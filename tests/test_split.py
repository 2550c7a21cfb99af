"""Layers stored as more than one fragment: the same KV in other places, in files and through the whole cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from kvhelp import Walker, kv_rows, small_cache, small_identity, small_layout
from kvtide.blocks import KEY
from kvtide.cache import CacheOptions, CpuArena, LostKv, TieredCache
from kvtide.errors import ConfigError
from kvtide.io.drive import SimDrive
from kvtide.io.ops import PAGE_BYTES
from kvtide.spec import SPLITS, Dtype, KVShape, LayerShape, SlotLayout, Split
from kvtide.tiers.contract import OK, READ_REQUEST
from kvtide.tiers.inspect import list_namespaces
from kvtide.tiers.memory import FramePool
from kvtide.tiers.namespace import OpenNamespace, open_namespace
from kvtide.tiers.verify import verify_namespace
from kvtide.trace.record import Recorder
from simkv import MODEL, Groups, check_cache, group_bytes, group_key, sim_tier

KEYS = [group_key(number) for number in range(3)]
NUM_SLOTS = 4


def opened(root: Path, split: Split, recorder: Recorder | None = None, num_slots: int = NUM_SLOTS) -> OpenNamespace:
    layout = small_layout(split=split)
    capacity_bytes = PAGE_BYTES + num_slots * layout.slot_bytes
    return open_namespace(root, small_identity(layout), layout, capacity_bytes=capacity_bytes, recorder=recorder)


def filled(root: Path, split: Split) -> Path:
    """Leave a closed store of three groups; return its namespace."""
    space = opened(root, split)
    assert Groups(space.tier.layout).write(space.tier, KEYS, [0, 1, 2]) == [OK] * 3
    space.close()
    return space.path


def test_stores_from_before_there_were_splits_are_the_same_bytes(tmp_path: Path) -> None:
    """Data pinned with the code before splits. Checkpoints are of another kind, so either side scans the other's."""
    path = filled(tmp_path, "none")
    assert path.name == "390b685f89d04623f1a8e5dd6bb3fe05"
    found = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in ("data.kvt", "checkpoint.kvt")}
    assert found == {
        "data.kvt": "e9ea24964c0d67827bc3a78e7616bee502a52ffe560926da3e3dc7a750d7d2b2",
        "checkpoint.kvt": "8349c02bc21e0f507755489fc300c151d72d10262a35620143817f5bff33689d",
    }
    assert "split" not in (path / "identity.json").read_text()


@pytest.mark.parametrize("split", SPLITS)
def test_every_fragment_lies_where_the_layout_says(split: Split, tmp_path: Path) -> None:
    layout, raw = small_layout(split=split), (filled(tmp_path, split) / "data.kvt").read_bytes()
    assert layout.num_fragments == {"none": 3, "kv": 6, "head": 6}[split]
    for slot, key in enumerate(KEYS):
        for fragment in range(layout.num_fragments):
            at = PAGE_BYTES + slot * layout.slot_bytes + layout.fragment_offset[fragment]
            wanted = group_bytes(layout, key, slot, fragment)
            assert raw[at : at + len(wanted)] == wanted.tobytes()


def test_each_split_has_a_namespace_of_its_own_and_all_of_them_verify(tmp_path: Path) -> None:
    paths = {filled(tmp_path, split) for split in SPLITS}
    assert len(paths) == 3
    seen = list_namespaces(tmp_path)
    assert {info.identity.split for info in seen if info.identity} == set(SPLITS)
    assert [(info.problem, info.num_groups) for info in seen] == [("", 3)] * 3
    for path in paths:
        report = verify_namespace(path)
        assert (report.problem, report.num_ok, report.num_corrupt) == ("", 3, 0)


@pytest.mark.parametrize("split", ["kv", "head"])
def test_a_bad_byte_in_any_part_is_found(split: Split, tmp_path: Path) -> None:
    path, layout = filled(tmp_path, split), small_layout(split=split)
    with (path / "data.kvt").open("r+b") as file:
        file.seek(PAGE_BYTES + layout.slot_bytes + layout.fragment_offset[layout.num_fragments - 1] + 5)
        file.write(b"\xff\x00\xff")
    report = verify_namespace(path, memory_bytes=1)  # so little that each fragment is read by itself
    assert (report.num_ok, report.num_corrupt) == (2, 1)


@pytest.mark.parametrize("split", SPLITS)
def test_operations_name_their_layer_and_parts_of_a_layer_are_one(split: Split, tmp_path: Path) -> None:
    filled(tmp_path, split)
    recorder = Recorder()
    space = opened(tmp_path, split, recorder)
    layout, pool = space.tier.layout, FramePool(8, PAGE_BYTES)
    for layer in range(layout.num_layers):
        parts, start = layout.layer_fragments(layer), recorder.counts()[1]
        requests = np.zeros(len(parts), READ_REQUEST)
        requests["fragment"] = list(parts)
        requests["address"] = pool.addresses(pool.take(len(parts)))
        keys = np.frombuffer(KEYS[1], KEY)
        assert (space.tier.read(keys, requests, cause="restore") == OK).all()
        ops = recorder.ops_between(start, recorder.counts()[1])
        assert ops["layer"].tolist() == [layer]
        assert ops["num_fragments"].tolist() == [layout.parts_per_layer]
        assert ops["length"].tolist() == [layout.layer_padded_bytes(layer)]
    space.close()


def test_one_part_can_be_read_without_the_others(tmp_path: Path) -> None:
    filled(tmp_path, "kv")
    space = opened(tmp_path, "kv")
    layout, before = space.tier.layout, space.tier.stats().read_bytes
    values = [(row, layout.layer_fragments(1)[1]) for row in range(3)]
    statuses, parts = Groups(layout).read(space.tier, KEYS, values)
    assert statuses == [OK] * 3
    for row, part in enumerate(parts):
        np.testing.assert_array_equal(part, group_bytes(layout, KEYS[row], row, 3))
    assert space.tier.stats().read_bytes - before == 3 * PAGE_BYTES
    space.close()


# Through the cache


def walked(cache: TieredCache, tokens: list[int], step: int = 5) -> None:
    """Compute what is missing of `tokens`; the walker compares every byte attention would see."""
    sequence, walker = cache.open(tokens), Walker(cache)
    while sequence.num_tokens < len(tokens):
        walker.step([sequence], [tokens[sequence.num_tokens : sequence.num_tokens + step]])
    check_cache(cache, [sequence])
    cache.release(sequence)


@pytest.mark.parametrize("windows", [1, 3])
@pytest.mark.parametrize("split", SPLITS)
def test_attention_sees_right_bytes_through_a_real_file_and_a_restart(
    split: Split, windows: int, tmp_path: Path
) -> None:
    tokens = list(range(100, 144))
    for start in (0, 44):
        space = opened(tmp_path, split, num_slots=12)
        layout = space.tier.layout
        cache = small_cache(
            layout, space.tier, dram_groups=2, windows=windows
        )  # too small: the file is read all the time
        match = cache.match(tokens)
        assert match.num_tokens == start
        assert match.file_bytes == start * layout.shape.bytes_per_token
        walked(cache, [*tokens, 7, 8, 9])
        assert space.tier.stats().num_reads > 0
        cache.close()
        space.close()


@pytest.mark.parametrize("split", SPLITS)
def test_one_matched_byte_is_counted_once_wherever_its_parts_lie(split: Split) -> None:
    layout = small_layout(split=split)
    cache = small_cache(layout, sim_tier(SimDrive(MODEL), layout, 8))
    walked(cache, list(range(24)), step=8)
    cache.flush()
    cache.resize(64, 64, 2)  # nothing is on the device any more
    unit = int(cache.match(list(range(24))).units[1])
    dropped = layout.layer_fragments(1)[-1]  # the last part of a layer, of the second group
    cache.ledger.free_frames(cache.ledger.frames[unit, [dropped]])
    match = cache.match(list(range(24)))
    assert (match.device_bytes, match.file_bytes) == (0, layout.fragment_bytes[dropped])
    assert match.dram_bytes == 24 * layout.shape.bytes_per_token - match.file_bytes
    before = cache.usage()["file"].read_bytes
    walked(cache, [*range(24), 1])
    assert cache.usage()["file"].read_bytes - before == layout.fragment_padded_bytes[dropped]
    cache.close()


@pytest.mark.parametrize("split", SPLITS)
def test_new_kv_lies_in_frames_as_in_slots_with_a_window_or_without(split: Split) -> None:
    layout = small_layout(split=split)
    cache, tokens = small_cache(layout), list(range(13))
    sequence = cache.open()
    for start, end in ((0, 5), (5, 13)):
        cache.begin_step(sequence, end - start)
        for layer in range(layout.num_layers):
            cache.write(sequence, layer, *kv_rows(tokens, layer, start, end))
        cache.seal(sequence, tokens[start:end])
    ledger = cache.ledger
    for group, unit in enumerate(sequence.table.units):
        num = min(8, 13 - 8 * group)
        for layer in range(layout.num_layers):
            k, v = kv_rows(tokens, layer, 8 * group, 8 * group + num)
            held = [ledger.frame_pool.rows[ledger.frames[unit, part]] for part in layout.layer_fragments(layer)]
            if split == "none":
                parts = [(held[0][: 8 * 256], k), (held[0][8 * 256 : 16 * 256], v)]
            elif split == "kv":
                parts = [(held[0][: 8 * 256], k), (held[1][: 8 * 256], v)]
            else:  # two heads of 128 bytes
                parts = [
                    (held[head][at * 1024 : (at + 1) * 1024], rows[:, head * 128 : (head + 1) * 128])
                    for head in range(2)
                    for at, rows in enumerate((k, v))
                ]
            for got, want in parts:
                np.testing.assert_array_equal(got.reshape(8, -1)[:num], want)
                assert not got.reshape(8, -1)[num:].any()
    Walker(cache).step([sequence], [[50, 51]])  # what no window ever held is copied to one, and compared
    check_cache(cache, [sequence])
    cache.close()


def test_a_window_of_another_layer_is_refused() -> None:
    cache = small_cache(small_layout())
    sequence = cache.open()
    cache.resize(8, 8, 1)
    cache.begin_step(sequence, 1)
    window = cache.layer([sequence], 0, cause="decode-read")
    with pytest.raises(AssertionError, match="another layer"):
        cache.write(sequence, 1, *kv_rows([1], 1, 0, 1), window=window)
    cache.close()


@pytest.mark.parametrize("split", ["kv", "head"])
def test_a_bad_part_loses_the_group_and_only_that(split: Split) -> None:
    layout, drive = small_layout(split=split), SimDrive(MODEL)
    cache = small_cache(layout, sim_tier(drive, layout, 8))
    walked(cache, list(range(32)), step=8)
    cache.close()
    tier = sim_tier(drive, layout, 8)
    cache = small_cache(layout, tier)
    sequence = cache.open(list(range(33)))
    unit = sequence.table.units[2]
    slot = tier._slot_of[cache.ledger.stored_key[unit].tobytes()]
    file = drive.lookup(tier._io._fd).file
    for part in layout.layer_fragments(1):
        file.write(PAGE_BYTES + slot * layout.slot_bytes + layout.fragment_offset[part], b"rot")
    with pytest.raises(LostKv) as lost:
        Walker(cache).step([sequence], [[32]])
    assert lost.value.units.tolist() == [unit]
    assert (tier.stats().num_corrupt, tier.stats().num_groups) == (2, 3)
    assert cache.heal(sequence) == 16
    Walker(cache).step([sequence], [list(range(16, 33))])
    check_cache(cache, [sequence])
    cache.close()


def many_heads() -> SlotLayout:
    """More heads than the frames that are always spare."""
    layer = LayerShape(k_bytes=256, v_bytes=256, num_heads=16)
    return SlotLayout(KVShape(dtype=Dtype.BF16, layers=(layer,) * 3, layer_index=(0, 1, 2)), 4, 2, "head")


def least_cache(layout: SlotLayout, more_frames: int) -> TieredCache:
    """A cache with `more_frames` above the least that is allowed, over a tier with room for 24 groups."""
    frames = 2 * layout.num_fragments + layout.parts_per_layer + more_frames
    arena, options = CpuArena(256 * 512), CacheOptions(dram_bytes=frames * PAGE_BYTES)
    tier = sim_tier(SimDrive(MODEL), layout, 24)
    return TieredCache(layout, small_identity(layout).digest(), arena, options, tier=tier)


def test_many_heads_fit_the_least_dram_that_is_allowed() -> None:
    """All parts of a layer must find room together."""
    with pytest.raises(ConfigError, match="--dram"):
        least_cache(many_heads(), -1)
    cache = least_cache(many_heads(), 0)
    for _ in range(2):
        walked(cache, list(range(60)), step=4)
        cache.flush()
    assert cache.usage()["file"].read_bytes > 0
    cache.close()


def test_frames_for_some_parts_of_a_group_go_back_where_the_others_have_none() -> None:
    """Two open tails leave room for the parts of one group and five more."""
    cache = least_cache(many_heads(), 5)
    live = [cache.open(), cache.open()]
    walker, tokens = Walker(cache), list(range(60))
    for start in range(0, 60, 4):
        walker.step(live, [tokens[start : start + 4], [900 + token for token in tokens[start : start + 4]]])
    cache.resize(128, 128, 2)  # the windows are empty, so that all of both rows is read again
    walker.step(live, [[70], [71]])
    check_cache(cache, live)
    cache.close()
