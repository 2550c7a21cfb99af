"""Ids of blocks from what prompts hold: hashes of a log, or parts that several prompts have. Pure. Next: lines.

Decides when two blocks are the same: when they and everything before them are.

Theory. A prefix is known by the sum, modulo 2**64, of one mixed number for each thing in it and its place. Sums need no
loop over requests. That two of N prefixes get one sum by accident has odds of about N**2 / 2**65: for 10 million
blocks, 1 in 400,000.
Source: the mixer is splitmix64, Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError
from kvtide.workload.requests import BLOCKS_MAX, Ids

Hashes = npt.NDArray[np.uint64]
_GOLDEN, _FIRST, _SECOND = (
    np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def mixed(values: Hashes) -> Hashes:
    """Return numbers that look random, the same for the same `values`. Shapes: kept."""
    found = values + _GOLDEN
    found = (found ^ (found >> np.uint64(30))) * _FIRST
    found = (found ^ (found >> np.uint64(27))) * _SECOND
    return found ^ (found >> np.uint64(31))


def chained(hashes: Hashes, block_start: Ids, *, input_tokens: Ids, block_tokens: int) -> Ids:
    """Return dense ids for blocks known by hashes: equal where the hashes from the beginning of the prompt on are.

    Logs differ in whether their hashes cover what comes before a block, so that is never relied on. A block filled in
    part is another than a full one, and than one filled otherwise.

    Shapes: hashes [N], block_start [R + 1], input_tokens [R]; returns [N].
    """
    counts = np.diff(block_start)
    places = within(counts)
    own = mixed(hashes ^ mixed(places.view(np.uint64)))
    rests = input_tokens % block_tokens
    ends = block_start[1:][rests > 0] - 1
    own[ends] = mixed(own[ends] + rests[rests > 0].view(np.uint64))
    return _dense(_sums(own, block_start))


def part_blocks(
    *, part_start: Ids, part_keys: Ids, part_tokens: Ids, block_tokens: int
) -> tuple[Ids, npt.NDArray[np.int32]]:
    """Return `block_start` and dense ids of prompts made of parts, such as a system prompt, documents, a question.

    Parts with one key begin with the same tokens: the longer one goes on where the shorter one ends. Blocks are equal
    as far as the parts before them, and they themselves, are. Parts of 0 tokens are passed over.

    Shapes: part_start [R + 1], part_keys and part_tokens [S]: prompt r has parts part_start[r] to part_start[r + 1];
    returns [R + 1] and [N].
    Raises: ConfigError if there were more than BLOCKS_MAX blocks.
    """
    is_there = part_tokens > 0
    part_start = np.concatenate([[0], np.cumsum(is_there)])[part_start]
    part_keys, part_tokens = part_keys[is_there], part_tokens[is_there]
    assert (np.diff(part_start) > 0).all(), "every prompt has a token"
    begins = _before(part_tokens, part_start)
    nodes = _part_nodes(part_start, part_keys, part_tokens)
    low, high = begins // block_tokens, (begins + part_tokens) // block_tokens
    sizes = high - low  # full blocks that end in the part
    extents = np.zeros(int(nodes.max(initial=-1)) + 1, np.int64)
    np.maximum.at(extents, nodes, sizes)
    bases = np.cumsum(extents) - extents
    input_tokens = begins[part_start[1:] - 1] + part_tokens[part_start[1:] - 1]
    rests = input_tokens % block_tokens
    # An unfilled last block is known by the part it ends in and by the prompt's length. Ids after those of full blocks.
    last = mixed(nodes[part_start[1:] - 1].view(np.uint64) ^ mixed(input_tokens.view(np.uint64)))
    rest_ids = np.zeros(len(rests), np.int64)
    rest_ids[rests > 0] = int(extents.sum()) + _dense(last[rests > 0])
    block_start = np.concatenate([[0], np.cumsum(-(-input_tokens // block_tokens))])
    if block_start[-1] > BLOCKS_MAX:
        raise ConfigError(
            f"the prompts have {block_start[-1]:,} blocks of {block_tokens} tokens; at most {BLOCKS_MAX:,} fit: "
            f"type a limit, or fewer requests"
        )
    runs = np.insert(sizes, part_start[1:], rests > 0)
    begins_at = np.insert(bases[nodes], part_start[1:], rest_ids) - (np.cumsum(runs) - runs)
    ids = np.repeat(begins_at.astype(np.int32), runs)  # BLOCKS_MAX fits 31 bits
    ids += np.arange(len(ids), dtype=np.int32)
    return block_start, ids


def within(counts: Ids) -> Ids:
    """Return 0, 1, ... anew for each of `counts`. Shapes: [n]; returns [sum of counts]."""
    starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(starts, counts)


def gathered(block_start: Ids, order: npt.NDArray[np.intp]) -> tuple[Ids, Ids]:
    """Return where the blocks of requests `order` lie, one request after the other, and where each then begins.

    Shapes: block_start [R + 1], order [n]; returns [blocks of those] and [n + 1].
    """
    counts = np.diff(block_start)[order]
    begins = np.concatenate([[0], np.cumsum(counts)])
    return np.repeat(block_start[:-1][order], counts) + within(counts), begins


def _part_nodes(part_start: Ids, part_keys: Ids, part_tokens: Ids) -> Ids:
    """Return one number for each part: equal where keys, and the whole parts before, are."""
    counts = np.diff(part_start)
    own = mixed(part_keys.view(np.uint64) ^ mixed(within(counts).view(np.uint64)))
    whole = mixed(own ^ mixed(part_tokens.view(np.uint64)))
    return _dense(_sums(whole, part_start) - whole + own)


def _sums(values: Hashes, start: Ids) -> Hashes:
    """Return sums from the beginning of each run to each place in it, modulo 2**64. Shapes: [N], [R + 1]; [N]."""
    sums = np.cumsum(values, dtype=np.uint64)
    before = np.concatenate([np.zeros(1, np.uint64), sums])[start[:-1]]
    return sums - np.repeat(before, np.diff(start))


def _before(values: Ids, start: Ids) -> Ids:
    """Return sums from the beginning of each run, none of them empty, up to and without each place in it."""
    sums = np.cumsum(values) - values
    return sums - np.repeat(sums[start[:-1]], np.diff(start))


def _dense(values: Hashes) -> Ids:
    return np.unique(values, return_inverse=True)[1].astype(np.int64)
