"""`kvtide import`: turn the log of another tool into a trace.

Decides where the trace goes and what is told; the importers decide what a log means.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvtide.units import printable

IMPORT_EXAMPLE = "Example: kvtide import biosnoop.txt -o disk.kvtrace && kvtide report disk.kvtrace"


def import_log(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Log of another tool, plain or .gz.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Trace file. Default: FILE.kvtrace, here.")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="auto, or one of those in docs/import.md.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Turn a log of bpftrace, biosnoop, blktrace, perf, strace, fio, iostat and others into a trace."""
    from kvtide.trace.importers import import_file

    place = output or Path(file.name + ".kvtrace")
    with _progress() as on_progress:
        found = import_file(file, place, format=form, on_progress=on_progress)
    health, about = found.about.health, found.about
    told = {
        "file": str(place),
        "format": found.format,
        "num_lines": found.num_lines,
        "num_events": found.num_events,
        "num_malformed": health.num_malformed,
        "malformed": health.malformed,
        "num_foreign": health.num_foreign,
        "num_lost": health.num_lost,
        "has_completions": health.has_completions,
        "rows": about.rows,
        "notes": about.notes,
    }
    if as_json:
        print(json.dumps(told))
        return
    typer.echo(
        f"{found.format}: {found.num_events} events, {health.num_foreign} other lines, "
        f"{health.num_malformed} malformed lines, {health.num_lost} events lost."
    )
    for line, text in health.malformed:
        typer.echo(f"  line {line}: {printable(text)}")
    for note in about.notes:
        typer.echo(printable(note))
    typer.echo(
        f"Kept {sum(about.rows.values())} rows in {printable(str(place))}; next: kvtide report {printable(str(place))}"
    )


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Give a function that draws a bar on the terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("Reading"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
