"""The charts of a page, as plotly's JSON. Decides what is drawn; knows no HTML. Next: html.

Colours are Okabe and Ito's, which colour-blind readers can tell apart. Texts from files are escaped: plotly reads tags.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtide.report.loaded import TraceReport
from kvtide.trace.figures import Side
from kvtide.units import format_bytes, printable

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from kvtide.probe.file import Probe

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
HEIGHT = 360


def charts_of(report: TraceReport, *, probe: Probe | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the JSON of each chart that `report` has figures for."""
    from plotly.graph_objects import Figure

    makers = {
        "Bytes over time, by cause": _timeline,
        "Sizes": _sizes,
        "Latency": _latency,
        "Depth over time": _depth,
        "Place over time": _heat,
        "Where the KV was": _flows,
    }
    for name, make in makers.items():
        figure = Figure()
        if make(figure, report):
            yield name, _finished(figure)
    if probe is not None:
        yield "Roofline", _finished(_roofline(report, probe), legend_below=True)


def _finished(figure: Figure, *, legend_below: bool = False) -> dict[str, Any]:
    figure.update_layout(
        template="plotly_white",
        height=HEIGHT,
        autosize=True,
        margin={"t": 20, "b": 90 if legend_below else 50, "l": 60, "r": 15},
        font={"size": 14},
        legend={"orientation": "h", "y": -0.3 if legend_below else 1.12},
    )
    made: dict[str, Any] = json.loads(figure.to_json())
    return {"data": made["data"], "layout": made["layout"], "config": {"responsive": True, "displaylogo": False}}


def _name(text: object) -> str:
    return html.escape(printable(str(text)))


def _seconds(report: TraceReport) -> np.ndarray:
    line = report.figures.timeline
    return np.arange(len(line.depth)) * line.bin_ns / 1e9


def _timeline(figure: Figure, report: TraceReport) -> bool:
    line = report.figures.timeline
    if not len(line.read_bytes) or not line.bin_ns:
        return False
    parts = {name: values for name, values in line.by_cause.items() if np.any(values)}
    parts = parts or {"reads": line.read_bytes, "writes": line.write_bytes}
    for index, (name, values) in enumerate(parts.items()):
        rate = np.asarray(values) / (line.bin_ns / 1e9) / 2**20
        colour = COLOURS[index % len(COLOURS)]
        figure.add_scatter(
            x=_seconds(report).tolist(),
            y=rate.tolist(),
            name=_name(name),
            stackgroup="all",
            line={"color": colour, "width": 0, "shape": "hv"},  # an outline would hide what lies below it
            fillcolor=colour,
        )
    figure.update_xaxes(title="s")
    figure.update_yaxes(title="MiB/s")
    return True


def _sides(report: TraceReport) -> list[tuple[str, Side]]:
    whole = report.figures.whole
    return [(name, side) for name, side in (("reads", whole.read), ("writes", whole.write)) if side.num_ops]


def _sizes(figure: Figure, report: TraceReport) -> bool:
    for index, (name, side) in enumerate(_sides(report)):
        sizes, counts = side.sizes.sizes, side.sizes.counts
        for kind, weights in (("count", counts), ("bytes", counts * sizes)):
            share = np.cumsum(weights) / max(1, weights.sum())
            dash = "solid" if kind == "count" else "dot"
            line = {"shape": "hv", "dash": dash, "color": COLOURS[index]}
            figure.add_scatter(x=sizes.tolist(), y=share.tolist(), name=f"{name} by {kind}", line=line)
    ticks = [2**power for power in range(9, 27, 3)]
    figure.update_xaxes(type="log", title="size", tickvals=ticks, ticktext=[format_bytes(tick) for tick in ticks])
    figure.update_yaxes(title="share up to this size", range=[0, 1.02])
    return bool(figure.data)


def _latency(figure: Figure, report: TraceReport) -> bool:
    for index, curve in enumerate(report.collected.curves if report.collected else []):
        figure.add_scatter(
            x=np.asarray(curve.nines).tolist(),
            y=(np.asarray(curve.ns) / 1000).tolist(),
            name=_name(f"{curve.direction}, {curve.kind}"),
            line={"color": COLOURS[index % len(COLOURS)]},
        )
    ticks = {0.0: "0", 0.30103: "p50", 1.0: "p90", 2.0: "p99", 3.0: "p99.9", 4.0: "p99.99"}
    figure.update_xaxes(title="percentile", tickvals=list(ticks), ticktext=list(ticks.values()))
    figure.update_yaxes(type="log", title="us")
    return bool(figure.data)


def _depth(figure: Figure, report: TraceReport) -> bool:
    line = report.figures.timeline
    if not len(line.depth):
        return False
    figure.add_scatter(
        x=_seconds(report).tolist(), y=line.depth.tolist(), name="depth", line={"shape": "hv", "color": COLOURS[0]}
    )
    figure.update_xaxes(title="s")
    figure.update_yaxes(title="in flight", rangemode="tozero")
    return True


def _heat(figure: Figure, report: TraceReport) -> bool:
    heat = report.collected.heat if report.collected else None
    if heat is None:
        return False
    both = np.asarray(heat.read) + np.asarray(heat.write)
    shade = np.where(both > 0, np.log10(np.maximum(both, 1)), np.nan)
    rows = [[None if np.isnan(value) else round(float(value), 2) for value in row] for row in shade]
    times = (heat.time_edges_ns - heat.time_edges_ns[0])[:-1] / 1e9
    figure.add_heatmap(
        x=times.tolist(),
        y=(heat.place_edges_bytes[:-1] / 2**30).tolist(),
        z=rows,
        colorscale="Viridis",
        colorbar={"title": "log10 bytes"},
    )
    figure.update_xaxes(title="s")
    figure.update_yaxes(title="GiB from the start")
    return True


def _flows(figure: Figure, report: TraceReport) -> bool:
    flows = report.collected.flows if report.collected else []
    if not flows:
        return False
    causes = [_name(flow.cause) for flow in flows]
    for index, tier in enumerate(("device", "dram", "file")):
        sizes = [getattr(flow, f"{tier}_bytes") / 2**20 for flow in flows]
        figure.add_bar(y=causes, x=sizes, name=tier, orientation="h", marker={"color": COLOURS[index]})
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title="MiB")
    return True


def _roofline(report: TraceReport, probe: Probe) -> Figure:
    from kvtide.report.roofline_html import WorkloadPoint, roofline_figure

    points = []
    for name, part in (report.figures.causes or {"all": report.figures.whole}).items():
        for side, is_write in ((part.read, False), (part.write, True)):
            if side.num_ops:  # a roof says what a device does while it works, not how often it is asked
                rate = side.bytes_per_s / (part.busy_share or 1.0)
                points.append(WorkloadPoint(_name(name), side.sizes.mean_bytes, rate, is_write))
    figure = roofline_figure(probe.roofline, cells=probe.cells, points=points)
    figure.update_yaxes(title_text="rate while in flight", col=1)
    return figure
