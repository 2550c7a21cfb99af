"""What every evictor promises: arrays of ids in, ids to drop out. Next: queues (what most of them are made of).

An evictor knows ids only: numbers 0 to capacity - 1, one for each place in a tier. It holds no bytes and reads no
clock. A place is used for other content later, so what an evictor remembers of content that left goes by key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
NEVER = np.iinfo(np.int64).max  # the time of a use that will not come


@dataclass(frozen=True, slots=True)
class Facts:
    """What a caller knows of ids, each fact in the order of the ids; None: not known.

    Shapes: each [n], as the ids they come with.
    Units: costs in ns to compute the content again; sizes in bytes; next_use in any time that only grows.
    """

    keys: Keys | None = None  # identity of the content; None: the id itself, right only where ids never change content
    costs: npt.NDArray[np.float64] | None = None
    sizes: npt.NDArray[np.int64] | None = None
    next_use: npt.NDArray[np.int64] | None = None

    def take(self, index: npt.NDArray[np.bool_] | npt.NDArray[np.intp] | slice) -> Facts:
        """Return the facts of those ids that `index` picks."""
        return Facts(
            self.keys if self.keys is None else self.keys[index],
            self.costs if self.costs is None else self.costs[index],
            self.sizes if self.sizes is None else self.sizes[index],
            self.next_use if self.next_use is None else self.next_use[index],
        )


NO_FACTS = Facts()


class Evictor(Protocol):
    """Orders the ids 0 to capacity - 1 that are in a tier. Within one call, later ids count as more recent.

    An id named twice in one call counts once, at its later place.
    """

    def admit(self, ids: Ids, facts: Facts = NO_FACTS) -> None:
        """Note that `ids` came in; one that is in already counts as new."""

    def touch(self, ids: Ids, facts: Facts = NO_FACTS) -> None:
        """Note that `ids` were used; those that are not in stay out."""

    def forget(self, ids: Ids) -> None:
        """Note that `ids` left; those that are not in are passed over."""

    def victims(self, num: int, evictable: Mask) -> Ids:
        """Return up to `num` ids to drop, best first, among those in and `evictable`.

        They stay in until they are forgotten, so a caller that cannot drop one may leave it.

        Shapes: evictable [capacity].
        """


class Expecting(Protocol):
    """The further power of an evictor that can be told what the waiting queue will need."""

    def expect(self, ids: Ids) -> None:
        """Keep `ids`, soonest needed first, in place of those expected before; those not in are passed over."""
