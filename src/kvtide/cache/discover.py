"""Finding what others left on a remote: groups of a prompt's prefix that the ledger does not know yet. Next: tiered.

The file of this machine tells what it holds when a cache opens; a remote, which others write to, is asked when a prompt
comes: once for all blocks the ledger does not know, and once more for unfilled blocks where what was found ends early.
What is found becomes units of the ledger, as if it had been in the inventory.

Threads: the mover's; callers do not hold the cache's lock.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KEY, KeyArray, chain_keys, partial_keys
from kvtide.cache.ledger import Ids, Ledger
from kvtide.tiers.contract import GroupRecords
from kvtide.tiers.stacked import StackedTier


def discover(tokens: Ids, root: bytes, ledger: Ledger, tier: StackedTier, lock: threading.Condition) -> int:
    """Let the ledger know of the groups of `tokens` that only the far tier has; return how many those are."""
    chain = _Chain(tokens, root, ledger)
    last_group = len(chain.keys) // ledger.layout.group_blocks * ledger.layout.group_blocks
    tails = chain.tails(last_group)
    with lock:
        hits = ledger.index.get(chain.keys)[0]
        ledger.recency.touch(np.unique(hits[hits >= 0])[::-1])  # not to be given up for what is found behind them
        tails = tails.unknown(ledger)
    known = hits >= 0
    found = tier.find(np.concatenate([chain.keys[~known], tails.keys]))
    chosen, num_blocks = chain.pick(found, known)
    if num_blocks < last_group:  # the prefix ends earlier than the prompt
        tails = chain.tails(num_blocks)
        with lock:
            tails = tails.unknown(ledger)
        found = tier.find(tails.keys)
    chosen.extend(chain.longest_tail(found, tails))
    return _adopt(chosen, ledger, tier, lock)


@dataclass(frozen=True, slots=True)
class _Tails:
    """Keys that groups with an unfilled last block would have: `num_full` blocks of the prompt, then `num_more` tokens.

    Shapes: all [n].
    """

    keys: KeyArray
    num_full: Ids
    num_more: Ids

    def unknown(self, ledger: Ledger) -> _Tails:
        """Return those the ledger does not know."""
        rows = ledger.index.get(self.keys)[0] < 0
        return _Tails(self.keys[rows], self.num_full[rows], self.num_more[rows])


class _Chain:
    """The keys of a prompt's blocks, which every record must agree with: a remote is not trusted to know better."""

    def __init__(self, tokens: Ids, root: bytes, ledger: Ledger) -> None:
        self._tokens, self._group, self._block = tokens, ledger.layout.group_blocks, ledger.layout.block_tokens
        self._root = np.frombuffer(root, KEY)
        self.keys = chain_keys(tokens, block_tokens=self._block, parent=root)

    def tails(self, first: int) -> _Tails:
        """Return the keys an unfilled block may have anywhere in the group of which block `first` is in."""
        parts, full = [np.zeros(0, KEY)], [np.zeros(0, np.int64)]
        end = min((first // self._group + 1) * self._group, len(self.keys) + 1)
        for index in range(first, end):
            inner = self._tokens[index * self._block : (index + 1) * self._block - 1]
            parts.append(partial_keys(inner, parent=self.keys[index - 1].tobytes() if index else self._root.tobytes()))
            full.append(np.full(len(parts[-1]), index))
        more = [np.arange(1, len(part) + 1) for part in parts]
        return _Tails(np.concatenate(parts), np.concatenate(full), np.concatenate(more))

    def pick(self, found: GroupRecords, known: npt.NDArray[np.bool_]) -> tuple[list[GroupRecords], int]:
        """Return the records that lengthen the known prefix, in order, and how many blocks it has then."""
        at = {key: index for index, key in enumerate(self.keys.tolist())}
        longest: dict[int, tuple[int, int]] = {}  # of each group: the last block that is found, and its row
        for row, key in enumerate(found.keys.tolist()):
            last = at.get(key, -1)
            if last >= 0 and self._is_right(found, row, last + 1, self.keys[:0]):
                longest[last // self._group] = max(longest.get(last // self._group, (-1, -1)), (last, row))
        chosen, num_blocks = [], 0
        while num_blocks < len(self.keys):
            group = num_blocks // self._group
            end = min((group + 1) * self._group, len(self.keys))
            num_known = int(np.argmin(np.append(known[num_blocks:end], False)))
            last, row = longest.get(group, (-1, -1))
            if last + 1 > num_blocks + num_known:
                chosen.append(found.take(slice(row, row + 1)))
            reached = max(last + 1, num_blocks + num_known)
            num_blocks = max(num_blocks, reached)
            if reached < end:
                break
        return chosen, num_blocks

    def longest_tail(self, found: GroupRecords, tails: _Tails) -> list[GroupRecords]:
        """Return the longest of the records of a group with an unfilled block, if there is one."""
        at = {key: index for index, key in enumerate(tails.keys.tolist())}
        best = (-1, -1)
        for row, key in enumerate(found.keys.tolist()):
            one = at.get(key, -1)
            full, more = (int(tails.num_full[one]), int(tails.num_more[one])) if one >= 0 else (0, 0)
            if one >= 0 and self._is_right(found, row, full, tails.keys[one : one + 1], more):
                best = max(best, (full * self._block + more, row))
        return [found.take(slice(best[1], best[1] + 1))] if best[1] >= 0 else []

    def _is_right(self, found: GroupRecords, row: int, num_full: int, tail: KeyArray, num_more: int = 0) -> bool:
        """Say whether a record is of the group that ends behind `num_full` full blocks, or the `tail` of more tokens.

        Shapes: tail [0], or [1] with `num_more` tokens in its block.
        """
        first = (num_full + len(tail) - 1) // self._group * self._group
        blocks = np.concatenate([self.keys[first:num_full], tail])
        parent = self.keys[first - 1] if first else self._root[0]
        return bool(
            found.num_blocks[row] == len(blocks)
            and found.num_tokens[row] == (num_full - first) * self._block + num_more
            and found.parents[row] == parent
            and (found.block_keys[row, : len(blocks)] == blocks).all()
        )


def _adopt(chosen: list[GroupRecords], ledger: Ledger, tier: StackedTier, lock: threading.Condition) -> int:
    """Make units of the records, in place of others that lie far, if need be, as long as there are any."""
    gone = np.zeros(0, KEY)
    with lock:
        missing = len(chosen) - ledger.pool.num_free
        if missing > 0:
            gone = ledger.dispose(ledger.recency.victims(missing, ledger.disposable() & ledger.is_far))
        num = min(len(chosen), ledger.pool.num_free)
        for record in chosen[:num]:
            ledger.adopt(record, is_far=True)
    tier.drop(gone)
    return num
