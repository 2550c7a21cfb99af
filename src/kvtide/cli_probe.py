"""`kvtide probe`: measure the device under a path, keep the result for later commands, and show its roofline.

Owns the defaults and the place of the probe file. Decides how it looks; `probe` decides what is measured.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvtide import __version__
from kvtide.errors import ConfigError
from kvtide.units import format_bytes, format_ns, printable

if TYPE_CHECKING:
    from kvtide.probe.file import Probe
    from kvtide.probe.fit import RoofFit
    from kvtide.probe.memory import Dram, GpuCopies

PROBE_EXAMPLE = "Example: kvtide probe /mnt/nvme --seconds 60 --html probe.html"
KEY_SIZES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
WIDTH_MAX = 100  # of the drawing
STAGES = {"memory": "copying memory", "fill": "writing the file", "measure": "measuring"}


def probe(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A directory on the device, or a file in it.")],
    seconds: Annotated[float, typer.Option(help="Time to spend, 1 to 3600. More time, more rounds.")] = 60.0,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Probe file. Default: where other commands look for it."),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with the roofline.")] = None,
    engine: Annotated[str, typer.Option(help="auto, uring or threads.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Of offsets and order.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with all cells.")] = False,
) -> None:
    """Measure the device under PATH: rate and latency by size and depth, roofs, knee, and memory.

    Writes a temporary file of at most 1 GiB there, without a name, so that nothing stays behind.
    """
    from kvtide.probe.caps import caps_of
    from kvtide.probe.file import as_json as as_values
    from kvtide.probe.file import check_place, default_path, knee_bytes_of, save
    from kvtide.probe.survey import ProbeOptions, check_seconds, probe_path

    check_seconds(seconds)
    place = output or default_path(_cache_dir(), caps_of(path))
    if output is None:
        _make_directory(place.parent)
    for file in filter(None, (place, html)):
        check_place(file)
    if html is not None and html.absolute() == place.absolute():
        raise ConfigError(f"-o and --html both name {html}; type two files")
    with _progress() as on_progress:
        options = ProbeOptions(seconds=seconds, engine=engine, seed=seed)
        found = probe_path(path, options, version=__version__, on_progress=on_progress)
    knee_bytes = knee_bytes_of(found)
    try:
        save(found, place)
        if html is not None:
            _write_page(found, html)
    finally:  # what was measured is told even where it cannot be written
        if as_json:
            print(json.dumps({**as_values(found), "knee_bytes": knee_bytes, "file": str(place)}))
        else:
            _show(found, knee_bytes, Console(highlight=False, markup=False, emoji=False))
    if not as_json:
        typer.echo(f"Kept in {printable(str(place))}" + (f", page in {printable(str(html))}" if html else ""))


def _cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "kvtide"


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {directory}: {error.strerror}; type -o with a file to write") from None


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Give a function that draws a bar on the terminal.

    It is redrawn between runs only: a thread that draws would be counted as CPU time of ops.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, auto_refresh=False)
    task = bar.add_task("", total=None)

    def show(stage: str, done: int, total: int) -> None:
        bar.update(task, description=STAGES[stage], completed=done, total=total)
        if console.is_terminal:
            bar.refresh()

    if console.is_terminal:
        bar.start()
    try:
        yield show
    finally:
        if console.is_terminal:
            bar.stop()


def _show(found: Probe, knee_bytes: int, console: Console) -> None:
    """Print the caps, the roofline of reads, a few cells, the roofs, memory and what is doubtful."""
    from kvtide.report.roofline import Mark, draw_roofline

    for line in _caps_lines(found):
        console.print(Text(printable(line)), soft_wrap=True)
    reads = [cell for cell in found.cells if not cell.is_write and cell.is_random]
    depths = sorted({cell.depth for cell in reads})
    ends = (depths[0], depths[-1])
    letters = {ends[1]: "o", ends[0]: "x"}
    marks = [Mark(cell.size_bytes, cell.bytes_per_s, letters[cell.depth]) for cell in reads if cell.depth in letters]
    console.print(Text(f"\nRandom reads (measured): x depth {ends[0]}, o depth {ends[1]}; dots: fitted roofs"))
    is_plain = not console.encoding.lower().startswith("utf")
    width = min(console.width, WIDTH_MAX)
    for line in draw_roofline(found.read.roof, marks, depths=ends, width=width, plain=is_plain):
        console.print(Text(line), no_wrap=True, overflow="crop")
    console.print()
    console.print(_cell_table(found))
    console.print(_roof_table(found))
    console.print(Text(f"Knee (measured): reads of {format_bytes(knee_bytes)} reach 90 % of the bandwidth roof."))
    console.print(Text(_dram_line(found.dram)))
    console.print(Text(printable(_gpu_line(found.gpu))))
    for warning in found.warnings:
        console.print(Text(f"Warning: {printable(warning)}"), style="yellow")


def _caps_lines(found: Probe) -> list[str]:
    """Return what is known of the device, in two lines."""
    caps, how = found.caps, "direct" if found.is_direct else "through the page cache"
    measured = f"{format_bytes(found.file_bytes)} file, {found.engine}, {how}, {found.num_rounds} rounds of a cell"
    if not caps.name:
        return [f"{caps.file_system or 'unknown file system'} at {caps.mount_point or '?'}, no block device", measured]
    kind = "virtual drive" if caps.is_virtual else "rotating disk" if caps.is_rotational else "solid-state drive"
    stack = f" under {' on '.join(caps.stack[:-1])}" if len(caps.stack) > 1 else ""
    first = (
        f"{' '.join(filter(None, (caps.name, caps.model)))}{stack}: {kind}, {format_bytes(caps.capacity_bytes)}, "
        f"{caps.file_system} at {caps.mount_point}"
    )
    limit = format_bytes(caps.max_sectors_bytes) if caps.max_sectors_bytes else "not limited"
    second = (
        f"read-ahead {format_bytes(caps.read_ahead_bytes)}, largest command {limit}, "
        f"scheduler {caps.scheduler or 'unknown'}, {caps.nr_requests} requests; {measured}"
    )
    return [first, second]


def _cell_table(found: Probe) -> Table:
    """Return a few cells of random access: each key size at the shallowest and at its deepest queue."""
    table = Table(
        title="Random cells (measured)", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for name in ("", "size", "depth", "ops/s", "MiB/s", "p50 us", "p99 us", "CPU us", "spread"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for is_write in (False, True):
        for size in KEY_SIZES:
            cells = [cell for cell in found.cells if cell.is_random and cell.is_write == is_write]
            cells = sorted((cell for cell in cells if cell.size_bytes == size), key=lambda cell: cell.depth)
            for cell in (cells[0], cells[-1]) if len(cells) > 1 else cells:
                table.add_row(
                    "write" if is_write else "read",
                    format_bytes(size),
                    str(cell.depth),
                    f"{cell.ops_per_s:,.0f}",
                    f"{cell.bytes_per_s / 2**20:,.0f}",
                    f"{cell.latency_ns_p50 / 1e3:,.0f}",
                    f"{cell.latency_ns_p99 / 1e3:,.0f}",
                    f"{cell.host_ns / 1e3:.1f}",
                    f"{cell.spread:.0%}",
                )
    return table


def _roof_table(found: Probe) -> Table:
    """Return the fitted roofs of both directions, side by side."""
    table = Table(title="Roofs (fitted)", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("", "reads", "writes"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    sides = (found.read, found.write)
    measures: list[tuple[str, Callable[[RoofFit], str]]] = [
        ("IOPS", lambda side: f"{side.roof.iops_max:,.0f}"),
        ("bandwidth", lambda side: f"{format_bytes(side.roof.bytes_per_s_max)}/s"),
        ("IOPS meets bandwidth at", lambda side: format_bytes(side.knee_bytes)),
        ("latency of an empty op", lambda side: format_ns(side.roof.latency_ns)),
        ("rate of one op in flight", lambda side: f"{format_bytes(side.roof.channel_bytes_per_s)}/s"),
        ("CPU of an op", lambda side: format_ns(side.roof.host_ns)),
        ("off by, median and most", lambda side: f"{_percent(side.error_median)}, {_percent(side.error_max)}"),
    ]
    for name, measure in measures:
        table.add_row(name, *(measure(side) for side in sides))
    for size in sorted({advice.size_bytes for side in sides for advice in side.depths}):
        table.add_row(f"depth for 90 % at {format_bytes(size)}", *(_depth_of(side, size) for side in sides))
    return table


def _percent(log_error: float) -> str:
    return f"{math.expm1(log_error):.0%}"


def _depth_of(side: RoofFit, size: int) -> str:
    return next((f"{math.ceil(advice.depth)}" for advice in side.depths if advice.size_bytes == size), "-")


def _dram_line(dram: Dram | None) -> str:
    if dram is None:
        return "DRAM: not measured."
    return (
        f"DRAM copy (measured): {format_bytes(dram.bytes_per_s_one)}/s with one thread, "
        f"{format_bytes(dram.bytes_per_s_all)}/s with {dram.num_threads}."
    )


def _gpu_line(gpu: GpuCopies) -> str:
    if gpu.reason:
        return f"Host to GPU: not measured, {gpu.reason}."
    both = zip(gpu.sizes_bytes, gpu.to_device_bytes_per_s, gpu.to_host_bytes_per_s, strict=True)
    told = "; ".join(f"{format_bytes(size)} {format_bytes(to)}/s, {format_bytes(back)}/s" for size, to, back in both)
    return f"{gpu.name}, to the device and back, pinned: {told}."


def _write_page(found: Probe, path: Path) -> None:
    from kvtide.probe.file import write_whole
    from kvtide.report.roofline_html import probe_page

    write_whole(path, probe_page(found, heading=_caps_lines(found)))
