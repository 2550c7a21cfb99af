"""A worker process as seen from outside: start it, order it about, kill it. Next: bench."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvtide.errors import IoError, UnsupportedError
from kvtide.stores.worker import ACKED
from kvtide.units import printable

ERROR_LETTERS_MAX = 300
SIGNALS_MS = 500


class Worker:
    """One engine in a process of its own, with its files in `folder`.

    Raises: UnsupportedError with the engine's own words where it refuses an order; IoError where it dies.
    """

    def __init__(self, engine: str, folder: Path, *, dim: int, seed: int, is_durable: bool, python: str = "") -> None:
        self.engine = engine
        self._acked = os.fdopen(os.memfd_create("kvtide-acked"), "r+b")  # nameless: it is gone however we end
        self._acked.truncate(ACKED.size)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        command = [python or sys.executable, "-m", "kvtide.stores.worker"]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors)
        assert self._child.stdout is not None
        self._answers = select.poll()
        self._answers.register(self._child.stdout, select.POLLIN)
        try:
            self.order(
                "open",
                engine=engine,
                folder=str(folder),
                dim=dim,
                seed=seed,
                durable=is_durable,
                acked=f"/proc/{os.getpid()}/fd/{self._acked.fileno()}",
            )
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._child.pid

    @property
    def num_acked(self) -> int:
        """Rows whose insertion was acknowledged, also after its death."""
        return int(ACKED.unpack(os.pread(self._acked.fileno(), ACKED.size, 0))[0])

    def send(self, do: str, **what: object) -> None:
        """Give an order without waiting for the answer."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps({"do": do, **what}).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def order(self, do: str, **what: object) -> dict[str, Any]:
        """Give an order and return the answer."""
        self.send(do, **what)
        assert self._child.stdout is not None
        while not self._answers.poll(SIGNALS_MS):
            pass  # a signal that came just before the wait, or to another thread, is seen now
        line = self._child.stdout.readline()
        if not line:
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise UnsupportedError(f"{self.engine}: {printable(answer['error'])[:ERROR_LETTERS_MAX]}")
        return answer

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Idempotent."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        self._errors.close()

    def close(self) -> None:
        """Close the engine and end the process."""
        self.order("close")
        self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._acked.close()

    def _died(self) -> IoError:
        code = self._child.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        last = printable(said[-1])[:ERROR_LETTERS_MAX] if said else "it said nothing"
        return IoError(5, f"{self.engine} ended with {code}: {last}")
