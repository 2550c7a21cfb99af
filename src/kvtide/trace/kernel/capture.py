"""Capturing what the kernel does for one device or one command, and turning it into frames. Next: attribute.

Decides which events are switched on, who belongs to the traced processes, and what is left out. Decoding happens after
the capture, so that it does not disturb it.

Theory. Two instances: block commands are recorded for the device whoever causes them, since their completions happen
in no process's name; calls are recorded for the traced processes only. Who belongs to them is followed through fork
events and by looking at /proc now and then.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError, IoError
from kvtide.trace.kernel import calls, commands
from kvtide.trace.kernel.pages import Located, locate, records, used_bytes
from kvtide.trace.kernel.spool import Spool
from kvtide.trace.kernel.tracefs import EventFormat, Instance

if TYPE_CHECKING:
    import polars as pl

TICK_S = 0.02
PROC_TICKS = 10  # ticks between two looks at /proc
KERNEL_WRITERS = ("kworker", "jbd2", "xfsaild", "btrfs", "flush-")  # write back what others left in the page cache
BLOCK = {"block/block_io_start": commands.START, "block/block_rq_issue": commands.ISSUE}
BLOCK_DONE = {"block/block_rq_complete": commands.COMPLETE}
FORK = "sched/sched_process_fork"
SUBMITS = ("io_uring/io_uring_submit_req", "io_uring/io_uring_submit_sqe")  # newer kernels, older ones
COMPLETE = "io_uring/io_uring_complete"


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What to record. `device` None: every device. `pids` empty: every process but this one."""

    device: int | None = None  # major << 20 | minor
    pids: tuple[int, ...] = ()
    has_queue: bool = True  # also when a command was handed to the block layer; costs a third more events
    has_calls: bool = False  # system calls; needs `pids`
    has_uring: bool = True
    buffer_bytes: int = 16 << 20  # a CPU
    memory_bytes_max: int = 256 << 20  # of pages kept in memory
    spool_bytes_max: int = 16 << 30  # then the capture ends
    folder: Path = field(default_factory=Path)  # for pages that memory does not hold


