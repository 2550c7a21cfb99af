"""What one worker of a soak does with a tiered cache, all of attention compared; and many openings. Next: soak."""

from __future__ import annotations

import errno
import gc
import threading
import time
from pathlib import Path

import numpy as np
import psutil

import _paths  # noqa: F401 - first, for what comes from tests
from _chunk_life import NUM_KEYS as NUM_CHUNKS
from _chunk_life import SHAPES, ChunkLife
from _places import Disk
from _tier_life import NUM_KEYS, TierLife
from kvhelp import Walker, small_cache
from kvtide.cache import TieredCache
from kvtide.cache.sequence import Sequence
from kvtide.errors import IoError
from kvtide.spec import SlotLayout
from oracle import Ledger
from simkv import check_cache

NUM_PROMPTS, TOKENS_MAX, LIVE_MAX = 8, 60, 4
OPERATIONS = {
    "begin_sequence": 20,
    "step": 40,
    "fork": 8,
    "truncate": 8,
    "release": 10,
    "pause": 8,
    "flush": 3,
    "reopen": 2,
}
SLOTS = 8, 16


class CacheLife:
    """One owner of a namespace with a cache over it. Bytes follow from the tokens before them."""

    def __init__(self, root: Path, layout: SlotLayout, ledger: Ledger, rng: np.random.Generator, engine: str) -> None:
        self._layout, self._ledger, self._rng = layout, ledger, rng
        self._disk = Disk(root, layout, engine, 0)
        self._prompts = [np.random.default_rng(n).integers(0, 9, TOKENS_MAX).tolist() for n in range(NUM_PROMPTS)]
        self._live: list[Sequence] = []
        self._cache: TieredCache

    def begin(self) -> None:
        """Open what the one before left."""
        self._open()

    def work(self, until: float) -> None:
        """Do operations until that time of the monotonic clock, then close."""
        names, shares = list(OPERATIONS), np.array(list(OPERATIONS.values())) / sum(OPERATIONS.values())
        while time.monotonic() < until:
            getattr(self, "_" + str(self._rng.choice(names, p=shares)))()
            self._ledger.add("operations")
        self._close()

    def _open(self) -> None:
        num_slots = int(self._rng.choice(SLOTS))
        tier = self._disk.open(num_slots)
        self._disk.check(num_slots)
        policy, evictor = str(self._rng.choice(["through", "back"])), str(self._rng.choice(["lip", "lru"]))
        self._cache = small_cache(self._layout, tier, tokens=2 * TOKENS_MAX, policy=policy, evictor=evictor)
        self._walker = Walker(self._cache)
        check_cache(self._cache, [])
        self._ledger.add("reopened")
        self._ledger.add("checks")

    def _close(self) -> None:
        check_cache(self._cache, self._live)
        self._live.clear()
        self._cache.close()
        self._disk.close()

    def _reopen(self) -> None:
        self._close()
        self._open()

    def _pick(self) -> Sequence | None:
        return self._live[int(self._rng.integers(0, len(self._live)))] if self._live else None

    def _begin_sequence(self) -> None:
        if len(self._live) >= LIVE_MAX:
            return
        tokens = self._prompts[int(self._rng.integers(0, NUM_PROMPTS))][: int(self._rng.integers(1, TOKENS_MAX))]
        sequence = self._cache.open(tokens)
        self._live.append(sequence)
        self._walk(sequence, tokens[sequence.num_tokens :])

    def _walk(self, sequence: Sequence, tokens: list[int]) -> None:
        if not tokens or sequence.num_tokens + len(tokens) > TOKENS_MAX:
            return
        try:
            self._walker.step([sequence], [tokens])
        except IoError as error:
            if error.errno != errno.ENOSPC:  # what live sequences hold fills all there is
                raise
            self._cache.abort_step(sequence)
            return
        self._ledger.add("verified_bytes", (sequence.num_tokens - len(tokens)) * 512 * self._layout.num_layers)

    def _step(self) -> None:
        sequence = self._pick()
        if sequence is not None:
            self._walk(sequence, self._rng.integers(0, 3, int(self._rng.integers(1, 6))).tolist())

    def _fork(self) -> None:
        sequence = self._pick()
        if sequence is not None and len(self._live) < LIVE_MAX:
            self._live.append(self._cache.fork(sequence))

    def _truncate(self) -> None:
        sequence = self._pick()
        if sequence is not None:
            self._cache.truncate(sequence, int(self._rng.integers(0, sequence.num_tokens + 1)))

    def _release(self) -> None:
        sequence = self._pick()
        if sequence is not None:
            self._live.remove(sequence)
            self._cache.release(sequence)

    def _pause(self) -> None:
        sequence = self._pick()
        if sequence is not None:
            self._cache.pause(sequence)

    def _flush(self) -> None:
        self._cache.flush()
        check_cache(self._cache, self._live)


class OpeningLife:
    """Opens and closes everything, over and over, in one process that is never ended: whatever leaks adds up."""

    def __init__(self, root: Path, layout: SlotLayout, ledger: Ledger, rng: np.random.Generator) -> None:
        self._root, self._layout, self._ledger, self._rng = root, layout, ledger, rng
        self._tiers = [Ledger(NUM_KEYS) for _ in range(2)]
        self._chunks = [Ledger(NUM_CHUNKS) for _ in SHAPES]
        self.samples: list[tuple[int, int, int, int]] = []  # openings, resident bytes, descriptors, threads

    def begin(self) -> None:
        """Nothing is kept."""

    def work(self, until: float) -> None:
        """Open and close until that time of the monotonic clock."""
        number = 0
        while time.monotonic() < until:
            self.once(number)
            number += 1
            if number % 20 == 0:
                self.sample(number)

    def once(self, number: int) -> None:
        """Open, use and close a tier, a chunk store and a cache, of one engine and then the other."""
        engine, rng, now = ("threads", "auto")[number % 2], self._rng, time.monotonic
        disk = Disk(self._root / f"tier-{engine}", self._layout, engine, 0)
        shape = number % len(SHAPES)
        lives = (
            TierLife(disk, self._tiers[number % 2], rng, has_faults=False),
            ChunkLife(self._root / f"chunks-{shape}", self._chunks[shape], rng, shape=shape, engine=engine),
            CacheLife(self._root / f"cache-{engine}", self._layout, Ledger(1), rng, engine),
        )
        for life in lives:
            life.begin()
            life.work(now() + 0.02)
        self._ledger.add("cycles", len(lives))
        self._ledger.add("operations", len(lives))

    def sample(self, number: int) -> None:
        """Note what this process has now."""
        gc.collect()
        me = psutil.Process()
        self.samples.append((number, me.memory_info().rss, me.num_fds(), threading.active_count()))
