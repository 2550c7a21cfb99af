"""`kvtide report`: what a trace shows, on the terminal, as JSON or as one page; two traces are compared.

Owns the defaults. Decides nothing of what is measured or how it looks: that is `trace.indicators` and `report`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvtide.errors import ConfigError
from kvtide.units import printable

if TYPE_CHECKING:
    from kvtide.probe.file import Probe
    from kvtide.report.loaded import TraceReport

REPORT_EXAMPLE = "Example: kvtide report run.kvtrace --probe probe.json --html run.html"
BAR_AFTER_S = 1.0  # what is done sooner needs no bar


def report(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace file, see kvtide trace and kvtide import.")],
    file2: Annotated[Path | None, typer.Argument(metavar="[FILE2]", help="Another trace to compare with.")] = None,
    probe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Probe file of the device: adds its roofline.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page that needs no network.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with all figures.")] = False,
) -> None:
    """Show what a trace holds: traffic, sizes, latency, depth, KV, and a verdict with its evidence.

    With FILE2 both are shown side by side, with the ratio of their figures.
    """
    from kvtide.probe.file import check_place, load, write_whole
    from kvtide.report.trace import show

    files = [file] if file2 is None else [file, file2]
    if html is not None:
        check_place(html)
        _check_overwrites(html, [*files, *([probe] if probe is not None else [])])
    probed = load(probe) if probe is not None else None
    reports = _load(files, probed, is_page=html is not None)
    if html is not None:
        from kvtide.report.html import trace_page

        write_whole(html, trace_page(reports, probe=probed))
    if as_json:
        print(json.dumps(_values(reports, probe, html), allow_nan=False))
        return
    console = Console(highlight=False, markup=False, emoji=False)
    show(reports, console)
    if html is not None:
        typer.echo(f"Page in {printable(str(html))}")


def _check_overwrites(html: Path, inputs: list[Path]) -> None:
    """Refuse to replace what is to be read."""
    for path in inputs:
        if html.exists() and path.exists() and html.samefile(path):
            raise ConfigError(f"--html {html} would replace {path}; type another file")


def _load(files: list[Path], probed: Probe | None, *, is_page: bool) -> list[TraceReport]:
    from kvtide.report.drill import DrillLimits
    from kvtide.report.loaded import load_report
    from kvtide.trace.file import TraceFile

    limits = None
    if is_page:
        most = DrillLimits()
        limits = DrillLimits(
            most.num_steps // len(files),
            most.num_objects // len(files),
            most.num_ops // len(files),
            most.num_commands // len(files),
        )
    num_rows = sum(sum(TraceFile(path).about.rows.values()) for path in files)
    roofline = probed.roofline if probed is not None else None
    with _progress(num_rows * (3 if is_page else 1)) as on_rows:
        return [load_report(path, roofline=roofline, limits=limits, on_rows=on_rows) for path in files]


def _values(reports: list[TraceReport], probe: Path | None, html: Path | None) -> dict[str, Any]:
    from kvtide.report.loaded import as_values
    from kvtide.report.measures import compared, warnings_of

    values: dict[str, Any] = {
        "traces": [
            {
                "file": str(one.path),
                "about": as_values(one.about),
                "indicators": as_values(one.figures),
                "verdict": as_values(one.verdict),
                "warnings": warnings_of(one),
            }
            for one in reports
        ],
        "probe": None if probe is None else str(probe),
        "html": None if html is None else str(html),
    }
    if len(reports) == 2:
        values["comparison"] = [
            {"group": name, "name": ours.name, "values": [as_values(ours.value), as_values(theirs.value)]}
            for name, pairs in compared(reports[0], reports[1])
            for ours, theirs in pairs
        ]
    return values


@contextmanager
def _progress(num_rows: int) -> Iterator[Callable[[int], None]]:
    """Give a function that draws a bar on the terminal, once there was something to wait for."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    task = bar.add_task("reading", total=max(1, num_rows))
    begun_s, is_drawn = time.monotonic(), False

    def show(num: int) -> None:
        nonlocal is_drawn
        bar.advance(task, num)
        if not is_drawn and console.is_terminal and time.monotonic() - begun_s > BAR_AFTER_S:
            bar.start()
            is_drawn = True

    try:
        yield show
    finally:
        if is_drawn:
            bar.stop()
