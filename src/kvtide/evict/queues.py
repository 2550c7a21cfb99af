"""Ids that stand in queues, each in one at most, and leave from anywhere: what evictors are made of. Next: recency.

Theory. A queue is a log. A push appends the id with a new stamp and notes the stamp at the id; an entry is alive while
its stamp is still that of its id. So moving or removing an id leaves a dead entry behind, and costs the same wherever
it stood:

    push 7, push 3, push 9, push 7 again, remove 9       head              end
    ids     [ 7  3  9  7 ]                                | 7  3  9  7 | free room
    stamps  [ 0  1  2  3 ]     stamp of 3: 1, of 7: 3       x     x      are dead

A look throws out the dead entries it meets: the live ones before them move up. The others go when the log is full,
which then doubles if it must. So each push pays for its entry's death, and all work is O(1) an id, amortised. Entries
that are alive and may not go are met again by every look; where there are many of them, one pass over the caller's mask
takes the place of the look.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvtide.evict.contract import Ids, Mask

LOOK_MIN = 32  # entries of a first look: numpy handles them as fast as one
FRUITLESS = 8  # entries an id found, from which on a pass over the mask, at a byte an id, may cost less


class _Log:
    __slots__ = ("end", "head", "ids", "stamps")

    def __init__(self) -> None:
        self.ids, self.stamps = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.head = self.end = 0


class Queues:
    """Queues of the ids 0 to capacity - 1. Stamps grow with every push to any queue, so ages compare across them.

    `num_scanned` counts the entries looked at so far.
    """

    def __init__(self, num_queues: int, capacity: int) -> None:
        self.queue_of = np.full(capacity, -1, np.int8)  # -1: in none
        self.stamps = np.full(capacity, -1, np.int64)
        self.num_scanned = 0
        self._nums = [0] * num_queues
        self._logs = [_Log() for _ in range(num_queues)]
        self._now = 0

    def num(self, queue: int) -> int:
        """Return how many ids stand in `queue`."""
        return self._nums[queue]

    def inside(self, ids: Ids) -> Ids:
        """Return those of `ids` that stand in any queue."""
        return ids[self.queue_of[ids] >= 0]

    def push(self, ids: Ids, queues: int | Ids) -> None:
        """Let `ids` stand last, in order, in one queue or each in its own, wherever they stood before.

        Shapes: ids [n]; queues [n], or one for all.
        """
        if not len(ids):
            return
        stamps = np.arange(self._now, self._now + len(ids))
        self._now += len(ids)
        self.stamps[ids] = stamps
        is_last = self.stamps[ids] == stamps
        if np.count_nonzero(is_last) < len(ids):  # an id was named twice
            ids, stamps = ids[is_last], stamps[is_last]
            queues = queues if isinstance(queues, int) else queues[is_last]
        self._uncount(ids)
        self.queue_of[ids] = queues
        if isinstance(queues, int):
            self._append(queues, ids, stamps)
            return
        for queue in set(queues.tolist()):
            own = queues == queue
            self._append(queue, ids[own], stamps[own])

    def remove(self, ids: Ids) -> None:
        """Let `ids` stand nowhere."""
        ids = self.inside(ids)
        if not len(ids):
            return
        places = np.arange(len(ids))
        self.stamps[ids] = places
        ids = ids[self.stamps[ids] == places]  # each once
        self._uncount(ids)
        self.queue_of[ids] = self.stamps[ids] = -1

    def merge(self, targets: Ids) -> None:
        """Let all ids of queue q stand in queue `targets[q]`, each by its age. Sorts everything.

        Shapes: targets [num_queues].
        """
        ids = np.flatnonzero(self.queue_of >= 0)
        ids = ids[np.argsort(self.stamps[ids], kind="stable")]
        self.num_scanned += len(ids)
        queues = targets[self.queue_of[ids]]
        self.queue_of[ids] = queues
        self._nums = [0] * len(self._logs)
        for log in self._logs:
            log.head = log.end = 0
        for queue in set(queues.tolist()):
            own = ids[queues == queue]
            self._append(queue, own, self.stamps[own])

    # Looking

    def first(self, queue: int, num: int, evictable: Mask) -> Ids:
        """Return up to `num` of the ids in `queue` that are `evictable`, first come first."""
        return _some(self.oldest(queue, num, evictable), num)

    def last(self, queue: int, num: int, evictable: Mask) -> Ids:
        """Return up to `num` of the ids in `queue` that are `evictable`, last come first."""
        return _some(self._look(queue, num, evictable, step=-1), num)

    def oldest(self, queue: int, num: int, evictable: Mask) -> Iterator[Ids]:
        """Yield the ids in `queue` that are `evictable`, first come first, in pieces of about `num` and growing.

        The caller may push meanwhile; what it pushes to this queue comes up too.
        """
        return self._look(queue, num, evictable, step=1)

    def _look(self, queue: int, num: int, evictable: Mask, *, step: int) -> Iterator[Ids]:
        log, reached = self._logs[queue], -1 if step > 0 else self._now
        size, num_seen, num_found, next_check = max(2 * num, LOOK_MIN), 0, 0, 0
        while True:
            begin, end = self._beyond(log, reached, step)
            if begin == end:
                return
            begin, end = (begin, min(end, begin + size)) if step > 0 else (max(begin, end - size), end)
            reached = int(log.stamps[end - 1 if step > 0 else begin])
            ids = self._alive(log, begin, end, step)
            ids = ids[evictable[ids]][::step]
            if len(ids):
                yield ids
            num_seen, num_found, size = num_seen + end - begin, num_found + len(ids), 2 * size
            if num_seen >= next_check and num_seen > FRUITLESS * num_found:
                next_check = 2 * num_seen
                begin, end = self._beyond(log, reached, step)
                if begin < end and FRUITLESS * np.count_nonzero(evictable) <= end - begin:
                    rest = self._rest(queue, reached, evictable, step)
                    reached = int(log.stamps[end - 1 if step > 0 else begin])
                    if len(rest):
                        yield rest[np.argsort(self.stamps[rest])[::step]]

    @staticmethod
    def _beyond(log: _Log, reached: int, step: int) -> tuple[int, int]:
        """Return where in `log` the entries are that a look has before it, after stamp `reached`."""
        stamps = log.stamps[log.head : log.end]
        middle = log.head + int(np.searchsorted(stamps, reached, side="right" if step > 0 else "left"))
        return (middle, log.end) if step > 0 else (log.head, middle)

    def _rest(self, queue: int, reached: int, evictable: Mask, step: int) -> Ids:
        """Return what of `queue` is evictable and after stamp `reached`, in no order."""
        ids = np.flatnonzero(evictable)
        return ids[(self.queue_of[ids] == queue) & (step * self.stamps[ids] > step * reached)]

    def _alive(self, log: _Log, begin: int, end: int, step: int) -> Ids:
        """Return the ids of the entries that are alive; throw out the others, and close up with what a look passed."""
        ids, stamps = log.ids[begin:end], log.stamps[begin:end]
        is_alive = self.stamps[ids] == stamps
        num_passed = begin - log.head if step > 0 else log.end - end
        num_dead = len(ids) - int(np.count_nonzero(is_alive))
        ids = ids[is_alive]
        self.num_scanned += len(is_alive) + (num_passed if num_dead else 0)
        if num_dead:
            stamps = stamps[is_alive]
            if step > 0:
                passed, to, own = slice(log.head, begin), slice(log.head + num_dead, begin + num_dead), begin + num_dead
                log.head += num_dead
            else:
                passed, to, own = slice(end, log.end), slice(end - num_dead, log.end - num_dead), begin
                log.end -= num_dead
            log.ids[to], log.stamps[to] = log.ids[passed], log.stamps[passed]
            log.ids[own : own + len(ids)], log.stamps[own : own + len(ids)] = ids, stamps
        return ids

    # Logs

    def _uncount(self, ids: Ids) -> None:
        """Count `ids` out of the queues they stand in."""
        if len(self._nums) == 1:
            self._nums[0] -= int(np.count_nonzero(self.queue_of[ids] == 0))
            return
        for queue, num in enumerate(np.bincount(self.queue_of[ids] + 1, minlength=len(self._nums) + 1)[1:].tolist()):
            self._nums[queue] -= num

    def _append(self, queue: int, ids: Ids, stamps: Ids) -> None:
        log = self._logs[queue]
        self._nums[queue] += len(ids)
        if log.end + len(ids) > len(log.ids):
            self._compact(log, len(ids))
        end = log.end + len(ids)
        log.ids[log.end : end], log.stamps[log.end : end] = ids, stamps
        log.end = end

    def _compact(self, log: _Log, room: int) -> None:
        """Move the live entries of `log` to its begin, with as much room behind them, and `room`, as they take."""
        begin, end = log.head, log.end
        ids, stamps = log.ids[begin:end], log.stamps[begin:end]
        is_alive = self.stamps[ids] == stamps
        self.num_scanned += len(ids)
        ids, stamps = ids[is_alive], stamps[is_alive]
        size = 2 * (len(ids) + room) + LOOK_MIN
        if size > len(log.ids):
            log.ids, log.stamps = np.zeros(size, np.int64), np.zeros(size, np.int64)
        log.ids[: len(ids)], log.stamps[: len(ids)] = ids, stamps
        log.head, log.end = 0, len(ids)


def _some(pieces: Iterator[Ids], num: int) -> Ids:
    """Return the first `num` ids of `pieces`."""
    found: list[Ids] = []
    missing = num
    while missing > 0:
        ids = next(pieces, None)
        if ids is None:
            break
        found.append(ids[:missing])
        missing -= len(found[-1])
    if len(found) == 1:
        return found[0]
    return np.concatenate(found) if found else np.zeros(0, np.int64)
