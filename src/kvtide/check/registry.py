"""All checks there are, in the order they run. Next: runner."""

from __future__ import annotations

from collections.abc import Sequence

from kvtide.check import capacity, corruption, crash, identity, liveness, order, speed
from kvtide.check.contract import Check
from kvtide.errors import ConfigError

CHECKS: tuple[Check, ...] = (
    *identity.CHECKS,
    *corruption.CHECKS,
    *crash.CHECKS,
    *capacity.CHECKS,
    *liveness.CHECKS,
    *order.CHECKS,
    *speed.CHECKS,
)


def checks_named(names: Sequence[str]) -> list[Check]:
    """Return the checks of these ids, all of them for none.

    Raises: ConfigError for an id there is not.
    """
    known = {check.id: check for check in CHECKS}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"no check has the id {unknown[0]!r}; `kvtide check --list` shows them all")
    return [check for check in CHECKS if not names or check.id in names]
