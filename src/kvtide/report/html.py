"""A trace as one page that needs no network: verdict, charts, and the way from a step down to block commands.

Decides the page's shape; figures come from `charts`. All text that comes from files is escaped here.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvtide.report.charts import charts_of
from kvtide.report.loaded import TraceReport
from kvtide.report.measures import about_rows, compared, groups, notes_of, warnings_of
from kvtide.units import format_bytes, format_ns, printable

if TYPE_CHECKING:
    import polars as pl

    from kvtide.probe.file import Probe
    from kvtide.report.drill import Drill

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:75rem;margin:0 auto;padding:1rem;color:#222;background:#fff}
table{border-collapse:collapse;font-size:14px}td,th{padding:.15rem .6rem;text-align:left;border-bottom:1px solid #ddd}
.wide{overflow-x:auto}.verdict{border-left:.4rem solid #0072b2;padding:.2rem 1rem;background:#f3f7fa}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,30rem),1fr));gap:1rem}
.chart{min-width:0}details{margin:.2rem 0 .2rem .6rem}summary{cursor:pointer}
h1,h2,h3,p,summary,td,th{overflow-wrap:anywhere}
@media print{details{display:none}.chart{break-inside:avoid}}
"""


def trace_page(reports: Sequence[TraceReport], *, probe: Probe | None = None) -> str:
    """Return the page of one trace, or of two side by side."""
    from plotly.offline import get_plotlyjs

    figures: list[tuple[str, dict[str, Any]]] = []
    parts = [_comparison(*reports)] if len(reports) == 2 else []
    columns = []
    for index, report in enumerate(reports):
        blocks = [_head(report, "AB"[index] if len(reports) > 1 else "")]
        for name, figure in charts_of(report, probe=probe):
            key = f"chart{len(figures)}"
            figures.append((key, figure))
            blocks.append(f'<section class="chart"><h3>{_text(name)}</h3><div id="{key}"></div></section>')
        blocks.append(_drill(report.drill))
        columns.append(f'<div class="chart">{"".join(blocks)}</div>')
    parts.append(f'<div class="{"pair" if len(reports) > 1 else "one"}">{"".join(columns)}</div>')
    script = "".join(f"Plotly.newPlot({json.dumps(key)},{_script(figure)});" for key, figure in figures)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>kvtide report</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE}</style><script>{get_plotlyjs()}</script></head><body>{''.join(parts)}"
        f"<script>{script}</script></body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(printable(str(value)))


def _script(value: object) -> str:
    """Return JSON that can stand in a script: no tag ends it, no line separator breaks it."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _table(rows: Sequence[Sequence[object]], titles: Sequence[str] = ()) -> str:
    head = f"<tr>{''.join(f'<th>{_text(title)}</th>' for title in titles)}</tr>" if titles else ""
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{head}{body}</table></div>'


def _head(report: TraceReport, letter: str) -> str:
    verdict = report.verdict
    lines = [f"<h1>{_text(letter)} {_text(report.path.name)}</h1>", _table(about_rows(report))]
    lines.append(f'<div class="verdict"><h2>{_text(verdict.name)}</h2><p>{_text(verdict.sentence)}</p>')
    rows = [(each.name, each.value, each.threshold, each.source) for each in verdict.evidence]
    lines.append(_table(rows, ("evidence", "value", "limit", "source of the limit")) if rows else "")
    remedies = [(each.what, each.gain) for each in verdict.remedies]
    lines.append((_table(remedies, ("what would help", "by how much")) if remedies else "") + "</div>")
    lines += [f"<p>{_text(line)}</p>" for line in (*warnings_of(report), *notes_of(report))]
    for name, measures in groups(report):
        table = _table([(each.name, each.text) for each in measures])
        lines.append(f"<details><summary>{_text(name)}</summary>{table}</details>")
    return "".join(lines)


def _comparison(first: TraceReport, second: TraceReport) -> str:
    lines = ["<h1>Comparison</h1>"]
    for name, pairs in compared(first, second):
        rows = [(ours.name, ours.text, theirs.text) for ours, theirs in pairs]
        lines.append(f"<h3>{_text(name)}</h3>{_table(rows, ('', 'A', 'B'))}")
    return "".join(lines)


def _drill(drill: Drill | None) -> str:
    """Return the steps, each with its objects, their ops and the commands of these."""
    if drill is None:
        return ""
    lines = [f"<h2>Steps</h2><p>{len(drill.steps)} of {drill.num_steps}: half the slowest, half evenly spaced.</p>"]
    objects, ops, commands = (_by(frame, key) for frame, key in _levels(drill))
    for step in drill.steps.iter_rows(named=True):
        title = (
            f"step {step['step']}, {step['phase']}: waited {format_ns(step['wait_ns'])}, "
            f"{format_bytes(step['file_bytes'])} from the file"
        )
        inner = "".join(_object(row, ops, commands) for row in objects.get(step["step"], []))
        lines.append(f"<details class='step'><summary>{_text(title)}</summary>{inner}</details>")
    return "".join(lines)


def _levels(drill: Drill) -> list[tuple[pl.DataFrame, str]]:
    return [(drill.objects, "step"), (drill.ops, "object"), (drill.commands, "op")]


def _by(frame: pl.DataFrame, key: str) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for row in frame.iter_rows(named=True):
        found.setdefault(row[key], []).append(row)
    return found


def _object(
    row: dict[str, Any], ops: dict[int, list[dict[str, Any]]], commands: dict[int, list[dict[str, Any]]]
) -> str:
    title = (
        f"layer {row['layer']} ({row['cause']}): wanted {format_bytes(row['wanted_bytes'])}, "
        f"waited {format_ns(row['wait_ns'])}, {row['num_ops']} ops"
    )
    rows: list[tuple[object, ...]] = []
    for op in ops.get(row["row"], []):
        took = format_ns(op["complete_ns"] - op["time_ns"])
        rows.append(("op", format_bytes(op["length"]), took, f"{op['num_commands']} commands"))
        for command in commands.get(op["row"], []):
            took = format_ns(command["complete_ns"] - command["time_ns"])
            rows.append(("- command", format_bytes(command["length"]), took, f"at {command['offset']}"))
    body = _table(rows, ("", "size", "time", "")) if rows else "<p>No operation: it was in memory.</p>"
    return f"<details><summary>{_text(title)}</summary>{body}</details>"
