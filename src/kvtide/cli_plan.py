"""`kvtide plan`: predict what a model, a machine and a layout give, and what would change it.

Decides only what is asked; planner computes, report.plan shows. Next: planner.options.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from kvtide.errors import ConfigError
from kvtide.hardware import Catalogue
from kvtide.hardware import load as load_catalogue
from kvtide.planner.closed import plan as make_plan
from kvtide.planner.examples import article, study
from kvtide.planner.inputs import Job, Machine
from kvtide.planner.layouts import Choice, choose
from kvtide.planner.memory import ENGINES as MEMORY_ENGINES
from kvtide.planner.memory import MemoryCase, memory_json, plan_memory
from kvtide.planner.options import PlanOptions, build, layout_case, sweep
from kvtide.planner.simulate import Simulated, simulate
from kvtide.planner.whatif import break_even, changes, cost_per_million, endurance
from kvtide.report.plan import PlanReport, SweepPoint, phase_json, plan_json, print_plan, print_sweep, sweep_json
from kvtide.report.plan_examples import print_article, print_study
from kvtide.report.plan_html import plan_page
from kvtide.report.plan_memory import print_memory

PLAN_EXAMPLE = "Example: kvtide plan llama-3-8b --gpu l40s --batch 16 --context 8000 --any-context --sweep depth=1,8,64"
EXAMPLES = ("article", "study")


def plan(
    model: Annotated[
        str | None, typer.Argument(help="A preset (llama-3-8b, ...), a config.json, or a model's folder.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences at a time.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 4096,
    output: Annotated[int, typer.Option(help="Tokens of each answer.")] = 256,
    gpu: Annotated[str, typer.Option(help="h100, h200, a100, l40s, ..., or cpu.")] = "h100",
    gpus: Annotated[int, typer.Option(help="GPUs that share the model.")] = 1,
    dtype: Annotated[str | None, typer.Option(help="Format of KV. Default: the model's.")] = None,
    weights: Annotated[str | None, typer.Option(help="Format of weights. Default: the model's.")] = None,
    kv_on_device: Annotated[str | None, typer.Option(help="Room for KV on the GPUs. Default: what is left.")] = None,
    dram: Annotated[str, typer.Option(help="DRAM for KV.")] = "256GiB",
    link: Annotated[str | None, typer.Option(help="pcie4-x16, ... Default: the GPU's.")] = None,
    ssd: Annotated[str, typer.Option(help="nvme-gen4, sata, ..., or none.")] = "nvme-gen4",
    ssds: Annotated[int, typer.Option(help="Drives, in RAID 0.")] = 1,
    disk: Annotated[str | None, typer.Option(help="Room for KV on the drives. Default: all.")] = None,
    cxl: Annotated[str, typer.Option(help="CXL memory for KV.")] = "0",
    network: Annotated[str | None, typer.Option(help="rdma-400g, tcp-100g, ...: for --disaggregate.")] = None,
    select: Annotated[str, typer.Option(help="Part of the context a step reads: full, 0.01, 1%.")] = "full",
    fragment: Annotated[str | None, typer.Option(help="Size of a read. Default: what the layout gives.")] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="auto: what suits the reads; or layer_major, block_first, ... Default: layer_major."),
    ] = None,
    block_tokens: Annotated[int, typer.Option(help="Tokens of one block.")] = 16,
    group_blocks: Annotated[int | None, typer.Option(help="Blocks stored together. Default: for 128 KiB.")] = None,
    depth: Annotated[int, typer.Option(help="Most operations in flight.")] = 64,
    io_threads: Annotated[int, typer.Option(help="Threads that submit I/O.")] = 1,
    io_path: Annotated[str, typer.Option(help="buffered, direct, io_uring, passthrough, spdk.")] = "io_uring",
    nominal: Annotated[bool, typer.Option("--nominal", help="Links at the rate of their standard.")] = False,
    overlap: Annotated[bool, typer.Option(help="Load the next layer while one computes.")] = True,
    disaggregate: Annotated[bool, typer.Option("--disaggregate", help="Prefill on another machine.")] = False,
    any_context: Annotated[bool, typer.Option("--any-context", help="Plan beyond the model's positions.")] = False,
    probe: Annotated[Path | None, typer.Option(help="A probe file: this drive instead of --ssd.")] = None,
    hardware: Annotated[Path | None, typer.Option(help="A catalogue file of your own hardware.")] = None,
    gpu_hour: Annotated[float | None, typer.Option(min=0, help="Price of one GPU for an hour.")] = None,
    sweeps: Annotated[list[str] | None, typer.Option("--sweep", help="KEY=A,B,C; several: every combination.")] = None,
    simulated: Annotated[
        bool, typer.Option("--simulate", help="Run the production cache under virtual time, too.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page to this file.")] = None,
    example: Annotated[str | None, typer.Option(help=f"A worked case: {' or '.join(EXAMPLES)}.")] = None,
    memory: Annotated[str | None, typer.Option(help="A vector store instead: kvtide, rocksdb, ..., or all.")] = None,
    rows: Annotated[int, typer.Option(help="With --memory: vectors kept.")] = 1_000_000,
    rate: Annotated[float, typer.Option(help="With --memory: vectors a second.")] = 10.0,
    dim: Annotated[int, typer.Option(help="With --memory: dimensions.")] = 768,
    durable: Annotated[bool, typer.Option("--durable", help="With --memory: each row on disk at once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict a model's first token, its pace, and the bottleneck by name, from geometry and figures of hardware."""
    catalogue, console = load_catalogue(hardware), Console(highlight=False)
    if memory is not None:
        _memory(memory, MemoryCase(rows, rate, dim, durable), console, as_json=as_json)
        return
    if example is not None:
        _example(example, catalogue, console, as_json=as_json)
        return
    if model is None:
        raise ConfigError("no model named; type kvtide plan llama-3-8b, or kvtide plan --example article")
    options = PlanOptions(
        model, batch, context, output, dtype, weights, gpu, gpus, kv_on_device, dram, link, ssd, ssds, disk, cxl,
        network, select, fragment, layout or "layer_major", block_tokens, group_blocks, depth, io_threads, io_path,
        nominal, overlap, disaggregate, any_context, probe,
    )  # fmt: skip
    if sweeps and (simulated or gpu_hour is not None):
        raise ConfigError("--sweep plans in closed form only: leave out --simulate and --gpu-hour")
    points = _swept(options, sweeps or [], catalogue)
    report = None if points else _report(options, catalogue, gpu_hour, is_simulated=simulated)
    if report is not None and (layout is not None or report.plan.job.select < 1.0):
        report = replace(report, layouts=_layouts(options, catalogue))
    if html is not None:
        html.write_text(plan_page(report, points), encoding="utf-8")
    if as_json:
        print(json.dumps(plan_json(report) if report else {"label": "modelled", "sweep": sweep_json(points)}, indent=1))
        return
    if report is not None:
        print_plan(report, console)
    else:
        print_sweep(points, console)
    if html is not None:
        console.print(f"Page in {html}", markup=False)


