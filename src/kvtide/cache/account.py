"""What a cache says of itself: fill of its tiers, and the event of one layer that was asked for. Next: tiered.

Threads: callers hold the cache's lock for `usage`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from kvtide.cache.choice import Choice
from kvtide.cache.ledger import Ledger
from kvtide.cache.sequence import Match, Sequence
from kvtide.cache.traffic import FillCounts
from kvtide.cache.windows import Windows
from kvtide.tiers.contract import Cause, TierStats
from kvtide.trace.events import CAUSES
from kvtide.trace.record import OBJECT_EVENT


@dataclass(slots=True)
class Asked:
    """What prefixes were asked for since the cache was made, and what became of them.

    `hit_bytes` are by the fastest tier that had them; `choices` are by why a kept prefix was loaded or computed again.
    """

    num_requests: int = 0
    num_tokens: int = 0
    kept_tokens: int = 0
    used_tokens: int = 0
    hit_bytes: Counter[str] = field(default_factory=Counter)
    choices: Counter[tuple[str, str]] = field(default_factory=Counter)

    def note(self, num_tokens: int, match: Match, choice: Choice) -> None:
        """Count one request for `num_tokens`, of which `match` is reused."""
        self.num_requests += 1
        self.num_tokens += num_tokens
        self.kept_tokens += choice.kept_tokens
        self.used_tokens += choice.used_tokens
        self.choices["recompute" if choice.recomputed_tokens else "load", choice.reason] += 1
        for name in MATCH_TIERS:
            self.hit_bytes[name.removesuffix("_bytes")] += getattr(match, name)


MATCH_TIERS = tuple(one.name for one in fields(Match) if one.name.endswith("_bytes"))


def usage(ledger: Ledger, windows: Windows) -> dict[str, TierStats]:
    """Return fill and capacity of device and DRAM.

    `num_groups` counts windows on the device, and groups that are whole in DRAM.
    """
    pool = ledger.frame_pool
    device = TierStats(capacity_bytes=windows.arena.num_bytes, used_bytes=windows.used_bytes())
    device.num_groups = len(windows.windows)
    dram = TierStats(capacity_bytes=pool.num_frames * pool.frame_bytes, used_bytes=ledger.used_bytes())
    owners = ledger.frame_unit[ledger.frame_unit >= 0]
    dram.num_groups = int((np.bincount(owners) == ledger.layout.num_fragments).sum())
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
