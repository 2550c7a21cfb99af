"""The allocator of early systems, as a baseline: each sequence reserves its maximum length in one piece. Pure.

Source: described and measured in PagedAttention (arXiv:2309.06180), section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtide.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ContiguousUsage:
    """How well reserved memory is used. Fractions are 0 to 1.

    `external_fragmentation` is the share of free tokens outside the largest free run.
    """

    capacity_tokens: int
    reserved_tokens: int
    used_tokens: int
    utilisation: float
    internal_fragmentation: float
    external_fragmentation: float


class ContiguousAllocator:
    """First-fit reservation of runs of tokens."""

    def __init__(self, capacity_tokens: int) -> None:
        if capacity_tokens < 1:
            raise ConfigError(f"a capacity of {capacity_tokens} tokens: at least 1 is needed")
        self.capacity_tokens = capacity_tokens
        self._runs: dict[int, tuple[int, int]] = {}  # sequence: first token, reserved tokens
        self._used: dict[int, int] = {}

    def reserve(self, sequence_id: int, max_tokens: int) -> bool:
        """Reserve `max_tokens` in one piece; False if no free run is long enough."""
        if sequence_id in self._runs or max_tokens < 1:
            raise ConfigError(f"sequence {sequence_id} with {max_tokens} tokens: already there, or nothing to reserve")
        first = next((start for start, length in self._free_runs() if length >= max_tokens), None)
        if first is None:
            return False
        self._runs[sequence_id], self._used[sequence_id] = (first, max_tokens), 0
        return True

    def append(self, sequence_id: int, num_tokens: int) -> bool:
        """Use `num_tokens` more of a reservation; False, and nothing changed, if it is too short."""
        if self._used[sequence_id] + num_tokens > self._runs[sequence_id][1]:
            return False
        self._used[sequence_id] += num_tokens
        return True

    def grow(self, sequence_id: int, max_tokens: int) -> int | None:
        """Give a sequence a longer reservation; return the tokens copied, None if there is no room.

        It stays where it is if what follows is free; otherwise it moves, with its tokens, to the first run that fits.
        """
        used, old = self._used[sequence_id], self._runs.pop(sequence_id)
        fits = [(start, start + length) for start, length in self._free_runs() if length >= max_tokens]
        if not fits or max_tokens < max(used, 1):
            self._runs[sequence_id] = old
            return None
        stays = any(start <= old[0] and old[0] + max_tokens <= end for start, end in fits)
        self._runs[sequence_id] = (old[0] if stays else fits[0][0], max_tokens)
        return 0 if stays else used

    def free(self, sequence_id: int) -> None:
        """Give a reservation back."""
        del self._runs[sequence_id], self._used[sequence_id]

    def usage(self) -> ContiguousUsage:
        """Return how well memory is used now."""
        reserved, used = sum(length for _, length in self._runs.values()), sum(self._used.values())
        lengths = [length for _, length in self._free_runs()]
        free = sum(lengths)
        return ContiguousUsage(
            capacity_tokens=self.capacity_tokens,
            reserved_tokens=reserved,
            used_tokens=used,
            utilisation=used / reserved if reserved else 1.0,
            internal_fragmentation=(reserved - used) / reserved if reserved else 0.0,
            external_fragmentation=1 - max(lengths) / free if free else 0.0,
        )

    def _free_runs(self) -> list[tuple[int, int]]:
        runs, at = [], 0
        for first, length in [*sorted(self._runs.values()), (self.capacity_tokens, 0)]:
            if first > at:
                runs.append((at, first - at))
            at = first + length
        return runs
