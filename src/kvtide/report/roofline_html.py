"""A roofline as a plotly figure, for pages: lines are the fitted roofs, points what was measured.

Decides only how it looks. plotly is imported when a figure is made. The figure needs no network; names given to it are
shown as text, never as markup.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtide.probe.file import Probe
from kvtide.probe.measure import Cell
from kvtide.roofline import Roof, Roofline
from kvtide.units import format_bytes, format_ns, printable

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

NUM_SIZES = 121  # of a line
SIZES_BYTES = (4 << 10, 4 << 20)
DEPTHS = (1, 32, 256)  # lines drawn where no cells say which depths there are
COLOURS = ("#440154", "#443983", "#31688e", "#21918c", "#35b779", "#90d743", "#d8b200")  # viridis: dark is shallow


@dataclass(frozen=True, slots=True)
class WorkloadPoint:
    """What a workload reached: its typical size, and its rate, in one direction."""

    name: str
    size_bytes: float
    bytes_per_s: float
    is_write: bool = False


def roofline_figure(
    roofline: Roofline, *, cells: Sequence[Cell] = (), points: Sequence[WorkloadPoint] = (), title: str = ""
) -> Figure:
    """Return a figure of two panels, reads and writes: a line a depth, random cells as dots, workloads as diamonds."""
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=1, cols=2, subplot_titles=("Reads", "Writes"), shared_yaxes=True)
    depths = sorted({cell.depth for cell in cells}) or list(DEPTHS)
    for column, (roof, is_write) in enumerate(((roofline.read, False), (roofline.write, True)), start=1):
        for index, depth in enumerate(depths):
            colour = COLOURS[index * (len(COLOURS) - 1) // max(1, len(depths) - 1)]
            mine = [cell for cell in cells if (cell.is_write, cell.is_random, cell.depth) == (is_write, True, depth)]
            _add_depth(figure, roof, depth, mine, colour, column)
        _add_points(figure, [point for point in points if point.is_write == is_write], column)
    figure.update_xaxes(type="log", title_text="size of an op", **_ticks(SIZES_BYTES[0], SIZES_BYTES[1], 4, ""))
    figure.update_yaxes(type="log", **_ticks(1 << 20, 1 << 40, 4, "/s"))
    figure.update_yaxes(title_text="rate", col=1)
    figure.update_layout(
        title={"text": html.escape(printable(title))} if title else None,
        template="plotly_white",
        height=520,
        legend={"title": {"text": "depth"}, "orientation": "h", "y": -0.2},  # above stand the names of the panels
        margin={"t": 90 if title else 50, "b": 100, "l": 80, "r": 20},
    )
    return figure


def probe_page(found: Probe, *, heading: Sequence[str]) -> str:
    """Return a page that needs no other file: `heading`, the roofline, and what is doubtful."""
    figure = roofline_figure(found.roofline, cells=found.cells, title="Roofline: lines fitted, dots measured")
    plot = figure.to_html(full_html=False, include_plotlyjs=True)
    lines = "".join(f"<p>{html.escape(printable(line))}</p>" for line in heading)
    doubts = "".join(f"<li>{html.escape(printable(warning))}</li>" for warning in found.warnings)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>kvtide probe</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<style>body{font:16px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem}</style>"
        f"</head><body><h1>Probe of {html.escape(printable(found.caps.name or found.caps.mount_point))}</h1>{lines}"
        f"{plot}{f'<h2>Warnings</h2><ul>{doubts}</ul>' if doubts else ''}"
        f"<p>{html.escape(printable(f'Measured {found.date} by kvtide {found.kvtide_version}.'))}</p>"
        "</body></html>\n"
    )


def _add_depth(figure: Figure, roof: Roof, depth: int, cells: list[Cell], colour: str, column: int) -> None:
    """Add the line of one depth and its cells; both directions share one entry in the legend."""
    import plotly.graph_objects as go

    name, is_first = str(depth), column == 1
    sizes = np.geomspace(*SIZES_BYTES, NUM_SIZES)
    rates = roof.bytes_per_s(sizes, depth)
    shown = [f"{format_bytes(size)}: {format_bytes(rate)}/s" for size, rate in zip(sizes, rates, strict=True)]
    line = go.Scatter(
        x=sizes.tolist(),
        y=rates.tolist(),
        mode="lines",
        name=name,
        legendgroup=name,
        showlegend=is_first,
        line={"color": colour, "width": 1.5},
        hovertext=shown,
        hovertemplate=f"roof at depth {depth}<br>%{{hovertext}}<extra></extra>",
    )
    figure.add_trace(line, row=1, col=column)
    if not cells:
        return
    told = [
        f"{format_bytes(cell.bytes_per_s)}/s, {cell.ops_per_s:,.0f} ops/s, p50 {format_ns(cell.latency_ns_p50)}, "
        f"p99 {format_ns(cell.latency_ns_p99)}, rounds differ by {cell.spread:.0%}"
        for cell in cells
    ]
    dots = go.Scatter(
        x=[cell.size_bytes for cell in cells],
        y=[cell.bytes_per_s for cell in cells],
        mode="markers",
        name=name,
        legendgroup=name,
        showlegend=False,
        marker={"color": colour, "size": 7},
        hovertext=told,
        hovertemplate=f"measured at depth {depth}<br>%{{hovertext}}<extra></extra>",
    )
    figure.add_trace(dots, row=1, col=column)


def _add_points(figure: Figure, points: list[WorkloadPoint], column: int) -> None:
    import plotly.graph_objects as go

    if not points:
        return
    names = [html.escape(printable(point.name)) for point in points]
    marks = go.Scatter(
        x=[point.size_bytes for point in points],
        y=[point.bytes_per_s for point in points],
        mode="markers+text",
        text=names,
        textposition="bottom right",
        name="workload",
        showlegend=False,
        marker={"color": "#c0392b", "size": 12, "symbol": "diamond"},
        hovertemplate="%{text}<extra></extra>",
    )
    figure.add_trace(marks, row=1, col=column)


def _ticks(low: int, high: int, factor: int, unit: str) -> dict[str, list[float] | list[str]]:
    """Return ticks at powers of two, with sizes in words."""
    values, value = [], float(low)
    while value <= high:
        values.append(value)
        value *= factor
    return {"tickvals": values, "ticktext": [f"{format_bytes(value)}{unit}" for value in values]}
