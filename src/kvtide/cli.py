"""The `kvtide` command: registers the commands and turns every named error into one line and an exit code.

Exit codes: 0 done, 1 failed, 2 asked for something impossible, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import Annotated

import typer

from kvtide import ConfigError, KvtideError, __version__
from kvtide.cli_bench import bench
from kvtide.cli_check import CHECK_EXAMPLE, check
from kvtide.cli_import import IMPORT_EXAMPLE, import_log
from kvtide.cli_plan import PLAN_EXAMPLE, plan
from kvtide.cli_probe import PROBE_EXAMPLE, probe
from kvtide.cli_recall import recall
from kvtide.cli_remote import remote
from kvtide.cli_replay import REPLAY_EXAMPLE, replay_command
from kvtide.cli_report import REPORT_EXAMPLE, report
from kvtide.cli_run import RUN_EXAMPLE, run
from kvtide.cli_size import SIZE_EXAMPLE, size
from kvtide.cli_store import store
from kvtide.cli_top import TOP_EXAMPLE, top
from kvtide.cli_trace import TRACE_EXAMPLE, trace
from kvtide.cli_why import WHY_EXAMPLE, why
from kvtide.units import printable

app = typer.Typer(name="kvtide", add_completion=False, pretty_exceptions_enable=False)
app.command("check", epilog=CHECK_EXAMPLE)(check)
app.command("import", epilog=IMPORT_EXAMPLE)(import_log)
app.command("plan", epilog=PLAN_EXAMPLE)(plan)
app.command("probe", epilog=PROBE_EXAMPLE)(probe)
app.command("replay", epilog=REPLAY_EXAMPLE)(replay_command)
app.command("report", epilog=REPORT_EXAMPLE)(report)
app.command("run", epilog=RUN_EXAMPLE)(run)
app.command("size", epilog=SIZE_EXAMPLE)(size)
app.command("top", epilog=TOP_EXAMPLE)(top)
app.command("trace", epilog=TRACE_EXAMPLE)(trace)
app.command("why", epilog=WHY_EXAMPLE)(why)
app.add_typer(bench)
app.add_typer(recall)
app.add_typer(remote)
app.add_typer(store)


@app.callback(invoke_without_command=True, epilog=SIZE_EXAMPLE)
def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Keep the KV cache of large language models in tiers, and see what every byte's I/O costs."""
    if version:
        typer.echo(f"kvtide {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


def main() -> None:
    """Run the command line and leave with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # closed, or not a real stream
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code = _run()
    except KeyboardInterrupt:  # a second one, while the first was handled
        code = 130
    if code == 130:  # all is closed: another one could only interrupt the way out
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def _run() -> int:
    try:
        app(standalone_mode=True)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except (KvtideError, OSError, MemoryError) as error:
        code = 2 if isinstance(error, ConfigError) else 1
        _say(error)
    except KeyboardInterrupt:
        code = 130
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:  # whoever read our output has left, or its disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter tries once more
        if not isinstance(error, BrokenPipeError):
            _say(error)
        code = code or 1
    return code


def _say(error: Exception) -> None:
    if sys.stderr is None:
        return
    message = printable(str(error)) or type(error).__name__
    if "--json" in sys.argv:
        line = json.dumps({"error": message, "kind": type(error).__name__})
    else:
        line = f"kvtide: {message}"
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
