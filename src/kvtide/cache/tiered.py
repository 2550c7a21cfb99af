"""The tiered cache: match, open, append, seal, fork, release, close. Its parts: ledger, windows, traffic, mover.

A sequence's KV is appended layer by layer (`begin_step`, then `layer` and `write` for each layer, then `seal` with the
token ids). New KV goes to a device window and to DRAM frames; full groups go on to the tier below in the background.
Attention reads a layer through `layer`, which waits for what is missing, while `prefetch` brings the next one.

Theory. The content of a unit only ever grows: whoever would overwrite tokens gets a copy of the unit first. So a copy
of a unit in any tier is right as far as it goes, whatever happens to the sequences that share it.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KEY, BlockTable, chain_keys, chain_root, partial_keys
from kvtide.cache.ledger import Ids, Ledger
from kvtide.cache.mover import DEMAND, PREFETCH, WRITE_BACK, Mover
from kvtide.cache.sequence import Match, Sequence
from kvtide.cache.traffic import FillCounts, Traffic
from kvtide.cache.windows import DeviceArena, Window, Windows
from kvtide.errors import ConfigError, IoError
from kvtide.spec import SlotLayout
from kvtide.tiers.contract import Cause, Tier, TierStats
from kvtide.tiers.file import FileTier
from kvtide.trace.record import CAUSES, OBJECT_EVENT, Recorder
from kvtide.units import format_bytes

SPARE_FRAMES = 8  # to read into while the groups of one step fill the rest


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Knobs of a cache. None changes results; all change speed and room."""

    dram_bytes: int
    write_policy: Literal["through", "back"] = "through"
    evictor: str = "lip"
    is_prefetching: bool = True


