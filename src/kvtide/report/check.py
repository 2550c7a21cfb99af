"""What checks of a store found, as lines for people, JSON values for programs, and a page. Decides how it looks."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtide.check.contract import Check, Outcome
from kvtide.check.runner import Report, Result
from kvtide.report.plan_html import STYLE
from kvtide.units import printable

COLOURS: dict[Outcome, str] = {"pass": "green", "fail": "bold red", "not applicable": "dim", "cannot tell": "yellow"}
_PAGE_STYLE = (
    ".pass{color:#0a7a3d}.fail{color:#b00020;font-weight:bold}.not{color:#777}.cannot{color:#8a6d00}"
    "td{vertical-align:top}table{border-collapse:collapse;font-size:14px}"
    "td,th{padding:.15rem .6rem;text-align:left;border-bottom:1px solid #ddd;overflow-wrap:anywhere}"
)


def print_result(result: Result, console: Console) -> None:
    """Print one line as soon as a check has ended."""
    verdict = result.verdict
    line = Text(f"{result.check.id:<20}")
    line.append(f"{verdict.outcome:<15}", style=COLOURS[verdict.outcome])
    line.append(f"{verdict.seconds:6.1f} s  ")
    line.append(printable(verdict.evidence))
    if verdict.smallest:
        line.append(f"  [smallest: {printable(verdict.smallest)}]")
    console.print(line, soft_wrap=True)


def print_summary(report: Report, console: Console) -> None:
    """Print what failed, with the public reports of the same fault, and how many of each verdict there are."""
    failed = [one for one in report.results if one.verdict.outcome == "fail"]
    if failed:
        table = Table(title="Failed", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for name in ("check", "should", "found", "smallest", "public report"):
            table.add_column(name, overflow="fold")
        for one in failed:
            cells = (one.check.id, one.check.proves, one.verdict.evidence, one.verdict.smallest, one.check.report)
            table.add_row(*(Text(printable(cell)) for cell in cells))
        console.print(table)
    console.print(Text(printable(f"{named(report)}: {totals(report)}")))


def named(report: Report) -> str:
    """Return what was checked, with its version."""
    traits = report.traits
    return f"{report.target} ({traits.package} {traits.version})"


def totals(report: Report) -> str:
    """Return how many checks came to which verdict."""
    counts = [(outcome, sum(one.verdict.outcome == outcome for one in report.results)) for outcome in COLOURS]
    return ", ".join(f"{num} {outcome}" for outcome, num in counts if num)


def print_checks(checks: Sequence[Check], console: Console) -> None:
    """Print every check there is."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("id", "proves", "how", "needs", "public report"):
        table.add_column(name, overflow="fold")
    for check in checks:
        table.add_row(check.id, check.proves, check.how, ", ".join(check.needs), check.report)
    console.print(table)


def check_json(report: Report) -> dict[str, Any]:
    """Return `report` as JSON values. Times in seconds."""
    return {
        "target": report.target,
        "traits": dataclasses.asdict(report.traits),
        "about": report.about,
        "num_failed": report.num_failed,
        "checks": [
            {**check_row(one.check), **dataclasses.asdict(one.verdict), "seconds": round(one.verdict.seconds, 3)}
            for one in report.results
        ],
    }


def check_row(check: Check) -> dict[str, Any]:
    """Return what a check is as JSON values."""
    return {name: getattr(check, name) for name in ("id", "title", "proves", "how", "report", "needs")}


def check_page(reports: Sequence[Report]) -> str:
    """Return the page of one target, or of several side by side: a row a check, then every verdict's evidence."""
    title = f"kvtide check: {', '.join(named(report) for report in reports)}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>kvtide check</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE}{_PAGE_STYLE}</style></head><body><h1>{_text(title)}</h1>"
        f"{_side_by_side(reports) if len(reports) > 1 else ''}{''.join(map(_section, reports))}</body></html>\n"
    )


def _side_by_side(reports: Sequence[Report]) -> str:
    rows = []
    verdicts = [{one.check.id: one.verdict.outcome for one in report.results} for report in reports]
    for check in {one.check.id: one.check for report in reports for one in report.results}.values():
        cells = "".join(_outcome(found.get(check.id)) for found in verdicts)
        rows.append(f"<tr><td>{_text(check.id)}</td><td>{_text(check.title)}</td>{cells}</tr>")
    heads = "".join(f"<th>{_text(named(report))}</th>" for report in reports)
    return f"<table><tr><th>check</th><th></th>{heads}</tr>{''.join(rows)}</table>"


def _section(report: Report) -> str:
    rows = []
    for one in report.results:
        verdict = one.verdict
        found = _text(verdict.evidence) + (f"<br>smallest: {_text(verdict.smallest)}" if verdict.smallest else "")
        rows.append(
            f"<tr><td>{_text(one.check.id)}</td>{_outcome(verdict.outcome)}<td>{_text(one.check.proves)}</td>"
            f"<td>{found}</td><td>{_text(one.check.how)}</td><td>{_text(one.check.report)}</td>"
            f"<td>{verdict.seconds:.1f}</td></tr>"
        )
    heads = "".join(f"<th>{name}</th>" for name in ("check", "", "should", "found", "how", "public report", "s"))
    about = ", ".join(f"{name} {value}" for name, value in report.about.items())
    return (
        f"<h2>{_text(named(report))}</h2><p>{_text(report.traits.note)}. {_text(about)}. {_text(totals(report))}.</p>"
        f"<table><tr>{heads}</tr>{''.join(rows)}</table>"
    )


def _outcome(outcome: Outcome | None) -> str:
    kind = (outcome or "not").split(" ", maxsplit=1)[0]
    return f'<td class="{kind}">{_text(outcome or "-")}</td>'


def _text(value: object) -> str:
    return html.escape(printable(str(value)))
