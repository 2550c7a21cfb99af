"""What a network client must do for the remote tier: named values in memory, in batches. Next: envelope, then remote.

A client moves bytes and knows nothing of keys, KV or what is right; `tiers.remote` checks all that arrives. Two
implementations: `tiers.valkey` and `tiers.mooncake`.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvtide.errors import IoError
from kvtide.tiers.contract import Statuses


class RemoteDown(IoError):  # noqa: N818
    """The remote did not answer in time, or cannot be reached: nothing is known of the call that was made."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EHOSTDOWN, reason)
        self._reason = reason

    def __str__(self) -> str:
        return self._reason


@dataclass(frozen=True, slots=True)
class Values:
    """n values: value i is `headers[i]`, then `lengths[i]` bytes at `addresses[i]`.

    `owner` is what must live as long as a client may use those addresses.
    Shapes: headers [n, H] uint8, each row contiguous; addresses, lengths [n].
    """

    headers: npt.NDArray[np.uint8]
    addresses: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.int64]
    owner: object = None

    def __len__(self) -> int:
        return len(self.headers)

    def take(self, rows: npt.NDArray[np.integer] | slice) -> Values:
        """Return some of the values. Headers are a view where `rows` is a slice."""
        return Values(self.headers[rows], self.addresses[rows], self.lengths[rows], self.owner)


class RemoteClient(Protocol):
    """Keeps values by name on another machine.

    Raises: RemoteDown from every method but `close`.
    Threads: one at a time.
    """

    def exists(self, names: list[str]) -> npt.NDArray[np.bool_]:
        """Say which names have a value."""

    def put(self, names: list[str], values: Values) -> Statuses:
        """Store values, in place of what was there. Returns [n]: OK, FULL or FAILED."""

    def get(self, names: list[str], values: Values) -> Statuses:
        """Fill in the values. Returns [n]: OK, MISSING, or FAILED where the server could not say.

        A value of another size or kind is MISSING. Only what is OK is written to.
        """

    def remove(self, names: list[str]) -> None:
        """Forget names. Those without a value are no error."""

    def close(self) -> None:
        """Give connections back. Idempotent, never waits longer than a call may."""


@runtime_checkable
class RegistersMemory(Protocol):
    """A client that moves bytes straight from memory it was told of."""

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Let values be put from this memory without a copy; it lives as long as the client."""
