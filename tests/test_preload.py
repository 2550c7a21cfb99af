"""A prefix that is brought to DRAM before its request runs."""

from __future__ import annotations

from pathlib import Path

from kvhelp import Walker, open_small, small_cache, small_layout

LAYOUT = small_layout()
TOKENS = list(range(3, 3 + 5 * LAYOUT.tokens_per_group + 1))


def kept(tmp_path: Path) -> None:
    """Leave a store that holds the groups of TOKENS."""
    space = open_small(tmp_path, LAYOUT)
    cache = small_cache(LAYOUT, space.tier)
    sequence = cache.open(TOKENS)
    Walker(cache).step([sequence], [TOKENS])
    cache.close()
    space.close()


def test_what_was_preloaded_is_found_in_dram_and_right(tmp_path: Path) -> None:
    kept(tmp_path)
    space = open_small(tmp_path, LAYOUT)
    cache = small_cache(LAYOUT, space.tier, dram_groups=12)
    assert cache.match(TOKENS[:-1]).dram_bytes == 0
    assert cache.preload(TOKENS[:-1]) == 5
    cache.drain()
    assert not cache.ledger.pins.any()
    match = cache.match(TOKENS[:-1])
    assert (match.num_tokens, match.file_bytes) == (5 * LAYOUT.tokens_per_group, 0)
    reads = space.tier.stats().num_reads
    sequence = cache.open(TOKENS)
    Walker(cache).step([sequence], [TOKENS[sequence.num_tokens :]])  # checks every byte
    assert space.tier.stats().num_reads == reads
    assert cache.preload(TOKENS[:-1]) == 0  # all there
    cache.close()
    space.close()


def test_no_more_than_half_of_dram_is_taken(tmp_path: Path) -> None:
    kept(tmp_path)
    space = open_small(tmp_path, LAYOUT)
    cache = small_cache(LAYOUT, space.tier, dram_groups=4)
    most = cache.ledger.frame_pool.num_frames // 2 // LAYOUT.num_fragments
    assert most < 5
    assert cache.preload(TOKENS) == most
    cache.drain()
    assert cache.ledger.is_resident().sum() == most
    assert cache.preload([1, 2, 3]) == 0  # nothing is kept of it
    cache.close()
    space.close()


def test_a_group_that_cannot_be_read_is_told_to_who_wants_it_only(tmp_path: Path) -> None:
    kept(tmp_path)
    space = open_small(tmp_path, LAYOUT)
    cache = small_cache(LAYOUT, space.tier, dram_groups=12)
    table = space.tier.table
    table.checksums[table.used] ^= 1
    assert cache.preload(TOKENS[:-1]) == 5
    cache.drain()
    assert not cache.ledger.pins.any()
    assert space.tier.stats().num_corrupt > 0
    assert cache.match(TOKENS[:-1]).num_tokens < 5 * LAYOUT.tokens_per_group
    cache.close()
    space.close()
