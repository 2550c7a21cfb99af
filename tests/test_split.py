"""Layers stored as more than one fragment: the same KV in other places, in files and through the whole cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from kvhelp import small_identity, small_layout
from kvtide.blocks import KEY
from kvtide.io.ops import PAGE_BYTES
from kvtide.spec import SPLITS, Split
from kvtide.tiers.contract import OK, READ_REQUEST
from kvtide.tiers.inspect import list_namespaces
from kvtide.tiers.memory import FramePool
from kvtide.tiers.namespace import OpenNamespace, open_namespace
from kvtide.tiers.verify import verify_namespace
from kvtide.trace.record import Recorder
from simkv import Groups, group_bytes, group_key

KEYS = [group_key(number) for number in range(3)]
NUM_SLOTS = 4


def opened(root: Path, split: Split, recorder: Recorder | None = None) -> OpenNamespace:
    layout = small_layout(split=split)
    capacity_bytes = PAGE_BYTES + NUM_SLOTS * layout.slot_bytes
    return open_namespace(root, small_identity(layout), layout, capacity_bytes=capacity_bytes, recorder=recorder)


def filled(root: Path, split: Split) -> Path:
    """Leave a closed store of three groups; return its namespace."""
    space = opened(root, split)
    assert Groups(space.tier.layout).write(space.tier, KEYS, [0, 1, 2]) == [OK] * 3
    space.close()
    return space.path


def test_stores_from_before_there_were_splits_are_the_same_bytes(tmp_path: Path) -> None:
    """Pinned with the code before splits: files it wrote must open, and files written now must open there."""
    path = filled(tmp_path, "none")
    assert path.name == "390b685f89d04623f1a8e5dd6bb3fe05"
    found = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in ("data.kvt", "checkpoint.kvt")}
    assert found == {
        "data.kvt": "e9ea24964c0d67827bc3a78e7616bee502a52ffe560926da3e3dc7a750d7d2b2",
        "checkpoint.kvt": "7c48ca0601bf9dd914e54d4398066fd84444d270073837b339157ecb83fbd27f",
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
