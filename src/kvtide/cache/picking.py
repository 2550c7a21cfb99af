"""Some groups of one layer, brought to DRAM and held there: what attention over a selection reads. Next: match.

Where attention to everything wants a layer in one piece on the device, attention to a selection wants a few scattered
groups of it. DRAM frames are their cache: what was chosen a step ago mostly is chosen again, and is still there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.cache.ledger import Ids, Ledger
from kvtide.cache.mover import DEMAND, PREFETCH, Mover
from kvtide.cache.sequence import Sequence
from kvtide.cache.traffic import Traffic
from kvtide.errors import IoError
from kvtide.tiers.contract import Cause


@dataclass(slots=True)
class Pick:
    """Fragments of one layer that are being brought, or are there.

    Shapes: fragments, frames [n]: fragment numbers of the layout, and the frame that holds each once `job` is
    done; `read` the places of those that were not in DRAM.
    """

    sequence: Sequence
    layer: int
    fragments: Ids
    frames: Ids
    read: Ids
    job: Future[object] | None = None
    wait_ns: int = 0  # how long `finish` stood still
    is_released: bool = False


class Picker:
    """Hands out picks; tells `on_done` of each that was waited for, with the time that was begun.

    Threads: the thread that runs the model.
    """

    def __init__(
        self,
        ledger: Ledger,
        traffic: Traffic,
        mover: Mover,
        lock: threading.Condition,
        *,
        clock: Callable[[], int],
        on_done: Callable[[Pick, int], None],
    ) -> None:
        self._ledger, self._traffic, self._mover, self._lock = ledger, traffic, mover, lock
        self._clock, self._on_done = clock, on_done

    def begin(self, sequence: Sequence, layer: int, places: Ids, fragments: Ids, *, cause: Cause) -> Pick:
        """Start to bring `fragments[i]`, of `layer`, of the group at `places[i]` of `sequence`.

        What is all in DRAM is held at once. Shapes: places, fragments [n], no pair twice.
        """
        units = sequence.units[places]
        with self._lock:
            frames = self._ledger.frames[units, fragments]
            pick = Pick(sequence, layer, fragments, frames, units[:0])
            if (frames >= 0).all():
                self._ledger.pin(frames, 1)
                return pick
            uids = self._ledger.uid[units]
        priority = PREFETCH if cause == "prefetch" else DEMAND
        pick.job = self._mover.submit(lambda: self._traffic.bring(units, uids, fragments, cause=cause), priority)
        return pick

    def finish(self, pick: Pick) -> Ids:
        """Wait for `pick`; return the frames of its fragments, which stay until it is released.

        Raises: LostKv if some cannot be read; IoError(ENOSPC) if DRAM has no room for them.
        """
        started = self._clock()
        if pick.job is not None:
            self._mover.hasten(pick.job)
            job, pick.job = pick.job, None
            pick.is_released = True  # unless it goes well
            pick.frames, pick.read = self._wait(job)
            pick.is_released = False
        pick.wait_ns = self._clock() - started
        self._on_done(pick, started)
        return pick.frames

    def settle(self, pick: Pick) -> npt.NDArray[np.bool_]:
        """Let go of `pick` when it has ended; say which fragments it read. One that failed read none: demand will tell.

        Shapes: returns [n].
        """
        was_read = np.zeros(len(pick.fragments), np.bool_)
        if pick.job is not None and not pick.is_released:
            job, pick.job, pick.is_released = pick.job, None, True
            with contextlib.suppress(IoError):
                frames, read = self._wait(job)
                was_read[read] = True
                self._traffic.let_go(frames)
        self.release(pick)
        return was_read

    def release(self, pick: Pick) -> None:
        """Let go of `pick`, wherever it stands. Idempotent."""
        if pick.is_released:
            return
        pick.is_released = True
        if pick.job is not None:  # nobody waits for it any more; what it brings is let go of when it ends
            pick.job.add_done_callback(self._forget)
        else:
            self._traffic.let_go(pick.frames)

    def _wait(self, job: Future[object]) -> tuple[Ids, Ids]:
        try:
            return _brought(job)
        except KeyboardInterrupt:  # what it brings is let go of when it ends
            job.add_done_callback(self._forget)
            raise

    def _forget(self, job: Future[object]) -> None:
        if not job.cancelled() and job.exception() is None:
            self._traffic.let_go(_brought(job)[0])


def _brought(job: Future[object]) -> tuple[Ids, Ids]:
    found = job.result()
    assert isinstance(found, tuple), "bringing says where, and what was read"
    return found
