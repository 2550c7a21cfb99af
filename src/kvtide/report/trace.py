"""The report of one trace, or of two side by side, on the terminal. Next: charts, html.

Decides only how it looks. Texts from files are made printable by `measures`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvtide.report.loaded import TraceReport
from kvtide.report.measures import (
    NONE,
    SLICE_COLUMNS,
    Measure,
    about_rows,
    clipped,
    compared,
    kv_measures,
    notes_of,
    ratio_text,
    side_measures,
    slice_rows,
    warnings_of,
    whole_measures,
)
from kvtide.trace.findings import Verdict

SERIES_MAX = 40  # means of samples that are shown
NAME_WIDTH_MAX = 24
WIDTH_FOR_RATE = 96  # columns; below, the rate gives way: it is bytes over the window


def show(reports: Sequence[TraceReport], console: Console) -> None:
    """Print one report, or two beside each other and then the verdict of each."""
    for report in reports:
        _show_about(report, console)
    if len(reports) == 1:
        _show_figures(reports[0], console)
    else:
        _show_comparison(reports[0], reports[1], console)
    for index, report in enumerate(reports):
        _show_verdict(report.verdict, console, name=_letter(index, reports))
    for report in reports:
        for line in warnings_of(report):
            console.print(Text(f"Warning: {line}", style="yellow"))
        for line in notes_of(report):
            console.print(Text(f"Note: {line}"))


def _letter(index: int, reports: Sequence[TraceReport]) -> str:
    return f" of {'AB'[index]}" if len(reports) > 1 else ""


def _table(title: str, columns: Sequence[str], *, num_left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < num_left else "right", no_wrap=index >= num_left)
    return table


def _show_about(report: TraceReport, console: Console) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, words in about_rows(report):
        grid.add_row(Text(label, style="bold"), Text(words))
    console.print(Padding(grid, (0, 0, 1, 0)))


def _show_figures(report: TraceReport, console: Console) -> None:
    figures = report.figures
    whole = figures.whole
    table = _table("By direction", ("", "reads", "writes"))
    for read, write in zip(side_measures(whole.read), side_measures(whole.write), strict=True):
        if read.value or write.value:
            table.add_row(Text(read.name), _text(read), _text(write))
    if table.row_count:
        console.print(table)
    for title, parts in (("By cause", figures.causes), ("By phase", figures.phases)):
        rows = slice_rows(list(parts.values()))
        if rows:
            kept = [i for i, name in enumerate(SLICE_COLUMNS) if name != "rate" or console.width >= WIDTH_FOR_RATE]
            table = _table(title, [SLICE_COLUMNS[i] for i in kept], num_left=2)
            for index in (0, 1):
                table.columns[index].min_width = min(NAME_WIDTH_MAX, max(len(row[index]) for row in rows))
            for row in rows:
                table.add_row(*(Text(row[i]) for i in kept))
            console.print(table)
    _show_list("Device and host", whole_measures(figures), console)
    if figures.kv is not None:
        _show_list("KV", kv_measures(figures.kv), console)
    if figures.series:
        table = _table("Means of samples", ("source/subject/name", "mean"))
        for name, mean in list(figures.series.items())[:SERIES_MAX]:
            table.add_row(Text(clipped(name, 80)), Text(f"{mean:,.4g}"))
        console.print(table)


def _text(measure: Measure) -> Text:
    return Text(measure.text if measure.value else NONE)


def _show_list(title: str, measures: Sequence[Measure], console: Console) -> None:
    table = _table(title, ("", ""))
    table.show_header = False
    for measure in measures:
        if measure.value:
            table.add_row(Text(measure.name), Text(measure.text))
    if table.row_count:
        console.print(table)


def _show_comparison(first: TraceReport, second: TraceReport, console: Console) -> None:
    """Print the figures of both traces, and how many times that of the first the second is."""
    for name, pairs in compared(first, second):
        table = _table(f"A against B: {name}", ("", "A", "B", "B / A"))
        for ours, theirs in pairs:
            table.add_row(Text(ours.name), _text(ours), _text(theirs), Text(ratio_text(ours.value, theirs.value)))
        console.print(table)


def _show_verdict(verdict: Verdict, console: Console, *, name: str) -> None:
    doubt = "" if verdict.is_certain else " (not certain)"
    console.print(Text.assemble((f"Verdict{name}: {verdict.name}{doubt}", "bold")))
    console.print(Text(clipped(verdict.sentence, 2000)))
    if verdict.reason and verdict.reason not in verdict.sentence:
        console.print(Text(f"Because: {clipped(verdict.reason, 2000)}"))
    if verdict.evidence:
        table = _table("Evidence", ("", "value", "limit", "source of the limit"), num_left=4)
        for row in verdict.evidence:
            table.add_row(*(Text(clipped(text)) for text in (row.name, row.value, row.threshold, row.source)))
        console.print(table)
    if verdict.remedies:
        console.print(Text("What would help", style="italic"))
    for remedy in verdict.remedies:
        console.print(Padding(Text(clipped(f"- {remedy.what}: {remedy.gain}", 1000)), (0, 0, 0, 1)))
    console.print()
