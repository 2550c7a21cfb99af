"""A plan as tables for people and as JSON values for programs. Decides only how it looks. Next: plan_html."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtide.planner.closed import PhasePlan, Plan
from kvtide.planner.layouts import Choice
from kvtide.planner.placement import TIERS
from kvtide.planner.simulate import Simulated, describe
from kvtide.planner.whatif import GAIN_MIN, BreakEven, Change, Endurance
from kvtide.units import format_bytes, format_ns, printable

CHANGES_MAX = 8


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan with what follows from it."""

    plan: Plan
    changes: list[Change]
    break_even: list[BreakEven]
    endurance: Endurance | None
    cost_per_million: float | None = None
    simulated: Simulated | None = None
    closed_itl_ns: float = 0.0  # of the same step as was simulated
    layouts: Choice | None = None  # None: not asked for


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One combination of a sweep: its values and its plan, or why there is none."""

    values: dict[str, str]
    plan: Plan | None
    reason: str = ""


def plan_json(report: PlanReport) -> dict[str, Any]:
    """Return `report` as JSON values: times in ns, sizes in bytes, rates a second. Label: modelled."""
    plan, job, machine = report.plan, report.plan.job, report.plan.machine
    return {
        "label": "modelled",
        "model": job.model.name,
        "job": {
            "batch": job.batch,
            "context": job.context,
            "output": job.output,
            "dtype": job.kv_dtype.value,
            "select": job.select,
            "layout": job.layout.value,
            "group_blocks": job.slot().group_blocks,
            "fragment_bytes": job.fragment_bytes,
        },
        "machine": {
            "gpu": machine.gpu.name,
            "gpus": machine.num_gpus,
            "link": machine.link.name if machine.link else None,
            "dram_bytes": machine.dram_bytes,
            "ssd": machine.ssd.name if machine.ssd else None,
            "ssds": machine.num_ssds,
            "depth": machine.depth,
            "io_path": machine.io_path.name,
        },
        "kv_bytes": plan.placement.total_bytes,
        "weight_bytes": plan.placement.weight_bytes,
        "placement": plan.placement.kv_bytes,
        "spilled_bytes": plan.placement.spilled_bytes,
        "ttft_ns": plan.ttft_ns,
        "itl_ns": plan.itl_ns,
        "tokens_per_s": plan.tokens_per_s,
        "phases": {name: phase_json(phase) for name, phase in plan.phases.items()},
        "changes": [asdict(change) for change in report.changes],
        "break_even": [asdict(row) for row in report.break_even],
        "endurance": asdict(report.endurance) if report.endurance else None,
        "cost_per_million_tokens": report.cost_per_million,
        "simulated": asdict(report.simulated) if report.simulated else None,
        "layouts": layouts_json(report.layouts) if report.layouts else None,
        "notes": plan.notes,
    }


def layouts_json(choice: Choice) -> dict[str, Any]:
    """Return compared layouts as JSON values: what a step reads with each, of fragments that are read whole."""
    rows = [
        {
            "layout": one.name,
            "group_blocks": one.group_blocks,
            "num_ops": one.num_ops,
            "num_bytes": one.num_bytes,
            "time_ns": one.time_ns,
            "slack_bytes": one.slack_bytes,
        }
        for one in choice.candidates
    ]
    best = choice.candidates.index(choice.best)
    return {"label": "modelled", "best": rows[best], "candidates": rows, "reasons": list(choice.reasons)}


def phase_json(phase: PhasePlan) -> dict[str, Any]:
    """Return one phase as JSON values."""
    uses = {name: asdict(use) | {"utilisation": phase.utilisation(name)} for name, use in phase.uses.items()}
    return {"total_ns": phase.total_ns, "limit": phase.limit, "bound": phase.bound, "uses": uses}


def sweep_json(points: Sequence[SweepPoint]) -> list[dict[str, Any]]:
    """Return a sweep as JSON values, one row a combination."""
    rows = []
    for point in points:
        row: dict[str, Any] = {"values": point.values}
        if point.plan is None:
            rows.append(row | {"reason": point.reason})
            continue
        plan = point.plan
        bounds = {name: phase.bound for name, phase in plan.phases.items()}
        rows.append(row | {"ttft_ns": plan.ttft_ns, "itl_ns": plan.itl_ns, "tokens_per_s": plan.tokens_per_s,
                           "bounds": bounds})  # fmt: skip
    return rows


def print_plan(report: PlanReport, console: Console) -> None:
    """Print the plan."""
    plan, job = report.plan, report.plan.job
    placed = ", ".join(f"{t} {format_bytes(plan.placement.kv_bytes[t])}" for t in TIERS if plan.placement.kv_bytes[t])
    console.print(
        Text(
            f"{printable(job.model.name)}: {job.batch} x {job.context:,} tokens, "
            f"{plan.placement.total_bytes / 1e9:,.1f} GB of KV ({job.kv_dtype.value}): {placed}. Modelled."
        )
    )
    console.print(_phases(plan))
    console.print(Text(_sentence(plan)))
    if any(map(_is_gain, report.changes)):
        console.print(_changes(report.changes))
    for row in report.break_even:
        console.print(Text(_break_even(row, job.context)))
    if report.endurance is not None:
        console.print(Text(_endurance(report.endurance)))
    if report.cost_per_million is not None:
        console.print(Text(f"A million output tokens cost {report.cost_per_million:,.2f}, the GPUs alone."))
    if report.simulated is not None:
        console.print(Text(f"{describe(report.simulated)}; in closed form {format_ns(report.closed_itl_ns)}."))
    if report.layouts is not None:
        console.print(_layouts(report.layouts))
        for sentence in report.layouts.reasons:
            console.print(Text(sentence))
    for note in plan.notes:
        console.print(Text(f"Note: {note}"))


def print_sweep(points: Sequence[SweepPoint], console: Console) -> None:
    """Print a row a combination."""
    keys = list(points[0].values)
    table = _table("Sweep (modelled)", [*keys, "TTFT", "ITL", "tokens/s", "prefill", "decode"], num_left=len(keys))
    for point in points:
        values = [Text(printable(point.values[key])) for key in keys]
        if point.plan is None:
            table.add_row(*values, "-", "-", "-", "-", Text(point.reason, overflow="ellipsis", no_wrap=True))
            continue
        plan = point.plan
        table.add_row(
            *values,
            format_ns(plan.ttft_ns),
            format_ns(plan.itl_ns),
            f"{plan.tokens_per_s:,.3g}",
            plan.phases["prefill"].bound,
            plan.phases["decode"].bound,
        )
    console.print(table)


def _table(title: str, columns: Sequence[str], *, num_left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < num_left else "right", no_wrap=True)
    return table


def _phases(plan: Plan) -> Table:
    table = _table("Phases", ["", "resource", "time", "busy", "bytes", "ops", "of", "depth"], num_left=2)
    for name, phase in plan.phases.items():
        table.add_row(Text(name, style="bold"), Text(phase.bound, style="bold"), format_ns(phase.total_ns))
        for resource, use in sorted(phase.uses.items(), key=lambda item: -item[1].time_ns):
            table.add_row(
                "",
                resource,
                format_ns(use.time_ns),
                f"{phase.utilisation(resource):.0%}",
                format_bytes(use.num_bytes),
                f"{use.num_ops:,}" if use.num_ops else "",
                format_bytes(use.op_bytes) if use.op_bytes else "",
                f"{use.depth:.3g}" if use.depth else "",
            )
    return table


def _layouts(choice: Choice) -> Table:
    columns = ["layout", "blocks", "reads", "of", "bytes", "time", "slack", ""]
    table = _table("Layouts: what a step reads (modelled)", columns)
    for one in choice.candidates:
        table.add_row(
            one.name,
            str(one.group_blocks),
            f"{one.num_ops:,.0f}",
            format_bytes(one.num_bytes / one.num_ops) if one.num_ops else "",
            format_bytes(one.num_bytes),
            format_ns(one.time_ns),
            format_bytes(one.slack_bytes),
            "best" if one is choice.best else "",
            style="bold" if one is choice.best else "",
        )
    return table


def _sentence(plan: Plan) -> str:
    decode = plan.phases["decode"]
    return (
        f"First tokens after {format_ns(plan.ttft_ns)} ({plan.phases['prefill'].bound}); then one every "
        f"{format_ns(plan.itl_ns)}, {plan.tokens_per_s:,.3g} tokens/s of the batch: {decode.limit} is the bottleneck "
        f"({decode.bound})."
    )


def _changes(changes: Sequence[Change]) -> Table:
    table = _table("What if", ["one change", "TTFT", "ITL", "then decode is"])
    shown = [change for change in changes if not change.reason and _is_gain(change)][:CHANGES_MAX]
    for change in shown:
        table.add_row(change.name, _gain(change.ttft_gain), _gain(change.itl_gain), change.bound)
    return table


def _is_gain(change: Change) -> bool:
    return max(change.ttft_gain, change.itl_gain) >= GAIN_MIN


def _gain(value: float) -> str:
    return "-" if 1 / GAIN_MIN < value < GAIN_MIN else f"{value:.2f} x"


def _break_even(row: BreakEven, context: int) -> str:
    times = f"{format_ns(row.load_ns)} to load, {format_ns(row.compute_ns)} to compute {context:,} tokens"
    if row.tokens is None:
        return f"From {row.tier}: computing is always faster ({times})."
    return f"From {row.tier}: loading is faster from {row.tokens:,} tokens on ({times})."


def _endurance(found: Endurance) -> str:
    rated = "" if found.rated is None else f", made for {found.rated:g}"
    return (
        f"Drives take {format_bytes(found.bytes_per_day)} a day when the machine is never idle: "
        f"{found.drive_writes_per_day:.2f} drive writes a day{rated}."
    )
