"""The plan of a vector store, as a table. Decides only how it looks."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtide.planner.memory import MemoryCase, MemoryPlan
from kvtide.units import format_bytes


def print_memory(case: MemoryCase, plans: Sequence[MemoryPlan], console: Console) -> None:
    """Print what each engine writes for a row and reads for a query."""
    durable = "each on disk when acknowledged" if case.is_durable else "acknowledged as each engine does"
    console.print(Text(f"{case.rows:,} vectors of {case.dim} float32, {case.rate:g} a second, {durable}. Modelled."))
    console.print(Text("Bytes written over bytes of the vectors, in all and by cause; device reads of a cold query."))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("engine", no_wrap=True)
    for name in ("all", "log", "flush", "merge", "index", "reads", "rounds", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in plans:
        written = each.written
        parts = (written.total, written.log, written.flush, sum(written.compaction), written.index)
        reads = (f"{each.reads:,.0f}", f"{each.rounds:,.0f}", format_bytes(each.read_bytes))
        table.add_row(each.engine, *(f"{part:.2f}" for part in parts), *reads)
    console.print(table)
    for each in plans:
        rate = format_bytes(each.written.total * case.rate * case.row_bytes)
        console.print(Text(f"{each.engine}: {rate} a second written; {each.how}."))
