"""Stores side by side, as a table for people, JSON values for programs, and a page. Decides only how it looks."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtide.report.plan_html import STYLE
from kvtide.stores.bench import BenchOptions, Measured
from kvtide.units import format_bytes, format_ns, printable

COLUMNS = 200
Cell = Callable[[Measured], str]


@dataclass(slots=True)
class RecallReport:
    """What was measured, how, and which engines are missing."""

    options: BenchOptions
    found: list[Measured] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    is_partial: bool = False


def recall_json(report: RecallReport) -> dict[str, Any]:
    """Return `report` as JSON values: times in ns, sizes in bytes. Label: measured."""
    return {
        "label": "measured",
        "is_partial": report.is_partial,
        "options": asdict(report.options) | {"user_bytes": report.options.user_bytes},
        "absent": report.absent,
        "engines": [asdict(each) for each in report.found],
    }


def _x(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ns(value: float | None) -> str:
    return "-" if value is None else format_ns(value)


def _num(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _bytes(value: float | None) -> str:
    return "-" if value is None else format_bytes(round(value))


def _kept(crashes: Sequence[dict[str, object]]) -> str:
    """Return kept over acknowledged rows of all crashes, and whether the store opened."""
    if not crashes:
        return "-"
    kept, acked = (sum(int(str(each[name])) for each in crashes) for name in ("kept", "acked"))
    return f"{kept}/{acked}{'' if all(each['opens'] for each in crashes) else ', will not open'}"


WRITES: tuple[tuple[str, Cell], ...] = (
    ("device x", lambda m: _x(m.device_x)),
    ("rested x", lambda m: _x(m.device_settled_x)),
    ("finished x", lambda m: _x(m.device_finished_x)),
    ("write_bytes x", lambda m: _x(m.write_bytes_x)),
    ("writes", lambda m: _num(m.num_writes)),
    ("small", lambda m: _share(m.small_share)),
    ("flushes", lambda m: _num(m.num_flushes)),
    ("files", lambda m: _num(m.num_files)),
    ("on disk", lambda m: _bytes(m.disk_bytes)),
    ("insert p50", lambda m: _ns(m.insert_ns_p50)),
    ("p99", lambda m: _ns(m.insert_ns_p99)),
    ("rows/s", lambda m: _num(m.rows_per_s)),
    ("SIGKILL kept", lambda m: _kept(m.kills)),
    ("power cut kept", lambda m: "; ".join(_kept([cut]) for cut in m.cuts) or "-"),
    ("acknowledged is", lambda m: m.acknowledged),
)
READS: tuple[tuple[str, Cell], ...] = (
    ("cold p50", lambda m: _ns(m.cold_ns_p50)),
    ("p99", lambda m: _ns(m.cold_ns_p99)),
    ("warm p50", lambda m: _ns(m.warm_ns_p50)),
    ("p99", lambda m: _ns(m.warm_ns_p99)),
    ("first query", lambda m: _ns(m.first_ns)),
    ("its reads", lambda m: _num(m.first_reads)),
    ("its rounds", lambda m: _num(m.first_rounds)),
    ("reads/query", lambda m: _num(m.reads_per_query)),
    ("bytes/query", lambda m: _bytes(m.read_bytes_per_query)),
    ("rounds", lambda m: _num(m.rounds_per_query)),
    ("warm reads", lambda m: _num(m.warm_reads_per_query)),
    ("recall@10", lambda m: "-" if m.recall is None else f"{m.recall:.3f}"),
    ("in cache at start", lambda m: _bytes(m.resident_at_start_bytes)),
    ("resident", lambda m: _bytes(m.resident_bytes)),
)


def print_recall(report: RecallReport, console: Console) -> None:
    """Print a table of writes and one of searches, and what could not be measured."""
    options = report.options
    what = f"{options.rows:,} vectors of {options.dim} float32 ({format_bytes(options.user_bytes)})"
    durable = "durable one by one where an engine can" if options.is_durable else "acknowledged as each engine does"
    pace = f"{options.rate:g} rows/s" if options.rate else "as fast as it goes"
    console.print(Text(f"{what}, {durable}, {pace}, seed {options.seed}. Measured."))
    if report.is_partial:
        console.print(Text("Interrupted: what follows is a part of what was asked for.", style="bold"))
    for source in dict.fromkeys(each.source for each in report.found):
        console.print(Text(f"x is bytes over user bytes; device bytes: {source}."))
    console.print(_table("Inserts (measured)", WRITES, report.found))
    console.print(_table("Searches: cold, each query for the first time; then warm (measured)", READS, report.found))
    for each in report.found:
        for note in each.notes:
            console.print(Text(f"{each.engine}: {printable(note)}"))
    for line in report.absent:
        console.print(Text(line, style="dim"))


def _table(title: str, columns: Sequence[tuple[str, Cell]], found: Sequence[Measured]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("engine", no_wrap=True)
    table.add_column("rows/call", justify="right", no_wrap=True)
    for name, _ in columns:
        is_text = name == "acknowledged is"
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
    for each in found:
        table.add_row(each.engine, str(each.batch), *(cell(each) for _, cell in columns))
    return table


def recall_page(report: RecallReport) -> str:
    """Return the page: charts of amplification and of reads, then the tables."""
    from plotly.graph_objects import Figure

    text = io.StringIO()
    print_recall(report, Console(file=text, width=COLUMNS, highlight=False, color_system=None))
    names = [f"{each.engine}, {each.batch}" for each in report.found]
    figures: list[Any] = []
    values: tuple[tuple[str, Callable[[Measured], float | None]], ...] = (
        ("Device bytes over user bytes, rows a call (measured)", lambda m: m.device_finished_x or m.device_x),
        ("Device reads of a cold query (measured)", lambda m: m.reads_per_query),
        ("Dependent rounds of a cold query (measured)", lambda m: m.rounds_per_query),
    )
    for title, value in values:
        figure = Figure()
        figure.add_bar(x=names, y=[value(each) for each in report.found])
        figure.update_yaxes(type="log")
        figure.update_layout(template="plotly_white", height=380, title_text=title)
        figures.append(figure)
    plots = [figure.to_html(full_html=False, include_plotlyjs=not index) for index, figure in enumerate(figures)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>kvtide recall bench</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head><body><h1>What vector stores write and read</h1>"
        f'{"".join(plots)}<div class="wide"><pre>{html.escape(text.getvalue())}</pre></div></body></html>\n'
    )
