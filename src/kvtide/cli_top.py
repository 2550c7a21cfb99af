"""`kvtide top`: what a device or a process does right now, with the verdict of the last seconds.

Owns the defaults. Captures the kernel second by second where it may; otherwise shows what /proc and /sys tell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvtide.cli_trace import find_device
from kvtide.errors import ConfigError, UnsupportedError
from kvtide.units import format_bytes, format_ns, printable

if TYPE_CHECKING:
    from kvtide.probe.caps import DeviceCaps
    from kvtide.trace.figures import Indicators, Side
    from kvtide.trace.findings import Verdict

TOP_EXAMPLE = "Example: kvtide top --device nvme0n1"


@dataclasses.dataclass(slots=True)
class View:
    """What is known of the last interval; `figures` and `verdict` only where the kernel was captured."""

    seconds: float
    rates: dict[str, float]
    figures: Indicators | None = None
    verdict: Verdict | None = None
    num_lost: int = 0


def top(
    device: Annotated[
        str | None, typer.Option(help="Block device, or a path on it. Default: that of the working directory.")
    ] = None,
    pid: Annotated[int | None, typer.Option(help="Only this process and its children.")] = None,
    interval: Annotated[float, typer.Option(min=0.2, max=60, help="Seconds between two views.")] = 1.0,
    count: Annotated[int | None, typer.Option(min=1, help="Leave after so many views.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a view, one a line.")] = False,
) -> None:
    """Show rates, sizes, depth, latency and the current verdict, until Ctrl-C."""
    caps = find_device(device)
    if pid is not None and not Path(f"/proc/{pid}").is_dir():
        raise ConfigError(f"--pid {pid}: there is no such process")
    why_not = _why_not()
    title = f"{caps.name or 'no device'}{f', process {pid}' if pid else ''}"
    views = _views(caps, pid, interval, count, is_captured=not why_not)
    with contextlib.suppress(KeyboardInterrupt):  # that is how it is meant to end
        if as_json:
            for view in views:
                print(json.dumps(_values(view)), flush=True)
            return
        console = Console(highlight=False, markup=False, emoji=False)
        note = f"{why_not}: sizes, depth over time and verdict are not known" if why_not else ""
        with Live(console=console, auto_refresh=False, screen=False) as live:
            for view in views:
                live.update(_drawn(view, title, note), refresh=True)


def _why_not() -> str:
    from kvtide.trace.kernel import find_tracefs

    try:
        find_tracefs()
    except UnsupportedError as refused:
        return str(refused)
    return ""


def _views(
    caps: DeviceCaps, pid: int | None, interval: float, count: int | None, *, is_captured: bool
) -> Iterator[View]:
    from kvtide.trace.live import Gauges, family

    gauges = Gauges(caps.name, lambda: family({pid}) if pid else set())
    done = 0
    while count is None or done < count:
        started = time.monotonic_ns()
        figures, verdict, num_lost = _captured(caps, pid, interval) if is_captured else _slept(interval)
        rates = {
            f"{source}/{name}": value
            for source, name, value in gauges.sample().select("source", "name", "value").iter_rows()
        }
        yield View((time.monotonic_ns() - started) / 1e9, rates, figures, verdict, num_lost)
        done += 1
        if pid is not None and not Path(f"/proc/{pid}").is_dir():
            return


def _slept(interval: float) -> tuple[None, None, int]:
    time.sleep(interval)
    return None, None, 0


def _captured(caps: DeviceCaps, pid: int | None, interval: float) -> tuple[Indicators, Verdict, int]:
    """Capture for one interval; return its figures, the verdict, and how many events were lost."""
    from kvtide.trace.file import About
    from kvtide.trace.indicators import Meter
    from kvtide.trace.kernel import Capture, CaptureOptions
    from kvtide.trace.verdict import judge

    about = About(source="kernel", devices={str(caps.number): caps.as_traced()} if caps.name else {})
    options = CaptureOptions(device=caps.number if caps.name else None, pids=(pid,) if pid else ())
    capture = Capture(options)
    try:
        about.start_ns = time.monotonic_ns()
        capture.start()
        time.sleep(interval)
        about.end_ns = time.monotonic_ns()
        capture.stop()
        about.health.num_lost = capture.num_lost
        meter = Meter(about)
        for level, frame in capture.frames():
            meter.add(level, frame)
        figures = meter.result()
        return figures, judge(figures, about=about), capture.num_lost
    finally:
        capture.close()


def _values(view: View) -> dict[str, Any]:
    from kvtide.report.loaded import as_values

    found: dict[str, Any] = {"seconds": view.seconds, "rates": view.rates, "num_lost": view.num_lost}
    if view.figures is not None and view.verdict is not None:
        found |= {"whole": as_values(view.figures.whole), "verdict": as_values(view.verdict)}
    return found


def _drawn(view: View, title: str, note: str) -> Group:
    table = Table(title=f"{printable(title)}, last {view.seconds:.1f} s", title_justify="left")
    for name in ("", "ops/s", "bytes/s", "median", "depth", "p50", "p99"):
        table.add_column(name, justify="left" if not name else "right")
    rates = view.rates
    for letter, name in (("r", "read"), ("w", "write")):
        side = getattr(view.figures.whole, name) if view.figures is not None else None
        table.add_row(name, *(_measured(side) if side is not None else _told(rates, letter)))
    lines = [Text(f"verdict: {view.verdict.name}. {printable(view.verdict.sentence)}")] if view.verdict else []
    if "process/cpu_share" in rates:
        lines.append(Text(f"CPU of one core: {rates['process/cpu_share']:.0%}"))
    if view.num_lost:
        lines.append(Text(f"{view.num_lost} events lost", style="yellow"))
    lines += [Text(note, style="yellow")] if note else []
    return Group(table, *lines)


def _measured(side: Side) -> list[str]:
    depth = f"{side.depth:.1f}" if side.depth is not None else "-"
    times = [format_ns(side.device.p50_ns), format_ns(side.device.p99_ns)]
    return [
        f"{side.ops_per_s:,.0f}",
        format_bytes(side.bytes_per_s),
        format_bytes(side.sizes.median_bytes),
        depth,
        *times,
    ]


def _told(rates: dict[str, float], letter: str) -> list[str]:
    ops, size = rates.get(f"diskstats/{letter}/s", 0.0), rates.get(f"diskstats/{letter}kB/s", 0.0) * 1024
    wait_ms = rates.get(f"diskstats/{letter}_await", 0.0)
    mean = format_bytes(size / ops) + " mean" if ops else "-"
    return [f"{ops:,.0f}", format_bytes(size), mean, f"{ops * wait_ms / 1000:.1f}", f"{wait_ms:.2f} ms mean", "-"]
