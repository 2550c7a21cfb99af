"""Requests as a log tells them, collected line by line, then brought in order of arrival. Next: hashed.

Decides how much of a log is kept: whole numbers, 8 bytes each. Knows no format.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError
from kvtide.units import format_ns
from kvtide.workload.prefixes import Hashes, gathered
from kvtide.workload.requests import BLOCKS_MAX, Ids


@dataclass(frozen=True, slots=True)
class Columns:
    """Requests in order of arrival. Times are from the first of them.

    Shapes: R requests, N hashes of all prompts; hash_start [R + 1].
    """

    line: Ids
    time_ns: Ids
    input_tokens: Ids
    output_tokens: Ids
    session: Ids
    hash_start: Ids
    hashes: Hashes
    num_early: int  # requests before the one on the line above

    def only(self, chosen: npt.NDArray[np.bool_]) -> Columns:
        """Return some of the requests. Shapes: chosen [R]."""
        places, start = gathered(self.hash_start, np.flatnonzero(chosen))
        times = self.time_ns[chosen]
        return Columns(
            self.line[chosen],
            times - times[:1],
            self.input_tokens[chosen],
            self.output_tokens[chosen],
            self.session[chosen],
            start,
            self.hashes[places],
            self.num_early,
        )

    def notes(self, clock: str) -> list[str]:
        """Say how times were read, so that a wrong unit shows."""
        if not len(self.line):
            return []
        said = [f"{clock}: {len(self.line):,} requests in {format_ns(int(self.time_ns[-1]))}."]
        if self.num_early:
            said.append(f"{self.num_early:,} requests came earlier than the one on the line above; they were sorted.")
        return said


class Rows:
    """Collects requests in the order of their lines. `limit`: how many at most, or None."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._numbers = array("q")  # six of each request: line, time, input, output, session, end of its hashes
        self._hashes = array("Q")

    @property
    def is_full(self) -> bool:
        """Whether there are as many as wanted."""
        return self._limit is not None and len(self) >= self._limit

    def __len__(self) -> int:
        return len(self._numbers) // 6

    def add(
        self,
        line: int,
        time_ns: int,
        input_tokens: int,
        output_tokens: int,
        *,
        session: int = -1,
        hashes: Iterable[int] = (),
    ) -> None:
        """Add a request, unless there are as many as wanted.

        Raises: ConfigError if all prompts together would have more than BLOCKS_MAX blocks.
        """
        if self.is_full:
            return
        self._hashes.extend(hashes)
        if len(self._hashes) > BLOCKS_MAX:
            raise ConfigError(
                f"the first {len(self):,} prompts have {BLOCKS_MAX:,} blocks already, and no more fit; "
                f"type a limit of at most as many requests"
            )
        self._numbers.extend((line, time_ns, input_tokens, output_tokens, session, len(self._hashes)))

    def columns(self) -> Columns:
        """Return all requests in order of arrival; those of one time stay in the order of their lines."""
        line, time, inputs, outputs, session, ends = np.array(self._numbers, np.int64).reshape(-1, 6).T.copy()
        hashes, start = np.frombuffer(self._hashes, np.uint64), np.concatenate([np.zeros(1, np.int64), ends])
        num_early = int(np.count_nonzero(np.diff(time) < 0))
        if num_early:
            order = np.argsort(time, kind="stable")
            line, time, inputs, outputs, session = (one[order] for one in (line, time, inputs, outputs, session))
            places, start = gathered(start, order)
            hashes = hashes[places]
        return Columns(line, time - time[:1], inputs, outputs, session, start, hashes, num_early)
