"""`kvtide trace`: record what a command, a process or a device does, from KV object down to block command.

Owns the defaults: the device under the working directory, everything on it. Decides what still can be seen where the
kernel may not be traced.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvtide import children
from kvtide.errors import ConfigError, KvtideError, UnsupportedError
from kvtide.units import format_bytes, parse_bytes, printable

if TYPE_CHECKING:
    from kvtide.probe.caps import DeviceCaps
    from kvtide.trace.attribute import OpIndex
    from kvtide.trace.file import About, TraceWriter
    from kvtide.trace.kernel import Capture
    from kvtide.trace.live import Gauges

TRACE_EXAMPLE = "Example: kvtide trace -o run.kvtrace -- kvtide run --ask 'What is decided?'"
DEFAULT_FILE = "trace.kvtrace"
RUN_TRACE = "KVTIDE_TRACE"  # tells a traced `kvtide run` where to leave its own records
SAMPLE_S = 0.25


@dataclass(slots=True)
class Ask:
    """What is to be traced."""

    output: Path
    seconds: float | None
    pid: int | None
    command: list[str]
    caps: DeviceCaps
    has_calls: bool
    has_queue: bool
    buffer_bytes: int


def trace(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND ...]", help="Run and trace this command.")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Trace file.")] = Path(DEFAULT_FILE),
    seconds: Annotated[float | None, typer.Option(min=0.1, help="Stop after this long.")] = None,
    pid: Annotated[int | None, typer.Option(help="Trace this process and its children.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Block device, or a path on it. Default: that of the working directory.")
    ] = None,
    calls: Annotated[bool, typer.Option("--calls", help="Read and write system calls too; costs more.")] = False,
    queue: Annotated[bool, typer.Option(help="Also when a command was queued; a third more events.")] = True,
    buffer: Annotated[str, typer.Option(help="Kernel memory for events, a CPU.")] = "16MiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Record block commands, io_uring requests and kvtide's own records into one trace file.

    A traced `kvtide run` hands over its own records, and every block command gets its layer and its cause. Without
    root, what /proc and /sys tell is recorded instead.
    """
    from kvtide.trace.file import TraceWriter

    ask = Ask(
        output, seconds, pid, command or [], find_device(device), calls, queue, max(64 << 10, parse_bytes(buffer))
    )
    _check(ask)
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    with TraceWriter(output) as writer:
        about, code = _record(ask, writer, console)
        num_rows = writer.finish(about)
    told = {"file": str(output), "rows": about.rows, "num_lost": about.health.num_lost, "notes": about.notes}
    told |= {"exit_code": code, "seconds": (about.end_ns - about.start_ns) / 1e9}
    if as_json:
        print(json.dumps(told))
    else:
        _tell(about, num_rows, output, console)
    if code:
        raise typer.Exit(code if 0 < code < 256 else 1)


def find_device(name: str | None) -> DeviceCaps:
    """Return the device called `name`, or the one under that path.

    Raises: ConfigError if there is none.
    """
    from kvtide.probe.caps import caps_of, caps_of_number

    path = Path(name) if name else Path()
    if name and not path.exists() and (Path("/dev") / name).exists():
        path = Path("/dev") / name
    is_node = path.exists() and path.is_block_device()
    number = path.stat().st_rdev if is_node else 0
    caps = caps_of_number(os.major(number) << 20 | os.minor(number)) if is_node else caps_of(path)
    if name and not caps.name:
        raise ConfigError(f"--device {printable(name)}: no block device is under it; type a name as in lsblk")
    return caps


def _check(ask: Ask) -> None:
    if ask.pid is not None and ask.command:
        raise ConfigError("--pid and a command were given; type one of them")
    if ask.pid is not None and not Path(f"/proc/{ask.pid}").is_dir():
        raise ConfigError(f"--pid {ask.pid}: there is no such process")
    if ask.has_calls and ask.pid is None and not ask.command:
        raise ConfigError("--calls needs to know whose: type --pid PID, or a command after --")
    if ask.seconds is None and ask.pid is None and not ask.command:
        raise ConfigError("nothing says when to stop: type --seconds S, --pid PID, or a command after --")


