"""`kvtide bench`: how well a part of kvtide does its work, measured on a model. Its first part: `select`.

Decides only what is asked; integrations.transformers.comparing measures, report.select shows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvtide.cli_run import cache_dir, fast_dtype, waiting
from kvtide.errors import ConfigError, UnsupportedError
from kvtide.report.select import SelectReport, print_select, select_json
from kvtide.report.select_html import select_page
from kvtide.select.compared import check_methods, default_methods
from kvtide.select.tasks import TASKS, check_tasks
from kvtide.units import printable

if TYPE_CHECKING:
    from kvtide.integrations.transformers import LoadedModel
    from kvtide.integrations.transformers.comparing import CompareOptions, Comparison

BENCH_EXAMPLE = "Example: kvtide bench select --methods full,quest,lowrank --contexts 1k --budgets 64,256"
WIDTH = 190  # of tables that no terminal bounds

bench = typer.Typer(name="bench", help="Measure how well a part of kvtide does its work.", epilog=BENCH_EXAMPLE)


@bench.callback(invoke_without_command=True)
def start(context: typer.Context) -> None:
    """Measure how well a part of kvtide does its work."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@bench.command("select", epilog=BENCH_EXAMPLE)
def select(
    methods: Annotated[
        str | None, typer.Option(help="Names, by commas. Default: all methods, floors, oracles.")
    ] = None,
    contexts: Annotated[str, typer.Option(help="Tokens of text, question and answer.")] = "1k,2k",
    budgets: Annotated[str, typer.Option(help="Tokens a query attends to in each layer.")] = "64,256",
    tasks: Annotated[str, typer.Option(help=f"Any of {', '.join(TASKS)}.")] = ",".join(TASKS),
    seeds: Annotated[int, typer.Option(min=1, max=10000, help="Texts of each context.")] = 3,
    seed: Annotated[int, typer.Option(min=0, max=1 << 31, help="The first one.")] = 0,
    model: Annotated[str | None, typer.Option(help="Model folder or hub id. Default: the embedded SmolLM2.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32. Default: what is fast here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the result as JSON to this file.")
    ] = None,
) -> None:
    """Measure what selected attention loses against attention to everything, and what it reads.

    Texts with hidden facts and prose that follows: answers, their likelihood, the attention mass that is held.
    """
    names = _words(methods) if methods is not None else default_methods()
    chosen = _words(tasks)
    check_methods(names)
    check_tasks(chosen)
    lengths, sizes = _numbers("--contexts", contexts), _numbers("--budgets", budgets)
    for option, path in (("--html", html), ("--output", output)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{option}: {path.absolute().parent} is no directory; make it, or type another file")
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    loaded = _load(model, dtype, console)
    from kvtide.integrations.transformers.comparing import CompareOptions, Comparison

    options = CompareOptions(names, lengths, sizes, chosen, seeds, seed)
    with _progress(console) as on_progress:
        comparison = Comparison(loaded, options, on_progress=on_progress)
        is_interrupted = _run(comparison)
    report = _report(loaded, options, comparison, is_interrupted=is_interrupted)
    _give(report, html=html, output=output, as_json=as_json)
    if is_interrupted:
        raise typer.Exit(130)


def _run(comparison: Comparison) -> bool:
    """Run everything; say whether it was interrupted."""
    try:
        comparison.run()
    except KeyboardInterrupt:
        return True
    return False


def _give(report: SelectReport, *, html: Path | None, output: Path | None, as_json: bool) -> None:
    result = select_json(report)
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if html is not None:
        html.write_text(select_page(report), encoding="utf-8")
    if as_json:
        print(json.dumps(result))
        return
    shown = Console(highlight=False, markup=False, emoji=False)
    print_select(report, shown if shown.is_terminal else Console(highlight=False, width=WIDTH, markup=False))
    for what, path in (("Page", html), ("Result", output)):
        if path is not None:
            shown.print(f"{what} in {printable(str(path))}")


def _report(
    loaded: LoadedModel, options: CompareOptions, comparison: Comparison, *, is_interrupted: bool
) -> SelectReport:
    found = comparison.found
    about = asdict(options) | {"done": found.done, "total": found.total}
    return SelectReport(loaded.name, loaded.dtype.value, found.answers, found.replays, is_interrupted, about)


def _load(model: str | None, dtype: str | None, console: Console) -> LoadedModel:
    with waiting(console, "Loading the model"):
        try:
            from kvtide.integrations.transformers import load
        except ImportError as error:
            raise UnsupportedError(f"{error}; type pip install 'kvtide[transformers]'") from None

        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        return load(model, dtype=dtype or fast_dtype(), cache_dir=cache_dir() / "models")


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[int, int, str], None]]:
    """Yield what shows how far it is, if somebody is there to see it."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield show


def _words(text: str) -> list[str]:
    """Return the words between commas, each once."""
    return list(dict.fromkeys(word for word in text.replace(" ", "").split(",") if word))


def _numbers(option: str, text: str) -> list[int]:
    """Return whole numbers between commas, in order, where 1k is 1,024.

    Raises: ConfigError that names the option.
    """
    found = []
    for word in _words(text):
        digits = word.lower().removesuffix("k")
        if not (digits.isascii() and digits.isdigit() and 0 < len(digits) < 8 and int(digits)):
            raise ConfigError(f"{option} has {printable(word)[:40]!r}; type whole numbers as 256 or 2k, by commas")
        found.append(int(digits) * (1024 if word.lower().endswith("k") else 1))
    if not found:
        raise ConfigError(f"{option} is empty; type whole numbers as 256 or 2k, by commas")
    return sorted(set(found))
