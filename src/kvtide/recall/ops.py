"""Reads, writes and syncs of a memory, through an `io.Engine`. Next: ring."""

from __future__ import annotations

import errno
import os

import numpy as np
import numpy.typing as npt

from kvtide.errors import IoError, ShortIo
from kvtide.io.ops import FSYNC, OP, READ, WRITE, Engine, address_of
from kvtide.trace.events import CAUSES
from kvtide.trace.record import OP_EVENT, Recorder

OP_BYTES_MAX = 1 << 20


class MemoryIo:
    """Reads, writes and syncs of a memory, waited for, and recorded under their cause.

    Threads: one at a time.
    """

    def __init__(self, engine: Engine, recorder: Recorder | None = None) -> None:
        self.engine, self._recorder = engine, recorder
        self.written_bytes = self.read_bytes = self.num_writes = self.num_reads = self.num_syncs = 0

    def move(self, kind: int, fd: int, buffer: npt.NDArray[np.uint8], at: int, *, cause: str, what: str) -> None:
        """Read into `buffer`, or write it, at byte `at`: operations of up to 1 MiB, all in flight at once.

        Raises: IoError that names `what`; ShortIo at the end of the file.
        """
        starts = np.arange(0, buffer.nbytes, OP_BYTES_MAX, dtype=np.uint64)
        batch = np.zeros(len(starts), OP)
        batch["fd"], batch["kind"], batch["tag"] = fd, kind, np.arange(len(starts))
        batch["offset"], batch["address"] = starts + np.uint64(at), starts + np.uint64(address_of(buffer))
        batch["length"] = np.minimum(buffer.nbytes - starts.astype(np.int64), OP_BYTES_MAX)
        self.run(batch, cause=cause, what=what)

    def run(self, batch: npt.NDArray[np.void], *, cause: str, what: str) -> None:
        """Do every operation of `batch`, whose tags count from 0.

        Raises: as `move`, after all have ended.
        """
        self.engine.submit(batch)
        parts, num = [], 0
        while num < len(batch):
            parts.append(self.engine.reap(1))
            num += len(parts[-1])
        done = np.concatenate(parts)
        tags = done["tag"].astype(np.int64)
        is_write = batch["kind"][tags] == WRITE
        moved = done["length"].astype(np.int64)
        self.num_writes += int(is_write.sum())
        self.num_reads += int((batch["kind"][tags] == READ).sum())
        self.num_syncs += int((batch["kind"][tags] == FSYNC).sum())
        self.written_bytes += int(moved[is_write].sum())
        self.read_bytes += int(moved[~is_write].sum())
        self._record(batch[tags], done, cause)
        bad = np.flatnonzero((done["error"] != 0) | (moved != batch["length"][tags]))
        if len(bad):
            number = int(done["error"][bad[0]])
            where = f"{what}, byte {int(batch['offset'][tags[bad[0]]])}"
            if number:
                raise IoError(number, f"{where}: {os.strerror(number)}{_hint(number)}")
            raise ShortIo(errno.EIO, f"{where}: {int(moved[bad[0]])} bytes moved, not all of them")

    def sync(self, fd: int, *, what: str) -> None:
        """Wait until what was written to `fd` is durable.

        Raises: IoError.
        """
        batch = np.zeros(1, OP)
        batch["fd"], batch["kind"] = fd, FSYNC
        self.run(batch, cause="memory-log", what=what)

    def _record(self, batch: npt.NDArray[np.void], done: npt.NDArray[np.void], cause: str) -> None:
        kept = batch["kind"] != FSYNC
        if self._recorder is None or not kept.any():
            return
        batch, done = batch[kept], done[kept]
        events = np.zeros(len(batch), OP_EVENT)
        events["time_ns"], events["complete_ns"] = done["submit_ns"], done["complete_ns"]
        events["cause"], events["fd"], events["is_write"] = CAUSES.index(cause), batch["fd"], batch["kind"] == WRITE
        events["offset"], events["length"], events["num_fragments"] = batch["offset"], done["length"], 1
        events["depth"], events["error"], events["layer"], events["slot"] = done["depth"], done["error"], -1, -1
        self._recorder.record_ops(events)


def _hint(number: int) -> str:
    return "; nothing that was acknowledged is lost: make room and add again" if number == errno.ENOSPC else ""
