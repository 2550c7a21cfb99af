"""The worked cases of `kvtide plan --example` on a terminal. Decides only how they look."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtide.planner.examples import FRAGMENTS, Article, Study
from kvtide.report.plan import PlanReport, print_plan
from kvtide.units import format_bytes, format_ns


def print_article(found: Article, console: Console) -> None:
    """Print both cases and how the sparse one scales."""
    console.print(Text("Everything is read for each token:", style="bold"))
    print_plan(PlanReport(found.full, [], [], None), console)
    console.print(Text("\nOne part in a hundred is read for each token, from the drives:", style="bold"))
    print_plan(PlanReport(found.sparse, [], [], None), console)
    sizes = [format_bytes(size) for size in FRAGMENTS]
    table = Table(
        title="Time between tokens by drives, depth and size of a read (modelled)", title_justify="left",
        box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True,
    )  # fmt: skip
    for name in ("drives", "depth"):
        table.add_column(name, no_wrap=True)
    for name in sizes:
        table.add_column(name, justify="right")
    cells: dict[tuple[str, int, int], list[str]] = {}
    for row in found.sweep:
        cells.setdefault((row.ssd, row.num_ssds, row.depth), []).append(f"{format_ns(row.itl_ns)} {row.bound}")
    for (ssd, num, depth), texts in cells.items():
        table.add_row(f"{num} x {ssd}", str(depth), *texts)
    console.print(table)


def print_study(found: Study, console: Console) -> None:
    """Print the traffic of the published run."""
    gib, mib = float(1 << 30), float(1 << 20)
    reads, writes = found.read_bytes_per_s, found.written_bytes_per_s
    lines = [
        "OPT-6.7B in fp16, 64 sequences, 256 + 256 tokens, all KV on the drive (FlexGen, CHEOPS 2025).",
        "Bytes from geometry (modelled), seconds from the study's log (from a paper).",
        f"read: {found.read_bytes / gib:,.0f} GiB, {reads[0] / gib:.2f} GiB/s in decode, {reads[1] / gib:.2f} in all",
        f"written: {found.written_bytes / gib:,.1f} GiB, {writes[2] / mib:.2f} MiB/s in all",
        f"  {writes[0] / mib:.1f} MiB/s in prefill, {writes[1] / mib:.1f} MiB/s in decode",
    ]
    for line in lines:
        console.print(Text(line))
