"""How a sequence grows and shrinks: units for new tokens, copy before write, keys of what became full. Next: loader.

Bookkeeping only: rows of a frame are copied, but nothing is read or written below DRAM. A unit that may be appended to
names its sequence as `opener`; only that one closes it.

Threads: callers hold the cache's lock.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KEY, KeyArray, chain_keys, partial_keys
from kvtide.cache.ledger import Ids, Ledger
from kvtide.cache.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Needs:
    """What a step takes. `tail` is the unit it continues, -1 if it begins a new one; `is_copied`: in a copy."""

    num_tokens: int
    filled: int
    tail: int
    is_copied: bool
    num_units: int
    num_frames: int


class Growth:
    """Grows, seals and cuts sequences."""

    def __init__(self, ledger: Ledger, lock: threading.Condition, *, reserve: int) -> None:
        self._ledger, self._lock, self._layout, self._reserve = ledger, lock, ledger.layout, reserve

    def needs(self, sequence: Sequence, num_tokens: int) -> Needs:
        """Return what `num_tokens` more of `sequence` take."""
        ledger, group = self._ledger, self._layout.tokens_per_group
        filled = sequence.num_tokens % group
        tail = sequence.table.units[-1] if filled else -1
        is_copied = tail >= 0 and (int(ledger.pool.counts()[tail]) > 1 or int(ledger.num_tokens[tail]) != filled)
        num_units = -(-(filled + num_tokens) // group) - (tail >= 0) + is_copied
        return Needs(num_tokens, filled, tail, is_copied, num_units, num_units * self._layout.num_fragments)

    def grow(self, sequence: Sequence, needs: Needs, frames: Ids | None) -> bool:
        """Extend the table and give every new unit its frames; False, and nothing changed, where room is short.

        `frames` were taken for it, with the tail pinned; None: take them if that is easy.
        """
        ledger, tail = self._ledger, needs.tail
        self._lock.wait_for(lambda: tail < 0 or not ledger.is_busy[tail])
        if frames is None:
            if not self._is_easy(needs):
                return False
            frames = ledger.take_frames(needs.num_frames, keep_unit=tail)
        elif tail >= 0:
            ledger.pins[ledger.frames[tail]] -= 1
        if len(frames) < needs.num_frames or ledger.pool.num_free < needs.num_units:
            ledger.frame_pool.give(frames)
            return False
        self._extend(sequence, needs, frames)
        return True

    def _is_easy(self, needs: Needs) -> bool:
        """Say whether the step can begin without moving anything but clean fragments out of DRAM."""
        ledger, tail = self._ledger, needs.tail
        if tail >= 0 and not ledger.is_resident(np.array([tail]))[0]:
            return False
        if not needs.num_frames and ledger.opener[tail] == -1 and not ledger.is_clean(np.array([tail]))[0]:
            return True
        is_new = needs.num_frames > 0 or ledger.opener[tail] < 0
        return ledger.pool.num_free >= needs.num_units and (
            not is_new or ledger.fits(needs.num_frames, tail, reserve=self._reserve)
        )

    def _extend(self, sequence: Sequence, needs: Needs, frames: Ids) -> None:
        ledger, num_fragments, tail = self._ledger, self._layout.num_fragments, needs.tail
        if needs.is_copied:
            self.close_tail(sequence)
            ledger.pool.share(np.array([tail]))  # so that the table copies also what only this sequence holds
        grown = sequence.table.append(ledger.pool, needs.num_tokens)
        if needs.is_copied:
            ledger.pool.release(np.array([tail]))
            if tail in sequence.own_units(self._layout.tokens_per_group):
                ledger.was_refused[tail] = True  # nobody will find what was taken back: it is not worth a write
        assert grown is not None, "fewer units than there were"
        units = np.array([*([grown.copy[1]] if grown.copy else []), *grown.new_units], np.int64)
        ledger.begin(units)
        ledger.frame_pool.clear(frames)
        ledger.bind(frames, np.repeat(units, num_fragments), np.tile(np.arange(num_fragments), len(units)))
        if grown.copy:
            self._copy_unit(sequence, grown.copy[0], grown.copy[1], needs.filled)
        touched = grown.spans[:, 0]
        ledger.opener[touched] = sequence.sequence_id
        ledger.was_refused[touched] = False
        sequence.pending, sequence.num_pending = grown.spans, needs.num_tokens
        sequence.units = np.array(sequence.table.units, np.int64)

    def _copy_unit(self, sequence: Sequence, source: int, target: int, num_tokens: int) -> None:
        ledger = self._ledger
        ledger.frame_pool.copy(ledger.frames[source], ledger.frames[target])
        ledger.num_tokens[target] = num_tokens
        first = (len(sequence.tokens) // self._layout.tokens_per_group) * self._layout.group_blocks
        keys = sequence.keys[first:]
        if keys:
            self._set_blocks(sequence, target, first, first, np.frombuffer(b"".join(keys), KEY))

    def seal(self, sequence: Sequence, tokens: list[int], *, is_exact: bool) -> Ids:
        """End the step in progress: its KV belongs to `tokens`. Return the units that became full."""
        ledger, pending = self._ledger, sequence.pending
        assert pending is not None, "no step was begun"
        if not is_exact and sequence.num_exact is None:
            sequence.num_exact = len(sequence.tokens)
        sequence.tokens.extend(tokens)
        ledger.num_tokens[pending[:, 0]] = pending[:, 2]
        self._extend_keys(sequence)
        full = pending[pending[:, 2] == self._layout.tokens_per_group, 0]
        ledger.opener[full] = -1
        sequence.pending, sequence.num_pending = None, 0
        return full

    def _extend_keys(self, sequence: Sequence) -> None:
        """Compute the keys of blocks that became full, and let others find them."""
        block, group = self._layout.block_tokens, self._layout.group_blocks
        at = len(sequence.keys)
        parent = sequence.parent_key(at, block)
        new = chain_keys(np.array(sequence.tokens[at * block :], np.int64), block_tokens=block, parent=parent)
        sequence.keys.extend(key.tobytes() for key in new)
        while at < len(sequence.keys):
            unit = at // group
            start, end = unit * group, min((unit + 1) * group, len(sequence.keys))
            keys = np.frombuffer(b"".join(sequence.keys[at:end]), KEY)
            self._set_blocks(sequence, sequence.table.units[unit], start, at, keys)
            at = end

    def _set_blocks(self, sequence: Sequence, unit: int, start: int, at: int, keys: KeyArray) -> None:
        """Note the keys of the blocks of `sequence` from `at` on, of `unit`, which begins with block `start`."""
        self._ledger.set_blocks(unit, at - start, keys, self._parent(sequence, start))
        self._ledger.is_own[unit] = sequence.is_own(at + len(keys) - 1, self._layout.block_tokens)

    def close_tail(self, sequence: Sequence) -> None:
        """Let the unfilled tail of `sequence`, if it has it open, be found, stored and evicted."""
        assert sequence.pending is None, "a step in progress has its tail open"
        ledger, block, units = self._ledger, self._layout.block_tokens, sequence.table.units
        if not units or ledger.opener[units[-1]] != sequence.sequence_id:
            return
        ledger.opener[units[-1]] = -1
        num_left = len(sequence.tokens) % block
        if num_left:
            parent = sequence.parent_key(len(sequence.keys), block)
            key = partial_keys(np.array(sequence.tokens[-num_left:], np.int64), parent=parent)[-1:]
            start = len(sequence.keys) // self._layout.group_blocks * self._layout.group_blocks
            self._set_blocks(sequence, units[-1], start, len(sequence.keys), key)

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Forget a step in progress, and the tokens from `num_tokens` on."""
        ledger, table = self._ledger, sequence.table
        if sequence.pending is not None:
            begun = sequence.pending[:, 0]
            table.truncate(ledger.pool, len(sequence.tokens))
            ledger.opener[np.setdiff1d(begun, np.array(table.units, np.int64))] = -1
            sequence.pending, sequence.num_pending = None, 0
        self.close_tail(sequence)
        if len(table.truncate(ledger.pool, num_tokens)):
            ledger.was_refused[:] = False  # what became idle may make room below
        if sequence.num_exact is not None and num_tokens <= sequence.num_exact:
            sequence.num_exact = None
        del sequence.tokens[num_tokens:]
        del sequence.keys[num_tokens // self._layout.block_tokens :]
        sequence.units = np.array(table.units, np.int64)

    @staticmethod
    def _parent(sequence: Sequence, first_block: int) -> npt.NDArray[np.void]:
        """Return the key of the block before `first_block`."""
        parent: npt.NDArray[np.void] = np.frombuffer(sequence.key_before(first_block), KEY)[0]
        return parent
