"""The `kvtide` command: registers the commands and turns every named error into one line and an exit code.

Exit codes: 0 done, 1 failed, 2 asked for something impossible, 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from kvtide import ConfigError, KvtideError, __version__
from kvtide.cli_run import RUN_EXAMPLE, run
from kvtide.cli_size import SIZE_EXAMPLE, size
from kvtide.cli_store import store
from kvtide.units import printable

app = typer.Typer(name="kvtide", add_completion=False, pretty_exceptions_enable=False)
app.command("run", epilog=RUN_EXAMPLE)(run)
app.command("size", epilog=SIZE_EXAMPLE)(size)
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
    try:
        app()
    except KvtideError as error:
        _say(error)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _say(error: KvtideError) -> None:
    message = printable(str(error))
    if "--json" in sys.argv:
        line = json.dumps({"error": message, "kind": type(error).__name__})
    else:
        line = f"kvtide: {message}"
    print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