def _record(ask: Ask, writer: TraceWriter, console: Console) -> tuple[About, int]:
    """Record until the end, and fill `writer`; return what is known of the trace, and the command's exit code."""
    from kvtide.trace.file import About

    number = str(ask.caps.number)
    about = About(source="kernel", command=" ".join(ask.command), pid=ask.pid or 0, host=os.uname().nodename)
    about.devices = {number: ask.caps.as_traced()} if ask.caps.name else {}
    with tempfile.TemporaryDirectory(prefix=".kvtide-", dir=ask.output.absolute().parent) as folder:
        own = Path(folder) / "own"
        with _started(ask, own) as child:
            roots = {child.pid} if child else {ask.pid} if ask.pid else set()
            capture = _capture(ask, roots, about, console)
            try:
                _follow(ask, child, roots, capture, writer, about, console)
                index = _own_records(own, writer, about)
                if capture is not None:
                    _decode(capture, index, writer, about, console)
            finally:
                if capture is not None:
                    capture.close()
            code = child.returncode if child else 0
    return about, code if code >= 0 else 128 - code


@contextmanager
def _started(ask: Ask, own: Path) -> Iterator[subprocess.Popen[bytes] | None]:
    """Start the command, stopped, so that nothing of it is missed; make sure that it ends.

    Raises: ConfigError if it cannot be started.
    """
    if not ask.command:
        yield None
        return
    from kvtide.trace.live import start_stopped

    if _which(ask.command[0]) is None:
        raise ConfigError(f"{printable(ask.command[0])}: no such command")
    child = start_stopped(ask.command, env=os.environ | {RUN_TRACE: str(own)})
    try:
        yield child
    finally:
        children.end(child)


def _which(name: str) -> str | None:
    import shutil

    return shutil.which(name)


def _capture(ask: Ask, roots: set[int], about: About, console: Console) -> Capture | None:
    """Start to capture; None, with a note, where the kernel may not be traced."""
    from kvtide.trace.kernel import Capture, CaptureOptions

    options = CaptureOptions(
        device=ask.caps.number if ask.caps.name else None,
        pids=tuple(roots),
        has_queue=ask.has_queue,
        has_calls=ask.has_calls,
        buffer_bytes=ask.buffer_bytes,
        folder=ask.output.absolute().parent,
    )
    try:
        capture = Capture(options)
    except UnsupportedError as refused:
        about.source = "proc"
        about.health.has_completions = False
        about.notes.append(f"The kernel was not traced: {refused}.")
        console.print(f"kvtide: {refused}. Recording what /proc and /sys tell instead.", style="yellow")
        return None
    capture.start()
    return capture


def _follow(
    ask: Ask,
    child: subprocess.Popen[bytes] | None,
    roots: set[int],
    capture: Capture | None,
    writer: TraceWriter,
    about: About,
    console: Console,
) -> None:
    """Wait for the end, sampling on the way. Ctrl-C ends it too, and what was recorded is kept."""
    from kvtide.trace.live import Gauges, family

    gauges = Gauges(ask.caps.name, lambda: family(roots))
    about.start_ns, about.epoch_ns = time.monotonic_ns(), time.time_ns()
    until = about.start_ns + int(ask.seconds * 1e9) if ask.seconds else None
    with _counting_ctrl_c() as ctrl_c:
        if child is not None:
            child.send_signal(signal.SIGCONT)
        _wait(child, ask.pid, until, gauges, writer, console, ctrl_c)
        if ctrl_c:
            about.notes.append("Interrupted: the trace ends there.")
        elif child is not None and child.poll() is None:
            about.notes.append("The command was ended when the time was over.")
        if child is not None and child.poll() is None:
            _end(child, ctrl_c)
    about.end_ns = time.monotonic_ns()
    if capture is not None:
        capture.stop()
        about.health.num_lost = capture.num_lost
    writer.add("sample", gauges.sample())


