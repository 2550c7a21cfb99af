"""Why a store wrote, as a table and as JSON values. Decides only how it looks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtide.stores.explain import Explained
from kvtide.units import format_bytes, printable


def explained_json(found: Explained) -> dict[str, Any]:
    """Return `found` as JSON values, sizes in bytes. Label: measured."""
    total = {"written_bytes": found.written_bytes, "small_share": found.small_share}
    amplification = found.written_bytes / found.user_bytes if found.user_bytes else None
    return {"label": "measured", **asdict(found), **total, "amplification": amplification}


def print_explained(found: Explained, console: Console) -> None:
    """Print bytes by cause, what reads did, and what would help."""
    total, user = found.written_bytes, found.user_bytes
    table = Table(title=f"Writes of {found.store} by cause (measured)", title_justify="left", box=SIMPLE_HEAD)
    for index, name in enumerate(("cause", "bytes", "share", *(["x"] if user else []), "writes", "small")):
        table.add_column(name, justify="left" if index == 0 else "right")
    for each in found.causes:
        times = [f"{each.num_bytes / user:.2f}"] if user else []
        small = f"{each.num_small / each.num_writes:.0%}"
        share = f"{each.num_bytes / total:.1%}"
        table.add_row(each.name, format_bytes(each.num_bytes), share, *times, f"{each.num_writes:,}", small)
    console.print(table)
    over = f", {total / user:.2f} x what the user gave" if user else ""
    line = f"{format_bytes(total)} written{over}; {found.small_share:.0%} of the writes are below 16 KiB"
    console.print(Text(f"{line}; {found.num_flushes:,} flushes."))
    if found.num_reads:
        console.print(
            Text(
                f"{found.num_reads:,} reads ({format_bytes(found.read_bytes)}) in {found.num_bursts:,} bursts: "
                f"dependent rounds p50 {found.rounds_p50:g}, most {found.rounds_max}, "
                f"{found.reads_per_round:.1f} reads a round."
            )
        )
    for name, value in sorted(found.rocksdb.items()):
        if value and (name.startswith("tables") or "stall" in name):
            console.print(Text(f"RocksDB says: {printable(name)} {value:,}", style="dim"))
    for remedy in found.remedies:
        console.print(Text(f"Would help: {remedy}."))
    for note in found.notes:
        console.print(Text(printable(note), style="dim"))
