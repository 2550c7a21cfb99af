"""What a check works with: fresh directories, processes of the target, chains, values, and words for what it found.

Decides what is cleaned up after a check: every process it started, every file system it mounted, every file. Next:
runner, then the checks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from kvtide.check import faultfs
from kvtide.check.contract import FaultMount, Outcome, Setup, Verdict
from kvtide.check.driver import CALL_S, Child, Died, Hung, Raised
from kvtide.check.values import VALUE_BYTES_MIN, value_of, wrong_values

SIZE = 65536
SERVER_S = 5.0  # for a server to end by itself
Found = list[bytes | None]


class Judged(Exception):  # noqa: N818
    """A check has come to its verdict."""

    def __init__(self, outcome: Outcome, evidence: str, smallest: str = "") -> None:
        super().__init__(evidence)
        self.verdict = Verdict(outcome, evidence, smallest)


def fail(evidence: str, smallest: str = "") -> NoReturn:
    """End the check: the target has the fault. `smallest` is the smallest input that shows it."""
    raise Judged("fail", evidence, smallest)


def cannot_tell(evidence: str) -> NoReturn:
    """End the check without a verdict."""
    raise Judged("cannot tell", evidence)


def not_applicable(evidence: str) -> NoReturn:
    """End the check: the target has nothing of the kind."""
    raise Judged("not applicable", evidence)


def passed(evidence: str) -> Verdict:
    """Return the verdict that all is well."""
    return Verdict("pass", evidence)


def smallest(fails: Callable[[int], bool], most: int, least: int = 1) -> int:
    """Return the smallest number that still fails, found by halving from `most`, which does."""
    while most // 2 >= least and fails(most // 2):
        most //= 2
    return most


class Closes(Protocol):
    """What is given up after a check."""

    def close(self) -> None:
        """Give it up. Idempotent."""


class Bench:
    """The means of checks of one target.

    `size` is that of values; `machine` what this machine has of `MachineNeed`. `is_quick` asks for fewer repeats.
    """

    def __init__(
        self,
        target: str,
        root: Path,
        *,
        machine: frozenset[str] = frozenset(),
        call_s: float = CALL_S,
        is_quick: bool = False,
        seed: int = 0,
    ) -> None:
        self.target, self.root, self.machine, self.is_quick, self.seed = target, root, machine, is_quick, seed
        self.call_s, self._count = call_s, 0
        self._children: list[Child] = []
        self._closing: list[Closes] = []
        self._idle: Child | None = None
        self._idle = self._start()
        self._children.clear()
        self.traits, self.powers = self._idle.traits, self._idle.powers
        self.size = self.fitting(SIZE)

    def fitting(self, size: int) -> int:
        """Return the size of values next to `size` that the target takes."""
        step = self.traits.value_multiple
        least = -(-VALUE_BYTES_MIN // step) * step
        return max(least, min(size, self.traits.value_bytes_max) // step * step)

    # Opening

    def directory(self) -> Path:
        """Return a new, empty directory."""
        self._count += 1
        path = self.root / f"d{self._count}"
        path.mkdir(mode=0o700)
        return path

    def setup(self, *, room: int | None = None, **changes: Any) -> Setup:
        """Return a setup in a new directory, bounded to about `room` values."""
        made = Setup(**{"directory": self.directory() / "store", "value_bytes": self.size, **changes})
        made.directory.mkdir(exist_ok=True)
        if room is not None:
            made = replace(made, capacity_bytes=self.room_bytes(room, made.value_bytes))
        return made

    def room_bytes(self, room: int, size: int) -> int:
        """Return a capacity that holds `room` values and what a store keeps beside them: a page or two each."""
        return 8192 + room * (size + 8192)

    def open(self, setup: Setup, *, fresh: bool = False, environment: Sequence[str] = ()) -> Child:
        """Return a process with the target open: a new one if `fresh`, else perhaps one that was used before."""
        child = self.process(fresh=fresh or bool(environment), environment=environment)
        child.open(setup)
        return child

    def process(self, *, fresh: bool = False, environment: Sequence[str] = ()) -> Child:
        """Return a process with no target open."""
        idle, self._idle = (None, self._idle) if fresh else (self._idle, None)
        if idle is None:
            return self._start(environment)
        self._children.append(idle)
        return idle

    def reopen(self, child: Child, setup: Setup) -> Child:
        """Close the target in `child`, and open it in another process."""
        child.close()
        return self.open(setup, fresh=True)

    def end_child(self, child: Child) -> None:
        """End a process before the check does."""
        self._children.remove(child)
        child.close_process()

    def on_end(self, closing: Closes) -> None:
        """Have something closed when the check ends, after its processes."""
        self._closing.append(closing)

    def fault_mount(self) -> FaultMount:
        """Return a directory whose file system fails by rules, gone when the check ends."""
        at, backing = self.directory(), self.directory()
        mount: FaultMount = faultfs.mount(backing, at)
        self.on_end(mount)
        return mount

    def _start(self, environment: Sequence[str] = ()) -> Child:
        child = Child(self.target, environment=environment, call_s=self.call_s)
        self._children.append(child)
        return child

    def end_check(self) -> None:
        """Give up whatever the check left; one process without a target is kept for the next."""
        for closing in self._closing:
            if isinstance(closing, FaultMount):
                with contextlib.suppress(Exception):  # it is closed already
                    closing.set([])  # or processes in it cannot end
        for child in self._children:
            if child.is_open and child.is_alive:
                with contextlib.suppress(Hung, Died, Raised):
                    child.close()
            if self._idle is None and child.is_alive and not (child.is_open or child.is_limited or child.is_odd):
                self._idle = child
            else:
                child.close_process()
        self._children.clear()
        for closing in reversed(self._closing):
            with contextlib.suppress(Exception):
                closing.close()
        self._closing.clear()
        for path in self.root.glob("d*"):
            end_servers(path)
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """End every process."""
        self.end_check()
        if self._idle is not None:
            self._idle.close_process()
            self._idle = None

    # Keys and values

    def chains(self, num: int, *, seed: int = 0, chunks: int = 1) -> list[list[int]]:
        """Return `num` chains of token ids, none the beginning of another, each `chunks` chunks long."""
        rng = np.random.default_rng([self.seed, seed])
        rows = rng.integers(0, 30000, (num, chunks * self.traits.chunk_tokens))
        rows[:, 0] = np.arange(num) + num * (seed % 7)
        return rows.tolist()

    def values(self, indices: Sequence[int], version: int = 0, size: int = 0) -> list[bytes]:
        """Return the values of keys by their index."""
        return [value_of(index, version, size or self.size) for index in indices]

    def filled(self, child: Child, num: int, *, size: int = 0, seed: int = 0) -> list[bytes]:
        """Store `num` values and return their keys.

        Ends the check as "cannot tell" if the target takes less than all: what is checked begins with them.
        """
        keys = child.keys(self.chains(num, seed=seed))
        good = child.put(keys, self.values(range(num), size=size))
        if not all(good):
            cannot_tell(f"the target took {sum(good)} of {num} values before any fault: {child.errors()[-200:]}")
        return keys

    def check_values(self, got: Found, indices: Sequence[int], where: str, *, size: int = 0, version: int = 0) -> int:
        """Return how many values came; end the check as failed if one is wrong."""
        if len(got) != len(indices):
            fail(f"{where}: {len(got)} answers to {len(indices)} keys")
        wrong = wrong_values(got, list(indices), size or self.size, version)
        if wrong:
            fail(f"{where}: {len(wrong)} of {len(got)} values are wrong: {wrong[0].what}", f"key {wrong[0].place}")
        return sum(value is not None for value in got)

    def get_or_raise(self, child: Child, keys: Sequence[bytes]) -> tuple[Found, str]:
        """Return what came, all misses where the target raised, and what it raised: an exception is no wrong byte."""
        try:
            return child.get(keys), ""
        except Raised as error:
            return [None] * len(keys), str(error)


def end_servers(directory: Path) -> None:
    """End the servers that targets started: their pids lie in `*.pid` files, and they name the directory.

    In their command line or their environment: a pid that was given to another process since is left alone.
    """
    for path in _files(directory, ".pid"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(path.read_text())
            told = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
            if str(directory).encode() in told:
                os.kill(pid, signal.SIGTERM)
                _wait_gone(pid)


def _wait_gone(pid: int) -> None:
    until = time.monotonic() + SERVER_S
    while Path(f"/proc/{pid}/fd").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]:
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.02)


def _files(directory: Path, suffix: str) -> Iterator[Path]:
    return (path for path in directory.rglob(f"*{suffix}") if path.is_file())
