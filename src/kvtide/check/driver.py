"""The suite's side of a target's process: every call has a deadline, and a hang is an answer. Next: bench."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

from kvtide.check.child import setup_json
from kvtide.check.contract import Reported, Setup, Traits
from kvtide.check.race import Plan, Row
from kvtide.check.wire import Blobs, Gone, Late, Wire
from kvtide.errors import KvtideError, UnsupportedError

START_S, CALL_S = 180.0, 30.0  # importing an engine takes tens of seconds on a slow machine


class Trouble(KvtideError):  # noqa: N818
    """A call of a target that did not answer as asked."""


class Hung(Trouble):
    """No answer before the deadline."""


class Died(Trouble):
    """The process is gone."""


class Raised(Trouble):
    """The target raised an exception. `kind` is its class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Child:
    """A process with one target, open or not. `call_s` is the deadline of a call; `seconds` what the last one took.

    Raises, in every call: Hung, Died, Raised.
    """

    def __init__(self, target: str, *, environment: Sequence[str] = (), call_s: float = CALL_S) -> None:
        """Start the process; `environment` has words of env(1), as in `A=1`, or `-u`, `A`."""
        ours, theirs = os.pipe(), os.pipe()
        self.call_s, self.seconds = call_s, 0.0
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        words = ["env", *environment, sys.executable, "-m", "kvtide.check.child"]
        words += [target, str(theirs[0]), str(ours[1])]
        self._process = subprocess.Popen(
            words, pass_fds=(theirs[0], ours[1]), stdin=subprocess.DEVNULL, stdout=self._errors, stderr=self._errors
        )
        os.close(theirs[0])
        os.close(ours[1])
        os.set_blocking(ours[0], False)
        os.set_blocking(theirs[1], False)
        self._wire = Wire(ours[0], theirs[1])
        self.is_open = self.is_limited = False
        self.is_odd = bool(environment)  # or what else makes it unlike a new one
        try:
            head, _ = self._receive(time.monotonic() + START_S, "start")
        except Hung:  # nothing of the store has been called yet: that is no fault of it
            self.close_process()
            raise UnsupportedError(
                f"importing {target} took more than {START_S:.0f} s: try it on a less busy machine"
            ) from None
        if "error" in head:
            self.close_process()
            raise Raised(head["kind"], head["error"])
        self.traits = Traits(**{**head["traits"], "facts": tuple(head["traits"]["facts"])})
        self.powers = frozenset(head["powers"])

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    # Calls

    def open(self, setup: Setup) -> None:
        """Open the target."""
        self._call({"op": "open", "setup": setup_json(setup)})
        self.is_open = True

    def close(self) -> None:
        """Close the target; the process can open another."""
        self.is_open = False
        self._call({"op": "close"})

    def keys(self, chains: Sequence[Sequence[int]]) -> list[bytes]:
        """Return the keys of chains."""
        found = self._call({"op": "keys", "chains": [list(map(int, chain)) for chain in chains]})[1]
        return cast("list[bytes]", found)

    def put(self, keys: Sequence[bytes], values: Sequence[bytes]) -> list[bool]:
        """Store values."""
        return cast("list[bool]", self._call({"op": "put"}, [*keys, *values])[0])

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Look keys up."""
        return cast("list[bool]", self._call({"op": "has"}, keys)[0])

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Read values."""
        return self._call({"op": "get"}, keys)[1]

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget values."""
        self._call({"op": "drop"}, keys)

    def drop_part(self, keys: Sequence[bytes], part: int) -> None:
        """Take a part of values away."""
        self._call({"op": "drop_part", "part": part}, keys)

    def reported(self) -> Reported:
        """Return the store's own figures."""
        return Reported(**self._call({"op": "reported"})[0])

    def begin(self, kind: Literal["put", "get"], keys: Sequence[bytes], values: Sequence[bytes] = ()) -> int:
        """Begin a job."""
        return int(self._call({"op": "begin", "kind": kind}, [*keys, *values])[0])

    def finish(self, timeout_s: float) -> dict[int, list[bool] | list[bytes | None]]:
        """Return the jobs that ended."""
        told, blobs = self._call({"op": "finish", "timeout_s": timeout_s})
        found, start = dict[int, list[bool] | list[bytes | None]](), 0
        for job, puts, num in told:
            found[job] = puts if puts is not None else blobs[start : start + num]
            start += num if puts is None else 0
        return found

    def spin(self, num: int) -> None:
        """Keep the interpreter of the process busy with `num` threads; 0 ends that."""
        self._call({"op": "spin", "num": num})

    def behind(self, operation: Literal["put", "get"], keys: Sequence[bytes], values: Sequence[bytes] = ()) -> int:
        """Begin a put or get on a thread of the process, and return its number: calls go on beside it."""
        self.is_odd = True
        return int(self._call({"op": "behind", "call": {"op": operation}}, [*keys, *values])[0])

    def behind_end(self, number: int, timeout_s: float) -> str | None:
        """Return what a call that was begun with `behind` raised, empty for nothing; None if it has not ended."""
        return cast("str | None", self._call({"op": "behind_end", "number": number, "timeout_s": timeout_s})[0])

    def num_threads(self) -> int:
        """Threads that Python knows of."""
        return int(self._call({"op": "threads"})[0])

    def race_begin(self, plan: Plan, keys: Sequence[bytes]) -> None:
        """Let the race run; `race_end` waits for it."""
        told = {name: getattr(plan, name) for name in Plan.__dataclass_fields__}
        self.ask({"op": "race", "plan": told}, keys)

    def race_end(self, plan: Plan) -> list[Row]:
        """Return the history of the race that was begun."""
        result, _ = self.answer(plan.seconds + self.call_s, "race")
        return [(row[0], row[1], row[2], row[3], row[4]) for row in result]

    def ask(self, head: dict[str, Any], blobs: Blobs = ()) -> None:
        """Send a call without waiting for its answer."""
        try:
            self._wire.send(head, blobs, until=time.monotonic() + self.call_s)
        except Late:
            raise Hung(f"{head['op']}: the process took no call for {self.call_s:.0f} s") from None
        except Gone:
            raise Died(self._last_words(head["op"])) from None

    def answer(self, timeout_s: float, what: str) -> tuple[Any, list[bytes | None]]:
        """Return the answer to what was asked."""
        head, blobs = self._receive(time.monotonic() + timeout_s, what)
        self.seconds = head.get("seconds", 0.0)
        if "error" in head:
            raise Raised(head["kind"], head["error"])
        return head["result"], blobs

    def _call(self, head: dict[str, Any], blobs: Blobs = ()) -> tuple[Any, list[bytes | None]]:
        self.ask(head, blobs)
        return self.answer(self.call_s, head["op"])

    def _receive(self, until: float, what: str) -> tuple[dict[str, Any], list[bytes | None]]:
        begun = time.monotonic()
        try:
            return self._wire.receive(until=until)
        except Late:
            self.is_odd = True  # its answer may still come
            raise Hung(f"{what}: no answer for {time.monotonic() - begun:.0f} s") from None
        except Gone:
            raise Died(self._last_words(what)) from None

    # The process

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._process.kill()
        self._process.wait()
        self.is_open = False

    def stop(self) -> None:
        """Stop it until `go_on`."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        self._process.send_signal(signal.SIGCONT)

    def limit(self, what: int, most: int) -> None:
        """Set the soft limit of a resource, such as `resource.RLIMIT_NOFILE`."""
        hard = resource.prlimit(self.pid, what)[1]
        resource.prlimit(self.pid, what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        self.is_limited = True

    def unlimit(self, what: int) -> None:
        """Undo `limit`."""
        hard = resource.prlimit(self.pid, what)[1]
        resource.prlimit(self.pid, what, (hard, hard))

    def num_files(self) -> int:
        """Descriptors it has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def moved_bytes(self) -> tuple[int, int]:
        """Return the bytes it had the block layer read and write since it was started."""
        text = Path(f"/proc/{self.pid}/io").read_text()
        found = dict(line.split(": ") for line in text.splitlines())
        return int(found["read_bytes"]), int(found["write_bytes"])

    def errors(self) -> str:
        """Return the end of what it printed."""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 4000))
        return self._errors.read().decode(errors="replace")

    def close_process(self) -> None:
        """Let it end by itself, or end it. Idempotent."""
        if self._errors.closed:
            return
        with contextlib.suppress(OSError):
            self._wire.close()
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.wait(0.5 if self.is_open else 2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _last_words(self, what: str) -> str:
        code = self._process.wait()
        ended = f"by signal {-code}" if code < 0 else f"with code {code}"
        lines = self.errors().strip().splitlines()
        return f"{what}: the process ended {ended}{': ' + lines[-1][:300] if lines else ''}"
