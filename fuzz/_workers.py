"""The workers of a soak: which lives they lead, how one is forked, paused and ended, and what it left. Next: soak."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import _paths  # noqa: F401 - first, for what comes from tests
from _cache_life import CacheLife, OpeningLife
from _chunk_life import NUM_KEYS as NUM_CHUNKS
from _chunk_life import ChunkLife
from _places import Disk, Drive
from _tier_life import NUM_KEYS, TierLife
from kvhelp import small_layout
from oracle import Ledger

ROLES = "tier", "full", "drive", "chunks", "chunks", "cache", "tier", "opening"
ENDINGS = (signal.SIGKILL,) * 12 + (signal.SIGTERM,) * 2 + (signal.SIGINT,) * 2 + (0,) * 4  # 0: it ends by itself
INTERRUPTED, FAILED = 130, 1
PATIENCE_S = 120  # of a worker that should end by itself, on a machine that others use, too
SMALL_FS_BYTES = 8 << 20


@dataclass
class Worker:
    """One place and the processes that own it, one after the other."""

    number: int
    role: str
    root: Path
    seed: int
    folder: Path  # of the whole soak
    ballast: Path | None = None
    ledger: Ledger = field(init=False)
    life: int = 0
    pid: int = 0
    ending: int = 0
    end_at: float = 0.0  # when `ending` is sent
    must_end_at: float = 0.0
    stop_at: float = 0.0  # when it is paused, then let go on; 0: not at all
    is_stopped: bool = False
    is_early: bool = False  # ended while it opens and checks
    life_s: float = 0.0

    def __post_init__(self) -> None:
        self.ledger = Ledger(NUM_CHUNKS if self.role == "chunks" else NUM_KEYS)

    @property
    def failure(self) -> Path:
        """Where a worker that finds something wrong says so."""
        return self.folder / f"failure-{self.number}.txt"

    def make(self) -> TierLife | ChunkLife | CacheLife | OpeningLife:
        """Return what the next process of this worker does."""
        rng = np.random.default_rng([self.seed, self.number, self.life])
        engine = ("auto", "threads")[(self.life + self.number) % 2]
        layout = small_layout(split=("none", "kv", "head")[self.number % 3])
        if self.role == "chunks":
            return ChunkLife(self.root, self.ledger, rng, shape=self.number, engine=engine)
        if self.role == "cache":
            return CacheLife(self.root, layout, self.ledger, rng, engine)
        if self.role == "opening":
            return OpeningLife(self.root, layout, self.ledger, rng)
        if self.role == "drive":
            # In memory, it begins anew with each process, so what earlier ones wrote is not there.
            self.ledger.acked[:] = self.ledger.ever[:] = 0
            place: Drive | Disk = Drive(layout, int(rng.integers(1 << 30)), is_packed=bool(self.life & 1))
        else:
            place = Disk(self.root, layout, engine, self.life)
        return TierLife(place, self.ledger, rng, has_faults=self.role != "kills", ballast=self.ballast)

    def fork(self, until: float) -> None:
        """Begin a life that ends by itself at that time of the monotonic clock."""
        self.pid = os.fork()
        if self.pid:
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            life = self.make()
            life.begin()
            self.ledger.counts[-1] = self.life
            life.work(until)
            if isinstance(life, OpeningLife):
                (self.folder / "samples.json").write_text(json.dumps(life.samples))
        except KeyboardInterrupt:
            os._exit(INTERRUPTED)
        except BaseException:  # the parent shows it, and the seed
            self.failure.write_text(traceback.format_exc())
            os._exit(FAILED)
        os._exit(0)

    def send(self, number: int) -> None:
        """Send a signal, if there is still a process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


@dataclass
class Toll:
    """What happened to the workers."""

    signals: dict[str, int] = field(default_factory=dict)
    num_lives: int = 0
    num_stops: int = 0
    num_early: int = 0
    failures: list[str] = field(default_factory=list)

    def note(self, name: str) -> None:
        """Count a signal."""
        self.signals[name] = self.signals.get(name, 0) + 1


