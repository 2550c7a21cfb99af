"""`kvtide replay`: what a cache would do for a log of requests. Decides only what is asked; planner.replay computes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from kvtide.errors import ConfigError
from kvtide.evict import EVICTOR_NAMES, make_evictor
from kvtide.evict.admission import make_admission
from kvtide.hardware import load as load_catalogue
from kvtide.planner.calibrate import measure_host
from kvtide.planner.compute import RooflineCompute
from kvtide.planner.inputs import Job, Machine
from kvtide.planner.options import PlanOptions, build
from kvtide.planner.replay import POLICIES, Case, replay
from kvtide.planner.timed import Timed, run_real, run_virtual
from kvtide.planner.virtual import Budgets
from kvtide.report.replay import print_replay, replay_json
from kvtide.units import parse_option_bytes
from kvtide.workload import AUTO, FORMAT_NAMES, SYNTHETIC_NAMES, Workload, load_workload, make

REPLAY_EXAMPLE = "Example: kvtide replay multi-turn --model llama-3-8b --dram 64GiB --disk 1TiB"
TIMED_REQUESTS = 16  # of a timed replay where no limit is given
SWEEP_KEYS = ("dram", "disk", "evict", "admit")


def replay_command(
    workload: Annotated[str, typer.Argument(help=f"A log of requests, or a generator: {', '.join(SYNTHETIC_NAMES)}.")],
    model: Annotated[str, typer.Option(help="A preset, a config.json, or a model's folder.")] = "llama-3-8b",
    dtype: Annotated[str | None, typer.Option(help="Format of KV. Default: the model's.")] = None,
    dram: Annotated[str, typer.Option(help="DRAM for KV.")] = "64GiB",
    disk: Annotated[str, typer.Option(help="Disk for KV.")] = "1TiB",
    evict: Annotated[str, typer.Option(help=f"Policies, with commas between: {', '.join(EVICTOR_NAMES)}.")] = ",".join(
        POLICIES
    ),
    admit: Annotated[str, typer.Option(help="always, second-touch, tinylfu, endurance.")] = "always",
    gpu: Annotated[str, typer.Option(help="What computes: h100, ..., cpu.")] = "h100",
    gpus: Annotated[int, typer.Option(help="GPUs that share the model.")] = 1,
    ssd: Annotated[str, typer.Option(help="The drive, for times.")] = "nvme-gen4",
    probe: Annotated[Path | None, typer.Option(help="A probe file: this drive instead of --ssd.")] = None,
    sweeps: Annotated[
        list[str] | None, typer.Option("--sweep", help=f"KEY=A,B,C of {', '.join(SWEEP_KEYS)}; several: all pairs.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Requests taken from the beginning.")] = None,
    log_format: Annotated[str, typer.Option("--format", help=f"{AUTO}, {', '.join(FORMAT_NAMES)}.")] = AUTO,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Run the first requests through the production cache, in virtual time.")
    ] = False,
    real: Annotated[
        Path | None, typer.Option(help="Run the first requests on real tiers, the file tier in this directory.")
    ] = None,
    device_memory: Annotated[str, typer.Option(help="Device memory of timed runs.")] = "1GiB",
    group_blocks: Annotated[int | None, typer.Option(help="Blocks stored together, in timed runs.")] = None,
    computed: Annotated[
        bool, typer.Option("--with-compute", help="Let the GPU's time pass in timed runs: modelled, or slept.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay requests: hits by tier and policy, bytes moved, time saved, and hits for every size of a tier."""
    console = Console(stderr=as_json, highlight=False)
    requests = _requests(workload, log_format, limit)
    options = PlanOptions(
        model,
        dtype=dtype,
        gpu=gpu,
        gpus=gpus,
        ssd=ssd,
        dram=dram,
        disk=disk,
        probe=probe,
        group_blocks=group_blocks,
        any_context=True,
    )
    job, machine = build(options, load_catalogue())
    cases = _cases({"dram": [dram], "disk": [disk], "evict": evict.split(","), "admit": [admit]}, sweeps or [])
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replaying", total=len(cases))
        found = replay(requests, job, machine, cases, on_progress=lambda done, _: bar.update(task, completed=done))
        timed = _timed(requests.take(limit or TIMED_REQUESTS), job, machine, real, bar, device_memory, dram, disk,
                       is_simulated=simulate, is_computed=computed, is_probed=probe is not None)  # fmt: skip
    if as_json:
        print(json.dumps(replay_json(found, timed)))
    else:
        print_replay(found, timed, console)


def _requests(name: str, log_format: str, limit: int | None) -> Workload:
    path = Path(name)
    if name in SYNTHETIC_NAMES and not path.exists():
        made = make(name)
        return made.take(limit) if limit is not None else made
    if not path.exists():
        raise ConfigError(
            f"{name[:80]!r} is no file and no generator; type the path of a log, or one of {', '.join(SYNTHETIC_NAMES)}"
        )
    return load_workload(path, format=log_format, limit=limit)


def _cases(values: dict[str, list[str]], sweeps: list[str]) -> list[Case]:
    """Return every combination of sizes, policies and admissions.

    Raises: ConfigError for a key that cannot be swept, or a value that cannot be.
    """
    for word in sweeps:
        key, mark, text = word.partition("=")
        if not mark or key.strip() not in SWEEP_KEYS or not text.strip(" ,"):
            raise ConfigError(f"--sweep {word[:60]!r}: type KEY=A,B,C with a key of {', '.join(SWEEP_KEYS)}")
        values[key.strip()] = [value.strip() for value in text.split(",") if value.strip()]
    for policy in values["evict"]:
        make_evictor(policy.strip(), 1)  # an unknown name is refused before anything runs
    for admission in values["admit"]:
        make_admission(admission, num_keys=1, bytes_per_day=1)
    return [
        Case(parse_option_bytes("--dram", dram), parse_option_bytes("--disk", disk), policy.strip(), admission)
        for dram, disk, policy, admission in itertools.product(*(values[key] for key in SWEEP_KEYS))
    ]


def _timed(
    requests: Workload, job: Job, machine: Machine, real: Path | None, bar: Progress, device: str, dram: str, disk: str,
    *, is_simulated: bool, is_computed: bool, is_probed: bool,
) -> list[Timed]:  # fmt: skip
    """Run what was asked for through the production cache."""
    if real is None and not is_simulated:
        return []
    budgets = Budgets(
        parse_option_bytes("--device-memory", device),
        parse_option_bytes("--dram", dram),
        parse_option_bytes("--disk", disk),
    )
    compute = RooflineCompute(job, machine) if is_computed else None
    task = bar.add_task("timed replay", total=requests.num_requests)
    made = []
    if real is not None:
        made.append(run_real(requests, job, real, budgets, compute, depth=machine.depth,
                             on_progress=lambda done, _: bar.update(task, completed=done)))  # fmt: skip
    if is_simulated:
        # Beside real tiers, or with their probe, this machine's processor is what moves KV.
        costs = measure_host(op_ns=machine.io_path.host_ns) if real is not None or is_probed else None
        made.append(run_virtual(requests, job, machine, budgets, compute, costs=costs,
                                on_progress=lambda done, _: bar.update(task, completed=done)))  # fmt: skip
    return made
