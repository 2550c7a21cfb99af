"""What a store of KV must offer to be checked, and what a check is. Pure: imports no store. Next: names, then wire.

*Theory.* The suite never holds the store it checks. A target lives in a process of its own (`child`), which the suite
may kill, stop, limit or start anew, and talks over a pipe. So this file speaks of bytes only: keys are whatever the
engine's own derivation gives, values are opaque, and all faults come from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from kvtide.check.bench import Bench

# What KV depends on, beside its tokens: a name, and two values of it under which values are of one size. A target is
# given the first of each; that which differs gets the second.
FACTS: Mapping[str, tuple[str, str]] = {
    "weights": ("a" * 64, "b" * 64),  # SHA-256 of the weights
    "revision": ("main", "v2"),  # of the model's repository, under the same name
    "rope": ('{"rope_type": "default"}', '{"rope_type": "yarn", "factor": 2.0}'),
    "dtype": ("fp8_e4m3", "fp8_e5m2"),
    "layout": ("layer-first", "page-first"),
    "tp": ("1", "2"),  # number of ranks; the target is rank 0
    "adapter": ("", "lora-1"),
    "build": ("engine 1.0", "engine 1.1"),  # of the engine that made the values
}
MODEL = "check/tiny-model"  # the model's name, the same for all


@dataclass(frozen=True, slots=True)
class Setup:
    """How a target is opened.

    Values are of `value_bytes`, all of one size. `capacity_bytes` bounds what lies in the store, for those that can be
    bounded; `memory_bytes` bounds the memory that values pass through or stay in (a staging pool, a DRAM tier), where
    there is such. `identity` has a value for each of `FACTS`; `salt` parts tenants. `direct`: past the page cache.
    """

    directory: Path
    value_bytes: int = 65536
    capacity_bytes: int | None = None
    memory_bytes: int | None = None
    identity: Mapping[str, str] = field(default_factory=lambda: {name: one for name, (one, _) in FACTS.items()})
    salt: str = ""
    direct: bool = False


@dataclass(frozen=True, slots=True)
class Traits:
    """What a target is and takes. Checks that need more than it has are not applicable.

    `facts` are those of `FACTS` that an engine hands to it, or that it sees itself: one it is never told of cannot be
    blamed on it, one it is told of and ignores can. Sizes of values are multiples of `value_multiple`.
    """

    name: str
    package: str
    version: str
    is_bounded: bool = False  # keeps to capacity_bytes
    is_durable: bool = False  # finds values again after it was closed or killed
    is_on_disk: bool = False  # values lie in files under the setup's directory
    is_checksummed: bool = False  # says it does
    can_be_direct: bool = False
    has_memory: bool = False  # heeds memory_bytes
    can_be_shared: bool = False  # several processes may have one directory open at a time
    can_be_threaded: bool = True  # several threads may call it at a time
    can_overwrite: bool = False  # a put of a key that is there puts the new value in its place
    facts: tuple[str, ...] = ()
    has_salt: bool = False
    chunk_tokens: int = 16  # of one value
    value_multiple: int = 1
    value_bytes_max: int = 1 << 30
    note: str = ""  # how it is driven, in one line


class Target(Protocol):
    """A store under test. The class is called with a `Setup`, and that opens it; whatever is raised is a failed open.

    All calls are batched and wait until they are done. A put answers True only for values that are stored whole; where
    a store answers before it has, the target waits for the store's own word on it. A get answers None for a miss.
    Exceptions are told as such: they are no wrong bytes.
    """

    traits: ClassVar[Traits]

    def keys(self, chains: Sequence[Sequence[int]]) -> list[bytes]:
        """Return for each chain of token ids the key of its last chunk, by the engine's own derivation.

        Chains are whole numbers of `traits.chunk_tokens` long.
        """

    def put(self, keys: Sequence[bytes], values: Sequence[bytes]) -> list[bool]:
        """Store values; say which are stored whole."""

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Say for each key what the engine's own look-up says."""

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return each value, or None where the store gives none."""

    def close(self) -> None:
        """Give up everything it holds, as the engine does at its end."""


@runtime_checkable
class Drops(Protocol):
    """A target that can be told to give up values."""

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget values; keys that are not there are no error."""


@dataclass(frozen=True, slots=True)
class Reported:
    """What a store says of itself: bytes since it was opened, and its fill. None: it does not say."""

    read_bytes: int | None = None
    written_bytes: int | None = None
    used_bytes: int | None = None
    num_values: int | None = None
    read_bytes_per_s: float | None = None  # of the last get
    written_bytes_per_s: float | None = None  # of the last put


@runtime_checkable
class Reports(Protocol):
    """A target that says what it moved and holds."""

    def reported(self) -> Reported:
        """Return the store's own figures."""


@runtime_checkable
class Begins(Protocol):
    """A target whose store can have several jobs under way at a time."""

    def begin(self, kind: Literal["put", "get"], keys: Sequence[bytes], values: Sequence[bytes]) -> int:
        """Begin a job and return its number at once. A get has no `values`."""

    def finish(self, timeout_s: float) -> dict[int, list[bool] | list[bytes | None]]:
        """Return the jobs that ended since it was last asked, waiting up to `timeout_s` for the first of them."""


@runtime_checkable
class Pools(Protocol):
    """A target whose values lie in several parts that are put and found together: pools of a hybrid model."""

    num_parts: int

    def drop_part(self, keys: Sequence[bytes], part: int) -> None:
        """Take one part of values away, as the eviction of one pool would. `part` counts from 0."""


# Faults of the file system: `faultfs.mount(backing, at)` returns a `FaultMount`.

Operation = Literal["open", "read", "write", "fsync", "rename", "unlink", "any"]
Fault = Literal["EIO", "ENOSPC", "short", "torn", "flip", "slow", "hang"]
"""short: fewer bytes move and that is told; torn: half the bytes move and it is not told; flip: one bit of what moves
differs; slow: after `delay_s`; hang: not before the rule is cleared."""


@dataclass(frozen=True, slots=True)
class FaultRule:
    """From the `after`-th matching operation on (from 0), `times` of them fail so; None: all."""

    operation: Operation
    fault: Fault
    after: int = 0
    times: int | None = None
    delay_s: float = 0.0


@runtime_checkable
class FaultMount(Protocol):
    """A directory that passes operations on to another one, but for those that a rule makes fail."""

    path: Path

    def set(self, rules: Sequence[FaultRule]) -> None:
        """Have these rules and no others, counting from now on. None: no faults; what hangs goes on."""

    def counts(self) -> dict[str, int]:
        """Return how often each operation came, and how many failed by a rule ("faults"), since `set`."""

    def close(self) -> None:
        """Let hanging operations go on and unmount. Idempotent."""


# Checks

Outcome = Literal["pass", "fail", "not applicable", "cannot tell"]
TraitNeed = Literal["bounded", "durable", "disk", "direct", "memory", "shared", "threads", "salt"]
PowerNeed = Literal["drops", "reports", "begins", "pools"]
MachineNeed = Literal["faultfs", "loop"]
Need = TraitNeed | PowerNeed | MachineNeed
"""What a check needs. Of the target: else it is not applicable. Of the machine: else it cannot tell."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found. `evidence` is one sentence; `smallest` the smallest input that still fails."""

    outcome: Outcome
    evidence: str
    smallest: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `report` names the public reports of the fault it looks for, as in `LMCache#4991`."""

    id: str
    title: str
    proves: str
    how: str
    report: str
    function: Callable[[Bench], Verdict]
    needs: tuple[Need, ...] = ()
