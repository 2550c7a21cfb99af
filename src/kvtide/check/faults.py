"""Which operation on a file fails, and how. Decides that; knows nothing of FUSE. Next: fuse, which asks.

A fault counts the operations it matches from the moment it is armed. It lets `after` of them pass, strikes `times` of
them (0: all that follow), and then rests.
"""

from __future__ import annotations

import errno
import fnmatch
import threading
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from kvtide.errors import ConfigError

OPS = (
    *("read", "write", "fsync", "open", "create", "rename", "unlink", "mkdir", "setattr", "fallocate", "statfs"),
    *("readdir", "lookup"),
    "any",  # but lookup and readdir, without which nothing is found
)
KINDS = {
    "error": OPS,  # the operation fails with `errno`
    "full": ("write", "fallocate"),  # ENOSPC once `bytes` more were written; the write that meets the end is short
    "short": ("read", "write"),  # at most `bytes` are moved (0: half), and that is what is reported
    "torn": ("write",),  # at most `bytes` are written (0: half), all are reported as written
    "flip": ("read", "write"),  # bit `bit` of what is moved differs
    "delay": OPS,  # `seconds` pass first
    "stall": OPS,  # nothing happens until the fault is cleared or the caller is killed
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, and when.

    Units: `bytes` bytes, `seconds` seconds; `bit` counts from the first bit of what is moved and wraps at its end.
    Raises: ConfigError for a kind or an operation that there is not, or one that the other does not go with.
    """

    kind: str
    op: str = "write"
    after: int = 0  # matching operations that pass first
    times: int = 1  # operations struck; 0: all that follow
    errno: str = "EIO"
    bytes: int = 0
    seconds: float = 0.0
    bit: int = 0
    match: str = "*"  # path below the mount, as fnmatch reads it

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"a fault of kind {self.kind!r}: there are {', '.join(KINDS)}")
        if self.op not in KINDS[self.kind]:
            raise ConfigError(f"a fault {self.kind!r} of {self.op!r}: it is one of {', '.join(KINDS[self.kind])}")
        if not hasattr(errno, self.errno):
            raise ConfigError(f"an error {self.errno!r}: errno has none of that name; type one such as ENOSPC")

    @property
    def number(self) -> int:
        """The error as errno(3) numbers it."""
        return int(getattr(errno, self.errno))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, said: object) -> Self:
        """Return the fault that `to_json` wrote.

        Raises: ConfigError for anything else.
        """
        known = {one.name: type(one.default) for one in fields(cls) if one.name != "kind"} | {"kind": str}
        if not isinstance(said, dict) or "kind" not in said or set(said) - set(known):
            raise ConfigError(f"a fault is an object with a kind and any of {', '.join(known)}: got {said!r}")
        for name, value in said.items():
            wanted = (int, float) if known[name] is float else known[name]
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise ConfigError(f"a fault's {name} is a {known[name].__name__}: got {value!r}")
        return cls(**said)


@dataclass(slots=True)
class Armed:
    """A fault that waits for its operations; `released` is set when it is cleared."""

    fault: Fault
    released: threading.Event
    seen: int = 0
    fired: int = 0
    bytes_left: int = 0


class Faults:
    """The faults that are armed. Threads: any may ask."""

    def __init__(self) -> None:
        self._armed: dict[int, Armed] = {}
        self._lock = threading.Lock()
        self._next_id = 1

    def arm(self, fault: Fault) -> int:
        """Let `fault` strike from now on; return the number it is known by."""
        with self._lock:
            number, self._next_id = self._next_id, self._next_id + 1
            self._armed[number] = Armed(fault, threading.Event(), bytes_left=fault.bytes)
            return number

    def clear(self, number: int | None = None) -> None:
        """Forget one fault or, without a number, all; what they hold up goes on."""
        with self._lock:
            for one in [number] if number is not None else list(self._armed):
                armed = self._armed.pop(one, None)
                if armed is not None:
                    armed.released.set()

    def is_any(self) -> bool:
        """Whether a fault is armed."""
        return bool(self._armed)

    def fired(self) -> dict[int, int]:
        """Operations struck by each fault that is armed."""
        with self._lock:
            return {number: armed.fired for number, armed in self._armed.items()}

    def strike(self, op: str, path: str) -> list[Armed]:
        """Return the faults that strike this operation, and count it."""
        with self._lock:
            return [armed for armed in self._armed.values() if _strikes(armed, op, path)]

    def room(self, op: str, path: str, size: int) -> int | None:
        """Take `size` bytes of what is left of a disk that fills up; return those that fit, None if none fills."""
        with self._lock:
            filling = [one for one in self._armed.values() if one.fault.kind == "full" and _concerns(one, op, path)]
            if not filling:
                return None
            taken = min(size, *(armed.bytes_left for armed in filling))
            for armed in filling:
                armed.bytes_left -= taken
                armed.fired += taken < size
            return taken

    def bytes_left(self) -> int | None:
        """Bytes left on a disk that fills up, or None if none does."""
        with self._lock:
            return min((one.bytes_left for one in self._armed.values() if one.fault.kind == "full"), default=None)


def _concerns(armed: Armed, op: str, path: str) -> bool:
    fault = armed.fault
    is_meant = fault.op in {op, "any"} and op not in (() if fault.op == op else ("lookup", "readdir"))
    takes_room = op == "fallocate" and (fault.kind == "full" or (fault.op == "write" and fault.errno == "ENOSPC"))
    return (is_meant or takes_room) and fnmatch.fnmatchcase(path, fault.match)


def _strikes(armed: Armed, op: str, path: str) -> bool:
    fault = armed.fault
    if fault.kind == "full" or not _concerns(armed, op, path):
        return False
    armed.seen += 1
    if armed.seen <= fault.after or (fault.times and armed.seen > fault.after + fault.times):
        return False
    armed.fired += 1
    return True
