"""Selected attention side by side, as tables for people and JSON values for programs. Decides only how it looks.
Next: select_html.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtide.select.scoring import Answer, AnswerRow, MassRow, Replays, answer_rows, mass_rows, rows_json
from kvtide.select.tasks import RETRIEVAL
from kvtide.units import format_bytes, format_ns, printable


@dataclass(slots=True)
class SelectReport:
    """Answers and replays of one model, and what was asked for. `about` says how they came about."""

    model: str
    dtype: str
    answers: list[Answer] = field(default_factory=list)
    replays: list[Replays] = field(default_factory=list)
    is_partial: bool = False
    about: dict[str, Any] = field(default_factory=dict)


def select_json(report: SelectReport) -> dict[str, Any]:
    """Return `report` as JSON values: times in ns, sizes in bytes, logarithms natural. Label: measured."""
    return {
        "label": "measured",
        "is_partial": report.is_partial,
        "model": report.model,
        "dtype": report.dtype,
        **report.about,
        **rows_json(report.answers, report.replays),
    }


def print_select(report: SelectReport, console: Console) -> None:
    """Print a table of answers and one of attention mass for each context."""
    answers, masses = answer_rows(report.answers), mass_rows(report.replays)
    console.print(Text(f"{printable(report.model)} in {report.dtype}: selected attention against all of it. Measured."))
    if report.is_partial:
        console.print(Text("Interrupted: what follows is a part of what was asked for.", style="bold"))
    for context in _contexts(answers, masses):
        here = [row for row in answers if row.context == context]
        if here:
            console.print(_answers(here, context))
        mass = [row for row in masses if row.context == context]
        if mass:
            console.print(_masses(mass, context))
    num_failed = sum(row.num_failed for row in answers)
    if num_failed:
        console.print(Text(f"{num_failed} selections failed and attended to everything: their rows look too good."))


def budget_text(budget: int | None) -> str:
    """Return a budget as a word."""
    return "all" if budget is None else str(budget)


def _contexts(answers: Sequence[AnswerRow], masses: Sequence[MassRow]) -> list[int]:
    return sorted({row.context for row in answers} | {row.context for row in masses})


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _answers(rows: Sequence[AnswerRow], context: int) -> Table:
    tasks = list(dict.fromkeys(row.task for row in rows))
    columns = ["method", "budget", "attended"]
    for task in tasks:
        columns += [f"{task} [95 %]", "d.log p", "KL"] if task in RETRIEVAL else [task, "d.log p", "KL", "same top"]
    num = max(row.num for row in rows)
    table = _table(f"Answers, {context:,} tokens, {num} texts (measured)", columns)
    for method, budget in dict.fromkeys((row.method, row.budget) for row in rows):
        found = {row.task: row for row in rows if (row.method, row.budget) == (method, budget)}
        attended = sum(row.attended for row in found.values()) / len(found)
        cells = [method, budget_text(budget), f"{attended:,.0f}"]
        for task in tasks:
            cells += _cells(found.get(task), is_scored=task in RETRIEVAL)
        table.add_row(*cells)
    return table


def _cells(row: AnswerRow | None, *, is_scored: bool) -> list[str]:
    if row is None:
        return ["-"] * (3 if is_scored else 4)
    common = [f"{row.log_likelihood_change:+.2f}", f"{row.kl:.3f}"]
    if row.score is not None:
        return [f"{row.score:.2f} [{row.low:.2f}-{row.high:.2f}]", *common]
    return [f"{row.perplexity:.2f}", *common, f"{row.top1:.0%}"]


def _masses(rows: Sequence[MassRow], context: int) -> Table:
    columns = ["method", "budget", "attended", "mass", "p5", "middle", "p5", "like oracle", "error", "groups", "reused",
               "new", "read/token", "new/token", "select", "summary"]  # fmt: skip
    num = max(row.num for row in rows)
    table = _table(f"Attention mass, {context:,} tokens, {num} texts (measured)", columns)
    for row in rows:
        found = row.replayed
        table.add_row(
            row.method,
            budget_text(row.budget),
            f"{found.attended:,.0f}",
            f"{found.mass:.3f}",
            f"{found.mass_p5:.3f}",
            _share(found.middle),
            _share(found.middle_p5),
            _share(found.index_recall),
            f"{found.error:.3f}",
            f"{found.groups:.1f}",
            _share(found.reuse),
            "-" if found.new_groups is None else f"{found.new_groups:.2f}",
            format_bytes(found.touched_bytes),
            "-" if found.new_bytes is None else format_bytes(found.new_bytes),
            format_ns(found.select_ns),
            format_bytes(found.fast_bytes),
        )
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
