"""Where the lives of a soak keep their groups: a real namespace, or a drive in memory that fails. Next: _tier_life.

Each place is opened, closed cleanly, and given up as a killed owner does.
"""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import numpy as np
import numpy.typing as npt

import _paths  # noqa: F401 - first, for what comes from tests
from kvhelp import open_small, small_identity
from kvtide.io.drive import SimDrive
from kvtide.io.ops import PAGE_BYTES, Batch, Completions, Engine
from kvtide.io.sim import Faults, SimEngine, VirtualClock
from kvtide.spec import SlotLayout
from kvtide.tiers.file import FileTier
from kvtide.tiers.inspect import OUR_FILES
from kvtide.tiers.namespace import OpenNamespace
from kvtide.tiers.owner import unlock
from simkv import MODEL

FAULTS = Faults(short=0.01, eio=0.01, enospc=0.01, torn=0.01, flipped=0.01, reordered=0.2, delayed=0.1)


class FailingEngine:
    """A real engine of which some operations are said to have failed with EIO, whether they did their work or not."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine, self._rng = engine, random.Random(seed)
        self.depth_max, self.share, self.num_failed = engine.depth_max, 0.0, 0

    def submit(self, batch: Batch) -> None:
        """Pass on."""
        self._engine.submit(batch)

    def reap(self, wait_num: int = 0) -> Completions:
        """Pass on, with a share of errors."""
        done = self._engine.reap(wait_num)
        if self.share:
            done = done.copy()
            bad = np.array([self._rng.random() < self.share for _ in range(len(done))], np.bool_)
            done["length"][bad], done["error"][bad] = 0, errno.EIO
            self.num_failed += int(bad.sum())
        return done

    def register(self, arena: npt.NDArray[np.uint8]) -> None:
        """Pass on."""
        self._engine.register(arena)

    def close(self) -> None:
        """Pass on."""
        self._engine.close()


class Disk:
    """A namespace in a directory. `failing` is its engine, whose share of errors can be set while it is open."""

    is_lossy = False

    def __init__(self, root: Path, layout: SlotLayout, engine: str, seed: int) -> None:
        self.root, self.layout, self._engine, self._seed = root, layout, engine, seed
        self.space: OpenNamespace | None = None
        self.failing: FailingEngine | None = None
        self.was_clean = False

    def open(self, num_slots: int) -> FileTier:
        """Open it.

        Raises: as `open_namespace` does.
        """
        space = self.space = open_small(self.root, self.layout, num_slots, self._engine)
        self.failing = FailingEngine(space.engine, self._seed)
        space.tier._io.engine = self.failing  # noqa: SLF001
        self.was_clean = space.was_clean
        return space.tier

    def close(self) -> None:
        """Close it cleanly."""
        if self.space is not None:
            self.space.close()
            self.space = None

    def give_up(self) -> None:
        """Leave it as a killed owner does."""
        if self.space is not None:
            self.space.engine.close()
            self.space.departures.abandon()
            os.close(self.space.fd)
            unlock(self.space.lock_fd)
            self.space.fd = self.space.lock_fd = -1
            self.space = None

    def check(self, num_slots: int) -> None:
        """See that the directory has what it should, and nothing else."""
        assert self.space is not None
        size = (self.space.path / "data.kvt").stat().st_size
        assert size == PAGE_BYTES + num_slots * self.layout.slot_bytes, f"the data file has {size} bytes"
        strays = {path.name for path in self.space.path.iterdir()} - set(OUR_FILES)
        assert not strays, f"files that are not ours: {strays}"


class Drive:
    """A drive in memory, with faults. What is closed cleanly hands its headers over as a checkpoint does."""

    is_lossy = True
    failing = None
    space = None

    def __init__(self, layout: SlotLayout, seed: int, *, is_packed: bool) -> None:
        self.layout, self._seed, self._is_packed = layout, seed, is_packed
        self._drive, self._clock = SimDrive(MODEL), VirtualClock()
        self.was_clean = False

    def open(self, num_slots: int) -> FileTier:
        """Open it by a scan."""
        self._seed += 1
        fd = self._drive.open("data", size_bytes=PAGE_BYTES + num_slots * self.layout.slot_bytes, direct=True)
        engine = SimEngine(self._drive, self._clock, FAULTS, seed=self._seed)
        digest = small_identity(self.layout).digest()
        tier = FileTier(engine, fd, self.layout, digest, num_slots, is_packed=self._is_packed)
        tier.scan()
        return tier

    def close(self) -> None:
        """Do nothing: who comes next scans."""

    def give_up(self) -> None:
        """Lose power."""
        self._drive.crash(self._seed)

    def check(self, num_slots: int) -> None:
        """There is no directory."""
