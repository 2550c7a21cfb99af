"""The cache in named scenes: what is shared, copied, kept, lost and found again."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import numpy as np
import pytest

from kvhelp import Walker, open_small, small_cache, small_identity, small_layout, threads_since
from kvtide.cache import CacheOptions, CpuArena, LostKv, TieredCache
from kvtide.cache.sequence import Sequence
from kvtide.errors import ConfigError, IoError
from kvtide.io.drive import SimDrive
from kvtide.io.sim import Faults
from kvtide.tiers.file import FileTier
from kvtide.tiers.memory import MemoryTier
from simkv import MODEL, check_cache, sim_tier

LAYOUT = small_layout()  # groups of 8 tokens, two blocks of 4


def numbers(num: int, start: int = 0) -> list[int]:
    return list(range(start, start + num))


def filled(cache: TieredCache, tokens: list[int], step: int = 8) -> Sequence:
    """Open a sequence of `tokens` and compute what is missing of it."""
    sequence, walker = cache.open(tokens), Walker(cache)
    while sequence.num_tokens < len(tokens):
        walker.step([sequence], [tokens[sequence.num_tokens : sequence.num_tokens + step]])
    return sequence


def test_a_prefix_is_found_by_blocks() -> None:
    cache = small_cache(LAYOUT)
    first = filled(cache, numbers(16))
    for shared, expected in ((16, 12), (15, 12), (13, 12), (12, 8), (9, 8), (5, 4), (4, 0), (0, 0)):
        match = cache.match(numbers(shared)[:-1])
        assert match.num_tokens == expected
        assert match.device_bytes + match.dram_bytes == expected * LAYOUT.shape.bytes_per_token
        assert match.file_bytes == 0
    second = cache.open([*numbers(12), 99, 98])
    assert second.tokens == numbers(12)
    Walker(cache).step([second], [[99, 98]])
    check_cache(cache, [first, second])
    cache.close()


def test_a_paused_tail_is_found_to_its_last_token() -> None:
    cache = small_cache(LAYOUT)
    first = filled(cache, numbers(11))
    assert cache.match(numbers(14)).num_tokens == 8
    cache.pause(first)
    assert cache.match(numbers(14)).num_tokens == 11
    assert cache.match([*numbers(10), 77]).num_tokens == 8
    second = filled(cache, numbers(14))
    assert second.matched.num_tokens == 11
    Walker(cache).step([first], [[50, 51]])
    check_cache(cache, [first, second])
    cache.close()


def test_another_salt_finds_nothing() -> None:
    cache = small_cache(LAYOUT)
    sequence = cache.open(numbers(9), salt="a tenant")
    Walker(cache).step([sequence], [numbers(9)])
    cache.pause(sequence)
    assert cache.match(numbers(9), salt="a tenant").num_tokens == 9
    assert cache.match(numbers(9), salt="another").num_tokens == 0
    assert cache.match(numbers(9)).num_tokens == 0
    cache.close()


def test_forks_share_until_they_grow() -> None:
    cache = small_cache(LAYOUT)
    parent = filled(cache, numbers(13))
    child = cache.fork(parent)
    assert child.table.units == parent.table.units
    walker = Walker(cache)
    walker.step([parent], [[100]])
    assert child.table.units[:1] == parent.table.units[:1]
    assert child.table.units[1] != parent.table.units[1]
    walker.step([child], [[200, 201]])
    walker.step([parent], [[101, 102, 103]])
    walker.step([child], [[202, 203]])
    check_cache(cache, [parent, child])
    cache.close()


def test_a_step_in_progress_cannot_be_forked() -> None:
    cache = small_cache(LAYOUT)
    sequence = cache.open()
    cache.begin_step(sequence, 3)
    with pytest.raises(AssertionError, match="forked"):
        cache.fork(sequence)
    cache.close()


def test_beams_fork_and_release_in_turn() -> None:
    cache, rng = small_cache(LAYOUT, dram_groups=16, tokens=128), np.random.default_rng(2)
    beams, walker = [filled(cache, numbers(9))], Walker(cache)
    beams += [cache.fork(beams[0]) for _ in range(2)]
    for step in range(12):
        walker.step(beams, [[1000 + 10 * step + row] for row in range(3)])
        chosen = [int(row) for row in rng.integers(0, 3, 3)]
        kept = [beams[row] if row not in chosen[:at] else cache.fork(beams[row]) for at, row in enumerate(chosen)]
        for row, beam in enumerate(beams):
            if row not in chosen:
                cache.release(beam)
        beams = kept
        check_cache(cache, beams)
    cache.close()


def test_two_sequences_with_equal_tokens_do_not_lose_each_others_copy() -> None:
    cache = small_cache(LAYOUT, MemoryTier(LAYOUT, 2 * LAYOUT.slot_bytes), dram_groups=2)
    first, second = cache.open(), cache.open()  # both before either is known
    walker = Walker(cache)
    walker.step([first], [numbers(8)])
    walker.step([second], [numbers(8)])
    cache.flush()
    assert cache.usage()["file"].num_groups == 1
    cache.release(first)
    for start in range(500, 1000, 100):  # pushes everything else out of DRAM, and the released one out of all
        cache.release(filled(cache, numbers(8, start)))
    walker.step([second], [[7, 7]])
    check_cache(cache, [second])
    cache.close()


def test_an_aborted_tail_is_stored_under_its_own_name(tmp_path: Path) -> None:
    space = open_small(tmp_path, LAYOUT)
    cache = small_cache(LAYOUT, space.tier)
    sequence = filled(cache, numbers(6))
    for num in (5, 1):  # with and without a new unit
        cache.begin_step(sequence, num)
        cache.abort_step(sequence)
    cache.flush()
    check_cache(cache, [sequence])
    cache.close()
    space.close()
    again = open_small(tmp_path, LAYOUT)
    assert again.was_clean
    assert again.tier.inventory().num_tokens.tolist() == [6]
    again.close()


def test_whoever_only_reads_a_tail_does_not_close_it() -> None:
    cache = small_cache(LAYOUT, sim_tier(SimDrive(MODEL), LAYOUT, 8))
    writer = filled(cache, numbers(6))
    reader = cache.open(numbers(5))
    assert reader.num_tokens == 4
    cache.begin_step(writer, 1)
    cache.release(reader)
    assert cache.ledger.is_open[writer.table.units[-1]]
    cache.abort_step(writer)
    check_cache(cache, [writer])
    cache.close()


@pytest.mark.parametrize("is_clean", [True, False])
def test_a_restart_finds_everything(tmp_path: Path, *, is_clean: bool) -> None:
    space = open_small(tmp_path, LAYOUT)
    cache = small_cache(LAYOUT, space.tier)
    filled(cache, numbers(29))
    cache.close()
    space.close()
    if not is_clean:
        (space.path / "checkpoint.kvt").unlink()
    space = open_small(tmp_path, LAYOUT)
    assert space.was_clean == is_clean
    cache = small_cache(LAYOUT, space.tier)
    match = cache.match(numbers(40))
    assert match.num_tokens == 29
    assert match.file_bytes == 29 * LAYOUT.shape.bytes_per_token
    sequence = filled(cache, numbers(40))
    assert sequence.matched.num_tokens == 29
    check_cache(cache, [sequence])
    cache.close()
    space.close()


@pytest.mark.parametrize(("policy", "expected"), [("through", 2), ("back", 0)])
def test_write_policies(policy: str, expected: int) -> None:
    tier = MemoryTier(LAYOUT, 8 * LAYOUT.slot_bytes)
    cache = small_cache(LAYOUT, tier, policy=policy)
    filled(cache, numbers(20))
    cache.drain()
    assert tier.stats().num_groups == expected
    cache.flush()
    assert tier.stats().num_groups == 3
    cache.close()


def test_without_a_disk_old_sequences_make_room() -> None:
    cache = small_cache(LAYOUT, None, dram_groups=4)
    for start in range(0, 500, 100):
        sequence = filled(cache, numbers(20, start))
        assert "file" not in cache.usage()
        check_cache(cache, [sequence])
        cache.release(sequence)
    cache.close()


def test_a_window_smaller_than_one_layer_is_refused() -> None:
    cache = small_cache(LAYOUT, windows=1, tokens=16)
    sequence = cache.open()
    with pytest.raises(ConfigError, match="--device-memory"):
        Walker(cache).step([sequence], [numbers(17)])
    Walker(cache).step([sequence], [numbers(16)])
    check_cache(cache, [sequence])
    cache.close()


def test_too_little_dram_is_refused() -> None:
    least = (2 * LAYOUT.num_fragments + 8) * max(LAYOUT.fragment_padded_bytes)
    digest = small_identity(LAYOUT).digest()
    with pytest.raises(ConfigError, match="--dram"):
        TieredCache(LAYOUT, digest, CpuArena(4096), CacheOptions(dram_bytes=least - 1))
    TieredCache(LAYOUT, digest, CpuArena(4096), CacheOptions(dram_bytes=least)).close()
    with pytest.raises(ConfigError, match="write policy"):
        TieredCache(LAYOUT, digest, CpuArena(4096), CacheOptions(dram_bytes=least, write_policy="never"))
    with pytest.raises(ConfigError, match="evictor"):
        TieredCache(LAYOUT, digest, CpuArena(4096), CacheOptions(dram_bytes=least, evictor="oldest"))


def spoil(tier: FileTier, drive: SimDrive, slot: int, layer: int) -> None:
    offset = 4096 + slot * LAYOUT.slot_bytes + LAYOUT.fragment_offset[layer] + 10
    file = drive.lookup(tier._io._fd).file
    file.write(offset, bytes([file.read(offset, 1)[0] ^ 1]))


def test_a_corrupt_group_is_lost_cut_and_computed_again() -> None:
    drive = SimDrive(MODEL)
    cache = small_cache(LAYOUT, sim_tier(drive, LAYOUT, 8))
    filled(cache, numbers(32))
    cache.close()
    tier = sim_tier(drive, LAYOUT, 8)
    cache = small_cache(LAYOUT, tier)
    sequence = cache.open(numbers(33))
    other = cache.fork(sequence)
    unit = sequence.table.units[2]
    spoil(tier, drive, tier._slot_of[cache.ledger.stored_key[unit].tobytes()], 1)
    with pytest.raises(LostKv) as lost:
        Walker(cache).step([sequence], [[32]])
    assert lost.value.units.tolist() == [unit]
    assert (tier.stats().num_corrupt, tier.stats().num_groups) == (1, 3)
    assert cache.heal(sequence) == 16
    assert cache.heal(other) == 16
    assert cache.match(numbers(33)).num_tokens == 16
    Walker(cache).step([sequence], [numbers(17, 16)])
    check_cache(cache, [sequence, other])
    cache.close()


def test_a_corrupt_tail_is_lost_when_it_is_to_grow() -> None:
    drive = SimDrive(MODEL)
    cache = small_cache(LAYOUT, sim_tier(drive, LAYOUT, 8))
    filled(cache, numbers(13))
    cache.close()
    tier = sim_tier(drive, LAYOUT, 8)
    cache = small_cache(LAYOUT, tier)
    sequence = cache.open(numbers(14))
    spoil(tier, drive, tier._slot_of[cache.ledger.stored_key[sequence.table.units[1]].tobytes()], 2)
    with pytest.raises(LostKv):
        cache.begin_step(sequence, 1)
    assert cache.heal(sequence) == 8
    Walker(cache).step([sequence], [numbers(6, 8)])
    check_cache(cache, [sequence])
    cache.close()


def test_a_disk_full_of_held_sequences_is_an_error_that_passes() -> None:
    tier = sim_tier(SimDrive(MODEL), LAYOUT, 2)
    cache = small_cache(LAYOUT, tier, dram_groups=2, tokens=128)
    held, walker = [], Walker(cache)
    held += [filled(cache, numbers(8, start)) for start in range(0, 400, 100)]  # two in the file, two in DRAM
    held.append(cache.open())
    with pytest.raises(IoError, match="--disk") as full:
        walker.step(held[-1:], [numbers(8, 400)])
    assert full.value.errno == errno.ENOSPC
    check_cache(cache, held)
    assert cache.num_refused > 0
    cache.release(held.pop(0))
    walker.step(held[-1:], [numbers(8, 400)])
    cache.release(held.pop(0))
    cache.release(held.pop(0))
    cache.flush()
    assert not cache.ledger.storable().any()
    check_cache(cache, held)
    cache.close()


def test_failed_writes_cost_only_room() -> None:
    drive = SimDrive(MODEL)
    tier = sim_tier(drive, LAYOUT, 8, Faults(eio=1.0))
    cache = small_cache(LAYOUT, tier, dram_groups=6)
    sequence = filled(cache, numbers(30))
    cache.flush()
    assert tier.stats().num_groups == 0
    assert cache.num_refused > 0
    Walker(cache).step([sequence], [[9]])
    check_cache(cache, [sequence])
    cache.close()


def test_close_is_idempotent_and_ends_the_thread() -> None:
    before = set(threading.enumerate())
    cache = small_cache(LAYOUT, MemoryTier(LAYOUT, 4 * LAYOUT.slot_bytes))
    sequence = filled(cache, numbers(9))
    assert threads_since(before) == ["kvtide-mover"]
    cache.close()
    cache.close()
    cache.release(sequence)
    assert threads_since(before) == []
