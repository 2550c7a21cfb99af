"""`kvtide check`: is a store of KV fit to be trusted? Any store: kvtide's, an engine's, yours.

Exit codes: 0 no check failed, 1 one did, 2 asked for something impossible.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvtide.check.names import TARGETS, path_of
from kvtide.errors import ConfigError

CHECK_EXAMPLE = "Example: kvtide check file"


def check(
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="TARGET...", help=f"What to check: {', '.join(TARGETS)}, or module:Class of your own."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="ID", help="Run this check; may be given several times.")
    ] = None,
    list_checks: Annotated[bool, typer.Option("--list", help="Show every check, and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page as well.")] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where stores are made, in a directory that is removed afterwards.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of chains and choices.")] = 0,
    deadline: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="A call without an answer after this hangs.")
    ] = 30.0,
) -> None:
    """Find out whether a store of KV gives wrong bytes, loses values, leaks or hangs: the faults users reported."""
    from rich.console import Console

    from kvtide.check.registry import CHECKS, checks_named
    from kvtide.check.runner import run_checks
    from kvtide.report.check import check_json, check_page, check_row, print_checks, print_result, print_summary

    console = Console(highlight=False)
    if list_checks:
        if as_json:
            typer.echo(json.dumps([check_row(one) for one in CHECKS], indent=2))
        else:
            print_checks(CHECKS, console)
        return
    if not targets:
        raise ConfigError(f"nothing to check was named; type one of {', '.join(TARGETS)}, or module:Class")
    for target in targets:
        path_of(target)
    checks = checks_named(only or [])
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"--dir {directory} is no directory; make it first")
    reports = []
    with Console(stderr=True).status("") as status:
        for target in targets:
            reports.append(
                run_checks(
                    target,
                    checks,
                    directory=directory,
                    on_begin=lambda one: status.update(f"{one.id}: {one.how}"),
                    on_result=lambda one: None if as_json else print_result(one, console),
                    call_s=deadline,
                    is_quick=quick,
                    seed=seed,
                )
            )
            if not as_json:
                print_summary(reports[-1], console)
    if html is not None:
        html.write_text(check_page(reports))
    if as_json:
        told = [check_json(report) for report in reports]
        typer.echo(json.dumps(told[0] if len(told) == 1 else told, indent=2))
    if any(report.num_failed for report in reports):
        raise typer.Exit(1)