class TieredCache:
    """KV of many sequences over device, DRAM and one tier below.

    Threads: the public methods are for one thread; the mover's thread works beside it.
    """

    def __init__(
        self,
        layout: SlotLayout,
        identity_digest: bytes,
        arena: DeviceArena,
        options: CacheOptions,
        *,
        tier: Tier | None = None,
        recorder: Recorder | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        frame_bytes = max(layout.fragment_padded_bytes)
        least = 2 * layout.num_layers + SPARE_FRAMES
        if options.dram_bytes < least * frame_bytes:
            raise ConfigError(
                f"DRAM of {format_bytes(options.dram_bytes)} is too small: two groups of every layer are needed, "
                f"{format_bytes(least * frame_bytes)}; type --dram {-(-least * frame_bytes // 2**20)}MiB or more, "
                f"or a smaller --group-blocks"
            )
        if options.write_policy not in {"through", "back"}:
            raise ConfigError(f"unknown write policy {options.write_policy!r}; type through or back")
        num_frames = options.dram_bytes // frame_bytes
        num_slots = tier.stats().capacity_bytes // layout.slot_bytes if tier is not None else 0
        self.layout, self._options, self._tier, self._clock = layout, options, tier, clock
        self._digest, self._recorder = identity_digest, recorder
        self.ledger = Ledger(layout, num_units=num_slots + num_frames, num_frames=num_frames, evictor=options.evictor)
        self.windows = Windows(layout, arena)
        self._lock = threading.Condition(threading.RLock())
        self._traffic = Traffic(self.ledger, self.windows, tier, self._lock)
        self._live: dict[int, Sequence] = {}
        self._next_id = 0
        self.wait_ns = 0
        if isinstance(tier, FileTier):
            self.ledger.adopt(tier.inventory())
        self._mover = Mover()

    # Sequences

    def match(self, tokens: npt.ArrayLike, *, salt: str = "") -> Match:
        """Return the longest prefix of `tokens` whose KV is kept, without taking hold of it."""
        ids = np.asarray(tokens, np.int64)
        block, group = self.layout.block_tokens, self.layout.group_blocks
        root = chain_root(self._digest, salt)
        keys = chain_keys(ids, block_tokens=block, parent=root)
        with self._lock:
            units, covered = self.ledger.index.get(keys)
            hits = units >= 0
            num_blocks = len(keys) if hits.all() else int(np.argmin(hits))
            ends = (
                np.append(np.arange(group - 1, num_blocks, group), num_blocks - 1) if num_blocks else np.zeros(0, int)
            )
            ends = np.unique(ends)
            found, num_tokens = units[ends], num_blocks * block
            parent = keys[num_blocks - 1].tobytes() if num_blocks else root
            rest = ids[num_tokens : num_tokens + block - 1]
            tails, tail_tokens = self.ledger.index.get(partial_keys(rest, parent=parent))
            if (tails >= 0).any():
                last = int(np.flatnonzero(tails >= 0)[-1])
                kept = found if num_blocks % group == 0 else found[:-1]
                found, num_tokens = np.append(kept, tails[last]), num_tokens + last + 1
            del covered, tail_tokens
            return self._located(Match(found, num_tokens, tuple(key.tobytes() for key in keys[:num_blocks])))

    def _located(self, match: Match) -> Match:
        """Fill in which tier holds how much of a match, counting each byte in the fastest tier that has it."""
        group, layers = self.layout.tokens_per_group, self.layout.shape.layers
        tokens = np.full(len(match.units), group, np.int64)
        if len(tokens):
            tokens[-1] = match.num_tokens - (len(tokens) - 1) * group
        uids = self.ledger.uid[match.units]
        for index, layer in enumerate(layers):
            window = self.windows.find(index)
            on_device = min(window.common_tokens(0, uids, group), match.num_tokens) if window is not None else 0
            in_dram = tokens[self.ledger.frames[match.units, index] >= 0].sum()
            begins = np.arange(len(tokens)) * group
            both = (np.clip(on_device - begins, 0, tokens) * (self.ledger.frames[match.units, index] >= 0)).sum()
            match.device_bytes += on_device * layer.token_bytes
            match.dram_bytes += int(in_dram - both) * layer.token_bytes
        match.file_bytes = match.num_tokens * self.layout.shape.bytes_per_token - match.device_bytes - match.dram_bytes
        return match

    def open(self, tokens: npt.ArrayLike = (), *, salt: str = "") -> Sequence:
        """Start a sequence that begins with what is kept of `tokens`, all but the last of them at most.

        The last one is left out because a model must run on at least one token to say what comes next.
        """
        ids = np.asarray(tokens, np.int64)
        with self._lock:
            match = self.match(ids[:-1], salt=salt)
            units = match.units
            self.ledger.pool.share(units)
            self.ledger.reached(units)
            sequence = Sequence(
                sequence_id=self._next_id,
                table=BlockTable(self.layout.tokens_per_group, units=units.tolist(), num_tokens=match.num_tokens),
                root=chain_root(self._digest, salt),
                tokens=ids[: match.num_tokens].tolist(),
                keys=list(match.keys),
                matched=match,
            )
            self._next_id += 1
            self._live[sequence.sequence_id] = sequence
            return sequence

    def fork(self, sequence: Sequence) -> Sequence:
        """Return a second sequence with the same tokens so far. Nothing is copied until one of them grows."""
        with self._lock:
            self.pause(sequence)
            child = Sequence(
                sequence_id=self._next_id,
                table=sequence.table.fork(self.ledger.pool),
                root=sequence.root,
                tokens=list(sequence.tokens),
                keys=list(sequence.keys),
                matched=Match(np.array(sequence.table.units, np.int64), len(sequence.tokens), ()),
            )
            self._next_id += 1
            self._live[child.sequence_id] = child
            return child

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Forget the tokens of `sequence` from `num_tokens` on, with a step that was begun and not sealed."""
        with self._lock:
            self._close_tail(sequence)
            sequence.pending = None
            sequence.table.truncate(self.ledger.pool, num_tokens)
            del sequence.tokens[num_tokens:]
            del sequence.keys[num_tokens // self.layout.block_tokens :]

    def abort_step(self, sequence: Sequence) -> None:
        """Undo a step that was begun and not sealed."""
        self.truncate(sequence, len(sequence.tokens))

    def heal(self, sequence: Sequence) -> int:
        """Cut `sequence` before the first KV that no tier holds any more; return how many tokens are left."""
        self._mover.drain()
        with self._lock:
            self.abort_step(sequence)
            units = np.array(sequence.table.units, np.int64)
            gone = ~self.ledger.is_resident(units) & (self.ledger.stored_tokens[units] == 0)
            if gone.any():
                self.truncate(sequence, int(np.argmax(gone)) * self.layout.tokens_per_group)
            return len(sequence.tokens)

    def release(self, sequence: Sequence) -> None:
        """End a sequence. What it computed stays, for whoever begins with the same tokens. Idempotent."""
        with self._lock:
            if self._live.pop(sequence.sequence_id, None) is None:
                return
            self.abort_step(sequence)
            self.pause(sequence)
            self.ledger.reached(sequence.table.units)
            sequence.table.release(self.ledger.pool)

    # One step

    def resize(self, num_tokens: int, least_tokens: int, rows: int) -> None:
        """Cut the device budget into windows for `rows` sequences of `num_tokens`, or of `least_tokens` if it must be.

        Raises: ConfigError if not even one window of `least_tokens` fits.
        """
        with self._lock:
            fits = self.windows.window_bytes(num_tokens, rows) * 2 <= self.windows.arena.num_bytes
            if rows == self.windows.rows and least_tokens <= self.windows.capacity_tokens:
                return
        self._mover.drain()
        with self._lock:
            self.windows.resize(num_tokens if fits else least_tokens, rows)

    def begin_step(self, sequence: Sequence, num_tokens: int) -> None:
        """Make room for `num_tokens` more tokens of `sequence`, in every layer.

        Raises: IoError(ENOSPC) if no tier has room; LostKv if the tail group cannot be read back.
        """
        assert sequence.pending is None, "the last step was not sealed"
        group, num_layers = self.layout.tokens_per_group, self.layout.num_layers
        filled = sequence.num_tokens % group
        tail = sequence.table.units[-1] if filled else -1
        num_units = (filled + num_tokens - 1) // group + 1 - (1 if filled else 0)
        for attempt in range(3):
            with self._lock:
                self._lock.wait_for(lambda: tail < 0 or not self.ledger.is_busy[tail])
                is_in = tail < 0 or bool(self.ledger.is_resident(np.array([tail]))[0])
                if is_in and self._grow(sequence, num_tokens, tail, filled):
                    return
            if not is_in:
                self._wait(self._mover.submit(lambda: self._traffic.load(tail, "restore"), DEMAND))
            elif attempt < 2:
                room = (num_units + 1) * num_layers
                self._wait(self._mover.submit(lambda: self._traffic.make_room(room, num_units + 1), DEMAND))
        raise IoError(
            errno.ENOSPC,
            f"no tier has room for {num_tokens} more tokens: {num_units} groups of {num_layers} fragments in DRAM are "
            f"needed beside what the open sequences hold; type a larger --dram or --disk, or a smaller --group-blocks",
        )

    def _grow(self, sequence: Sequence, num_tokens: int, tail: int, filled: int) -> bool:
        """Extend the table and give every new unit its frames; False, and nothing changed, where room is short."""
        ledger, num_layers = self.ledger, self.layout.num_layers
        must_copy = tail >= 0 and int(ledger.num_tokens[tail]) != filled
        if must_copy:
            ledger.pool.share(np.array([tail]))
        needs_copy = tail >= 0 and int(ledger.pool.counts()[tail]) > 1
        num_units = -(-(filled + num_tokens) // self.layout.tokens_per_group) - (1 if tail >= 0 else 0) + needs_copy
        grown = None
        frames = ledger.take_frames(num_units * num_layers, keep_unit=tail)
        if len(frames) == num_units * num_layers:
            grown = sequence.table.append(ledger.pool, num_tokens)
        if must_copy:
            ledger.pool.release(np.array([tail]))
        if grown is None:
            ledger.frame_pool.give(frames)
            return False
        units = np.array(([grown.copy[1]] if grown.copy else []) + list(grown.new_units), np.int64)
        units = np.unique(units)
        ledger.begin(units)
        ledger.frame_pool.rows[frames] = 0
        ledger.bind(frames, np.repeat(units, num_layers), np.tile(np.arange(num_layers), len(units)))
        if grown.copy:
            self._copy_unit(sequence, grown.copy[0], grown.copy[1], filled)
        touched = grown.spans[:, 0]
        ledger.is_open[touched] = True
        ledger.was_refused[touched] = False
        sequence.pending, sequence.num_pending = grown.spans, num_tokens
        sequence.units = np.array(sequence.table.units, np.int64)
        return True

    def _copy_unit(self, sequence: Sequence, source: int, target: int, num_tokens: int) -> None:
        ledger = self.ledger
        for layer in range(self.layout.num_layers):
            ledger.frame_pool.rows[ledger.frames[target, layer]] = ledger.frame_pool.rows[ledger.frames[source, layer]]
        ledger.num_tokens[target] = num_tokens
        group = self.layout.group_blocks
        first = (len(sequence.tokens) // self.layout.tokens_per_group) * group
        keys = sequence.keys[first:]
        if keys:
            parent = sequence.keys[first - 1] if first else sequence.root
            ledger.set_blocks(target, 0, np.frombuffer(b"".join(keys), KEY), np.frombuffer(parent, KEY)[0])

    def layer(self, sequences: list[Sequence], layer: int, *, cause: Cause) -> Window:
        """Return the window that holds all sealed KV of `layer`, waiting for what is missing.

        Windows handed out before may be refilled from now on. Rows are the sequences, in order.
        Raises: LostKv if some of it cannot be read.
        """
        started = self._clock()
        num_tokens = [len(sequence.tokens) for sequence in sequences]
        counts = FillCounts()
        with self._lock:
            for other in self.windows.windows:
                other.in_use = False
            window = self.windows.find(layer)
            job = window.job if window is not None else None
        if job is not None:
            self._mover.hasten(job)
            counts = self._collect(window, job)
        with self._lock:
            window = self.windows.find(layer)
            if window is None or not self._is_filled(window, sequences, num_tokens):
                window, job = self._start_fill(sequences, layer, num_tokens, cause, DEMAND)
                assert window is not None, "every window is in use"
                assert job is not None
            else:
                job = None
        if job is not None:
            counts = self._collect(window, job)
        window.in_use = True
        waited_ns = self._clock() - started
        self.wait_ns += waited_ns
        self._note(sequences, layer, cause, counts, started, waited_ns)
        return window

    def prefetch(self, sequences: list[Sequence], layer: int, *, is_written: bool = False) -> None:
        """Begin to bring all KV of `layer` up, behind whatever is demanded; of this step's too if `is_written`."""
        if not self._options.is_prefetching or len(self.windows.windows) < 2:
            return
        with self._lock:
            window = self.windows.find(layer)
            num_tokens = [len(s.tokens) + (s.num_pending if is_written else 0) for s in sequences]
            if window is not None and (window.job is not None or self._is_filled(window, sequences, num_tokens)):
                return
            self._start_fill(sequences, layer, num_tokens, "prefetch", PREFETCH)

    def _start_fill(
        self, sequences: list[Sequence], layer: int, num_tokens: list[int], cause: Cause, priority: int
    ) -> tuple[Window | None, Future[object] | None]:
        window = self.windows.find(layer) or self.windows.victim(layer)
        if window is None:
            return None, None
        if window.layer != layer:
            window.layer, window.uids, window.num_tokens = layer, [], []
        units = [sequence.units for sequence in sequences]
        filled = window
        window.job = self._mover.submit(
            lambda: self._traffic.fill(filled, layer, units, num_tokens, cause=cause), priority
        )
        return window, window.job

    def _collect(self, window: Window | None, job: Future[object]) -> FillCounts:
        assert window is not None
        try:
            counts = job.result()
        finally:
            window.job = None
        assert isinstance(counts, FillCounts)
        return counts

    def _is_filled(self, window: Window, sequences: list[Sequence], num_tokens: list[int]) -> bool:
        group = self.layout.tokens_per_group
        return len(window.num_tokens) >= len(sequences) and all(
            window.common_tokens(row, self.ledger.uid[sequence.units], group) >= num_tokens[row]
            for row, sequence in enumerate(sequences)
        )

    def write(
        self, sequence: Sequence, row: int, window: Window, k: npt.NDArray[np.uint8], v: npt.NDArray[np.uint8]
    ) -> None:
        """Keep the KV this step computed for the window's layer; the caller has put it into the window already.

        Shapes: k [T, k_bytes of a token], v [T, v_bytes].
        """
        assert sequence.pending is not None, "no step was begun"
        layer, group = window.layer, self.layout.tokens_per_group
        shape, k_part = self.layout.shape.layers[layer], self.layout.k_bytes[layer]
        v_part = group * shape.v_bytes
        done = 0
        with self._lock:
            rows, frames = self.ledger.frame_pool.rows, self.ledger.frames
            for unit, start, end in sequence.pending.tolist():
                frame, num = rows[frames[unit, layer]], end - start
                frame[:k_part].reshape(group, -1)[start:end] = k[done : done + num]
                if v_part:
                    frame[k_part : k_part + v_part].reshape(group, -1)[start:end] = v[done : done + num]
                done += num
            window.uids[row] = self.ledger.uid[sequence.units]
            window.num_tokens[row] = len(sequence.tokens) + sequence.num_pending

    def seal(self, sequence: Sequence, tokens: npt.ArrayLike) -> None:
        """End a step: the pending KV belongs to `tokens`. Full groups are queued for the tier below."""
        ids = np.asarray(tokens, np.int64).tolist()
        assert sequence.pending is not None, "no step was begun"
        assert len(ids) == sequence.num_pending, "a step is sealed with as many tokens as it had"
        with self._lock:
            ledger, group = self.ledger, self.layout.tokens_per_group
            sequence.tokens.extend(ids)
            ledger.num_tokens[sequence.pending[:, 0]] = sequence.pending[:, 2]
            self._extend_keys(sequence)
            full = sequence.pending[sequence.pending[:, 2] == group, 0]
            ledger.is_open[full] = False
            sequence.pending, sequence.num_pending = None, 0
        if len(full) and self._tier is not None and self._options.write_policy == "through":
            self._mover.submit(lambda: self._traffic.store(full, "prefill-write"), WRITE_BACK)

    def _extend_keys(self, sequence: Sequence) -> None:
        """Compute the keys of blocks that became full, and let others find them."""
        block, group = self.layout.block_tokens, self.layout.group_blocks
        first = len(sequence.keys)
        parent = sequence.keys[-1] if first else sequence.root
        new = chain_keys(np.array(sequence.tokens[first * block :], np.int64), block_tokens=block, parent=parent)
        sequence.keys.extend(key.tobytes() for key in new)
        at = first
        while at < len(sequence.keys):
            unit, end = at // group, min((at // group + 1) * group, len(sequence.keys))
            keys = np.frombuffer(b"".join(sequence.keys[at:end]), KEY)
            start = unit * group
            before = sequence.keys[start - 1] if start else sequence.root
            self.ledger.set_blocks(sequence.table.units[unit], at - start, keys, np.frombuffer(before, KEY)[0])
            at = end

    def pause(self, sequence: Sequence) -> None:
        """Say that `sequence` will not grow for now: its unfilled tail can be found, stored and evicted."""
        with self._lock:
            if sequence.pending is not None:
                return
            self._close_tail(sequence)

    def _close_tail(self, sequence: Sequence) -> None:
        ledger, block = self.ledger, self.layout.block_tokens
        units = sequence.table.units
        if not units or not ledger.is_open[units[-1]]:
            return
        tail, num_left = units[-1], len(sequence.tokens) % block
        ledger.is_open[tail] = False
        if num_left and sequence.pending is None:
            parent = sequence.keys[-1] if sequence.keys else sequence.root
            key = partial_keys(np.array(sequence.tokens[-num_left:], np.int64), parent=parent)[-1:]
            in_unit = len(sequence.keys) % self.layout.group_blocks
            start = len(sequence.keys) - in_unit
            before = sequence.keys[start - 1] if start else sequence.root
            ledger.set_blocks(tail, in_unit, key, np.frombuffer(before, KEY)[0])

    # All of it

    def flush(self) -> None:
        """Return when everything that can be stored below is stored, tails of paused sequences too."""
        for sequence in list(self._live.values()):
            self.pause(sequence)
        while self._wait(self._mover.submit(lambda: self._traffic.store_some("demote"), DEMAND)):
            pass

    def drain(self) -> None:
        """Return when the background has nothing left to do."""
        self._mover.drain()

    def close(self) -> None:
        """Release every sequence, store what the tier below lacks, stop the background. Idempotent."""
        if not self._mover.is_closed:
            for sequence in list(self._live.values()):
                self.release(sequence)
            self.flush()
            self._mover.close()

    def usage(self) -> dict[str, TierStats]:
        """Return fill and capacity of each tier, exact to the byte."""
        pool = self.ledger.frame_pool
        device = TierStats(capacity_bytes=self.windows.arena.num_bytes, used_bytes=self.windows.used_bytes())
        device.num_groups = len(self.windows.windows)
        dram = TierStats(capacity_bytes=pool.num_frames * pool.frame_bytes, used_bytes=self.ledger.used_bytes())
        dram.num_groups = int(self.ledger.is_resident().sum())
        return {"device": device, "dram": dram} | ({"file": self._tier.stats()} if self._tier is not None else {})

    @property
    def num_refused(self) -> int:
        """Groups the tier below did not take, for want of room or after an error."""
        return self._traffic.num_refused

    def _wait(self, job: Future[object]) -> object:
        started = self._clock()
        try:
            return job.result()
        finally:
            self.wait_ns += self._clock() - started

    def _note(
        self, sequences: list[Sequence], layer: int, cause: Cause, counts: FillCounts, started: int, waited_ns: int
    ) -> None:
        if self._recorder is None:
            return
        event = np.zeros(1, OBJECT_EVENT)
        num_tokens = sum(len(sequence.tokens) for sequence in sequences)
        event["time_ns"], event["wait_ns"] = started, waited_ns
        event["sequence_id"], event["layer"] = sequences[0].sequence_id, layer
        event["cause"], event["num_tokens"] = CAUSES.index(cause), num_tokens
        event["wanted_bytes"] = num_tokens * self.layout.shape.layers[layer].token_bytes
        event["dram_bytes"], event["file_bytes"] = counts.dram_bytes, counts.file_bytes
        self._recorder.record_objects(event)


__all__ = ["CacheOptions", "Ids", "TieredCache"]