def _memory(engine: str, case: MemoryCase, console: Console, *, as_json: bool) -> None:
    plans = [plan_memory(name, case) for name in (MEMORY_ENGINES if engine == "all" else [engine])]
    if as_json:
        print(json.dumps(memory_json(case, plans), indent=1))
    else:
        print_memory(case, plans, console)


def _report(options: PlanOptions, catalogue: Catalogue, gpu_hour: float | None, *, is_simulated: bool) -> PlanReport:
    job, machine = build(options, catalogue)
    found = make_plan(job, machine)
    price = cost_per_million(found, gpu_hour) if gpu_hour is not None else None
    run = _simulated(job, machine) if is_simulated else None
    closed_ns = make_plan(replace(job, output=1), machine).itl_ns if run else 0.0
    table = changes(found, catalogue)
    return PlanReport(found, table, break_even(job, machine), endurance(found), price, run, closed_ns)


def _layouts(options: PlanOptions, catalogue: Catalogue) -> Choice | None:
    """Compare layouts with the groups that were typed, if any were; None without a drive."""
    case = layout_case(*build(replace(options, layout="layer_major"), catalogue))
    return choose(case) if case is not None else None


def _simulated(job: Job, machine: Machine) -> Simulated:
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("prefill", total=job.batch)
        return simulate(job, machine, on_progress=lambda done, _: bar.update(task, completed=done))


def _swept(options: PlanOptions, words: Sequence[str], catalogue: Catalogue) -> list[SweepPoint]:
    """Plan every combination; one that cannot be is a row with its reason, unless none can."""
    points = []
    for values, swept in sweep(options, words) if words else []:
        try:
            points.append(SweepPoint(values, make_plan(*build(swept, catalogue))))
        except ConfigError as refused:
            points.append(SweepPoint(values, None, str(refused)))
    if points and all(point.plan is None for point in points):
        raise ConfigError(points[0].reason)
    return points


def _example(name: str, catalogue: Catalogue, console: Console, *, as_json: bool) -> None:
    if name == "article":
        found = article(catalogue)
        if not as_json:
            print_article(found, console)
            return
        cases: dict[str, Any] = {
            key: {
                "kv_bytes": case.placement.total_bytes,
                "placement": case.placement.kv_bytes,
                "spill_ns": case.phases["prefill"].uses["link"].time_ns,
                "reload_ns": case.phases["decode"].uses["link"].time_ns,
                "ttft_ns": case.ttft_ns,
                "itl_ns": case.itl_ns,
                "steps_per_s": 1e9 / case.itl_ns,
                "phases": {phase: phase_json(each) for phase, each in case.phases.items()},
                "notes": case.notes,
            }
            for key, case in (("full", found.full), ("top_1_percent", found.sparse))
        }
        print(json.dumps({"label": "modelled", "example": name, **cases, "sweep": [asdict(r) for r in found.sweep]}))
    elif name == "study":
        traffic = study()
        if as_json:
            rates = {
                "read_bytes_per_s": traffic.read_bytes_per_s,
                "written_bytes_per_s": traffic.written_bytes_per_s,
            }
            print(json.dumps({"example": name, **asdict(traffic), **rates}))
        else:
            print_study(traffic, console)
    else:
        raise ConfigError(f"--example is {name[:40]!r}; type {' or '.join(EXAMPLES)}")
