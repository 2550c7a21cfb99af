"""`kvtide recall`: what vector stores write for a row and read for a query. Parts: bench, engines, explain.

Decides only what is asked; stores measures, report.recall shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvtide.errors import ConfigError
from kvtide.units import parse_option_bytes, printable

if TYPE_CHECKING:
    from kvtide.report.recall import RecallReport
    from kvtide.stores.bench import BenchOptions
    from kvtide.stores.engines.contract import About

RECALL_EXAMPLE = "Example: kvtide recall bench --engines kvtide,sqlite --rows 2000 --batch 1,64"
WIDTH = 230  # of tables that no terminal bounds

recall = typer.Typer(
    name="recall", help="What vector stores write for a row and read for a query.", epilog=RECALL_EXAMPLE
)


@recall.callback(invoke_without_command=True)
def begin(context: typer.Context) -> None:
    """Show what vector stores write for a row and read for a query."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@recall.command("engines")
def engines(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the engines that can be measured, and what to install for those that are missing."""
    from kvtide.stores.engines.names import ENGINES, is_installed

    rows = [(each, is_installed(each)) for each in ENGINES.values()]
    if as_json:
        found = [{"name": each.name, "is_installed": is_here, "package": each.package} for each, is_here in rows]
        print(json.dumps(found))
        return
    for each, is_here in rows:
        print(f"{each.name:12} {'installed' if is_here else f'pip install {each.package}':32} {each.search}")


@recall.command("bench", epilog=RECALL_EXAMPLE)
def bench(
    engines: Annotated[str, typer.Option(help="Names by commas, or all: those installed.")] = "all",
    rows: Annotated[int, typer.Option(help="Vectors to insert.")] = 5000,
    dim: Annotated[int, typer.Option(help="Dimensions, float32.")] = 256,
    batch: Annotated[str, typer.Option(help="Rows a call, by commas: one run each.")] = "1,64",
    durable: Annotated[bool, typer.Option("--durable", help="Every acknowledged row survives a power cut.")] = False,
    rate: Annotated[float, typer.Option(min=0, help="Rows a second; 0: as fast as it goes.")] = 0.0,
    queries: Annotated[int, typer.Option(help="Searches, cold and again warm.")] = 50,
    settle: Annotated[float, typer.Option(min=0, help="Seconds of rest before bytes are counted again.")] = 0.0,
    kills: Annotated[int, typer.Option(min=0, max=1000, help="SIGKILLs amid inserts.")] = 1,
    cuts: Annotated[str, typer.Option(help="Power cuts, seconds after the last row, by commas; none.")] = "0",
    seed: Annotated[int, typer.Option(min=0, max=1 << 31, help="Of vectors and queries.")] = 1,
    disk: Annotated[str, typer.Option(help="Size of the measured file system.")] = "4GiB",
    folder: Annotated[Path, typer.Option("--dir", help="Where its image lies.")] = Path(".kvtide/recall"),
    python: Annotated[
        list[str] | None, typer.Option("--python", help="ENGINE=PATH: an engine that needs an interpreter of its own.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to this file.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write JSON to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure stores one after another: device bytes, reads, latencies, recall, and what crashes leave.

    As root each gets a file system on a loop device of its own; nothing of it stays.
    """
    from kvtide.report.recall import RecallReport
    from kvtide.stores.bench import BenchOptions
    from kvtide.stores.engines.names import ENGINES, chosen, is_installed

    for option, path in (("--html", html), ("--output", output)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{option}: {path.absolute().parent} is no directory; make it, or type another file")
    interpreters = _interpreters(python or [])
    named = [name for name in interpreters if engines == "all"]
    wanted = [ENGINES[name] for name in ENGINES if name in named or is_installed(ENGINES[name])]
    if engines != "all":
        words = [word for word in engines.replace(" ", "").split(",") if word not in interpreters]
        wanted = [ENGINES[name] for name in interpreters if name in engines.split(",")]
        wanted = (chosen(",".join(words)) if words else []) + wanted
    options = BenchOptions(
        rows, dim, 1, durable, rate, queries, seed, settle, parse_option_bytes("--disk", disk), kills, _seconds(cuts)
    )
    options.check()
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    report = RecallReport(options)
    absent = [each for each in ENGINES.values() if each not in wanted and not is_installed(each)]
    report.absent = [f"{each.name}: not installed; pip install {each.package}" for each in absent]
    folder.mkdir(parents=True, exist_ok=True)
    _run(report, wanted, _batches(batch), interpreters, folder, console, output)
    _give(report, html=html, output=output, as_json=as_json)
    if report.is_partial:
        raise typer.Exit(130)


@recall.command("explain", epilog="Example: kvtide recall explain --store db --run -- python fill.py")
def explain(
    words: Annotated[list[str] | None, typer.Argument(metavar="TRACE | -- COMMAND ...")] = None,
    run: Annotated[bool, typer.Option("--run", help="Run and trace the command behind --.")] = False,
    store: Annotated[Path | None, typer.Option(help="Folder of the store's files.")] = None,
    user_bytes: Annotated[str | None, typer.Option(help="What the user gave: for amplification.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Keep the trace of --run in this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say why a store wrote: bytes by cause, small writes, chains of reads, and what would help.

    A trace of `kvtide trace` needs --store, to know which file lies where: files that are gone count as unknown. With
    --run the files are looked at while the command runs.
    """
    from kvtide.report.explain import explained_json, print_explained
    from kvtide.stores.explaining import explain_run, explain_trace

    size = parse_option_bytes("--user-bytes", user_bytes) if user_bytes is not None else None
    if run:
        if not words or store is None:
            raise ConfigError(
                "--run needs --store and a command: type kvtide recall explain --store DIR --run -- COMMAND"
            )
        found = explain_run(words, store, user_bytes=size, output=output)
    elif words is None or len(words) != 1:
        raise ConfigError("type one trace file, or --store DIR --run -- COMMAND")
    else:
        found = explain_trace(Path(words[0]), store, user_bytes=size)
    if as_json:
        print(json.dumps(explained_json(found)))
    else:
        print_explained(found, Console(highlight=False, markup=False, emoji=False))


def _run(
    report: RecallReport,
    wanted: list[About],
    batches: list[int],
    interpreters: dict[str, str],
    folder: Path,
    console: Console,
    output: Path | None,
) -> None:
    """Measure everything; at Ctrl-C keep what is there. `output` grows with each engine."""
    from dataclasses import replace

    from kvtide.report.recall import recall_json
    from kvtide.stores.bench import measure
    from kvtide.stores.crash import crash

    with _progress(console, len(wanted) * len(batches)) as (on, step):
        try:
            for about in wanted:
                python = interpreters.get(about.name, "")
                for size in batches:
                    options: BenchOptions = replace(report.options, batch=size)
                    found = measure(about, options, folder, python=python, on=on)
                    report.found.append(found)
                    crash(about, options, folder, found, python=python, on=on)
                    if output is not None:
                        output.write_text(json.dumps(recall_json(report), indent=1) + "\n", encoding="utf-8")
                    step()
        except KeyboardInterrupt:
            report.is_partial = True


def _give(report: RecallReport, *, html: Path | None, output: Path | None, as_json: bool) -> None:
    from kvtide.report.recall import print_recall, recall_json, recall_page

    result = recall_json(report)
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if html is not None:
        html.write_text(recall_page(report), encoding="utf-8")
    if as_json:
        print(json.dumps(result))
        return
    shown = Console(highlight=False, markup=False, emoji=False)
    print_recall(report, shown if shown.is_terminal else Console(highlight=False, width=WIDTH, markup=False))


@contextmanager
def _progress(console: Console, total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda what: bar.update(task, description=what), lambda: bar.advance(task)


def _batches(text: str) -> list[int]:
    words = [word for word in text.replace(" ", "").split(",") if word]
    if not words or not all(word.isascii() and word.isdigit() and 0 < int(word[:9]) < 1 << 20 for word in words):
        raise ConfigError(f"--batch is {printable(text)[:40]!r}; type whole numbers by commas, as in 1,64")
    return [int(word) for word in dict.fromkeys(words)]


def _seconds(text: str) -> tuple[float, ...]:
    if text == "none":
        return ()
    try:
        found = tuple(sorted({float(word) for word in text.split(",")}))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= each <= 3600 for each in found):
        raise ConfigError(f"--cuts is {printable(text)[:40]!r}; type seconds by commas, as in 0,9,40, or none")
    return found


def _interpreters(words: list[str]) -> dict[str, str]:
    """Return interpreters by engine.

    Raises: ConfigError for what is not ENGINE=PATH.
    """
    from kvtide.stores.engines.names import ENGINES

    found = {}
    for word in words:
        name, _, path = word.partition("=")
        if name not in ENGINES or not Path(path).is_file():
            raise ConfigError(
                f"--python is {printable(word)[:60]!r}; type ENGINE=PATH, as in diskann=/opt/diskann/bin/python"
            )
        found[name] = path
    return found
