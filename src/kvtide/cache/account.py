"""What a cache says of itself: fill of its tiers, and the event of one layer that was asked for. Next: tiered.

Threads: callers hold the cache's lock for `usage`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtide.cache.ledger import Ledger
from kvtide.cache.sequence import Sequence
from kvtide.cache.traffic import FillCounts
from kvtide.cache.windows import Windows
from kvtide.tiers.contract import Cause, TierStats
from kvtide.trace.events import CAUSES
from kvtide.trace.record import OBJECT_EVENT


def usage(ledger: Ledger, windows: Windows) -> dict[str, TierStats]:
    """Return fill and capacity of device and DRAM.

    `num_groups` counts windows on the device, and groups that are whole in DRAM.
    """
    pool = ledger.frame_pool
    device = TierStats(capacity_bytes=windows.arena.num_bytes, used_bytes=windows.used_bytes())
    device.num_groups = len(windows.windows)
    dram = TierStats(capacity_bytes=pool.num_frames * pool.frame_bytes, used_bytes=ledger.used_bytes())
    dram.num_groups = int(ledger.is_resident().sum())
    return {"device": device, "dram": dram}


def object_event(
    sequences: list[Sequence],
    layer: int,
    cause: Cause,
    counts: FillCounts,
    *,
    token_bytes: int,
    started_ns: int,
    waited_ns: int,
    step: int,
) -> npt.NDArray[np.void]:
    """Return the trace's row of one layer of a step. Shapes: [1] OBJECT_EVENT."""
    num_tokens = sum(len(sequence.tokens) for sequence in sequences)
    event = (
        started_ns,
        sequences[0].sequence_id,
        layer,
        CAUSES.index(cause),
        num_tokens,
        num_tokens * token_bytes,
        counts.dram_bytes,
        counts.file_bytes,
        waited_ns,
        step,
        sum(sequence.num_pending for sequence in sequences),
    )
    return np.array([event], OBJECT_EVENT)
