"""A replay as tables for people and as JSON values for programs. Decides only how it looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtide.planner.replay import CaseResult, Replayed
from kvtide.planner.timed import Timed
from kvtide.units import format_bytes, format_ns, printable

CURVE_ROWS = 10  # shown of a curve; JSON has all


def replay_json(found: Replayed, timed: Sequence[Timed]) -> dict[str, Any]:
    """Return a replay as JSON values: sizes in bytes, times in ns. Counts are exact, times modelled."""
    workload = found.workload
    return {
        "label": "simulated",
        "workload": {
            "name": workload.name,
            "source": workload.source,
            "requests": workload.num_requests,
            "blocks": workload.num_blocks,
            "unique_blocks": workload.num_unique,
            "block_tokens": workload.block_tokens,
            "input_tokens": int(workload.input_tokens.sum()),
            "malformed": workload.malformed.num,
            "notes": list(workload.notes),
        },
        "block_bytes": found.block_bytes,
        "ideal": {"hit_blocks": found.ideal_blocks, "hit_tokens": found.ideal_tokens},
        "cases": [_case_json(result) for result in found.results],
        "curve": [{"bytes": size, "hit_blocks": hits} for size, hits in found.curve_rows()],
        "timed": [_timed_json(each) for each in timed],
    }


def _case_json(result: CaseResult) -> dict[str, Any]:
    values = asdict(result)
    return values.pop("case") | values | {"writes_per_reread": result.writes_per_reread}


def _timed_json(timed: Timed) -> dict[str, Any]:
    values = asdict(timed)
    values["ttft_ns"], values["step_ns"] = _median(timed.ttft_ns), _median(timed.step_ns)
    return values | {"num_requests": len(timed.ttft_ns)}


def _median(values: Sequence[int]) -> float | None:
    return float(np.median(values)) if values else None


def print_replay(found: Replayed, timed: Sequence[Timed], console: Console) -> None:
    """Print what was found."""
    workload = found.workload
    num, tokens = max(1, workload.num_blocks), max(1, int(workload.input_tokens.sum()))
    console.print(
        Text(
            f"{printable(workload.name)} ({workload.source}): {workload.num_requests:,} requests, {num:,} blocks of "
            f"{workload.block_tokens} tokens, {format_bytes(found.block_bytes)} each, {workload.num_unique:,} unique. "
            f"An endless cache hits {found.ideal_blocks:,} ({found.ideal_blocks / num:.1%}), "
            f"{found.ideal_tokens / tokens:.1%} of the prompts' tokens."
        )
    )
    if workload.malformed.num:
        shown = "; ".join(f"line {line}: {printable(reason)}" for line, reason in workload.malformed.first)
        console.print(Text(f"{workload.malformed.num:,} lines were malformed: {shown}"))
    console.print(_cases(found, num))
    console.print(_curve(found, num))
    if timed:
        console.print(_timed(timed))
    for note in workload.notes:
        console.print(Text(f"Note: {printable(note)}"))


def _table(title: str, columns: Sequence[str], *, num_left: int) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < num_left else "right", no_wrap=True)
    return table


def _cases(found: Replayed, num: int) -> Table:
    sizes = {(result.case.dram_bytes, result.case.disk_bytes) for result in found.results}
    is_one = len(sizes) == 1
    where = ", ".join(f"DRAM {format_bytes(dram)}, disk {format_bytes(disk)}" for dram, disk in sizes) if is_one else ""
    columns = ["policy", "hits", "of DRAM", "of disk", "read", "written", "per reread", "saved"]
    title = f"Policies{f', {where}' if where else ''} (counts exact, times modelled)"
    table = _table(title, columns if is_one else ["DRAM", "disk", *columns], num_left=1 if is_one else 3)
    for result in found.results:
        case, ratio = result.case, result.writes_per_reread
        room = [] if is_one else [format_bytes(case.dram_bytes), format_bytes(case.disk_bytes)]
        table.add_row(
            *room,
            case.policy if case.admission == "always" else f"{case.policy}, {case.admission}",
            f"{(result.dram_hits + result.disk_hits) / num:.2%}",
            f"{result.dram_hits / num:.2%}",
            f"{result.disk_hits / num:.2%}",
            format_bytes(result.read_bytes),
            format_bytes(result.written_bytes),
            "-" if ratio is None else f"{ratio:.1f}",
            f"{result.saved_ns / max(1.0, result.compute_ns):.1%}",
        )
    table.caption = "per reread: bytes written for each byte read again; saved: of the time to compute all prompts"
    table.caption_justify = "left"
    return table


def _curve(found: Replayed, num: int) -> Table:
    table = _table("Hits of an LRU tier by its size", ["size", "hits", ""], num_left=0)
    rows = found.curve_rows()
    kept = np.unique(np.linspace(0, len(rows) - 1, CURVE_ROWS).astype(int))
    for index in kept.tolist():
        size, hits = rows[index]
        table.add_row(format_bytes(size), f"{hits / num:.1%}", Text("#" * round(40 * hits / num)))
    table.columns[2].justify = "left"
    return table


def _timed(timed: Sequence[Timed]) -> Table:
    title = f"The first {len(timed[0].ttft_ns)} requests through the production cache"
    table = _table(title, ["", *(each.label for each in timed)], num_left=1)
    rows: dict[str, Callable[[Timed], str]] = {
        "tokens matched": lambda t: f"{t.matched_tokens / max(1, t.prompt_tokens):.1%}",
        "TTFT p50": lambda t: _time(t.ttft_ns, 50),
        "TTFT p99": lambda t: _time(t.ttft_ns, 99),
        "step p50": lambda t: _time(t.step_ns, 50),
        "reads": lambda t: f"{t.num_reads:,}",
        "bytes read": lambda t: format_bytes(t.read_bytes),
        "writes": lambda t: f"{t.num_writes:,}",
        "bytes written": lambda t: format_bytes(t.written_bytes),
        "mean depth": lambda t: f"{t.depth_mean:.1f}",
    }
    for name, text in rows.items():
        table.add_row(name, *(text(each) for each in timed))
    return table


def _time(values: Sequence[int], percentile: float) -> str:
    return format_ns(float(np.percentile(values, percentile))) if values else "-"
