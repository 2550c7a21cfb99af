"""When to leave a remote alone: after a failure nothing is asked of it for a while, then one probe. Next: remote.

Pure but for the log: the clock is handed in. The rest doubles with every failed probe, up to a cap.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvtide.units import format_ns, printable

REST_NS, REST_NS_MAX = 1_000_000_000, 60_000_000_000  # a dead machine costs one time-out a minute in the end
LOG = logging.getLogger("kvtide.remote")


class Breaker:
    """Closed while calls go well; open from a failure on until a probe goes well.

    Threads: one at a time.
    """

    def __init__(
        self, name: str, now_ns: Callable[[], int], *, rest_ns: int = REST_NS, rest_ns_max: int = REST_NS_MAX
    ) -> None:
        self._name, self._now_ns = name, now_ns
        self._first_ns, self._most_ns = rest_ns, rest_ns_max
        self._rest_ns, self._until_ns, self._since_ns = rest_ns, 0, 0
        self.is_open = False
        self.num_opened = 0

    def is_resting(self) -> bool:
        """Say whether nothing may be asked now, not even a probe."""
        return self.left_ns() > 0

    def left_ns(self) -> int:
        """Return how long it rests from now on."""
        return max(0, self._until_ns - self._now_ns()) if self.is_open else 0

    def fail(self, reason: object) -> None:
        """Note that a call or a probe failed."""
        now = self._now_ns()
        if not self.is_open:
            self.is_open, self._rest_ns, self._since_ns = True, self._first_ns, now
            self.num_opened += 1
            rest = format_ns(self._rest_ns)
            LOG.warning("%s: %s; going on without it, next try in %s", self._name, printable(str(reason)), rest)
        else:
            self._rest_ns = min(2 * self._rest_ns, self._most_ns)
        self._until_ns = self._now_ns() + self._rest_ns

    def succeed(self) -> None:
        """Note that a probe went well."""
        if self.is_open:
            self.is_open = False
            LOG.warning("%s answers again, after %s", self._name, format_ns(self._now_ns() - self._since_ns))
