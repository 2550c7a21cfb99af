"""Evictors that no long scan sweeps clean, since ghosts tell them what comes back: s3-fifo and arc. Next: values.

Ghosts go by key. A caller whose ids get other content must give keys when it admits: without them the id itself is the
key, and all that comes into a used place looks as if it came back. What is forgotten becomes a ghost, whatever the
reason. All work is O(1) an id, amortised; keys are looked up in dicts, one at a time.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np

from kvtide.evict.contract import NO_FACTS, Facts, Ids, Keys, Mask
from kvtide.evict.queues import Queues

Ghosts = OrderedDict[int, None]  # keys, oldest first
_NO_GHOST = object()


class S3Fifo:
    """New ids pass through a small queue; only those used twice there, or back soon after, reach the main queue.

    Both are first in, first out. In the main queue a use buys a second round, up to three. The small queue is asked
    first as long as it has its share; asking moves ids on and takes counted uses away, so asking twice may return
    something else the second time, as good.
    Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, with its shares and limits. As in
    its authors' library the main queue may pass its share between two evictions.
    """

    _SMALL, _MAIN = 0, 1
    _USES_MAX = 3

    def __init__(self, capacity: int, *, small_share: float = 0.1) -> None:
        self._queues = Queues(2, capacity)
        self._uses = np.zeros(capacity, np.int8)
        self._keys: Keys = np.arange(capacity, dtype=np.uint64)
        self._num_small = max(1, int(small_share * capacity))
        self._ghosts: Ghosts = OrderedDict()
        self._num_ghosts_max = max(0, capacity - self._num_small)  # as many as the main queue's share

    def admit(self, ids: Ids, facts: Facts = NO_FACTS) -> None:
        """Let `ids` into the small queue, those whose key is a ghost into the main queue."""
        keys = _keys(ids, facts)
        is_back = [self._ghosts.pop(key, _NO_GHOST) is None for key in keys.tolist()]
        self._keys[ids], self._uses[ids] = keys, 0
        self._queues.push(ids, np.where(is_back, self._MAIN, self._SMALL))

    def touch(self, ids: Ids, facts: Facts = NO_FACTS) -> None:
        """Count a use of those of `ids` that are in."""
        del facts
        ids = self._queues.inside(ids)
        self._uses[ids] = np.minimum(self._uses[ids] + 1, self._USES_MAX)

    def forget(self, ids: Ids) -> None:
        """Take `ids` out; those in the small queue become ghosts."""
        _add(self._ghosts, self._keys[ids[self._queues.queue_of[ids] == self._SMALL]])
        while len(self._ghosts) > self._num_ghosts_max:
            self._ghosts.popitem(last=False)
        self._queues.remove(ids)

    def victims(self, num: int, evictable: Mask) -> Ids:
        """Return the oldest that were not used enough to stay; the others met on the way move on."""
        found = self._from_small(num, evictable, self._num_small)
        found = np.concatenate([found, self._from_main(num - len(found), evictable)])
        if len(found) < num:
            rest = evictable.copy()
            rest[found] = False
            found = np.concatenate([found, self._from_small(num - len(found), rest, 0)])
            rest[found] = False
            found = np.concatenate([found, self._from_main(num - len(found), rest)])
        return found

    def _from_small(self, num: int, evictable: Mask, num_keep: int) -> Ids:
        """Return up to `num` of the small queue, until fewer than `num_keep` would stay; move used ones to the main."""
        found, num_found, num_here = [np.zeros(0, np.int64)], 0, self._queues.num(self._SMALL)
        if num <= 0 or num_here < num_keep:
            return found[0]
        for piece in self._queues.oldest(self._SMALL, num, evictable):
            goes = self._uses[piece] < 2
            totals = num_found + np.cumsum(goes)
            left = num_here - np.arange(1, len(piece) + 1)
            ends = np.flatnonzero(goes & ((totals == num) | (left < num_keep)))
            end = int(ends[0]) + 1 if len(ends) else len(piece)
            ids, goes = piece[:end], goes[:end]
            self._uses[ids[~goes]] = 0
            self._queues.push(ids[~goes], self._MAIN)
            found.append(ids[goes])
            num_found, num_here = int(totals[end - 1]), num_here - end
            if len(ends):
                break
        return np.concatenate(found)

    def _from_main(self, num: int, evictable: Mask) -> Ids:
        """Return up to `num` of the main queue; those used stand last again, with one use less."""
        found, num_found = [np.zeros(0, np.int64)], 0
        if num <= 0:
            return found[0]
        for piece in self._queues.oldest(self._MAIN, num, evictable):
            goes = self._uses[piece] == 0
            totals = num_found + np.cumsum(goes)
            end = int(np.searchsorted(totals, num)) + 1
            ids, goes = piece[:end], goes[:end]
            self._uses[ids[~goes]] -= 1
            self._queues.push(ids[~goes], self._MAIN)
            found.append(ids[goes])
            num_found = int(totals[len(ids) - 1])
            if num_found == num:
                break
        return np.concatenate(found)


class Arc:
    """Keeps what was used once and what was used again in two queues, and learns from ghosts of both which to favour.

    Differs from the paper in one thing: a place must be free before its new content is known, so a ghost's return
    shifts the balance for the evictions after it, not for its own.
    Source: Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003; once and again are its
    T1 and T2, their ghosts B1 and B2, the target its p.
    """

    _ONCE, _AGAIN = 0, 1

    def __init__(self, capacity: int) -> None:
        self._queues = Queues(2, capacity)
        self._keys: Keys = np.arange(capacity, dtype=np.uint64)
        self._ghosts: tuple[Ghosts, Ghosts] = OrderedDict(), OrderedDict()
        self._capacity, self._target = capacity, 0.0

    def admit(self, ids: Ids, facts: Facts = NO_FACTS) -> None:
        """Let `ids` in as used once; those whose key is a ghost as used again."""
        keys = _keys(ids, facts)
        self._queues.remove(ids)
        once, again = self._ghosts
        num_once, num = self._queues.num(self._ONCE), self._queues.num(self._ONCE) + self._queues.num(self._AGAIN)
        queues = np.full(len(ids), self._AGAIN)
        for place, key in enumerate(keys.tolist()):
            num += 1
            if key in once:
                self._target = min(self._target + max(len(again) / len(once), 1.0), self._capacity)
                del once[key]
            elif key in again:
                self._target = max(self._target - max(len(once) / len(again), 1.0), 0.0)
                del again[key]
            else:
                queues[place] = self._ONCE
                num_once += 1
                # Content and ghosts used once stay within the capacity, all together within twice that.
                while once and num_once + len(once) > self._capacity:
                    once.popitem(last=False)
                while again and num + len(once) + len(again) > 2 * self._capacity:
                    again.popitem(last=False)
        self._keys[ids] = keys
        self._queues.push(ids, queues)

    def touch(self, ids: Ids, facts: Facts = NO_FACTS) -> None:
        """Let those of `ids` that are in be the last used of those used again."""
        del facts
        self._queues.push(self._queues.inside(ids), self._AGAIN)

    def forget(self, ids: Ids) -> None:
        """Take `ids` out; their keys become ghosts."""
        queues = self._queues.queue_of[ids]
        for queue in (self._ONCE, self._AGAIN):
            _add(self._ghosts[queue], self._keys[ids[queues == queue]])
        self._queues.remove(ids)

    def victims(self, num: int, evictable: Mask) -> Ids:
        """Return the least recently used of those used once, as far as they pass the target, then of the others."""
        surplus = math.ceil(self._queues.num(self._ONCE) - self._target)
        once = self._queues.first(self._ONCE, num, evictable)
        num_once = min(max(surplus, 0), len(once))
        again = self._queues.first(self._AGAIN, num - num_once, evictable)
        return np.concatenate([once[:num_once], again, once[num_once : max(num, 0) - len(again)]])


def _add(ghosts: Ghosts, keys: Keys) -> None:
    """Let `keys` be the newest ghosts, in order."""
    for key in keys.tolist():
        ghosts[key] = None
        ghosts.move_to_end(key)


def _keys(ids: Ids, facts: Facts) -> Keys:
    return ids.astype(np.uint64) if facts.keys is None else facts.keys