class Capture:
    """A running capture: `start`, `stop`, then `frames`, then `close`.

    Threads: one thread of its own reads pages from `start` to `stop`.
    Raises: UnsupportedError without root or tracefs; IoError where the kernel or the disk refuses.
    """

    def __init__(self, options: CaptureOptions) -> None:
        if options.has_calls and not options.pids:
            raise ConfigError("system calls are traced for named processes only; type --pid PID, or a command")
        self.options, self.family = options, Family(options.pids)
        self.num_lost = self.num_others = 0
        self.is_full = False
        self._layouts: dict[str, EventFormat] = {}
        self._instances: list[Instance] = []
        self._spools: list[Spool] = []
        self._halt = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        try:
            self._open_block()
            if options.has_calls:
                self._open_calls()
        except BaseException:
            self.close()
            raise

    def _open_block(self) -> None:
        instance = Instance(buffer_bytes=self.options.buffer_bytes)
        self._instances.append(instance)
        condition = "" if self.options.device is None else f"dev == {self.options.device}"
        wanted = BLOCK | BLOCK_DONE
        for event in wanted:
            is_needed = event != "block/block_io_start" or (self.options.has_queue and instance.has(event))
            if is_needed:
                self._layouts[event] = instance.enable(event, condition)
        if self.options.pids and instance.has(FORK):
            self._layouts[FORK] = instance.enable(FORK)
        submit = next((event for event in SUBMITS if instance.has(event)), None)
        if self.options.has_uring and submit == SUBMITS[0]:
            self._layouts[SUBMITS[0]] = instance.enable(SUBMITS[0])
            self._layouts[COMPLETE] = instance.enable(COMPLETE)

    def _open_calls(self) -> None:
        instance = Instance(buffer_bytes=self.options.buffer_bytes)
        self._instances.append(instance)
        instance.follow(list(self.options.pids))
        for name in calls.SYSCALLS:
            for side in ("enter", "exit"):
                event = f"syscalls/sys_{side}_{name}"
                if instance.has(event):
                    self._layouts[event] = instance.enable(event)

    def start(self) -> None:
        """Begin to record."""
        options = self.options
        for instance in self._instances:
            instance.start()
            self._spools.append(
                Spool(
                    instance.num_cpus,
                    page_bytes=mmap.PAGESIZE,
                    memory_bytes_max=options.memory_bytes_max // len(self._instances),
                    folder=options.folder,
                )
            )
        self._thread = threading.Thread(target=self._run, name="kvtide-capture", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End recording and read what is left.

        Raises: IoError if pages could not be kept.
        """
        for instance in self._instances:
            instance.stop()
        self._halt.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self.num_lost = sum(instance.num_lost() for instance in self._instances)
        for instance in self._instances:
            instance.close()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._halt.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for instance in self._instances:
            instance.close()
        for spool in self._spools:
            spool.close()

    @property
    def is_spilled(self) -> bool:
        """Whether pages went to a file: on the traced disk they show in the trace."""
        return any(spool.is_spilled for spool in self._spools)

    @property
    def num_bytes(self) -> int:
        """Bytes captured so far."""
        return sum(spool.num_bytes for spool in self._spools)

    def frames(self, on_piece: Callable[[int, int], None] | None = None) -> Iterator[tuple[str, pl.DataFrame]]:
        """Yield (level, rows) in the order of time, at most some 400,000 at once.

        `on_piece` gets the pages done and all there are.
        Raises: FormatError if the kernel's pages are not understood.
        """
        total, done = sum(spool.num_pages for spool in self._spools), 0
        for index, spool in enumerate(self._spools):
            decoder = Decoder(self._layouts, self.family, is_calls=index == 1)
            for pages, border in spool.pieces():
                yield from decoder.add(pages, border)
                done += sum(map(len, pages))
                if on_piece is not None:
                    on_piece(done, total)
            self.num_others += decoder.num_others

    def _run(self) -> None:
        try:
            tick = 0
            while not self._halt.wait(TICK_S):
                self._drain()
                if tick % PROC_TICKS == 0:
                    self.family.look()
                tick += 1
            self._drain()
        except (OSError, IoError) as error:
            self._error = error
            for instance in self._instances:
                instance.stop()

    def _drain(self) -> None:
        for instance, spool in zip(self._instances, self._spools, strict=True):
            for cpu in range(instance.num_cpus):
                started = time.monotonic()
                while page := instance.read(cpu, mmap.PAGESIZE):
                    spool.append(cpu, page)
                    has_caught_up = used_bytes(page) < mmap.PAGESIZE // 2
                    if has_caught_up or time.monotonic() - started > TICK_S:  # the other CPUs' buffers fill meanwhile
                        break
        if self.num_bytes > self.options.spool_bytes_max and not self.is_full:
            self.is_full = True
            for instance in self._instances:
                instance.stop()


class Family:
    """Threads of the traced processes and of their children."""

    def __init__(self, pids: tuple[int, ...]) -> None:
        self.threads: set[int] = set(pids)
        self._processes: set[int] = set(pids)
        self._lock = threading.Lock()

    def look(self) -> None:
        """Add the threads and children that /proc shows now."""
        waiting = list(self._processes)
        while waiting:
            pid = waiting.pop()
            threads, children = _relatives(pid)
            with self._lock:
                self.threads |= threads
            waiting += [child for child in children if child not in self._processes]
            self._processes |= children

    def forked(self, parents: npt.NDArray[np.int32], children: npt.NDArray[np.int32]) -> None:
        """Add the children of members. Shapes: [n], in the order of time."""
        with self._lock:
            for parent, child in zip(parents.tolist(), children.tolist(), strict=True):
                if parent in self.threads:
                    self.threads.add(child)

    def members(self, pids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Return which of `pids` belong. Shapes: [n]."""
        with self._lock:
            return np.isin(pids, np.fromiter(self.threads, np.int32, len(self.threads)))


def _relatives(pid: int) -> tuple[set[int], set[int]]:
    """Return the threads and the child processes of `pid`; nothing where it has ended."""
    threads, children = set(), set()
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            threads.add(int(task.name))
            children |= {int(child) for child in (task / "children").read_text().split()}
    except (OSError, ValueError):
        pass
    return threads, children


class Decoder:
    """Turns the pages of one instance into frames, piece by piece."""

    def __init__(self, layouts: dict[str, EventFormat], family: Family, *, is_calls: bool) -> None:
        self._layouts, self._family, self._is_calls = layouts, family, is_calls
        self._commands, self._calls = commands.Commands(), calls.Calls()
        self._held: list[npt.NDArray[np.void]] = [np.zeros(0, commands.EVENT), np.zeros(0, calls.EVENT)]
        self.num_others = 0

    def add(self, pages: list[npt.NDArray[np.uint8]], border: int | None) -> Iterator[tuple[str, pl.DataFrame]]:
        """Yield what a piece of the spool holds; see `Spool.pieces`."""
        blocks: list[npt.NDArray[np.void]] = [self._held[0]]
        requests: list[npt.NDArray[np.void]] = [self._held[1]]
        for each in map(np.ascontiguousarray, pages):
            if len(each):
                located = locate(each)
                self._find_forks(each, located)
                blocks += self._find_blocks(each, located)
                requests += self._find_calls(each, located)
        if not self._is_calls:
            block = self._commands.add(self._until(0, blocks, border), is_last=border is None)
            yield "block", self._ours(block)
        call = self._calls.add(self._until(1, requests, border), is_last=border is None)
        yield "call", self._ours(call) if not self._is_calls else call

    def _until(self, index: int, events: list[npt.NDArray[np.void]], border: int | None) -> npt.NDArray[np.void]:
        """Return all events before `border`; keep the others for the next piece."""
        together = np.concatenate(events)
        is_later = together["time_ns"] >= border if border is not None else np.zeros(len(together), np.bool_)
        self._held[index] = together[is_later]
        return together[~is_later]

    def _find_forks(self, pages: npt.NDArray[np.uint8], located: Located) -> None:
        if FORK in self._layouts and not self._is_calls:
            rows, _ = records(pages, located, self._layouts[FORK])
            self._family.forked(rows["parent_pid"], rows["child_pid"])

    def _find_blocks(self, pages: npt.NDArray[np.uint8], located: Located) -> list[npt.NDArray[np.void]]:
        if self._is_calls:
            return []
        kinds = {event: kind for event, kind in (BLOCK | BLOCK_DONE).items() if event in self._layouts}
        return [
            commands.block_events(*records(pages, located, self._layouts[event]), kind) for event, kind in kinds.items()
        ]

    def _find_calls(self, pages: npt.NDArray[np.uint8], located: Located) -> list[npt.NDArray[np.void]]:
        found = []
        for event, layout in self._layouts.items():
            system, _, name = event.partition("/")
            if self._is_calls and system == "syscalls":
                rows, time_ns = records(pages, located, layout)
                side, short = name[len("sys_") :].split("_", 1)
                found.append(
                    calls.enter_events(rows, time_ns, short) if side == "enter" else calls.exit_events(rows, time_ns)
                )
            elif not self._is_calls and event == SUBMITS[0]:
                found.append(calls.submit_events(*records(pages, located, layout)))
            elif not self._is_calls and event == COMPLETE:
                found.append(calls.complete_events(*records(pages, located, layout)))
        return found

    def _ours(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return the rows of traced processes, and of the kernel's writers on anybody's behalf."""
        pids = frame["pid"].to_numpy()
        is_ours = self._family.members(pids) | (pids == -1) if self._family.threads else pids != os.getpid()
        if "comm" in frame:
            comm = frame["comm"]
            for name in KERNEL_WRITERS:
                is_ours = is_ours | comm.str.starts_with(name).to_numpy()
        self.num_others += int((~is_ours).sum())
        return frame.filter(is_ours)
