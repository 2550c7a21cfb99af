"""`kvtide store`: what a directory of stored KV holds, whether its bytes are right, and removing it.

Decides only how it looks and which exit code it has: 0 all is well, 1 corrupt, unreadable or owned by another process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from kvtide.errors import ConfigError
from kvtide.spec import Identity
from kvtide.tiers.inspect import Dropped, NamespaceInfo, drop_namespace, find_namespaces, list_namespaces
from kvtide.tiers.verify import VerifyReport, verify_namespace
from kvtide.units import format_bytes, printable

STORE_EXAMPLE = "Example: kvtide store ls .kvtide/store"
BAR_AFTER_S = 2.0  # what is done sooner needs no bar

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory given to --dir of the other commands.")]
Chosen = Annotated[
    str | None, typer.Option("--namespace", metavar="PREFIX", help="Only this one: the first digits of its name.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

store = typer.Typer(name="store", help="Look into a directory of stored KV, check it, remove it.", epilog=STORE_EXAMPLE)


@store.callback(invoke_without_command=True)
def start(context: typer.Context) -> None:
    """Look into a directory of stored KV, check it, remove it."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@store.command("ls", epilog=STORE_EXAMPLE)
def ls(directory: Directory, as_json: AsJson = False) -> None:
    """List the namespaces: whose KV they hold, capacity, use and age. Changes nothing."""
    found = list_namespaces(directory)
    if as_json:
        _print_json({"directory": str(directory), "namespaces": [info_json(info) for info in found]})
        return
    console = Console(highlight=False)
    if not found:
        console.print(Text(f"{printable(str(directory))} is a store without namespaces."))
    for info in found:
        _print_info(info, console)


@store.command("verify", epilog="Example: kvtide store verify .kvtide/store --namespace 3fa9")
def verify(directory: Directory, namespace: Chosen = None, as_json: AsJson = False) -> None:
    """Read everything and compare it with its checksums. Corrupt groups are forgotten, so their room is free."""
    reports = []
    for path in find_namespaces(directory, namespace):
        with _progress(path.name) as on_progress:
            reports.append(verify_namespace(path, on_progress=on_progress))
    if as_json:
        _print_json({"directory": str(directory), "namespaces": [report_json(report) for report in reports]})
    else:
        _print_reports(directory, reports, Console(highlight=False))
    if not all(report.is_fine for report in reports):
        raise typer.Exit(1)


