"""From what people type to a job and a machine: one place for names, defaults, and what a sweep may vary.

Next: cli_plan.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from kvtide.errors import ConfigError
from kvtide.hardware import Catalogue, from_probe, raid0
from kvtide.modelfiles import load_model
from kvtide.planner.inputs import Job, Machine, check
from kvtide.planner.layouts import AUTO, LAYOUT_OF_NAME, Case, Pattern, choose, read_time
from kvtide.planner.placement import place
from kvtide.probe.file import load as load_probe
from kvtide.spec import Dtype, Layout
from kvtide.units import parse_option_bytes

SWEEP_POINTS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What was typed, as text or number; None: not given."""

    model: str
    batch: int = 1
    context: int = 4096
    output: int = 256
    dtype: str | None = None
    weights: str | None = None
    gpu: str = "h100"
    gpus: int = 1
    kv_on_device: str | None = None
    dram: str = "256GiB"
    link: str | None = None
    ssd: str | None = "nvme-gen4"
    ssds: int = 1
    disk: str | None = None
    cxl: str = "0"
    network: str | None = None
    select: str = "full"
    fragment: str | None = None
    layout: str = "layer_major"
    block_tokens: int = 16
    group_blocks: int | None = None
    depth: int = 64
    io_threads: int = 1
    io_path: str = "io_uring"
    nominal: bool = False
    overlap: bool = True
    disaggregate: bool = False
    any_context: bool = False
    probe: Path | None = None


def build(options: PlanOptions, catalogue: Catalogue) -> tuple[Job, Machine]:
    """Return the job and the machine these options mean.

    Raises: ConfigError for unknown names, values that cannot be, or a probe file that is none.
    """
    job = Job(
        load_model(options.model),
        batch=options.batch,
        context=options.context,
        output=options.output,
        dtype=Dtype.parse(options.dtype) if options.dtype else None,
        weight_dtype=Dtype.parse(options.weights) if options.weights else None,
        select=_select(options.select),
        layout=Layout.LAYER_MAJOR if options.layout == AUTO else _layout(options.layout),
        block_tokens=options.block_tokens,
        group_blocks=options.group_blocks,
        fragment_bytes=_size("--fragment", options.fragment),
        device_kv_bytes=_size("--kv-on-device", options.kv_on_device),
        is_overlapped=options.overlap,
        is_disaggregated=options.disaggregate,
        is_any_context=options.any_context,
    )
    machine = _machine(options, catalogue)
    if options.layout == AUTO:
        case = layout_case(job, machine)
        if case is None:
            raise ConfigError("--layout auto compares reads from a drive, and --ssd is none; type another --layout")
        best = choose(case).best
        job = replace(job, layout=best.layout, group_blocks=best.group_blocks)
    return job, machine


def layout_case(job: Job, machine: Machine) -> Case | None:
    """Return what `planner.layouts` is to compare for a decode step halfway through the output; None without a drive.

    A part of the context that is selected is taken as single blocks, the same for all heads, chosen independently.
    Raises: ConfigError where the job does not fit the machine.
    """
    if machine.ssd is None:
        return None
    check(job, machine)
    room = place(job, machine).room_bytes
    num_tokens = job.context + job.output // 2
    budget = None if job.select == 1.0 else max(1, round(num_tokens * job.select))
    return Case(
        job.shape(),
        job.block_tokens,
        num_tokens,
        Pattern(budget, job.block_tokens),
        read_time(machine.io_path.over(machine.ssd.read), machine.depth, num_threads=machine.num_io_threads),
        drive=machine.ssd.name,
        fast_bytes=room["device"] + room["dram"] + room["cxl"],
        num_sequences=job.batch,
        group_blocks=job.group_blocks,
    )


