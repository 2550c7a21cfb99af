"""Hits of tiers of blocks: the curve of all sizes and the simulation, against a cache written with an OrderedDict."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.errors import ConfigError
from kvtide.evict import EVICTOR_NAMES
from kvtide.evict.admission import DAY_NS, Endurance, SecondTouch
from kvtide.planner.curve import lru_curve
from kvtide.planner.hits import simulate, simulate_two

MOONCAKE = Path(__file__).parents[2] / "shared/data/requests/mooncake_conversation.jsonl"
REQUESTS = st.lists(st.lists(st.integers(0, 14), max_size=7), max_size=30)
CHAINS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 8)), max_size=30).map(  # prefixes of a few prompts
    lambda cuts: [[(prompt if depth > 2 else 0) * 100 + depth for depth in range(num)] for prompt, num in cuts]
)


def arrays(requests):
    starts = np.concatenate([[0], np.cumsum([len(blocks) for blocks in requests], dtype=np.int64)])
    return starts, np.array([block for blocks in requests for block in blocks], np.int64)


class Dict:
    """An LRU tier as plain as can be: least recent first."""

    def __init__(self, capacity, keeps=lambda _: True):
        self.blocks, self.capacity, self.keeps = OrderedDict(), capacity, keeps
        self.written = self.evicted = self.peak = self.reread = 0
        self.unread = set()

    def serve(self, blocks):
        for block in reversed(blocks[: self.capacity] if len(set(blocks)) == len(blocks) else blocks):
            if block not in self.blocks:
                if not self.keeps(block):
                    continue
                self.written += 1
                self.unread.add(block)
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.capacity:
            self.unread.discard(self.blocks.popitem(last=False)[0])
            self.evicted += 1
        self.peak = max(self.peak, len(self.blocks))

    def read(self, block):
        self.reread += block in self.unread
        self.unread.discard(block)


def prefix_of(blocks, is_there):
    num = 0
    while num < len(blocks) and is_there(blocks[num]):
        num += 1
    return num


def lru_hits(requests, capacity):
    tier, hits = Dict(capacity), []
    for blocks in requests:
        hits.append(prefix_of(blocks, tier.blocks.__contains__))
        for block in blocks[: hits[-1]]:
            tier.read(block)
        tier.serve(blocks)
    return hits, tier


@given(requests=REQUESTS | CHAINS)
@settings(max_examples=150, deadline=None)
def test_curve_is_the_simulation_is_a_dict_at_every_size(requests):
    starts, ids = arrays(requests)
    curve = lru_curve(starts, ids)
    capacities = np.arange(18)
    expected = [lru_hits(requests, capacity)[0] for capacity in capacities]
    assert curve.hits(capacities).tolist() == [sum(hits) for hits in expected]
    for capacity, hits in zip(capacities.tolist(), expected, strict=True):
        assert simulate(starts, ids, capacity).hits.tolist() == hits
    assert curve.num_cold == len(set(ids.tolist()))
    assert curve.num_blocks == len(ids)
    assert curve.hits(10**9) == sum(lru_hits(requests, 10**9)[0])
    assert curve.hits([[0], [5]]).shape == (2, 1)


@given(requests=CHAINS, capacity=st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_copies_are_counted(requests, capacity):
    starts, ids = arrays(requests)
    counts, (_, tier) = simulate(starts, ids, capacity), lru_hits(requests, capacity)
    assert (counts.num_written, counts.num_evicted) == (tier.written, tier.evicted)
    assert (counts.num_peak, counts.num_reread) == (tier.peak, tier.reread)


@given(requests=CHAINS, dram_blocks=st.integers(0, 9), disk_blocks=st.integers(0, 20), refuses=st.booleans())
@settings(max_examples=100, deadline=None)
def test_two_tiers_hit_as_two_dicts(requests, dram_blocks, disk_blocks, refuses):
    seen = set()

    def keeps(block):
        is_known = block in seen
        seen.add(block)
        return is_known or not refuses

    dram, disk = Dict(dram_blocks), Dict(disk_blocks, keeps)
    expected = []
    for blocks in requests:
        num = prefix_of(blocks, lambda block: block in dram.blocks or block in disk.blocks)
        expected.append([sum(b in dram.blocks for b in blocks[:num]), sum(b not in dram.blocks for b in blocks[:num])])
        for block in blocks[:num]:
            (dram if block in dram.blocks else disk).read(block)
        dram.serve(blocks)
        disk.serve(blocks)
    admission = SecondTouch(1000) if refuses else None
    two = simulate_two(*arrays(requests), dram_blocks=dram_blocks, disk_blocks=disk_blocks, admission=admission)
    assert np.column_stack([two.dram.hits, two.disk.hits]).tolist() == expected
    for counts, tier in ((two.dram, dram), (two.disk, disk)):
        assert (counts.num_written, counts.num_evicted) == (tier.written, tier.evicted)
        assert (counts.num_peak, counts.num_reread) == (tier.peak, tier.reread)


@given(requests=REQUESTS | CHAINS, capacity=st.integers(0, 16), policy=st.sampled_from(EVICTOR_NAMES))
@settings(max_examples=200, deadline=None)
def test_no_policy_holds_more_than_fits_or_hits_what_was_never_asked(requests, capacity, policy):
    starts, ids = arrays(requests)
    costs = np.arange(1.0, len(ids) + 1)
    counts = simulate(starts, ids, capacity, policy=policy, costs=costs)
    assert counts.num_peak <= capacity
    assert counts.num_reread <= counts.num_written
    assert 0 <= counts.num_written - counts.num_evicted <= capacity
    endless = simulate(starts, ids, 1000, policy=policy)
    assert (counts.hits <= endless.hits).all()
    assert endless.num_evicted == 0
    assert endless.hits.tolist() == lru_hits(requests, 1000)[0]


def test_a_prompt_longer_than_the_tier_leaves_its_first_blocks():
    starts, ids = arrays([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]])
    for policy in EVICTOR_NAMES:
        assert simulate(starts, ids, 3, policy=policy).hits.tolist() == [0, 3], policy


def test_gdsf_keeps_what_takes_long_to_compute():
    starts, ids = arrays([[1], [2], [3], [1], [2]])
    costs = np.array([9.0, 1.0, 1.0, 9.0, 1.0])
    assert simulate(starts, ids, 2, policy="gdsf", costs=costs).hits.tolist() == [0, 0, 0, 1, 0]
    assert simulate(starts, ids, 2, policy="lru", costs=costs).hits.tolist() == [0, 0, 0, 0, 0]


def test_look_ahead_keeps_what_waits():
    starts, ids = arrays([[1], [2], [3], [1], [2]])
    assert simulate(starts, ids, 2, policy="look-ahead", look_ahead=3).hits.sum() == 1
    assert simulate(starts, ids, 2, policy="look-ahead", look_ahead=0).hits.sum() == 0


def test_endurance_stops_writing_until_time_has_passed():
    starts, ids = arrays([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    times = np.array([0, 1, DAY_NS, DAY_NS + 1])
    admission = Endurance(bytes_per_day=20, burst_bytes=20)
    counts = simulate(starts, ids, 9, admission=admission, times_ns=times, block_bytes=10)
    assert counts.hits.tolist() == [0, 2, 2, 3]
    assert counts.num_written == 3


def test_impossible_tiers_are_refused():
    starts, ids = arrays([[1]])
    with pytest.raises(ConfigError, match="-1 blocks"):
        simulate(starts, ids, -1)
    with pytest.raises(ConfigError, match="unknown evictor"):
        simulate(starts, ids, 1, policy="best")


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the Mooncake conversation trace is not here")
def test_a_real_trace_hits_as_a_dict_says():
    requests = [json.loads(line)["hash_ids"] for line in MOONCAKE.read_text().splitlines()]
    starts, ids = arrays(requests)
    curve = lru_curve(starts, ids)
    assert (curve.num_blocks, curve.num_cold) == (288_500, 182_790)
    assert curve.hits(10**9) == 105_710  # all that is asked for again: whole prefixes come back
    hits, tier = lru_hits(requests, 10_000)
    assert curve.hits(10_000) == sum(hits)
    counts = simulate(starts, ids, 10_000)
    assert counts.hits.tolist() == hits
    assert (counts.num_written, counts.num_reread) == (tier.written, tier.reread)
