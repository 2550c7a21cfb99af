"""The process a target lives in: takes messages, calls the target, answers. Next: race, then driver.

`python -m kvtide.check.child TARGET READ_FD WRITE_FD`. Its first message says what the target is. What the target
prints goes to stderr. It ends when the suite closes its pipe.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvtide.check.contract import Setup, Target
from kvtide.check.names import load_target
from kvtide.check.race import Plan, run_race
from kvtide.check.wire import Blobs, Gone, Wire

POWERS = {"drops": ("drop",), "reports": ("reported",), "begins": ("begin", "finish"), "pools": ("drop_part",)}
Answer = tuple[Any, Blobs]


def setup_json(setup: Setup) -> dict[str, Any]:
    """Return `setup` as JSON values."""
    return {**asdict(setup), "directory": str(setup.directory), "identity": dict(setup.identity)}


class _Host:
    """One target at a time, and the threads that keep the interpreter busy."""

    def __init__(self, cls: type[Target]) -> None:
        self._cls = cls
        self._target: Any = None
        self._spinning = threading.Event()
        self._behind: list[tuple[threading.Thread, list[Any]]] = []

    def answer(self, head: dict[str, Any], blobs: list[Any]) -> Answer:
        """Do what a message asks for and return the answer with its blobs."""
        return _OPERATIONS[head["op"]](self, head, blobs)

    def open(self, head: dict[str, Any], _: Blobs) -> Answer:
        told = head["setup"]
        self._target = self._cls(Setup(**{**told, "directory": Path(told["directory"])}))  # type: ignore[call-arg]
        return None, ()

    def close(self, _head: dict[str, Any], _: Blobs) -> Answer:
        target, self._target = self._target, None
        target.close()
        del target
        gc.collect()  # what only cycles hold is no leak
        return None, ()

    def keys(self, head: dict[str, Any], _: Blobs) -> Answer:
        return None, self._target.keys(head["chains"])

    def put(self, _head: dict[str, Any], blobs: list[Any]) -> Answer:
        num = len(blobs) // 2
        return [bool(good) for good in self._target.put(blobs[:num], blobs[num:])], ()

    def has(self, _head: dict[str, Any], blobs: list[Any]) -> Answer:
        return [bool(there) for there in self._target.has(blobs)], ()

    def get(self, _head: dict[str, Any], blobs: list[Any]) -> Answer:
        return None, [None if value is None else bytes(value) for value in self._target.get(blobs)]

    def drop(self, _head: dict[str, Any], blobs: list[Any]) -> Answer:
        self._target.drop(blobs)
        return None, ()

    def drop_part(self, head: dict[str, Any], blobs: list[Any]) -> Answer:
        self._target.drop_part(blobs, head["part"])
        return None, ()

    def reported(self, _head: dict[str, Any], _: Blobs) -> Answer:
        return asdict(self._target.reported()), ()

    def begin(self, head: dict[str, Any], blobs: list[Any]) -> Answer:
        num = len(blobs) // 2 if head["kind"] == "put" else len(blobs)
        return self._target.begin(head["kind"], blobs[:num], blobs[num:]), ()

    def finish(self, head: dict[str, Any], _: Blobs) -> Answer:
        told, sent = [], list[bytes | None]()
        for job, found in self._target.finish(head["timeout_s"]).items():
            is_put = all(isinstance(one, bool) for one in found)
            told.append([job, found if is_put else None, len(found)])
            sent += () if is_put else found
        return told, sent

    def race(self, head: dict[str, Any], blobs: list[Any]) -> Answer:
        return run_race(self._target, Plan(**head["plan"]), blobs), ()

    def spin(self, head: dict[str, Any], _: Blobs) -> Answer:
        """Keep the interpreter busy with some threads; 0 ends that."""
        self._spinning.clear()
        self._spinning = threading.Event()
        if head["num"]:
            self._spinning.set()
        for _index in range(head["num"]):
            threading.Thread(target=_spin, args=(self._spinning,), daemon=True).start()
        return None, ()

    def behind(self, head: dict[str, Any], blobs: list[Any]) -> Answer:
        """Begin a call on a thread of its own; `behind_end` tells which of these came to an end, and how."""
        found: list[Any] = []

        def work() -> None:
            try:
                self.answer(head["call"], blobs)
                found.append("")
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=work, daemon=True)
        self._behind.append((thread, found))
        thread.start()
        return len(self._behind) - 1, ()

    def behind_end(self, head: dict[str, Any], _: Blobs) -> Answer:
        thread, found = self._behind[head["number"]]
        thread.join(head["timeout_s"])
        return (found[0] if found else None), ()

    def threads(self, _head: dict[str, Any], _: Blobs) -> Answer:
        return threading.active_count(), ()


_OPERATIONS: dict[str, Callable[[_Host, dict[str, Any], list[Any]], Answer]] = {
    one.__name__: one
    for one in (
        *(_Host.open, _Host.close, _Host.keys, _Host.put, _Host.has, _Host.get, _Host.drop, _Host.drop_part),
        *(_Host.reported, _Host.begin, _Host.finish, _Host.race, _Host.spin, _Host.threads),
        *(_Host.behind, _Host.behind_end),
    )
}


def _spin(going: threading.Event) -> None:
    count = 0
    while going.is_set():
        count += 1


def main(words: Sequence[str]) -> int:
    """Serve one target until the suite is gone."""
    name, wire = words[0], Wire(int(words[1]), int(words[2]))
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        cls = load_target(name)
        powers = [power for power, names in POWERS.items() if all(hasattr(cls, name) for name in names)]
        wire.send({"traits": asdict(cls.traits), "powers": powers})
    except Exception as error:
        wire.send({"error": str(error), "kind": type(error).__name__})
        return 1
    host = _Host(cls)
    try:
        while True:
            head, blobs = wire.receive()
            begun = time.perf_counter()
            try:
                result, sent = host.answer(head, blobs)
                reply: dict[str, Any] = {"result": result}
            except Exception as error:  # told to the suite, which judges it
                reply, sent = {"error": str(error)[:2000], "kind": type(error).__name__}, ()
            wire.send({**reply, "seconds": time.perf_counter() - begun}, sent)
    except Gone:
        return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # threads that a target left behind must not keep it
