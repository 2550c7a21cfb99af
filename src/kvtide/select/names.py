"""Selectors by name. Pure."""

from __future__ import annotations

from collections.abc import Callable

from kvtide.errors import ConfigError
from kvtide.select.clo import Clo
from kvtide.select.contract import Heads, Selector
from kvtide.select.floors import Oracle, RandomUnits, WindowOnly
from kvtide.select.full import Full
from kvtide.select.infinigen import InfiniGen
from kvtide.select.kvswap import KvSwap
from kvtide.select.lowrank import LowRank
from kvtide.select.quest import Quest
from kvtide.select.retrieval import Retrieval
from kvtide.select.shadowkv import ShadowKv
from kvtide.units import printable

DEFAULT = "lowrank"
METHODS = ("full", "quest", "shadowkv", "infinigen", "retrieval", "kvswap", "lowrank", "clo", "pmr")
UNDRAFTED = ("clo", "pmr", "shadowkv", "random")  # of one token otherwise than of several, or by what came before
ONE_HEAD = Heads(num_layers=1, num_q=1, num_kv=1, dim=2, scaling=1.0)  # to ask for a name without a model


def why_not(name: str) -> str:
    """Return why there is no selection called `name`; empty if there is."""
    try:
        make_selector(name, ONE_HEAD, group_tokens=16)
    except ConfigError as refused:
        return f"{refused}."
    return ""


def make_selector(name: str, heads: Heads, *, group_tokens: int) -> Selector:
    """Return the selector called `name`, for a store whose groups have `group_tokens` tokens.

    A name of two parts, as `clo+quest`, wraps the second in the first; clo and pmr alone wrap the default. Methods that
    read whole groups of all heads choose in the store's own groups; the others keep their paper's unit.
    Raises: ConfigError for an unknown name; UnsupportedError where the library of a method is missing.
    """
    first, plus, rest = name.partition("+")
    if first == "pmr":  # drafts, which the integration makes, around an ordinary selection
        if rest.partition("+")[0] in UNDRAFTED:
            raise ConfigError(
                f"pmr+{printable(rest)[:40]}: what it selects depends on more than the query, so drafts would change "
                f"the output; type pmr, or pmr with quest, infinigen, retrieval, kvswap or lowrank"
            )
        return make_selector(rest or DEFAULT, heads, group_tokens=group_tokens)
    if first == "clo":
        return Clo(heads, make_selector(rest or DEFAULT, heads, group_tokens=group_tokens))
    made: dict[str, Callable[[], Selector]] = {
        "full": lambda: Full(heads),
        "quest": lambda: Quest(heads),
        "shadowkv": lambda: ShadowKv(heads, is_exact_keys=False),
        "infinigen": lambda: InfiniGen(heads),
        "retrieval": lambda: Retrieval(heads),
        "kvswap": lambda: KvSwap(heads, unit=group_tokens),
        "lowrank": lambda: LowRank(heads, unit=group_tokens),
        "window": lambda: WindowOnly(heads),
        "random": lambda: RandomUnits(heads, unit=group_tokens),
        "oracle": lambda: Oracle(heads, unit=group_tokens, sharing="all"),
    }
    if plus or first not in made:
        raise ConfigError(
            f"unknown selection {printable(name)[:40]!r}; type {', '.join(METHODS)}, or clo+NAME or pmr+NAME"
        )
    return made[first]()