class Herd:
    """Keeps workers alive until it is told to stop. `rng` decides when each is paused and ended."""

    def __init__(self, workers: list[Worker], rng: random.Random, *, only_kills: bool, life_s_max: float) -> None:
        self.workers, self.toll = workers, Toll()
        self._rng, self._only_kills, self._life_s_max = rng, only_kills, life_s_max

    def start(self, worker: Worker, stop_at: float) -> None:
        """Begin the next life of a worker, and decide how it ends."""
        rng, now = self._rng, time.monotonic()
        worker.life += 1
        self.toll.num_lives += 1
        worker.ending = signal.SIGKILL if self._only_kills else rng.choice(ENDINGS)
        life_s = rng.random() * self._life_s_max * rng.choice([0.1, 1.0, 1.0])
        worker.is_early = rng.random() < 0.1
        worker.stop_at = now + rng.random() * life_s if rng.random() < 0.2 and not self._only_kills else 0.0
        worker.is_stopped = False
        if worker.role == "opening":
            worker.ending, worker.stop_at, life_s = 0, 0.0, stop_at - now
        worker.end_at = now + life_s if worker.is_early or not worker.ending else 0.0
        worker.must_end_at = now + life_s + PATIENCE_S
        worker.fork(now + life_s if not worker.ending else now + life_s + 2 * PATIENCE_S)
        worker.life_s = life_s

    def look(self, worker: Worker) -> None:
        """Do what is due to one worker that lives; start nothing."""
        now, rng = time.monotonic(), self._rng
        pid, status = os.waitpid(worker.pid, os.WNOHANG)
        if pid:
            worker.pid = 0
            self._judge(worker, os.waitstatus_to_exitcode(status))
            return
        if worker.end_at == 0.0 and worker.ledger.counts[-1] == worker.life:
            worker.end_at = now + worker.life_s
        if worker.stop_at and now >= worker.stop_at:
            worker.send(signal.SIGCONT if worker.is_stopped else signal.SIGSTOP)
            self.toll.num_stops += not worker.is_stopped
            worker.is_stopped = not worker.is_stopped
            worker.stop_at = now + rng.random() * 0.5 if worker.is_stopped else 0.0
        elif worker.ending and worker.end_at and now >= worker.end_at:
            worker.send(worker.ending)
            worker.end_at = now + (PATIENCE_S if worker.ending == signal.SIGKILL else 1.0)
            worker.ending = signal.SIGKILL  # as a user would in the end
        elif now > worker.must_end_at:
            self.toll.failures.append(f"worker {worker.number} ({worker.role}) did not end")
            worker.send(signal.SIGKILL)
            worker.must_end_at = now + PATIENCE_S

    def _judge(self, worker: Worker, code: int) -> None:
        if code < 0:
            self.toll.note(signal.Signals(-code).name)
            self.toll.num_early += worker.ledger.counts[-1] != worker.life
        elif code == INTERRUPTED:
            self.toll.note("SIGINT")
        elif code:
            found = worker.failure.read_text() if worker.failure.exists() else f"exit status {code}"
            self.toll.failures.append(f"worker {worker.number} ({worker.role}), life {worker.life}: {found}")

    def end(self) -> None:
        """End every worker that lives."""
        for worker in self.workers:
            if worker.pid and (worker.role != "opening" or self.toll.failures):
                worker.send(signal.SIGKILL)
                worker.send(signal.SIGCONT)
        for worker in self.workers:
            if worker.pid:
                status = os.waitpid(worker.pid, 0)[1]
                worker.pid = 0
                self._judge(worker, os.waitstatus_to_exitcode(status))


@contextlib.contextmanager
def small_filesystem(folder: Path) -> Iterator[Path | None]:
    """Mount a file system of a few MiB; yield its place, None where that is not allowed."""
    image, place = folder / "small.img", folder / "small"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(SMALL_FS_BYTES)
    words = (
        ["mkfs.ext4", "-q", "-F", "-O", "^has_journal", str(image)],
        ["mount", "-o", "loop", str(image), str(place)],
    )
    try:
        is_there = not any(subprocess.run(some, capture_output=True, check=False).returncode for some in words)
    except FileNotFoundError:
        is_there = False
    try:
        yield place if is_there else None
    finally:
        if is_there:
            subprocess.run(["umount", "-l", str(place)], check=False)
        image.unlink()
