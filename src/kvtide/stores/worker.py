"""The process in which an engine is measured: takes orders as JSON lines, answers with JSON lines. Next: host.

Run as `python -m kvtide.stores.worker`, by `host` only. What the libraries print goes to standard error. The number of
acknowledged rows stands in a file that outlives a SIGKILL.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from kvtide.stores import corpus
from kvtide.stores.engines.contract import Engine, EngineOptions, LateEngine
from kvtide.stores.engines.names import opened

PR_SET_PDEATHSIG = 1  # Source: linux/prctl.h
ACKED = struct.Struct("<q")
LATE_NS = 10**9  # that an engine may take for its last rows


class Worker:
    """One engine and what is asked of it."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._dim, self._seed = int(job["dim"]), int(job["seed"])
        with Path(job["acked"]).open("r+b") as file:
            self._acked = mmap.mmap(file.fileno(), ACKED.size)
        options = EngineOptions(Path(job["folder"]), self._dim, is_durable=bool(job["durable"]))
        self._engine: Engine = opened(job["engine"], options)

    def insert(self, *, first: int, num: int, batch: int, rate: float) -> dict[str, Any]:
        """Insert rows, `batch` a call, at most `rate` a second; 0: as fast as it goes."""
        rows = corpus.vectors_of(first, num, self._dim, seed=self._seed)
        ids = np.arange(first, first + num)
        took = np.zeros(-(-num // batch), np.int64)
        late = self._engine if isinstance(self._engine, LateEngine) else None
        began = time.monotonic_ns()
        for index in range(len(took)):
            low, high = index * batch, min(num, (index + 1) * batch)
            if rate:
                late_s = (time.monotonic_ns() - began) / 1e9
                time.sleep(max(0.0, high / rate - late_s))
            start = time.monotonic_ns()
            self._engine.insert(ids[low:high], rows[low:high])
            took[index] = time.monotonic_ns() - start
            kept = late.num_durable() if late is not None else high
            ACKED.pack_into(self._acked, 0, first + kept)
        ended = time.monotonic_ns()
        while late is not None and late.num_durable() < num and time.monotonic_ns() - ended < LATE_NS:
            time.sleep(0.001)
        ACKED.pack_into(self._acked, 0, first + (late.num_durable() if late is not None else num))
        return {"took_ns": took.tolist(), "seconds": (ended - began) / 1e9}

    def finish(self) -> dict[str, Any]:
        """Save, merge, build."""
        start = time.monotonic_ns()
        self._engine.finish()
        return {"seconds": (time.monotonic_ns() - start) / 1e9}

    def search(self, *, num: int, k: int, skip: int = 0) -> dict[str, Any]:
        """Search for queries one by one; say when each began and ended, on the clock of traces."""
        queries = corpus.queries_of(skip + num, self._dim, seed=self._seed)[skip:]
        begin, end, found = [], [], []
        for at in range(num):
            begin.append(time.monotonic_ns())
            found.append(self._engine.search(queries[at : at + 1], k)[0].tolist())
            end.append(time.monotonic_ns())
        return {"begin_ns": begin, "end_ns": end, "ids": found}

    def rows(self) -> dict[str, Any]:
        """Say which rows are there."""
        return {"ids": np.unique(self._engine.ids()).tolist()}

    def io(self) -> dict[str, Any]:
        """Say what the kernel counted for this process, and its memory."""
        counted = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {name: int(value) for name, value in counted.items()} | {"resident_bytes": pages * mmap.PAGESIZE}

    def close(self) -> dict[str, Any]:
        """Close the engine."""
        self._engine.close()
        return {}


def main() -> None:
    """Take orders until there are no more."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the host's to handle
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker: Worker | None = None
    for line in sys.stdin:
        order = json.loads(line)
        do = order.pop("do")
        try:
            if do == "open":
                worker = Worker(order)
                _answer(out, {})
            else:
                _answer(out, getattr(worker, do)(**order))
        except Exception as error:
            _answer(out, {"error": f"{type(error).__name__}: {error}"})
    out.flush()
    os._exit(0)  # some libraries' threads do not end


def _answer(out: TextIO, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
