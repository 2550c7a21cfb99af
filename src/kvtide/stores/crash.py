"""What is left after a SIGKILL, and after a power cut: rows that were acknowledged and are not there. Next: bench.

A power cut is a copy of the device's image, mounted as it is: what was only in the page cache is lost. Commands that
the device completed count as kept, although a real drive may lose those that were not flushed: so it flatters.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvtide.errors import KvtideError
from kvtide.stores.bench import BenchOptions, Measured, Progress, place_for, start
from kvtide.stores.device import LoopDisk
from kvtide.stores.engines.contract import About

if TYPE_CHECKING:
    from kvtide.stores.device import Place


def crash(about: About, options: BenchOptions, work: Path, found: Measured, *, python: str = "", on: Progress) -> None:
    """Add to `found` what crashes leave. Kills come at a moment drawn from the seed."""
    rng = np.random.default_rng(options.seed)
    options = replace(options, disk_bytes=min(options.disk_bytes, 1 << 30))
    for index in range(options.kills):
        on(f"{about.name}: SIGKILL {index + 1} of {options.kills}")
        with place_for(work, options) as place:
            found.kills.append(_killed(about, options, place, python, float(rng.uniform(0.2, 0.8))))
    if options.cuts_s:
        with place_for(work, options) as place:
            if isinstance(place, LoopDisk):
                _cut(about, options, place, work, found, python, on)
            else:
                found.notes.append("no power cut: it needs a device of its own")


def _killed(about: About, options: BenchOptions, place: Place, python: str, share: float) -> dict[str, object]:
    with start(about, options, place, python) as worker:
        worker.send("insert", first=0, num=options.crash_rows, batch=options.batch, rate=options.rate)
        until = time.monotonic() + 30
        while worker.num_acked < share * options.crash_rows and time.monotonic() < until:
            time.sleep(0.0005)
        worker.kill()
        acked = worker.num_acked
    return _left(about, options, place, python, acked)


def _cut(
    about: About, options: BenchOptions, place: LoopDisk, work: Path, found: Measured, python: str, on: Progress
) -> None:
    with start(about, options, place, python) as worker:
        try:
            worker.order("insert", first=0, num=options.crash_rows, batch=options.batch, rate=options.rate)
        except KvtideError as error:
            found.notes.append(str(error))
            return
        since = time.monotonic()
        for after_s in sorted(options.cuts_s):
            on(f"{about.name}: power cut {after_s:g} s after {options.crash_rows} rows")
            time.sleep(max(0.0, since + after_s - time.monotonic()))
            image = place.copy_image()
            try:
                with place_for(work, options, image=image) as copy:
                    left = _left(about, options, copy, python, worker.num_acked)
            except KvtideError as error:
                left = {"acked": worker.num_acked, "kept": 0, "opens": False, "why": str(error)}
            found.cuts.append({"after_s": after_s} | left)


def _left(about: About, options: BenchOptions, place: Place, python: str, acked: int) -> dict[str, object]:
    """Return how many of the acknowledged rows an engine finds when it is opened again."""
    try:
        with start(about, options, place, python) as worker:
            ids = np.array(worker.order("rows")["ids"], np.int64)
            worker.kill()
    except KvtideError as error:
        return {"acked": acked, "kept": 0, "opens": False, "why": str(error)}
    return {"acked": acked, "kept": int((ids < acked).sum()), "opens": True}