def _machine(options: PlanOptions, catalogue: Catalogue) -> Machine:
    gpu = catalogue.gpu(options.gpu)
    dram, link, io_path = catalogue.memory("dram-ddr5"), options.link or gpu.link, catalogue.io_path(options.io_path)
    ssd = catalogue.ssd(options.ssd) if options.ssd and options.ssd != "none" else None
    found_link = catalogue.link(link) if link else None
    if options.probe is not None:
        measured = from_probe(load_probe(options.probe))
        ssd, io_path = measured.drive, measured.io_path
        dram, found_link = measured.memory or dram, (measured.link or found_link) if link else None
    return Machine(
        gpu=gpu,
        num_gpus=options.gpus,
        link=found_link,
        dram=dram,
        dram_bytes=_size("--dram", options.dram) or 0,
        io_path=io_path,
        ssd=raid0(ssd, options.ssds) if ssd else None,
        ssd_bytes=_size("--disk", options.disk),
        num_ssds=options.ssds,
        cxl=catalogue.memory("cxl-expander") if _size("--cxl", options.cxl) else None,
        cxl_bytes=_size("--cxl", options.cxl) or 0,
        network=catalogue.network(options.network) if options.network else None,
        depth=options.depth,
        num_io_threads=options.io_threads,
        is_nominal=options.nominal,
    )


def _size(name: str, text: str | None) -> int | None:
    return None if text is None else parse_option_bytes(name, text)


def _select(text: str) -> float:
    if text.strip().lower() == "full":
        return 1.0
    try:
        value = float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        raise ConfigError(f"--select is {text[:40]!r}; type full, a part as 0.01, or a percentage as 1%") from None
    return value


def _layout(text: str) -> Layout:
    names = [layout.value for layout in Layout]
    if text in LAYOUT_OF_NAME:
        return LAYOUT_OF_NAME[text]
    if text not in names:
        raise ConfigError(f"--layout is {text[:40]!r}; type {AUTO}, or one of {', '.join(names)}")
    return Layout(text)


def sweep(options: PlanOptions, words: Sequence[str]) -> list[tuple[dict[str, str], PlanOptions]]:
    """Return every combination of `KEY=A,B,C` in `words`, each as its values and the options with them.

    Raises: ConfigError for a key that is no option, a value of the wrong kind, or too many combinations.
    """
    axes = [_axis(word) for word in words]
    num = 1
    for _, values in axes:
        num *= len(values)
    if num > SWEEP_POINTS_MAX:
        raise ConfigError(f"--sweep has {num} combinations; at most {SWEEP_POINTS_MAX} are planned: give fewer values")
    rows = []
    for combination in itertools.product(*(values for _, values in axes)):
        chosen = dict(zip((key for key, _ in axes), combination, strict=True))
        typed: dict[str, Any] = {key: _typed(key, value) for key, value in chosen.items()}
        rows.append((chosen, replace(options, **typed)))
    return rows


def _axis(word: str) -> tuple[str, list[str]]:
    key, mark, text = word.partition("=")
    name = key.strip().lstrip("-").replace("-", "_")
    known = [item.name for item in fields(PlanOptions) if item.name not in {"model", "probe"}]
    if not mark or name not in known:
        near = difflib.get_close_matches(name[:40], known, n=3, cutoff=0.4)
        hint = f"near it: {', '.join(near)}" if near else f"keys are {', '.join(known)}"
        raise ConfigError(f"--sweep {word[:60]!r}: type KEY=A,B,C; {hint}")
    values = [value.strip() for value in text.split(",") if value.strip()]
    if not values:
        raise ConfigError(f"--sweep {word[:60]!r} has no values; type {key}=A,B,C")
    return name, values


def _typed(key: str, value: str) -> int | str | bool:
    default = next(item for item in fields(PlanOptions) if item.name == key)
    if "bool" in str(default.type):
        if value.lower() not in {"true", "false"}:
            raise ConfigError(f"--sweep {key}={value[:40]}: type true or false")
        return value.lower() == "true"
    if "int" in str(default.type):
        try:
            return int(value)
        except ValueError:
            raise ConfigError(f"--sweep {key}={value[:40]}: a whole number is needed") from None
    return value
