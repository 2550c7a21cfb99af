"""The one background thread that moves KV: most urgent job first. Next: traffic (the jobs).

Demand goes before prefetch, prefetch before write-back, all before warming; within one priority, first come first
served. A job is never interrupted, so jobs are kept short (a layer, a few groups). Knows nothing of what a job does.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from kvtide.errors import ConfigError
from kvtide.io.process import Opener

DEMAND, PREFETCH, WRITE_BACK, WARM = 0, 1, 2, 3


class Mover:
    """Runs jobs on its own thread.

    Threads: any thread may submit.
    """

    def __init__(self) -> None:
        self._ready = threading.Condition()
        self._heap: list[tuple[int, int, Callable[[], object], Future[object]]] = []
        self._order = itertools.count()
        self._is_busy = False
        self._is_closed = False
        self._opener = Opener()
        self._thread = threading.Thread(target=self._run, name="kvtide-mover", daemon=True)
        self._thread.start()

    def now_ns(self) -> int:
        """Return the time on the line that jobs run on."""
        return time.perf_counter_ns()

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more jobs."""
        return self._is_closed or not self._opener.is_here

    def submit(self, job: Callable[[], object], priority: int) -> Future[object]:
        """Queue `job`; its result or exception comes through the future.

        Raises: ConfigError after `close`; IoError in a process forked from the one that made it.
        """
        self._opener.check("this cache")
        future: Future[object] = Future()
        with self._ready:
            if self._is_closed:
                raise ConfigError("this cache is closed; open its store again")
            heapq.heappush(self._heap, (priority, next(self._order), job, future))
            self._ready.notify_all()  # one of the waiting may be somebody who drains
        return future

    def hasten(self, future: Future[object]) -> None:
        """Let a queued job run as demand, because somebody now waits for it."""
        with self._ready:
            for index, (_, order, job, queued) in enumerate(self._heap):
                if queued is future:
                    self._heap[index] = (DEMAND, order, job, queued)
                    heapq.heapify(self._heap)
                    return

    def drain(self) -> None:
        """Return when nothing is queued and nothing runs; warming does not count, it changes nothing."""
        self._opener.check("this cache")
        with self._ready:
            self._ready.wait_for(lambda: all(item[0] == WARM for item in self._heap) and not self._is_busy)

    def close(self) -> None:
        """Finish what is queued, then stop the thread. Idempotent.

        Interrupted, it gives up what is queued but still waits for the job that runs: when this returns or raises,
        nothing uses the tiers any more. In a forked child, where it has no thread, it does nothing.
        """
        if not self._opener.is_here:
            return
        interrupted: KeyboardInterrupt | None = None
        with self._ready:
            self._is_closed = True
            self._ready.notify_all()
        while self._thread.is_alive():
            try:
                self._thread.join()
            except KeyboardInterrupt as error:
                interrupted = error
                with self._ready:
                    dropped, self._heap = self._heap, []
                for _, _, _, future in dropped:
                    future.cancel()
        if interrupted is not None:
            raise interrupted

    def _run(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._heap or self._is_closed)
                if not self._heap:
                    return
                priority, _, job, future = heapq.heappop(self._heap)
                self._is_busy = priority != WARM
            try:
                future.set_result(job())
            except BaseException as error:  # whoever waits for the future gets it, whatever it is
                future.set_exception(error)
            with self._ready:
                self._is_busy = False
                self._ready.notify_all()
