"""Which methods and budgets are compared, by name. Pure. Next: tasks."""

from __future__ import annotations

from kvtide.errors import ConfigError, UnsupportedError
from kvtide.select.contract import Heads, Reach, Selector
from kvtide.select.floors import Oracle
from kvtide.select.names import METHODS, ONE_HEAD, make_selector
from kvtide.units import printable

FLOORS = ("window", "random")
ORACLES = ("oracle", "oracle-head", "oracle-token")  # groups for all heads; groups a head; tokens a head


def make_compared(name: str, heads: Heads, *, group_tokens: int) -> Selector:
    """Return the method, floor or oracle called `name`.

    Raises: ConfigError for an unknown name.
    """
    if name == "oracle-head":
        return Oracle(heads, unit=group_tokens, sharing="head")
    if name == "oracle-token":
        return Oracle(heads, unit=1, sharing="head")
    return make_selector(name, heads, group_tokens=group_tokens)


def default_methods() -> list[str]:
    """Return all methods there are, `full` first, then floors and oracles. `pmr` gives the output of what it wraps."""
    return [*(name for name in METHODS if name != "pmr" and _is_known(name)), *FLOORS, *ORACLES]


def check_methods(names: list[str]) -> None:
    """Refuse methods that do not exist.

    Raises: ConfigError that names the first.
    """
    for name in names:
        if not _is_known(name):
            raise ConfigError(
                f"--methods has {printable(name)[:40]!r}; type any of {', '.join(default_methods())}, or clo+NAME"
            )


def check_budgets(selectors: dict[str, Selector], budgets: list[int]) -> None:
    """Refuse budgets that leave a method nothing to choose.

    Raises: ConfigError that names the method and the least budget.
    """
    for name, selector in selectors.items():
        if name == "full":
            continue
        for budget in budgets:
            try:
                Reach(1 << 30, budget).check(selector.unit)
            except ConfigError as refused:
                what = str(refused).replace("type --budget", "type --budgets with")
                raise ConfigError(f"{name}: {what}") from None


def _is_known(name: str) -> bool:
    try:
        make_compared(name, ONE_HEAD, group_tokens=16)
    except (ConfigError, UnsupportedError):
        return False
    return not name.startswith("pmr")
