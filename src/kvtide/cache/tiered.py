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

import numpy as np
import numpy.typing as npt

from kvtide.blocks import BlockTable, chain_root
from kvtide.cache.account import Asked, object_event, usage
from kvtide.cache.choice import Choice, Pace, choose, tokens_in_memory
from kvtide.cache.discover import discover
from kvtide.cache.growth import Growth
from kvtide.cache.ledger import Ledger
from kvtide.cache.loader import Loader
from kvtide.cache.match import find_prefix
from kvtide.cache.mover import DEMAND, WRITE_BACK, Mover
from kvtide.cache.options import CacheOptions, check_dram
from kvtide.cache.parts import Rows, put_rows
from kvtide.cache.picking import Pick, Picker
from kvtide.cache.preload import preload
from kvtide.cache.sequence import Match, Sequence
from kvtide.cache.traffic import FillCounts, Traffic
from kvtide.cache.warm import warm_for
from kvtide.cache.windows import DeviceArena, Window, Windows
from kvtide.errors import IoError
from kvtide.spec import SlotLayout
from kvtide.tiers.contract import Cause, Tier, TierStats
from kvtide.tiers.file import FileTier
from kvtide.tiers.memory import FramePool
from kvtide.tiers.stacked import StackedTier
from kvtide.trace.record import Recorder


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
        mover: Mover | None = None,
        frame_pool: type[FramePool] = FramePool,
        pace: Pace | None = None,
    ) -> None:
        """Make a cache. `frame_pool` keeps its frames, jobs run on `mover` (None: a thread of its own).

        Raises: ConfigError for budgets too small, or an unknown evictor.
        """
        check_dram(layout, options.dram_bytes)
        frame_bytes = max(layout.fragment_padded_bytes)
        pool = frame_pool(options.dram_bytes // frame_bytes, frame_bytes)
        num_slots = tier.stats().capacity_bytes // layout.slot_bytes if tier is not None else 0
        self.layout, self._options, self._tier, self._clock = layout, options, tier, clock
        self._digest, self._recorder = identity_digest, recorder
        self.ledger = Ledger(layout, num_units=num_slots + pool.num_frames, frame_pool=pool, evictor=options.evictor)
        self.windows = Windows(layout, arena)
        self._lock = threading.Condition(threading.RLock())
        self.pace = pace or Pace()
        self._mover = mover or Mover()
        self._traffic = Traffic(self.ledger, self.windows, tier, self._lock, self.pace, self._mover.now_ns)
        self._growth = Growth(self.ledger, self._lock, reserve=self._traffic.reserve)
        self._live: dict[int, Sequence] = {}
        self.asked = Asked()
        self._next_id = 0
        self.wait_ns = self._num_steps = 0
        self._step_began, self._step_tokens = (0, 0), 0  # when, and wait_ns then; of all rows of the step
        self.ledger.stores_far = isinstance(tier, StackedTier) and tier.near is None
        if isinstance(tier, FileTier | StackedTier):
            self.ledger.adopt(tier.inventory())
        self._store_error: BaseException | None = None
        if tier is not None and frame_pool is FramePool:
            warm_for(tier.stats().used_bytes, pool, arena, self._mover)
        self._loader = Loader(self.ledger, self.windows, self._traffic, self._mover, self._lock)
        self.picker = Picker(self.ledger, self._traffic, self._mover, self._lock, clock=clock, on_done=self._note_pick)

    # Sequences

    def match(self, tokens: npt.ArrayLike, *, salt: str = "") -> Match:
        """Return the longest prefix of `tokens` whose KV is kept, without taking hold of it."""
        ids, root = np.asarray(tokens, np.int64), chain_root(self._digest, salt)
        self._discover(ids, root)
        with self._lock:
            return find_prefix(self.ledger, self.windows, ids, root=root)

    def _discover(self, tokens: npt.NDArray[np.int64], root: bytes) -> None:
        """Have the ledger know what a remote holds of `tokens`."""
        tier = self._tier
        if isinstance(tier, StackedTier) and self._options.reuse != "never":
            job = self._mover.submit(lambda: discover(tokens, root, self.ledger, tier, self._lock), DEMAND)
            self._wait(job)

    def preload(self, tokens: npt.ArrayLike, *, salt: str = "") -> int:
        """Begin to bring what is kept of `tokens` to DRAM, for a request that waits; return the groups on their way."""
        return preload(self.match(tokens, salt=salt).units, self.ledger, self._traffic, self._mover, self._lock)

    def open(self, tokens: npt.ArrayLike = (), *, salt: str = "") -> Sequence:
        """Start a sequence that begins with what is kept of `tokens`, all but the last of them at most.

        The last one is left out because a model must run on at least one token to say what comes next.
        Shapes: tokens [T], each 0 to 2**32 - 1.
        """
        ids, root = np.asarray(tokens, np.int64), chain_root(self._digest, salt)
        self._discover(ids[:-1], root)
        with self._lock:
            found = find_prefix(self.ledger, self.windows, ids[:-1], root=root)
            match, choice = self._chosen(found, root, ids)
            units = match.units
            self.ledger.pool.share(units)
            self.ledger.reached(units)
            sequence = Sequence(
                sequence_id=self._next_id,
                table=BlockTable(self.layout.tokens_per_group, units=units.tolist(), num_tokens=match.num_tokens),
                root=root,
                tokens=ids[: match.num_tokens].tolist(),
                keys=list(match.keys),
                matched=match,
                choice=choice,
            )
            self._next_id += 1
            self._live[sequence.sequence_id] = sequence
            self.asked.note(len(ids), match, choice)
        if self._recorder is not None and choice.kept_tokens:
            self._recorder.record_choice(self._clock(), sequence.sequence_id, choice.figures())
        return sequence

    def _chosen(self, found: Match, root: bytes, tokens: npt.NDArray[np.int64]) -> tuple[Match, Choice]:
        """Decide how much of `found` is reused; return that, located, and the decision."""
        resident = self.ledger.is_resident(found.units).tolist()
        in_memory = tokens_in_memory(resident, self.layout.tokens_per_group, found.num_tokens)
        below_bytes = found.file_bytes + found.remote_bytes
        choice = choose(found.num_tokens, below_bytes, in_memory, self.pace, self._options.reuse)
        if choice.recomputed_tokens:
            found = find_prefix(self.ledger, self.windows, tokens[: choice.used_tokens], root=root)
        return found, choice

    def fork(self, sequence: Sequence) -> Sequence:
        """Return a second sequence with the same tokens so far. Nothing is copied until one of them grows."""
        assert sequence.pending is None, "a step in progress cannot be forked"
        with self._lock:
            self.pause(sequence)
            child = Sequence(
                sequence_id=self._next_id,
                table=sequence.table.fork(self.ledger.pool),
                root=sequence.root,
                tokens=list(sequence.tokens),
                keys=list(sequence.keys),
                matched=Match(np.array(sequence.table.units, np.int64), len(sequence.tokens), ()),
                choice=sequence.choice,
                num_exact=sequence.num_exact,
            )
            self._next_id += 1
            self._live[child.sequence_id] = child
            return child

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Forget the tokens of `sequence` from `num_tokens` on, with a step that was begun and not sealed."""
        self._step_tokens = 0
        with self._lock:
            self._growth.truncate(sequence, num_tokens)

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
            own = sequence.own_units(self.layout.tokens_per_group)
            self.ledger.reached(sequence.table.units)
            self._growth.truncate(sequence, 0)
            gone = self.ledger.dispose(own[self.ledger.disposable()[own]])  # nobody can find them any more
        if len(gone):
            self._mover.submit(lambda: self._traffic.room.drop(gone, "dropped"), WRITE_BACK)

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
        self._num_steps += 1
        if not self._step_tokens:
            self._step_began = self._clock(), self.wait_ns
        self._step_tokens += num_tokens
        needs = self._growth.needs(sequence, num_tokens)
        with self._lock:
            if self._growth.grow(sequence, needs, None):
                return
        job = self._mover.submit(lambda: self._traffic.prepare(needs.tail, needs.num_frames, needs.num_units), DEMAND)
        frames = self._wait(job)
        if isinstance(frames, np.ndarray):
            with self._lock:
                is_grown = self._growth.grow(sequence, needs, frames)
            assert is_grown, "room that was made is not there"
            return
        raise IoError(
            errno.ENOSPC,
            f"no tier has room for {num_tokens} more tokens: {needs.num_units} groups of {self.layout.num_fragments} "
            f"fragments in DRAM are needed beside what the open sequences hold; type a larger --dram or --disk, or a "
            f"smaller --group-blocks",
        )

    def layer(self, sequences: list[Sequence], layer: int, *, cause: Cause) -> Window:
        """Return the window that holds all sealed KV of `layer`, waiting for what is missing.

        Windows handed out before may be refilled from now on. Rows are the sequences, in order.
        Raises: LostKv if some of it cannot be read.
        """
        started = self._clock()
        window, counts = self._loader.load(sequences, layer, cause)
        waited_ns = self._clock() - started
        self.wait_ns += waited_ns
        if self._recorder is not None:
            token_bytes, step = self.layout.shape.layers[layer].token_bytes, self._num_steps - 1
            event = object_event(sequences, layer, cause, counts, token_bytes=token_bytes, started_ns=started,
                                 waited_ns=waited_ns, step=step)  # fmt: skip
            self._recorder.record_objects(event)
        return window

    def prefetch(self, sequences: list[Sequence], layer: int, *, is_written: bool = False) -> None:
        """Begin to bring all KV of `layer` up, behind whatever is demanded; of this step's too if `is_written`."""
        if self._options.is_prefetching:
            self._loader.prefetch(sequences, layer, is_written=is_written)

    def _note_pick(self, pick: Pick, started_ns: int) -> None:
        """Note what attention to a selection waited for, and where it came from."""
        self.wait_ns += pick.wait_ns
        if self._recorder is None:
            return
        padded = self._traffic.padded_bytes[pick.fragments]
        read_bytes = int(padded[pick.read].sum())
        counts = FillCounts(int(padded.sum()) - read_bytes, read_bytes)
        token_bytes, step = self.layout.shape.layers[pick.layer].token_bytes, self._num_steps - 1
        event = object_event([pick.sequence], pick.layer, "decode-read", counts, token_bytes=token_bytes,
                             started_ns=started_ns, waited_ns=pick.wait_ns, step=step)  # fmt: skip
        event["wanted_bytes"] = padded.sum()
        self._recorder.record_objects(event)

    def write(
        self, sequence: Sequence, layer: int, k: Rows, v: Rows, *, window: Window | None = None, row: int = 0
    ) -> None:
        """Keep the KV this step computed for `layer`.

        The caller has put it into row `row` of `window`, which holds that layer, already; None: only DRAM gets it.
        Shapes: k [T, k_bytes of a token], v [T, v_bytes].
        """
        assert sequence.pending is not None, "no step was begun"
        assert window is None or window.layer == layer, "the window holds another layer"
        parts = self.layout.layer_fragments(layer)
        with self._lock:
            frames = self.ledger.frames[sequence.pending[:, 0], parts.start : parts.stop]
        # Bytes move outside the lock: frames of open units stay theirs.
        put_rows(self.ledger.frame_pool, self.layout, layer, frames, sequence.pending, k, v)
        if window is None:
            return
        with self._lock:
            window.uids[row] = self.ledger.uid[sequence.units]
            window.num_tokens[row] = len(sequence.tokens) + sequence.num_pending

    def seal(self, sequence: Sequence, tokens: npt.ArrayLike, *, is_exact: bool = True) -> None:
        """End a step: the pending KV belongs to `tokens`. Full groups are queued for the tier below.

        KV that is not `is_exact`, and all behind it, serves this sequence alone: nobody else finds it.
        Shapes: tokens [T], as many as the step was begun with.
        """
        ids = np.asarray(tokens, np.int64).tolist()
        assert sequence.pending is not None, "no step was begun"
        assert len(ids) == sequence.num_pending, "a step is sealed with as many tokens as it had"
        self._note_pace()
        with self._lock:
            full = self._growth.seal(sequence, ids, is_exact=is_exact)
        if len(full) and self._tier is not None and self._options.write_policy == "through":
            job = self._mover.submit(lambda: self._traffic.room.send(full, "prefill-write"), WRITE_BACK)
            job.add_done_callback(self._note_store)

    def _note_pace(self) -> None:
        """Take in what the step of all rows cost, from its first layer's KV to its last one's: all layers but one."""
        num_layers, (began, waited) = self.layout.num_layers, self._step_began
        if self._step_tokens and num_layers > 1:
            computed_ns = self._clock() - began - (self.wait_ns - waited)
            self.pace.note_step(self._step_tokens, computed_ns * num_layers / (num_layers - 1))
        self._step_tokens = 0

    def pause(self, sequence: Sequence) -> None:
        """Say that `sequence` will not grow for now: its unfilled tail can be found, stored and evicted."""
        with self._lock:
            if sequence.pending is None:
                self._growth.close_tail(sequence)

    # All of it

    def flush(self) -> None:
        """Return when everything that can be stored below is stored, tails of paused sequences too."""
        for sequence in list(self._live.values()):
            self.pause(sequence)
        while self._wait(self._mover.submit(self._traffic.room.flush_some, DEMAND)):
            pass
        if self._store_error is not None:
            raise self._store_error

    def _note_store(self, job: Future[object]) -> None:
        """Keep what a background store raised: nobody waits for it, `flush` tells."""
        if not job.cancelled():
            self._store_error = self._store_error or job.exception()

    def drain(self) -> None:
        """Return when the background has nothing left to do, nor to send."""
        self._mover.drain()
        self._traffic.room.drain()

    def close(self) -> None:
        """Release every sequence, store what the tier below lacks, stop the background. Idempotent."""
        if self._mover.is_closed:
            return
        try:
            for sequence in list(self._live.values()):
                self.release(sequence)
            self.flush()
        finally:
            self._mover.close()
        self._traffic.room.drain()

    def usage(self) -> dict[str, TierStats]:
        """Return fill and capacity of each tier, exact to the byte once `drain` has returned.

        `num_groups` counts windows on the device, and groups that are whole in DRAM.
        """
        with self._lock:
            found = usage(self.ledger, self.windows)
        if isinstance(self._tier, StackedTier):
            return found | self._tier.by_tier()
        return found | ({"file": self._tier.stats()} if self._tier is not None else {})

    @property
    def is_prefetching(self) -> bool:
        """Whether KV is brought before it is asked for."""
        return self._options.is_prefetching

    @property
    def num_refused(self) -> int:
        """Groups the tier below did not take, for want of room or after an error."""
        return self._traffic.room.num_refused

    def _wait(self, job: Future[object]) -> object:
        started = self._clock()
        try:
            return job.result()
        finally:
            self.wait_ns += self._clock() - started
