"""The names by which vLLM knows the chunks that are there, and what its KV events say of them. Next: facts.

*Theory.* vLLM asks for every chunk of every request from Python, one by one, and if the interpreter goes to another
thread meanwhile, it waits for 5 ms. So the common look-up has to be one question to one set, of vLLM's own names: to
cut a name down to the store's 32 bytes costs as much again. A name comes in when its chunk was stored, or is first
found the slow way, and goes when its chunk leaves. The store tells both on its worker's thread. A look-up that finds a
chunk the slow way looks again after it put the name in: if the chunk left between the two, it takes the name out.

A name is found from the store's key only if it was 32 bytes of hash and the number of a group. Others stay out of the
set, and are found the slow way each time. After a start the set has the names of group 0, which the keys are a part of.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Iterator, KeysView

from kvtide.blocks import KEY, KeyArray
from kvtide.chunks import fold, fold_one

_FIRST = bytes(4)  # how a name of group 0 ends
_NAME_BYTES = KEY.itemsize + len(_FIRST)


class KnownChunks:
    """The set `names`, to be asked by anyone, and the events of what came and went, if `has_events`.

    `groups` are the numbers of vLLM's cache groups.
    Threads: `stored` and `gone` are for the store's worker, the rest for vLLM's scheduler.
    """

    def __init__(self, groups: Iterable[int], *, has_events: bool) -> None:
        self.names: set[bytes] = set()
        self._ends = [group.to_bytes(4, "big") for group in groups]
        self._has_events = has_events
        self._announced: dict[bytes, bytes] = {}  # names by the store's keys
        self._events: collections.deque[tuple[list[bytes], bool]] = collections.deque()
        self._held: Collection[bytes] = ()

    def start(self, held: KeysView[bytes]) -> None:
        """Take up what is there; `held` are the store's keys, kept up to date by it. Before the first transfer."""
        self._held = held
        if _FIRST in self._ends:
            self.names.update(key + _FIRST for key in held)

    def find(self, name: bytes) -> bool:
        """Say whether a chunk is there, of a name that is not in `names`."""
        folded = fold_one(name)
        if folded not in self._held:
            return False
        if len(name) != _NAME_BYTES:
            return True
        self.names.add(name)
        if folded in self._held:
            return True
        self.names.discard(name)
        return False

    def stored(self, keys: KeyArray, names: list[bytes]) -> None:
        """Note chunks that are there since they were stored, by the store's keys too. Shapes: keys [n]."""
        self.names.update(name for name in names if len(name) == _NAME_BYTES)
        if not self._has_events:
            return
        new = {key: name for key, name in zip(keys.tolist(), names, strict=True) if key not in self._announced}
        self._announced |= new
        self._tell(list(new.values()), is_removed=False)

    def gone(self, keys: KeyArray) -> None:
        """Note chunks that left, by the store's keys. Shapes: keys [n]."""
        left = keys.tolist()
        for end in self._ends:
            self.names.difference_update(_names(left, end))
        self._tell([self._announced.pop(key) for key in left if key in self._announced], is_removed=True)

    def _tell(self, names: list[bytes], *, is_removed: bool) -> None:
        if names:
            self._events.append((names, is_removed))

    def take_events(self) -> Iterator[tuple[list[bytes], bool]]:
        """Return what came and went since the last call, in order: names, and whether they went."""
        while self._events:
            yield self._events.popleft()


def _names(keys: list[bytes], end: bytes) -> list[bytes]:
    """Return the names that end in `end` and fold to `keys`: to fold twice undoes it."""
    return [key + end for key in fold([key + end for key in keys]).tolist()]
