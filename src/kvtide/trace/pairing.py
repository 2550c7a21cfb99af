"""Which end belongs to which start: pairs issues with completions by key. Next: importers, kernel.

Pure: arrays in, indexes out. Knows neither formats nor what a key is made of.

Theory. Keys such as (device, sector) are used again and again, and logs lose events. So an end belongs to the event
directly before it in the order of (key, time), and only if that is a start. A start that meets another start of its
key before an end has lost its own end; an end that meets another end has lost its start.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NONE = -1  # in place of an index: no partner


def pair(
    keys: npt.NDArray[np.uint64], time_ns: npt.NDArray[np.int64], is_end: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Return for each event the index of its partner, or NONE.

    Each end is paired with the latest earlier start of its key, if no other event of that key lies between. Events of
    one key at the same time keep the order they are given in.

    Shapes: keys, time_ns, is_end and the result [n].
    """
    order = np.lexsort((time_ns, keys))  # stable
    partner = np.full(len(keys), NONE, np.int64)
    before, after = order[:-1], order[1:]
    is_pair = (keys[before] == keys[after]) & ~is_end[before] & is_end[after]
    partner[before[is_pair]] = after[is_pair]
    partner[after[is_pair]] = before[is_pair]
    return partner
