"""Selected attention side by side, as one page that needs no network. Decides only how it looks."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from kvtide.report.plan_html import STYLE
from kvtide.report.select import SelectReport, print_select
from kvtide.select.scoring import AnswerRow, MassRow, answer_rows, mass_rows, wilson
from kvtide.units import printable

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLUMNS = 190
Row = TypeVar("Row", AnswerRow, MassRow)


def select_page(report: SelectReport) -> str:
    """Return the page: the charts of each context, then the tables."""
    text = io.StringIO()
    print_select(report, Console(file=text, width=COLUMNS, highlight=False, color_system=None))
    figures = _figures(answer_rows(report.answers), mass_rows(report.replays))
    plots = [figure.to_html(full_html=False, include_plotlyjs=not index) for index, figure in enumerate(figures)]
    title = f"{printable(report.model)}: selected attention{' (interrupted)' if report.is_partial else ''}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>kvtide bench select</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1>"
        f"{''.join(plots)}<pre>{html.escape(text.getvalue())}</pre></body></html>\n"
    )


def _figures(answers: Sequence[AnswerRow], masses: Sequence[MassRow]) -> list[Figure]:
    figures = []
    for context in sorted({row.context for row in answers} | {row.context for row in masses}):
        where = f"{context:,} tokens (measured)"
        mass = [row for row in masses if row.context == context and row.budget is not None]
        if mass:
            figures += [_mass(mass, where), _read(mass, where)]
        here = [row for row in answers if row.context == context and row.budget is not None]
        if any(row.score is not None for row in here):
            figures.append(_score(here, where))
        if here:
            figures.append(_divergence(here, where))
    return figures


def _empty(title: str, x: str, y: str, *, is_log_x: bool = True, is_log_y: bool = False) -> Figure:
    from plotly.graph_objects import Figure

    figure = Figure()
    figure.update_xaxes(type="log" if is_log_x else "linear", title_text=x)
    figure.update_yaxes(type="log" if is_log_y else "linear", title_text=y)
    figure.update_layout(template="plotly_white", height=460, title_text=title)
    return figure


def _mass(rows: Sequence[MassRow], where: str) -> Figure:
    figure = _empty(f"Attention mass by budget, {where}", "budget, tokens", "share of the attention mass")
    for method, found in _by_method(rows):
        y = [row.replayed.mass for row in found]
        figure.add_scatter(x=[row.budget for row in found], y=y, name=html.escape(method), mode="lines+markers")
    return figure


def _read(rows: Sequence[MassRow], where: str) -> Figure:
    """Accuracy against I/O: what a step needs that the step before did not touch."""
    title = f"Attention mass by new bytes a token, {where}"
    figure = _empty(title, "new bytes a token, all layers", "share of the attention mass", is_log_x=False)
    for method, found in _by_method(rows):
        figure.add_scatter(
            x=[row.replayed.new_bytes for row in found],
            y=[row.replayed.mass for row in found],
            text=[f"budget {row.budget}" for row in found],
            name=html.escape(method),
            mode="lines+markers",
        )
    return figure


def _score(rows: Sequence[AnswerRow], where: str) -> Figure:
    figure = _empty(f"Right answers by budget, {where}, with 95 % intervals", "budget, tokens", "share of the answers")
    for method, found in _by_method([row for row in rows if row.score is not None]):
        budgets = _budgets(found)
        shares, above, below = [], [], []
        for budget in budgets:
            here = [row for row in found if row.budget == budget]
            num, num_exact = sum(row.num for row in here), sum(row.num_exact for row in here)
            low, high = wilson(num_exact, num)
            shares.append(num_exact / num)
            above.append(high - shares[-1])
            below.append(shares[-1] - low)
        bars = {"type": "data", "array": above, "arrayminus": below, "thickness": 1}
        figure.add_scatter(x=budgets, y=shares, error_y=bars, name=html.escape(method), mode="lines+markers")
    return figure


def _divergence(rows: Sequence[AnswerRow], where: str) -> Figure:
    """Divergence from attention to everything, all tasks alike."""
    title = f"Divergence of the next token by budget, {where}"
    figure = _empty(title, "budget, tokens", "KL, nats", is_log_y=True)
    for method, found in _by_method(rows):
        budgets = _budgets(found)
        means = []
        for budget in budgets:
            here = [row.kl for row in found if row.budget == budget]
            means.append(max(sum(here) / len(here), 1e-7))
        figure.add_scatter(x=budgets, y=means, name=html.escape(method), mode="lines+markers")
    return figure


def _budgets(rows: Iterable[AnswerRow]) -> list[int]:
    return sorted({row.budget for row in rows if row.budget is not None})


def _by_method(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.method, []).append(row)
    return list(found.items())
