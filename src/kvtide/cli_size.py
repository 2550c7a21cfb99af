"""`kvtide size`: the numbers of `sizing` as tables for people or JSON for programs. Decides only how they look."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtide.modelfiles import load_model
from kvtide.sizing import FragmentRow, Phase, Reservation, SizeReport, size_report
from kvtide.spec import Dtype
from kvtide.units import format_bytes, printable

DEFAULT_TOKENS = 4096
SIZE_EXAMPLE = "Example: kvtide size llama-3-70b --tokens 32000 --batch 32"


def size(
    model: Annotated[str, typer.Argument(help="A preset (llama-3-8b, ...), a config.json, or a model's folder.")],
    tokens: Annotated[int, typer.Option(help="Tokens of each sequence.")] = DEFAULT_TOKENS,
    batch: Annotated[int, typer.Option(help="Sequences at a time.")] = 1,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"Format KV is kept in: {', '.join(d.value for d in Dtype)}. Default: the model's."),
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks that share the KV heads.")] = 1,
    block_tokens: Annotated[int, typer.Option(help="Tokens of one block.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Size a model's KV cache, the work of its phases, and the I/O each layout causes."""
    report = size_report(
        load_model(model),
        num_tokens=tokens,
        batch=batch,
        dtype=None if dtype is None else Dtype.parse(dtype),
        tp_size=tp,
        block_tokens=block_tokens,
    )
    if as_json:
        typer.echo(json.dumps(report_json(report), indent=2))
    else:
        print_report(report, Console())


def report_json(report: SizeReport) -> dict[str, Any]:
    """`report` as JSON values; sizes are whole bytes, counts of work are whole FLOP."""
    model, shape = report.model, report.shape
    by_layout: dict[str, dict[str, dict[str, Any]]] = {}
    for row in report.fragments:
        by_layout.setdefault(row.layout.value, {})[row.access.value] = _fragment_json(row)
    return {
        "model": model.name,
        "source": model.source,
        "inputs": {
            "tokens": report.num_tokens,
            "batch": report.batch,
            "dtype": shape.dtype.value,
            "tp": shape.tp_size,
            "block_tokens": report.block_tokens,
            "group_blocks": report.group_blocks,
        },
        "num_layers": model.num_layers,
        "num_kv_layers": shape.num_layers,
        "num_params": model.num_params,
        "active_params": model.active_params,
        "weight_dtype": model.weight_dtype.value,
        "max_positions": model.max_positions,
        "bytes_per_token": report.bytes_per_token,
        "block_bytes": report.block_bytes,
        "total_bytes": report.total_bytes,
        "windowed_bytes": report.windowed_bytes,
        "total_bytes_all_ranks": report.total_bytes_all_ranks,
        "prefill": _phase_json(report.prefill),
        "decode": _phase_json(report.decode),
        "contiguous": _reservation_json(report.contiguous),
        "paged": _reservation_json(report.paged),
        "fragments": by_layout,
    }


def _fragment_json(row: FragmentRow) -> dict[str, Any]:
    found = row.found
    picked = {} if row.k is None else {"k": row.k}
    return picked | {
        "fragment_bytes": found.fragment_bytes,
        "num_fragments": found.num_fragments,
        "wanted_bytes": found.wanted_bytes,
        "padded_bytes": found.padded_bytes,
        "amplification": found.amplification,
    }


def _phase_json(phase: Phase) -> dict[str, Any]:
    return {
        "flop": phase.flop,
        "weight_flop": phase.weight_flop,
        "attention_flop": phase.attention_flop,
        "bytes_moved": phase.bytes_moved,
        "weight_bytes": phase.weight_bytes,
        "kv_read_bytes": phase.kv_read_bytes,
        "kv_written_bytes": phase.kv_written_bytes,
        "intensity_flop_per_byte": phase.intensity,
    }


def _reservation_json(found: Reservation) -> dict[str, Any]:
    return {
        "reserved_tokens": found.reserved_tokens,
        "reserved_bytes": found.reserved_bytes,
        "used_bytes": found.used_bytes,
        "wasted_bytes": found.wasted_bytes,
        "utilisation": found.utilisation,
        "internal_fragmentation": found.internal_fragmentation,
    }


