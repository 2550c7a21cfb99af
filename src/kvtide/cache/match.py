"""Finding the longest kept prefix of some tokens, and where its bytes lie. Changes nothing. Next: tiered.

Threads: callers hold the cache's lock.
"""

from __future__ import annotations

import numpy as np

from kvtide.blocks import chain_keys, partial_keys
from kvtide.cache.ledger import Ids, Ledger
from kvtide.cache.sequence import Match
from kvtide.cache.windows import Windows


def find_prefix(ledger: Ledger, windows: Windows, tokens: Ids, *, root: bytes) -> Match:
    """Return the longest prefix of `tokens` whose KV is kept: full blocks, then as much of an unfilled one as fits."""
    block, group = ledger.layout.block_tokens, ledger.layout.group_blocks
    keys = chain_keys(tokens, block_tokens=block, parent=root)
    hits = ledger.index.get(keys)[0]
    num_blocks = len(hits) if (hits >= 0).all() else int(np.argmin(hits >= 0))
    ends = np.append(np.arange(group - 1, num_blocks, group), num_blocks - 1) if num_blocks else np.zeros(0, np.int64)
    units, num_tokens = hits[np.unique(ends)], num_blocks * block
    parent = keys[num_blocks - 1].tobytes() if num_blocks else root
    rest = tokens[num_tokens : num_tokens + block - 1]
    tails = ledger.index.get(partial_keys(rest, parent=parent))[0]
    if (tails >= 0).any():
        last = int(np.flatnonzero(tails >= 0)[-1])
        kept = units if num_blocks % group == 0 else units[:-1]
        units, num_tokens = np.append(kept, tails[last]), num_tokens + last + 1
    match = Match(units, num_tokens, tuple(key.tobytes() for key in keys[:num_blocks]))
    _locate(ledger, windows, match)
    return match


def _locate(ledger: Ledger, windows: Windows, match: Match) -> None:
    """Fill in which tier holds how much of a match, counting each byte in the fastest tier that has it."""
    layout, group = ledger.layout, ledger.layout.tokens_per_group
    part_bytes = np.array(layout.fragment_bytes) // group  # of one token
    tokens = np.full(len(match.units), group, np.int64)
    if len(tokens):
        tokens[-1] = match.num_tokens - (len(tokens) - 1) * group
    uids, begins = ledger.uid[match.units], np.arange(len(tokens)) * group
    below = tokens * layout.shape.bytes_per_token  # of each unit
    for index, layer in enumerate(layout.shape.layers):
        window = windows.find(index)
        on_device = min(window.common_tokens(0, uids, group), match.num_tokens) if window is not None else 0
        parts = slice(index * layout.parts_per_layer, (index + 1) * layout.parts_per_layer)
        bytes_in_dram = (ledger.frames[match.units, parts] >= 0) @ part_bytes[parts]  # of a token of each unit
        in_both = np.clip(on_device - begins, 0, tokens)
        match.device_bytes += on_device * layer.token_bytes
        match.dram_bytes += int((tokens - in_both) @ bytes_in_dram)
        below -= in_both * layer.token_bytes + (tokens - in_both) * bytes_in_dram
    match.remote_bytes = int(below[ledger.is_far[match.units]].sum())
    match.file_bytes = int(below.sum()) - match.remote_bytes
