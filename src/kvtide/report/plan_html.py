"""A plan, or a sweep, as one page that needs no network. Decides only how it looks."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from kvtide.report.plan import PlanReport, SweepPoint, print_plan, print_sweep
from kvtide.units import printable

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLUMNS = 110
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem}"
    "pre{overflow-x:auto;font-size:14px;line-height:1.35}"
)


def plan_page(report: PlanReport | None, points: Sequence[SweepPoint]) -> str:
    """Return the page of a plan, or of a sweep where there is no single plan."""
    text = io.StringIO()
    console = Console(file=text, width=COLUMNS, highlight=False, color_system=None)
    if report is not None:
        print_plan(report, console)
        title, figure = report.plan.job.model.name, _phases(report)
    else:
        print_sweep(points, console)
        title, figure = "Sweep", _sweep(points)
    plot = figure.to_html(full_html=False, include_plotlyjs=True)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>kvtide plan</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><h1>{html.escape(printable(title))}</h1>"
        f"{plot}<pre>{html.escape(text.getvalue())}</pre></body></html>\n"
    )


def _phases(report: PlanReport) -> Figure:
    """Bars: how long each resource works in each phase."""
    from plotly.graph_objects import Figure

    figure, plan = Figure(), report.plan
    names = sorted({name for phase in plan.phases.values() for name in phase.uses})
    for name in names:
        times = [phase.uses[name].time_ns / 1e9 if name in phase.uses else None for phase in plan.phases.values()]
        figure.add_bar(x=list(plan.phases), y=times, name=html.escape(printable(name)))
    figure.update_yaxes(type="log", title_text="s of work")
    figure.update_layout(template="plotly_white", barmode="group", height=420, title_text="Work of each resource")
    return figure


def _sweep(points: Sequence[SweepPoint]) -> Figure:
    """Lines: time between tokens over the first key, a line for each combination of the others."""
    from plotly.graph_objects import Figure

    figure = Figure()
    keys = list(points[0].values)
    lines: dict[str, list[SweepPoint]] = {}
    for point in points:
        name = ", ".join(f"{key} {point.values[key]}" for key in keys[1:]) or "ITL"
        lines.setdefault(name, []).append(point)
    for name, line in lines.items():
        figure.add_scatter(
            x=[html.escape(printable(point.values[keys[0]])) for point in line],
            y=[point.plan.itl_ns / 1e9 if point.plan else None for point in line],
            text=[point.plan.phases["decode"].bound if point.plan else "" for point in line],
            name=html.escape(printable(name)),
            mode="lines+markers",
        )
    figure.update_xaxes(type="category", title_text=html.escape(printable(keys[0])))
    figure.update_yaxes(type="log", title_text="s between tokens")
    figure.update_layout(template="plotly_white", height=420)
    return figure
