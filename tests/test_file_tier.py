"""The file tier and its directory: what is believed of a file, who may open it, and what a fault costs."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvhelp import open_small, small_identity, small_layout
from kvtide.blocks import KEY
from kvtide.errors import ConfigError, FormatError, IoError
from kvtide.io.drive import SimDrive
from kvtide.io.ops import READ
from kvtide.io.sim import Faults, SimEngine, VirtualClock
from kvtide.spec import SlotLayout
from kvtide.tiers.contract import CORRUPT, FAILED, MISSING, OK
from kvtide.tiers.file import SCAN_SLOTS, FileTier
from kvtide.tiers.header import HeaderCodec
from kvtide.tiers.namespace import OpenNamespace, open_namespace
from kvtide.trace.record import Recorder
from simkv import MODEL, Groups, check_slots, group_bytes, group_key, sim_tier

LAYOUT = small_layout()
GROUPS = Groups(LAYOUT)
KEYS = [group_key(number) for number in range(6)]


def store(root: Path, num: int = 4, num_slots: int = 8) -> Path:
    """Leave a closed store of `num` groups; return its namespace."""
    space = open_small(root, LAYOUT, num_slots)
    assert GROUPS.write(space.tier, KEYS[:num], [0] * num) == [OK] * num
    space.close()
    return space.path


def held(space: OpenNamespace) -> set[bytes]:
    return {key.tobytes() for key in space.tier.inventory().keys}


def poke(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def num_fds() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


# Headers


def encoded(num: int = 3) -> tuple[HeaderCodec, np.ndarray]:
    codec, pages = HeaderCodec(LAYOUT, small_identity(LAYOUT).digest()), np.zeros((num, LAYOUT.header_bytes), np.uint8)
    records = GROUPS.records(KEYS[:num])
    codec.encode(records, np.arange(num, dtype=np.uint64), np.ones((num, LAYOUT.num_fragments), np.uint64), pages)
    return codec, pages


def test_headers_decode_to_what_was_encoded() -> None:
    codec, pages = encoded()
    decoded, records = codec.decode(pages), GROUPS.records(KEYS[:3])
    assert decoded.valid.all()
    for name in ("keys", "parents", "num_tokens", "num_blocks", "block_keys"):
        assert (getattr(decoded.records, name) == getattr(records, name)).all()
    assert decoded.sequences.tolist() == [0, 1, 2]


def test_a_header_with_any_bit_of_any_field_flipped_is_no_header() -> None:
    codec, pages = encoded(1)
    num_bytes = codec._dtype.itemsize
    flipped = np.repeat(pages, num_bytes, axis=0)
    flipped[np.arange(num_bytes), np.arange(num_bytes)] ^= 1 << np.arange(num_bytes, dtype=np.uint8) % 8
    assert not codec.decode(flipped).valid.any()
    assert not codec.decode(np.zeros_like(pages)).valid.any()
    assert not codec.decode(np.full_like(pages, 255)).valid.any()


def test_headers_of_another_identity_or_version_are_no_headers() -> None:
    codec, pages = encoded(1)
    assert codec.decode(pages).valid.all()
    assert not HeaderCodec(LAYOUT, b"\1" * 32).decode(pages).valid.any()
    pages[0, 8] = 9
    assert not codec.decode(pages).valid.any()


# What a file says


def test_a_corrupt_fragment_is_dropped_and_counted(tmp_path: Path) -> None:
    space = open_small(tmp_path, LAYOUT)
    GROUPS.write(space.tier, KEYS[:2], [0, 0])
    slot = space.tier._slot_of[KEYS[1]]
    poke(space.path / "data.kvt", 4096 + slot * LAYOUT.slot_bytes + LAYOUT.fragment_offset[1] + 7, b"\xff")
    statuses, _ = GROUPS.read(space.tier, KEYS[:2], [(0, 1), (1, 0), (1, 1), (1, 2)])
    assert statuses == [OK, OK, CORRUPT, OK]
    assert space.tier.lookup(np.frombuffer(b"".join(KEYS[:2]), KEY)).tolist() == [True, False]
    assert (space.tier.stats().num_corrupt, space.tier.stats().num_groups) == (1, 1)
    check_slots(space.tier)
    space.close()


@pytest.mark.parametrize("is_clean", [True, False])
def test_a_truncated_data_file_gives_misses(tmp_path: Path, *, is_clean: bool) -> None:
    path = store(tmp_path)
    os.truncate(path / "data.kvt", 4096 + LAYOUT.slot_bytes + 100)
    if not is_clean:
        (path / "checkpoint.kvt").unlink()
    space = open_small(tmp_path, LAYOUT, 8)
    for key in KEYS[:4]:
        statuses, parts = GROUPS.read_group(space.tier, key)
        if set(statuses) == {OK}:
            assert GROUPS.version_of(key, parts, [0]) == 0
        else:
            assert set(statuses) <= {OK, CORRUPT, MISSING}
    assert len(held(space)) == 1
    check_slots(space.tier)
    space.close()


def reseal(path: Path, offset: int, data: bytes) -> None:
    """Change the superblock as another program would: with a checksum that agrees."""
    page = bytearray(path.read_bytes()[:4096])
    page[offset : offset + len(data)] = data
    page[-8:] = xxhash.xxh3_64_digest(bytes(page[:-8]))
    poke(path, 0, bytes(page))


@pytest.mark.parametrize(
    ("offset", "data", "text"),
    [
        (0, b"ANOTHER\0", "expected b'KVTFILE'"),
        (8, b"\7", "version 7"),
        (16, b"\1", "geometry"),
        (40, b"\0\1", "ident"),
    ],
)
def test_a_foreign_superblock_is_an_error_that_names_the_file(
    tmp_path: Path, offset: int, data: bytes, text: str
) -> None:
    path = store(tmp_path)
    reseal(path / "data.kvt", offset, data)
    before = num_fds()
    with pytest.raises(FormatError, match=text) as error:
        open_small(tmp_path, LAYOUT, 8)
    assert str(path / "data.kvt") in str(error.value)
    assert num_fds() == before


def test_a_flipped_or_cut_superblock_is_an_error(tmp_path: Path) -> None:
    path = store(tmp_path)
    poke(path / "data.kvt", 100, b"\1")
    with pytest.raises(FormatError, match="checksum"):
        open_small(tmp_path, LAYOUT, 8)
    os.truncate(path / "data.kvt", 100)
    with pytest.raises(FormatError, match="superblock"):
        open_small(tmp_path, LAYOUT, 8)


def test_a_maker_that_died_before_the_superblock_does_not_block_the_store(tmp_path: Path) -> None:
    path = store(tmp_path, 0)
    (path / "checkpoint.kvt").unlink()
    poke(path / "data.kvt", 0, bytes(4096))
    space = open_small(tmp_path, LAYOUT, 8)
    assert GROUPS.write(space.tier, KEYS, [0] * len(KEYS)) == [OK] * len(KEYS)
    space.close()
    open_small(tmp_path, LAYOUT, 8).close()


def test_another_identity_in_a_namespace_is_an_error(tmp_path: Path) -> None:
    path = store(tmp_path)
    text = (path / "identity.json").read_text()
    (path / "identity.json").write_text(text.replace("small", "other"))
    with pytest.raises(FormatError, match=r"identity\.json"):
        open_small(tmp_path, LAYOUT, 8)
    (path / "identity.json").write_bytes(b"\xff not json")
    with pytest.raises(FormatError):
        open_small(tmp_path, LAYOUT, 8)


# Who may open


def test_foreign_places_are_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="not a kvtide store"):
        open_small(tmp_path / "full", LAYOUT)
    assert sorted(entry.name for entry in (tmp_path / "full").iterdir()) == ["thesis.tex"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        open_small(tmp_path / "file", LAYOUT)
    with pytest.raises(IoError, match="another --dir"):
        open_small(tmp_path / "file" / "below", LAYOUT)
    with pytest.raises(ConfigError, match="--disk"):
        open_namespace(tmp_path / "new", small_identity(LAYOUT), LAYOUT, capacity_bytes=4095 + LAYOUT.slot_bytes)
    assert not (tmp_path / "new").exists()


def test_a_store_of_another_version_is_an_error(tmp_path: Path) -> None:
    store(tmp_path)
    marker = tmp_path / "kvtide-store"
    marker.write_text(marker.read_text().replace("1", "2"))
    with pytest.raises(FormatError, match="kvtide-store"):
        open_small(tmp_path, LAYOUT)


def test_a_maker_that_died_before_the_marker_does_not_block_the_directory(tmp_path: Path) -> None:
    (tmp_path / "kvtide-store.partial").write_text("")
    open_small(tmp_path, LAYOUT).close()


def test_a_file_in_the_namespaces_place_is_an_error(tmp_path: Path) -> None:
    path = store(tmp_path)
    shutil.rmtree(path)
    path.write_text("")
    with pytest.raises(IoError, match=path.name):
        open_small(tmp_path, LAYOUT)


def test_a_second_owner_is_told_who_is_first(tmp_path: Path) -> None:
    space = open_small(tmp_path, LAYOUT)
    before = num_fds()
    for _ in range(3):
        with pytest.raises(IoError, match=f"process {os.getpid()}") as error:
            open_small(tmp_path, LAYOUT)
        assert error.value.errno == errno.EBUSY
    assert num_fds() == before
    space.close()
    space.close()
    open_small(tmp_path, LAYOUT).close()


def test_nobody_else_may_read(tmp_path: Path) -> None:
    path = store(tmp_path / "root")
    files = [entry for entry in path.iterdir() if entry.is_file()]
    assert {entry.name for entry in files} == {"identity.json", "owner.lock", "data.kvt", "checkpoint.kvt"}
    for entry in [*files, tmp_path / "root" / "kvtide-store"]:
        assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    for folder in (path, tmp_path / "root"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


# Opening again


def test_a_checkpoint_is_used_once(tmp_path: Path) -> None:
    path = store(tmp_path)
    space = open_small(tmp_path, LAYOUT, 8)
    assert space.was_clean
    assert not (path / "checkpoint.kvt").exists()
    assert held(space) == set(KEYS[:4])
    space.close()
    saved = (path / "checkpoint.kvt").read_bytes()
    for at in range(0, len(saved), len(saved) // 23):
        (path / "checkpoint.kvt").write_bytes(saved[:at] + bytes([saved[at] ^ 4]) + saved[at + 1 :])
        space = open_small(tmp_path, LAYOUT, 8)
        assert not space.was_clean
        assert held(space) == set(KEYS[:4])
        space.close()
    (path / "checkpoint.kvt").write_bytes(saved[:-9])
    space = open_small(tmp_path, LAYOUT, 8)
    assert not space.was_clean
    space.close()


def test_an_empty_store_closes_cleanly(tmp_path: Path) -> None:
    store(tmp_path, 0)
    space = open_small(tmp_path, LAYOUT, 8)
    assert space.was_clean
    space.close()


def test_a_slot_dropped_before_a_clean_close_is_wiped_before_it_is_used_again(tmp_path: Path) -> None:
    space = open_small(tmp_path, LAYOUT, 2)
    GROUPS.write(space.tier, KEYS[:2], [0, 0])
    space.tier.drop(np.frombuffer(KEYS[0], KEY))
    space.close()
    space = open_small(tmp_path, LAYOUT, 2)
    assert space.was_clean
    assert space.tier.table.has_header.all()
    space.close()


@pytest.mark.parametrize("is_readable", [True, False])
def test_what_is_stored_again_wins_over_what_was_dropped_before(tmp_path: Path, *, is_readable: bool) -> None:
    """The dropped one's header is still in the file, behind the new one's, when a later owner scans."""
    space = open_small(tmp_path, LAYOUT, 8)
    GROUPS.write(space.tier, KEYS[:2], [0, 1])
    space.tier.drop(np.frombuffer(b"".join(KEYS[:2]), KEY))
    if is_readable:
        space.close()
        space = open_small(tmp_path, LAYOUT, 8)
        assert space.was_clean
        tier = space.tier
    else:  # an owner that could read no header
        tier = FileTier(space.engine, space.fd, LAYOUT, small_identity(LAYOUT).digest(), 8)
        tier._io.engine = BadPage(space.engine, 4096 + LAYOUT.slot_bytes)
        tier.scan()
        tier._io.engine = space.engine
        assert tier.stats().num_failed == 1
    assert GROUPS.write(tier, KEYS[1:2], [2]) == [OK]
    again = FileTier(space.engine, space.fd, LAYOUT, small_identity(LAYOUT).digest(), 8)
    again.scan()
    statuses, parts = GROUPS.read_group(again, KEYS[1])
    assert set(statuses) == {OK}
    assert GROUPS.version_of(KEYS[1], parts, [1, 2]) == 2
    space.close()


@pytest.mark.parametrize("is_clean", [True, False])
def test_capacity_may_change_between_openings(tmp_path: Path, *, is_clean: bool) -> None:
    path = store(tmp_path, 6, 6)
    for num_slots in (10, 3, 3, 7):
        if not is_clean:
            (path / "checkpoint.kvt").unlink()
        space = open_small(tmp_path, LAYOUT, num_slots)
        assert (path / "data.kvt").stat().st_size == 4096 + num_slots * LAYOUT.slot_bytes
        assert space.tier.stats().capacity_bytes == num_slots * LAYOUT.slot_bytes
        assert len(held(space)) == (6 if num_slots == 10 else 3)
        for key in held(space):
            statuses, parts = GROUPS.read_group(space.tier, key)
            assert set(statuses) == {OK}
            assert GROUPS.version_of(key, parts, [0]) == 0
        check_slots(space.tier)
        space.close()


def test_of_two_slots_with_one_key_the_later_write_wins() -> None:
    layout, drive = SlotLayout(LAYOUT.shape, 1, 1), SimDrive(MODEL)
    num_slots, groups = SCAN_SLOTS + 8, Groups(layout)
    tier = sim_tier(drive, layout, num_slots)
    old_slots = np.arange(num_slots - 1)
    tier._free[old_slots] = False  # the older version lies in the last slot, the newer one in the first
    groups.write(tier, KEYS[:1], [1])
    tier._free[old_slots] = True
    groups.write(tier, KEYS[:1], [2])
    again = sim_tier(drive, layout, num_slots)
    statuses, parts = groups.read_group(again, KEYS[0])
    assert set(statuses) == {OK}
    assert groups.version_of(KEYS[0], parts, [1, 2]) == 2
    check_slots(again)


def test_a_full_disk_is_an_error_that_says_so(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("mounting a small file system needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode().strip()}")
    try:
        before = num_fds()
        with pytest.raises(IoError, match="--disk") as error:
            open_small(tmp_path / "store", LAYOUT, 100)
        assert error.value.errno == errno.ENOSPC
        assert num_fds() == before
        open_small(tmp_path / "store", LAYOUT, 4).close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# Reads over gaps


def test_reads_are_joined_over_gaps_and_what_that_moves_is_counted() -> None:
    page, recorder = 4096, Recorder()
    tier = sim_tier(SimDrive(MODEL), LAYOUT, 4, gap_bytes_max=page, recorder=recorder)
    GROUPS.write(tier, KEYS[:3], [0] * 3)  # slots of a header and three fragments, a page each
    num, moved = tier.stats().num_reads, tier.stats().read_bytes
    _, before = recorder.counts()
    statuses, parts = GROUPS.read(tier, KEYS[:3], [(0, 0), (0, 2), (1, 0), (2, 2)])
    assert statuses == [OK] * 4
    for (row, fragment), part in zip([(0, 0), (0, 2), (1, 0), (2, 2)], parts, strict=True):
        np.testing.assert_array_equal(part, group_bytes(LAYOUT, KEYS[row], 0, fragment))
    assert tier.stats().num_reads - num == 2  # three with a page between each, and one six pages on
    assert tier.stats().read_bytes - moved == 6 * page
    assert tier.stats().gap_bytes == 2 * page
    assert sorted(recorder.ops_between(before, before + 9)["num_fragments"].tolist()) == [1, 3]
    GROUPS.write(tier, [KEYS[3]], [0])
    assert tier.stats().gap_bytes == 2 * page, "no write goes over a gap"


class BadPage:
    """An engine whose reads fail that touch one page of the file."""

    def __init__(self, engine: SimEngine, offset: int) -> None:
        self._engine, self._offset, self._failing = engine, offset, set[int]()
        self.depth_max = engine.depth_max

    def submit(self, batch: np.ndarray) -> None:
        for row in batch:
            if row["kind"] == READ and row["offset"] <= self._offset < row["offset"] + row["length"]:
                self._failing.add(int(row["tag"]))
        self._engine.submit(batch)

    def reap(self, wait_num: int = 0) -> np.ndarray:
        done = self._engine.reap(wait_num)
        bad = np.isin(done["tag"], list(self._failing))
        self._failing -= set(done["tag"].tolist())
        done["length"][bad], done["error"][bad] = 0, errno.EIO
        return done


def test_a_bad_page_in_a_gap_costs_nothing_that_was_wanted() -> None:
    tier = sim_tier(SimDrive(MODEL), LAYOUT, 4, gap_bytes_max=4096)
    GROUPS.write(tier, KEYS[:1], [0])
    tier._io.engine = BadPage(tier._io.engine, 4096 + LAYOUT.fragment_offset[1])
    statuses, parts = GROUPS.read(tier, KEYS[:1], [(0, 0), (0, 2)])
    assert statuses == [OK, OK]
    np.testing.assert_array_equal(parts[1], group_bytes(LAYOUT, KEYS[0], 0, 2))
    assert tier.stats().num_failed == 0
    statuses, _ = GROUPS.read(tier, KEYS[:1], [(0, 0), (0, 1), (0, 2)])
    assert FAILED in statuses
    assert tier.stats().num_failed == statuses.count(FAILED)


# Faults


FAULTS = [
    Faults(eio=0.2),
    Faults(enospc=0.3),
    Faults(short=0.2),
    Faults(torn=0.3),
    Faults(flipped=0.3),
    Faults(eio=0.05, enospc=0.05, short=0.05, torn=0.05, flipped=0.05, reordered=0.5, delayed=0.5),
]


@pytest.mark.parametrize("faults", FAULTS, ids=lambda faults: str(replace(faults, delay_factor=1))[7:60])
@pytest.mark.parametrize("seed", range(3))
def test_no_fault_gives_wrong_bytes_or_leaks_a_slot(faults: Faults, seed: int) -> None:
    drive, versions = SimDrive(MODEL), dict[bytes, list[int]]()
    tier = sim_tier(drive, LAYOUT, 5, faults, seed=seed, gap_bytes_max=4096 * (seed % 2))
    rng, seen = np.random.default_rng(seed), set[int]()
    for version in range(40):
        keys = [KEYS[index] for index in rng.permutation(len(KEYS))[: int(rng.integers(1, 4))]]
        for key in keys:
            versions.setdefault(key, []).append(version)
        statuses = GROUPS.write(tier, keys, [version] * len(keys))
        check_slots(tier)
        for key, status in zip(keys, statuses, strict=True):
            if status == FAILED:
                continue
            found, parts = GROUPS.read_group(tier, key)
            seen |= set(found)
            if set(found) == {OK}:
                assert GROUPS.version_of(key, parts, versions[key]) is not None
        tier.drop(np.frombuffer(keys[0], KEY))
        check_slots(tier)
    assert seen <= {OK, MISSING, CORRUPT, FAILED}
    assert OK in seen
    stats = tier.stats()
    assert stats.num_corrupt + stats.num_failed > 0
    calm = FileTier(SimEngine(drive, VirtualClock()), tier._io._fd, LAYOUT, small_identity(LAYOUT).digest(), 5)
    calm.scan()
    for key in list(calm._slot_of):
        found, parts = GROUPS.read_group(calm, key)
        if set(found) == {OK}:
            assert GROUPS.version_of(key, parts, versions[key]) is not None
    check_slots(calm)


def test_a_slot_whose_header_cannot_be_read_is_wiped_before_use() -> None:
    drive = SimDrive(MODEL)
    GROUPS.write(sim_tier(drive, LAYOUT, 3), KEYS[:3], [0] * 3)
    blind = sim_tier(drive, LAYOUT, 3, Faults(eio=1.0))
    assert (blind.stats().num_groups, blind.stats().num_failed) == (0, 3)
    assert blind.table.has_header.all()


def test_who_only_looks_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtide.tiers import owner

    looking = os.open(tmp_path / "owner.lock", os.O_RDONLY | os.O_CREAT, 0o600)
    owner.fcntl.flock(looking, owner.fcntl.LOCK_SH)
    monkeypatch.setattr(owner, "time", types.SimpleNamespace(sleep=lambda _: os.close(looking)))
    os.close(owner.lock(tmp_path))


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_no_ownership(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtide.tiers import owner

    take = owner.fcntl.flock

    def remove_first(fd: int, how: int) -> None:
        (tmp_path / "owner.lock").unlink()
        take(fd, how)

    monkeypatch.setattr(owner.fcntl, "flock", remove_first)
    with pytest.raises(IoError, match="being removed"):
        owner.lock(tmp_path)