def print_report(report: SizeReport, console: Console) -> None:
    """Tables of sizes, phases, allocators and fragments."""
    model = report.model
    console.print(Text(f"{printable(model.name)}  ({printable(model.source)})", style="bold"))
    console.print(_sizes(report))
    console.print(_phases(report))
    console.print(_allocators(report))
    console.print(_fragments(report))


def _table(title: str, *names: str, left: int = 1) -> Table:
    """An empty table whose first `left` columns hold words and the others numbers; it fits 80 columns."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index < left else "right", no_wrap=True)
    return table


def _sizes(report: SizeReport) -> Table:
    shape, ranks = report.shape, report.shape.tp_size
    where = "" if ranks == 1 else f", one of {ranks} ranks"
    table = _table(f"KV cache in {shape.dtype.value}{where}", "what", "size")
    table.add_row(
        f"a token, {shape.num_layers} of {report.model.num_layers} layers", format_bytes(report.bytes_per_token)
    )
    table.add_row(f"a block of {report.block_tokens} tokens", format_bytes(report.block_bytes))
    table.add_row(f"{report.batch:,} x {report.num_tokens:,} tokens", format_bytes(report.total_bytes))
    table.add_row("", f"{report.total_bytes:,} B")
    if report.windowed_bytes != report.total_bytes:
        table.add_row("of it within reach of sliding windows", format_bytes(report.windowed_bytes))
    if ranks > 1:
        table.add_row("on all ranks", format_bytes(report.total_bytes_all_ranks))
    if report.num_tokens > report.model.max_positions:
        table.caption = f"The model was published for {report.model.max_positions:,} positions."
    return table


def _phases(report: SizeReport) -> Table:
    title = "Work of the batch on the whole model, computed; FLOP/byte is an upper bound"
    table = _table(title, "phase", "FLOP", "attention", "weights", "KV read", "KV written", "FLOP/byte")
    for name, phase in (("prefill", report.prefill), ("decode step", report.decode)):
        table.add_row(
            name,
            _flop(phase.flop),
            f"{phase.attention_flop / phase.flop:.1%}",
            format_bytes(phase.weight_bytes),
            format_bytes(phase.kv_read_bytes),
            format_bytes(phase.kv_written_bytes),
            f"{phase.intensity:,.1f}",
        )
    return table


def _flop(count: int) -> str:
    value = float(count)
    for unit in ("", "K", "M", "G", "T", "P"):
        if value < 999.5:
            return f"{value:.3g} {unit}".rstrip()
        value /= 1000
    return f"{value:,.4g} E"


def _allocators(report: SizeReport) -> Table:
    title = "Memory set aside: room for the longest sequence, or whole blocks"
    table = _table(title, "allocator", "tokens each", "reserved", "used", "wasted", "utilisation")
    rows = (("contiguous", report.contiguous), ("paged", report.paged))
    for name, found in rows:
        table.add_row(
            name,
            f"{found.reserved_tokens:,}",
            format_bytes(found.reserved_bytes),
            format_bytes(found.used_bytes),
            format_bytes(found.wasted_bytes),
            f"{found.utilisation:.1%}",
        )
    return table


def _fragments(report: SizeReport) -> Table:
    title = (
        f"Contiguous runs of one sequence; groups of {report.group_blocks} blocks, in block_first 1\n"
        "k: scattered blocks or tokens that are read; moved: bytes for a byte wanted"
    )
    table = _table(title, "layout", "access", "k", "run", "runs", "wanted", "moved", left=2)
    for row in report.fragments:
        found = row.found
        table.add_row(
            row.layout.value,
            row.access.value,
            "" if row.k is None else f"{row.k:,}",
            format_bytes(found.fragment_bytes),
            f"{found.num_fragments:,}",
            format_bytes(found.wanted_bytes),
            f"{found.amplification:.4g}x",
            end_section=row.access.value == "read_head_tokens",
        )
    return table
