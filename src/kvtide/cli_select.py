"""The options that make a command attend to a selection, and what is told of one. Next: cli_run."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kvtide.errors import ConfigError
from kvtide.select.contract import Budget
from kvtide.select.names import DEFAULT, why_not
from kvtide.units import format_bytes

if TYPE_CHECKING:
    from kvtide.integrations.transformers import KvStore
    from kvtide.integrations.transformers.store import SelectOptions

NONE = "none"
AUTO = "auto"


def select_options(name: str, budget: str) -> SelectOptions | None:
    """Return what `--select NAME --budget BUDGET` asks for; None for attention to everything.

    Raises: ConfigError for unknown names and budgets.
    """
    parsed = Budget.parse(budget)
    if name in {NONE, "full"}:
        return None
    if name != AUTO and (refused := why_not(name)):
        raise ConfigError(f"--select: {refused} Or type {NONE} or {AUTO}.")
    from kvtide.integrations.transformers.store import SelectOptions

    return SelectOptions(DEFAULT if name == AUTO else name, parsed)


def select_report(store: KvStore) -> dict[str, Any] | None:
    """Return what selecting did, for `--json`; None if nothing was selected."""
    if store.selecting is None or store.options.select is None:
        return None
    found: dict[str, Any] = {
        "method": store.options.select.name,
        "budget_tokens": store.options.select.budget.tokens,
        "budget_share": store.options.select.budget.share,
        "fast_bytes": store.selecting.selector.fast_bytes(),
        "counts": dataclasses.asdict(store.selecting.counts),
    }
    if store.drafter is not None:
        found["drafts"] = dataclasses.asdict(store.drafter.counts)
    return found


def select_lines(store: KvStore) -> list[str]:
    """Return sentences that say what selecting did."""
    if store.selecting is None or store.options.select is None:
        return []
    counts, selector = store.selecting.counts, store.selecting.selector
    if not counts.num_queries:
        return [f"{store.options.select.name}: no step attended to a selection."]
    layers = store.layout.num_layers
    tokens, steps = counts.num_queries / layers, max(1, counts.num_steps)
    wanted, read = counts.num_wanted / steps, counts.num_read / steps
    attended = counts.num_attended / counts.num_queries
    lines = [f"{store.options.select.name} attended to {attended:.0f} tokens a layer, of each query."]
    lines.append(
        f"A step wanted {wanted:.0f} fragments and read {read:.0f} of them from the file tier, "
        f"{_share(counts.num_read_ahead, counts.num_read)} ahead of time; {counts.num_wasted} were read in vain."
    )
    lines.append(
        f"Selecting took {counts.select_ns / tokens / 1e6:.1f} ms a token, waiting for reads "
        f"{counts.wait_ns / tokens / 1e6:.1f} ms; its summaries take {format_bytes(selector.fast_bytes())}."
    )
    if store.drafter is not None:
        drafts = store.drafter.counts
        lines.append(
            f"Drafts: {drafts.num_accepted} of {drafts.num_drafted} tokens were right, in {drafts.num_steps} steps of "
            f"several tokens; {drafts.num_near_ties} near ties were decided one token at a time."
        )
    if counts.num_failed:
        lines.append(f"{counts.num_failed} selections failed and attended to everything instead.")
    return lines


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "none"