def _wait(
    child: subprocess.Popen[bytes] | None,
    pid: int | None,
    until_ns: int | None,
    gauges: Gauges,
    writer: TraceWriter,
    console: Console,
    ctrl_c: list[int],
) -> None:
    is_shown = child is None and console.is_terminal
    with _spinner(console, "Recording; Ctrl-C ends it", is_shown=is_shown):
        while not ctrl_c and (until_ns is None or time.monotonic_ns() < until_ns):
            left_s = (until_ns - time.monotonic_ns()) / 1e9 if until_ns else SAMPLE_S
            if child is None:
                time.sleep(max(0.0, min(SAMPLE_S, left_s)))
                if pid is not None and not Path(f"/proc/{pid}").is_dir():
                    return
            else:
                try:
                    child.wait(max(0.01, min(SAMPLE_S, left_s)))
                except subprocess.TimeoutExpired:
                    pass
                else:
                    return
            writer.add("sample", gauges.sample())


def _end(child: subprocess.Popen[bytes], ctrl_c: list[int]) -> None:
    """Let the command end itself, as after Ctrl-C, and kill it if it does not, or at the next Ctrl-C."""
    child.send_signal(signal.SIGINT)
    seen, until = len(ctrl_c), time.monotonic() + children.ENDING_S
    while len(ctrl_c) == seen and time.monotonic() < until:
        try:
            child.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        return
    child.kill()
    child.wait()


@contextmanager
def _counting_ctrl_c() -> Iterator[list[int]]:
    """Give a list that grows at every Ctrl-C: an exception could come in the midst of writing the trace."""
    pressed: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:  # as in a script's background
        yield pressed
        return
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _own_records(own: Path, writer: TraceWriter, about: About) -> OpIndex | None:
    """Take over what a traced kvtide recorded itself; return its ops, None where there are none."""
    from kvtide.trace.attribute import OpIndex
    from kvtide.trace.file import TraceFile

    if not own.exists():
        return None
    try:
        recorded = TraceFile(own)
        for level in ("object", "op"):
            for frame in recorded.frames(level):
                writer.add(level, frame)
        ops = recorded.frame("op")
    except KvtideError as error:
        about.notes.append(f"What kvtide recorded itself cannot be read: {error}")
        return None
    about.files = recorded.about.files
    about.notes += recorded.about.notes
    about.health.num_lost += recorded.about.health.num_lost
    return OpIndex(ops, about.files)


def _decode(capture: Capture, index: OpIndex | None, writer: TraceWriter, about: About, console: Console) -> None:
    columns = (TextColumn("Decoding"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        for level, frame in capture.frames(lambda done, total: bar.update(task, completed=done, total=total)):
            writer.add(level, index.attribute(frame) if index is not None and level == "block" else frame)
    if capture.num_others:
        about.notes.append(f"{capture.num_others} events of other processes were left out.")
    if capture.is_full:
        about.notes.append("The capture ended early: it had reached its largest size.")
    if capture.is_spilled:
        about.notes.append("The capture was too large for memory: writing it shows in the trace if it is on this disk.")


@contextmanager
def _spinner(console: Console, text: str, *, is_shown: bool) -> Iterator[None]:
    if not is_shown:
        yield
        return
    with console.status(text):
        yield


def _tell(about: About, num_rows: int, output: Path, console: Console) -> None:
    seconds = (about.end_ns - about.start_ns) / 1e9
    parts: list[Any] = [f"{num} {level}" for level, num in about.rows.items() if num]
    console.print(f"Traced {seconds:.1f} s: {', '.join(parts) or 'nothing'} rows, {about.health.num_lost} events lost.")
    for note in about.notes:
        console.print(printable(note))
    size = format_bytes(output.stat().st_size)
    console.print(
        f"Kept {num_rows} rows in {printable(str(output))} ({size}); next: kvtide report {printable(str(output))}"
    )
