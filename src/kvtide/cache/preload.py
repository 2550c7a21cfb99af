"""Bringing a prefix to DRAM before its request runs: what a queue of waiting requests allows. Next: tiered.

A request that waits will want all of its prefix at once. While another one computes, the drive is mostly idle; groups
brought meanwhile are found in DRAM. They come behind whatever is demanded, a few at a time, and never take more than
half of DRAM: what runs needs its own. Source: CachedAttention, arXiv 2403.19708 (look-ahead by the job queue).
"""

from __future__ import annotations

import contextlib
import functools
import threading

import numpy as np

from kvtide.cache.ledger import Ids, Ledger
from kvtide.cache.mover import PREFETCH, Mover
from kvtide.cache.traffic import Traffic
from kvtide.errors import IoError

GROUPS_A_JOB = 4  # whole groups: neighbouring fragments merge, so few operations; a demand waits for few
SHARE_MAX = 0.5  # of all frames


def preload(units: Ids, ledger: Ledger, traffic: Traffic, mover: Mover, lock: threading.Condition) -> int:
    """Begin to bring the groups of `units`, a prefix in order, to DRAM; return how many are on their way."""
    num_fragments = ledger.frames.shape[1]
    with lock:
        absent = units[~ledger.is_resident(units)]
        absent = absent[ledger.stored_tokens[absent] > 0]
        absent = absent[: int(SHARE_MAX * ledger.frame_pool.num_frames) // num_fragments]
        uids = ledger.uid[absent]
    fragments = np.arange(num_fragments)

    def bring(some: Ids, their_uids: Ids) -> None:
        each = np.repeat(some, num_fragments), np.repeat(their_uids, num_fragments), np.tile(fragments, len(some))
        with contextlib.suppress(IoError):  # whoever wants it will demand it, and be told
            frames, _ = traffic.bring(*each, cause="prefetch")
            traffic.let_go(frames)

    for start in range(0, len(absent), GROUPS_A_JOB):
        part = slice(start, start + GROUPS_A_JOB)
        mover.submit(functools.partial(bring, absent[part], uids[part]), PREFETCH)
    return len(absent)
