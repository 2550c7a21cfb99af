"""How many blocks would hit in a least-recently-used tier, for all sizes at once. Pure arrays. Next: hits.

Theory. A request looks its blocks up in the tier as it is before, and hits the longest prefix of them that is all
there; then they all become the most recent, the first of the prompt before all. Under LRU a tier of C blocks holds the
C most recent, so a block is there if its *distance*, the number of other blocks more recent, is below C, and a prefix
is there if the greatest distance in it is.

Let the uses of blocks be numbered in order of recency, S the first number of the request that asks, and p < S the last
use of the block. Of the S - 1 - p uses since, those count that are the last of their block:

    distance = (S - 1 - p) - (uses m < S whose block was used before, at prev(m) > p)

since each such m makes prev(m) a use that is not the last. The second term counts pairs in order of request and out of
order of prev. Uses sorted by prev, latest first, are split by the bits of their request's number, the highest bit
first, each part in two that keep their order: of two requests the earlier has a 0 where the later has a 1 for the first
time, so each use with a 1 counts the uses with a 0 before it in its part. O(N log R), all in numpy.
Source: stack distances, Mattson et al., IBM Systems Journal 1970; the splitting is that of a wavelet tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Curve:
    """Hits of an LRU tier by its size.

    Shapes: needed [blocks that hit in an endless tier], ascending: the least size in blocks with which each hits.
    """

    num_blocks: int  # asked for
    num_cold: int  # asked for the first time: no tier has them
    needed: Ids

    def hits(self, capacities: npt.ArrayLike) -> Ids:
        """Return the blocks that hit in tiers of these sizes, in blocks. Shapes: any; returns the same."""
        return np.searchsorted(self.needed, np.asarray(capacities), side="right").astype(np.int64)


def lru_curve(block_start: Ids, block_ids: Ids) -> Curve:
    """Return the hits of the blocks of all requests, in order, for LRU tiers of any size.

    A request that has a block twice uses it once, at its first place; the other place hits if the first does.

    Shapes: block_start [R + 1], block_ids [N]: request r asks for block_ids[block_start[r]:block_start[r + 1]].
    """
    num = len(block_ids)
    cold = num + 1  # farther than any
    request = np.repeat(np.arange(len(block_start) - 1), np.diff(block_start))
    order = np.argsort(block_ids, kind="stable")
    is_used = first_places(request, block_ids, order)
    use = _recency(request, is_used)
    begin = np.searchsorted(request[is_used], request)  # S of each block
    order = order[is_used[order]]
    is_same = block_ids[order[1:]] == block_ids[order[:-1]]
    later, earlier = order[1:][is_same], order[:-1][is_same]
    distance = np.full(num, cold, np.int64)
    distance[~is_used] = 0
    last = use[earlier]
    distance[later] = begin[later] - 1 - last - _pairs(request[later], last)
    reach = _running_maximum(distance, request, cold + 1)
    return Curve(num, int(is_used.sum()) - len(later), np.sort(reach[reach < cold]) + 1)


def first_places(request: Ids, block_ids: Ids, order: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """Return where a block has its first place in its request.

    Shapes: request, block_ids [N]; order [N], which sorts block_ids and leaves equals as they are; returns [N].
    """
    is_first = np.ones(len(block_ids), np.bool_)
    later, earlier = order[1:], order[:-1]
    is_first[later] = (block_ids[later] != block_ids[earlier]) | (request[later] != request[earlier])
    return is_first


def _recency(request: Ids, is_used: npt.NDArray[np.bool_]) -> Ids:
    """Return the number of each use: requests in order, blocks of each from the last to the first; -1: no use."""
    used = np.flatnonzero(is_used)
    own = request[used]
    ends = np.searchsorted(own, own, side="right")
    begins = np.searchsorted(own, own, side="left")
    use = np.full(len(request), -1, np.int64)
    use[used] = begins + ends - 1 - np.arange(len(used))
    return use


def _pairs(request: Ids, last: Ids) -> Ids:
    """Return for each use how many others are of an earlier request and have a greater `last`.

    Shapes: request, last [n], `last` without equals; returns [n].
    """
    places = np.argsort(last)[::-1]
    counts = np.zeros(len(last), np.int64)
    for bit in range(int(request.max(initial=0)).bit_length() - 1, -1, -1):
        own = request[places] >> bit
        is_one = (own & 1).astype(np.bool_)
        zeros = np.cumsum(~is_one)  # 0 bits up to here, in all parts
        part = own >> 1
        is_first = np.append(True, part[1:] != part[:-1])[: len(part)]
        firsts = np.flatnonzero(is_first)
        zeros_before: Ids = (zeros - ~is_one)[firsts][np.cumsum(is_first) - 1]
        counts[places[is_one]] += (zeros - zeros_before)[is_one]
        places = places[np.argsort(own, kind="stable")]
    return counts


def _running_maximum(values: Ids, request: Ids, above: int) -> Ids:
    """Return the greatest of the values up to each, in its request. They are at least 0, and all below `above`."""
    return np.maximum.accumulate(values + request * above) - request * above