@store.command("drop", epilog="Example: kvtide store drop .kvtide/store --namespace 3fa9 --yes")
def drop(
    directory: Directory,
    namespace: Chosen = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete one namespace, or all and the store with them. Files that are not kvtide's are never touched."""
    if as_json and not yes:
        raise ConfigError("--json asks nothing; type --yes too to drop without being asked")
    agreed = yes

    def confirm(doomed: list[Dropped]) -> bool:
        nonlocal agreed
        agreed = agreed or typer.confirm(_question(directory, doomed), err=True)
        return agreed

    dropped = drop_namespace(directory, namespace, confirm=confirm)
    if not agreed:
        typer.echo("Nothing was dropped.")
        raise typer.Exit(1)
    freed_bytes = sum(one.file_bytes for one in dropped)
    if as_json:
        names = [one.digest for one in dropped]
        _print_json({"directory": str(directory), "dropped": names, "freed_bytes": freed_bytes})
    else:
        typer.echo(f"Dropped {_namespaces(len(dropped))}, {format_bytes(freed_bytes)} are free.")


def _question(directory: Path, doomed: list[Dropped]) -> str:
    size = format_bytes(sum(one.file_bytes for one in doomed))
    names = "".join(f"\n  {one.digest}  {format_bytes(one.file_bytes)}" for one in doomed)
    return f"{printable(str(directory))}:{names}\nDrop {_namespaces(len(doomed))}, {size}?"


def _namespaces(num: int) -> str:
    return "1 namespace" if num == 1 else f"{num:,} namespaces"


def _print_json(values: dict[str, Any]) -> None:
    typer.echo(json.dumps(values, indent=2))


def info_json(info: NamespaceInfo) -> dict[str, Any]:
    """`info` as JSON values; `identity` and `problem` are null where there is none."""
    return {
        "digest": info.digest,
        "identity": None if info.identity is None else info.identity.describe(),
        "problem": info.problem or None,
        "capacity_bytes": info.capacity_bytes,
        "used_bytes": info.used_bytes,
        "file_bytes": info.file_bytes,
        "num_groups": info.num_groups,
        "num_tokens": info.num_tokens,
        "age_s": info.age_s,
        "is_direct": info.is_direct,
        "is_clean": info.is_clean,
    }


def report_json(report: VerifyReport) -> dict[str, Any]:
    """`report` as JSON values."""
    return {
        "digest": report.digest,
        "model": None if report.identity is None else report.identity.model,
        "problem": report.problem or None,
        "num_groups": report.num_groups,
        "num_ok": report.num_ok,
        "num_corrupt": report.num_corrupt,
        "num_unreadable": report.num_unreadable,
        "num_slots_unreadable": report.num_slots_unreadable,
        "read_bytes": report.read_bytes,
        "is_fine": report.is_fine,
    }


def _print_info(info: NamespaceInfo, console: Console) -> None:
    """One namespace as words beside their meaning."""
    rows = [] if info.identity is None else _identity_words(info.identity)
    if info.problem:
        rows.append(("problem", info.problem))
    if info.capacity_bytes:
        share = info.used_bytes / info.capacity_bytes
        rows.append(("capacity", f"{format_bytes(info.capacity_bytes)}, {format_bytes(info.used_bytes)} ({share:.0%})"))
        rows[-1] = (rows[-1][0], f"{rows[-1][1]} used by {info.num_groups:,} groups, {info.num_tokens:,} tokens")
    else:
        rows.append(("files", format_bytes(info.file_bytes)))
    if info.age_s is not None:
        rows.append(("age", f"{format_age(info.age_s)} since the last write"))
    if info.is_direct is not None:
        rows.append(("reads", "direct (O_DIRECT)" if info.is_direct else "through the page cache: no O_DIRECT here"))
        rows.append(("closed", "cleanly" if info.is_clean else "not cleanly; the next owner scans it"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, words in rows:
        grid.add_row(Text(f"  {label}"), Text(printable(words)))
    console.print(Text(info.digest, style="bold"))
    console.print(grid)


def _identity_words(identity: Identity) -> list[tuple[str, str]]:
    if identity.facts:  # chunks of another engine: what the other fields say means nothing for them
        sizes = [layer[1] for layer in identity.layers]
        pieces = f" in {len(sizes)} pieces" if len(sizes) > 1 else ""
        rows = [("model", identity.model), ("chunks", f"{format_bytes(sum(sizes))} each{pieces}")]
        rows.append(("weights", identity.weights_digest[:16]))
        return [*rows, *((name, told) for name, told in identity.facts if told)]
    cut = "" if identity.split == "none" else f", split by {identity.split}"
    rank = "" if identity.tp_size == 1 else f", rank {identity.tp_rank} of {identity.tp_size}"
    rows = [
        ("model", " ".join(filter(None, (identity.model, identity.revision)))),
        ("KV", f"{identity.dtype.value}, {len(identity.layers)} layers, {identity.layout.value}{cut}{rank}"),
        ("blocks", f"{identity.block_tokens} tokens each, {identity.group_blocks} in a group"),
        ("digests", f"weights {identity.weights_digest[:16]}, tokenizer {identity.tokenizer_digest[:16]}"),
        *([("encrypted", identity.encryption)] if identity.encryption else []),
    ]
    if identity.adapter:
        rows.insert(1, ("adapter", identity.adapter))
    return rows


def format_age(age_s: int) -> str:
    """`45 s`, `3 min`, `5 h` or `12 d`: whole units, rounded down."""
    for unit, unit_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= unit_s:
            return f"{age_s // unit_s:,} {unit}"
    return f"{age_s} s"


def _print_reports(directory: Path, reports: list[VerifyReport], console: Console) -> None:
    """A table of all namespaces, and below it what could not be read."""
    if not reports:
        console.print(Text(f"{printable(str(directory))} is a store without namespaces."))
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("namespace", "groups", "ok", "corrupt", "unreadable", "read"):
        table.add_column(name, justify="left" if name == "namespace" else "right", no_wrap=True)
    for report in reports:
        counts = (report.num_groups, report.num_ok, report.num_corrupt, report.num_unreadable)
        table.add_row(report.digest[:16], *(f"{count:,}" for count in counts), format_bytes(report.read_bytes))
    console.print(table)
    for report in reports:
        if report.problem:
            console.print(Text(f"{report.digest[:8]}: {printable(report.problem)}"))
        if report.num_slots_unreadable:
            console.print(Text(f"{report.digest[:8]}: {report.num_slots_unreadable:,} slots have unreadable headers"))
    num_corrupt = sum(report.num_corrupt for report in reports)
    if num_corrupt:
        console.print(Text(f"{num_corrupt:,} corrupt groups were forgotten; their KV is computed again when needed."))


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function that draws a bar on the terminal, once there was something to wait for."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    console = Console(stderr=True)
    bar = Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console, transient=True)
    task = bar.add_task(f"verify {name[:8]}", total=None)
    begun_s, is_drawn = time.monotonic(), False

    def show(done_bytes: int, total_bytes: int) -> None:
        nonlocal is_drawn
        bar.update(task, completed=done_bytes, total=total_bytes)
        if not is_drawn and console.is_terminal and time.monotonic() - begun_s > BAR_AFTER_S:
            bar.start()
            is_drawn = True

    try:
        yield show
    finally:
        if is_drawn:
            bar.stop()
