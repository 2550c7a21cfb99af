"""What a tier lets in: bytes written and never read again wear out a drive. Pure: keys in, a mask out.

Each policy keeps a bounded memory, whatever it is asked; times come from the caller.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError
from kvtide.evict.contract import Keys, Mask
from kvtide.evict.names import unknown

DAY_NS = 24 * 3600 * 10**9
Sizes = npt.NDArray[np.int64]


class Admission(Protocol):
    """Says what is worth writing. Asking counts: a key asked for is a key that was needed and not there."""

    def admits(self, keys: Keys, *, num_bytes: Sizes | int, now_ns: int) -> Mask:
        """Return which of the content with `keys` to let in; earlier keys matter more.

        Shapes: keys [n]; num_bytes [n], or one for all; returns [n].
        """


class Always:
    """Lets everything in."""

    def admits(self, keys: Keys, *, num_bytes: Sizes | int, now_ns: int) -> Mask:
        """Return all."""
        del num_bytes, now_ns
        return np.ones(len(keys), np.bool_)


class SecondTouch:
    """Lets in what was asked for before, as far back as `num_keys` keys go.

    A key that is let in stays known, so what was dropped and comes back soon is let in at once.
    """

    def __init__(self, num_keys: int) -> None:
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._num_keys = num_keys

    def admits(self, keys: Keys, *, num_bytes: Sizes | int, now_ns: int) -> Mask:
        """Return those seen before; the second time in one call counts."""
        del num_bytes, now_ns
        was_seen = np.zeros(len(keys), np.bool_)
        for place, key in enumerate(keys.tolist()):
            was_seen[place] = key in self._seen
            self._seen[key] = None
            self._seen.move_to_end(key)
            if len(self._seen) > self._num_keys:
                self._seen.popitem(last=False)
        return was_seen


class TinyLfu:
    """Lets in what was asked for twice, or more often than what would have to go, by estimate.

    Theory. Four rows of counters; a key adds one to a counter in each row, and its estimate is the least of the four:
    others may have added to some, so it is never too low before a halving. All counters are halved after `num_keys`
    additions, so that old fame fades; what came once is then forgotten. With two counters a key, at most half of a row
    is in use then, and about one new key in forty looks as if it came before. All keys of a call are counted before
    any is judged.
    Source: TinyLFU (arXiv:1512.00727), count-min sketch of 4 rows, counts to 15. It halves after ten times as many
    additions, which suits a comparison with a victim; here most new keys would then pass for second ones.
    """

    ROWS = 4
    COUNT_MAX = 15
    # Odd multipliers of Fibonacci hashing: 2**64 over the golden ratio, and its further powers modulo 2**64.
    _FACTORS = np.cumprod(np.full(ROWS, 0x9E3779B97F4A7C15, np.uint64))

    def __init__(self, num_keys: int) -> None:
        bits = max(4, (2 * num_keys - 1).bit_length())  # counters a row: at least two a key
        self._shift = np.uint64(64 - bits)
        self._counts = np.zeros((self.ROWS, 1 << bits), np.uint8)
        self._num_added, self._num_added_max = 0, max(1, num_keys)

    def admits(
        self, keys: Keys, *, num_bytes: Sizes | int, now_ns: int, victim_count: npt.NDArray[np.uint8] | int = 1
    ) -> Mask:
        """Return those whose estimate, this time included, is above that of their victims.

        Shapes: victim_count [n] from `estimate`, or one for all; 1 lets in what comes the second time.
        """
        del num_bytes, now_ns
        self._add(keys)
        is_let_in: Mask = self.estimate(keys) > victim_count
        self._fade()
        return is_let_in

    def estimate(self, keys: Keys) -> npt.NDArray[np.uint8]:
        """Return how often `keys` were asked for lately. Shapes: keys [n]; returns [n], 0 to 15."""
        counts: npt.NDArray[np.uint8] = np.take_along_axis(self._counts, self._places(keys), axis=1).min(axis=0)
        return counts

    def _places(self, keys: Keys) -> npt.NDArray[np.int64]:
        mixed = keys ^ (keys >> np.uint64(32))  # so that high bits of a key reach all of the product's high bits
        return ((mixed[None, :] * self._FACTORS[:, None]) >> self._shift).astype(np.int64)

    def _add(self, keys: Keys) -> None:
        for row, places in zip(self._counts, self._places(keys), strict=True):
            where, nums = np.unique(places, return_counts=True)
            row[where] = np.minimum(row[where] + nums, self.COUNT_MAX)
        self._num_added += len(keys)

    def _fade(self) -> None:
        if self._num_added >= self._num_added_max:
            self._counts >>= 1
            self._num_added //= 2


class Endurance:
    """Lets in as many bytes a day as the drive is meant to bear, with some saved up for bursts.

    Of one call the first are let in, as far as the budget reaches: later blocks are of no use without earlier ones.
    """

    def __init__(self, *, bytes_per_day: int, burst_bytes: int | None = None) -> None:
        if bytes_per_day < 1:
            raise ConfigError(f"a budget of {bytes_per_day} bytes a day lets nothing in: at least 1 is needed")
        self._bytes_per_day = bytes_per_day
        # An hour's share: a burst then costs at most a 24th of a day's wear.
        self._credit_max = (burst_bytes if burst_bytes is not None else max(1, bytes_per_day // 24)) * DAY_NS
        self._credit = self._credit_max  # in bytes times DAY_NS, so that nothing is rounded
        self._then_ns: int | None = None

    def admits(self, keys: Keys, *, num_bytes: Sizes | int, now_ns: int) -> Mask:
        """Return the first of `keys` that the budget pays for."""
        then_ns = now_ns if self._then_ns is None else self._then_ns
        self._credit = min(self._credit_max, self._credit + max(0, now_ns - then_ns) * self._bytes_per_day)
        self._then_ns = max(now_ns, then_ns)
        totals = np.cumsum(np.broadcast_to(np.asarray(num_bytes, np.int64), len(keys)))
        is_let_in: Mask = totals <= self._credit // DAY_NS
        if is_let_in.any():
            self._credit -= int(totals[is_let_in][-1]) * DAY_NS
        return is_let_in


ADMISSION_NAMES = ("always", "second-touch", "tinylfu", "endurance")


def make_admission(name: str, *, num_keys: int, bytes_per_day: int = 0) -> Admission:
    """Return the admission called `name`, which remembers about `num_keys` keys or lets `bytes_per_day` in.

    Raises: ConfigError that lists the names, or for a budget of nothing.
    """
    if name not in ADMISSION_NAMES:
        raise ConfigError(unknown("admission", name, ADMISSION_NAMES))
    if name == "always":
        return Always()
    if name == "second-touch":
        return SecondTouch(num_keys)
    if name == "tinylfu":
        return TinyLfu(num_keys)
    return Endurance(bytes_per_day=bytes_per_day)
