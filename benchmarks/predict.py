"""How far is what kvtide predicts from what happens?

One probe of the drive and one calibration of the processor and the model; then, for each configuration, the same turns
on real tiers and on virtual ones. Operations and bytes must be equal; times are compared: the first token when a
prompt is computed, the first token when its KV is restored after a restart, and the time between tokens.

`run` configurations run the model, as `kvtide run` does. `replay` ones run no model: its time is slept, and made-up
bytes are kept.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from _bench import environment, parser, summary
from _model import add_dtype, run_on_model, tokens_of, versions
from kvtide import __version__
from kvtide.cache import CacheOptions, CpuArena, TieredCache
from kvtide.hardware import from_probe
from kvtide.integrations.transformers import KvStore, LoadedModel, Session, StoreOptions
from kvtide.planner.calibrate import measure_host
from kvtide.planner.compute import MeasuredCompute, StepTime
from kvtide.planner.driver import Compute, Driver, TurnTimes
from kvtide.planner.timed import Sleeper
from kvtide.planner.virtual import FREE, Budgets, HostCosts, reopened, virtual_cache
from kvtide.probe.survey import ProbeOptions, probe_path
from kvtide.spec import KVShape, SlotLayout
from kvtide.tiers.namespace import open_namespace
from kvtide.trace.record import Recorder

MIB = 1 << 20
NUM_NEW = 8  # tokens of an answer
NUM_TURNS = 4  # each after a restart; all but the first find the document's KV on disk
TAIL = 24  # tokens of a question after the document
STEP_SIZES = (1, 24, 128, 512)
DEPTH_MAX = 64  # of the file tier


@dataclass(frozen=True, slots=True)
class Config:
    """One row of the table. Sizes in parts of the KV of the whole context."""

    kind: str
    context: int
    group_blocks: int
    device: float
    dram: float
    num_turns: int = NUM_TURNS


CONFIGS = [
    Config(kind, context, group, device, dram)
    for kind, context, group, device, dram in (
        ("run", 1000, 2, 0.2, 0.9),
        ("run", 1000, 8, 0.2, 0.9),
        ("run", 1000, 8, 1.2, 2.0),
        ("run", 2000, 4, 0.1, 0.7),
        ("run", 2000, 8, 0.1, 0.7),
        ("run", 2000, 8, 0.5, 1.5),
        ("run", 2000, 16, 0.1, 0.9),
        ("replay", 1000, 4, 0.2, 0.9),
        ("replay", 2000, 4, 0.1, 0.7),
        ("replay", 2000, 8, 0.1, 0.7),
        ("replay", 2000, 16, 0.5, 1.5),
        ("replay", 4000, 8, 0.1, 0.5),
        ("replay", 4000, 16, 0.1, 0.5),
    )
]


@dataclass(slots=True)
class Turn:
    """What one turn did. Times in ms."""

    ttft_ms: float
    itl_ms: float
    num_ops: int
    read_bytes: int
    written_bytes: int
    matched_tokens: int


def main() -> int:
    """Measure, predict, compare."""
    made = parser(__doc__ or "")
    made.set_defaults(repeats=3)
    add_dtype(made)
    made.add_argument("--probe-seconds", type=float, default=30.0)
    args = made.parse_args()
    if args.smoke:
        args.repeats, args.probe_seconds = 1, 1.0
    return run_on_model("predict", args, measure, show)


def measure(args: argparse.Namespace, loaded: LoadedModel) -> dict[str, Any]:
    """Return the whole result."""
    args.dir.mkdir(parents=True, exist_ok=True)
    root = args.dir / "predict"
    shape = KVShape.of(loaded.spec, loaded.dtype)
    configs = [CONFIGS[0], CONFIGS[7]] if args.smoke else CONFIGS
    if args.smoke:
        configs = [replace(config, context=64, num_turns=2) for config in configs]
    found = probe_path(args.dir, ProbeOptions(seconds=args.probe_seconds), version=__version__)
    drive = from_probe(found).drive.device_model()
    host = measure_host(op_ns=found.read.roof.host_ns)
    # This machine's pace drifts, so it is measured before, between and after what it predicts.
    steps = calibrate_model(loaded, shape, smoke=args.smoke)
    slept = model_of(steps, shape)
    measured = []
    try:
        for number, config in enumerate(configs):
            measured.append(run_config(config, args, loaded, root, shape, slept))
            print(f"{number + 1} of {len(configs)} measured", file=sys.stderr)
            if not args.smoke and number + 1 in {len(configs) // 3, 2 * len(configs) // 3, len(configs)}:
                steps += calibrate_model(loaded, shape, smoke=args.smoke)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    model = model_of(steps, shape)
    rows = [
        compare(config, shape, turns_of(loaded, config), runs, drive, host, model if config.kind == "run" else slept)
        for config, runs in zip(configs, measured, strict=True)
    ]
    errors = [abs(error) for row in rows for error in row["errors"].values()]
    return {
        "benchmark": "predict",
        "question": "how far is what kvtide predicts from what happens?",
        "label": "measured; predictions: simulated",
        "environment": environment(args.dir) | versions(),
        "model": loaded.name,
        "dtype": loaded.dtype.value,
        "seed": args.seed,
        "repeats": args.repeats,
        "smoke": args.smoke,
        "goal": "operations and bytes equal; median error of times <= 10 %, worst <= 25 %",
        "probe": {"label": "measured", "read": asdict(found.read.roof), "write": asdict(found.write.roof)},
        "host": asdict(host),
        "rows": rows,
        "num_configs": len(rows),
        "counts_equal": sum(row["counts_equal"] for row in rows),
        "median_error": float(np.median(errors)),
        "worst_error": float(np.max(errors)),
    }


def calibrate_model(loaded: LoadedModel, shape: KVShape, *, smoke: bool) -> list[StepTime]:
    """Time steps of the model with all KV on the device, so that nothing waits.

    A step of one token runs in `generate`, as all decoding does. `num_new` 0 stands for what comes once a turn.
    """
    contexts, sizes = ((96, 48), (1, 24)) if smoke else ((2048, 1024, 256), STEP_SIZES)
    tokens = tokens_of(loaded, max(contexts) + max(sizes) + 8)
    room = max(64 * MIB, 2 * len(tokens) * shape.bytes_per_token)
    options = StoreOptions(device_bytes=room, dram_bytes=room, group_blocks=8)
    steps = []
    with KvStore(loaded, options) as store:
        session = store.session(tokens[: contexts[0] + 1])
        session.kv.capacity_hint = len(tokens)
        session.prefill(reserve_tokens=max(sizes))
        for context in contexts:
            sequence = session.kv.sequences[0]
            for size in sizes:
                for _ in range(1 if smoke else 3 if size < 512 else 2):
                    if session.kv.num_tokens > context:
                        store.cache.truncate(sequence, context)
                    session.tokens = tokens
                    if session.kv.num_tokens < context:
                        session.forward(session.kv.num_tokens, context)
                    if size == 1:
                        gaps = generate(session, tokens[: context + 1], 3 if smoke else 6)
                        took = float(np.median(gaps[1:]))
                        steps.append(StepTime(0, context, max(0.0, gaps[0] - took)))
                    else:
                        started = time.perf_counter_ns()
                        session.forward(context, context + size)
                        took = time.perf_counter_ns() - started
                    steps.append(StepTime(size, context, took))
        session.release()
    return steps


def model_of(steps: list[StepTime], shape: KVShape) -> MeasuredCompute:
    """Return the model's pace from all calibrations."""
    once = [step.total_ns for step in steps if not step.num_new]
    return MeasuredCompute(
        best([step for step in steps if step.num_new]), num_layers=shape.num_layers, turn_ns=float(np.median(once))
    )


def best(steps: list[StepTime]) -> list[StepTime]:
    """Return the median of equal steps."""
    grouped: dict[tuple[int, int], list[float]] = {}
    for step in steps:
        grouped.setdefault((step.num_new, step.num_old), []).append(step.total_ns)
    return [StepTime(new, old, float(np.median(times))) for (new, old), times in grouped.items()]


class Clock:
    """A streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[int] = []

    def put(self, value: Any) -> None:
        """Note a token; the prompt comes first."""
        if value.dim() == 1:
            self.times.append(time.perf_counter_ns())

    def end(self) -> None:
        """Nothing is left over."""


def generate(session: Session, tokens: list[int], num_new: int) -> list[int]:
    """Return when each token came, in ns after the call."""
    session.tokens = tokens
    clock, started = Clock(), time.perf_counter_ns()
    session.generate(max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False, streamer=clock)
    times = [at - started for at in clock.times]
    return [times[0], *np.diff(times).tolist()]


def turns_of(loaded: LoadedModel, config: Config) -> list[list[int]]:
    """Return prompts: one document, and a question each."""
    tokens = tokens_of(loaded, config.context + config.num_turns * TAIL)
    starts = range(config.context, len(tokens), TAIL)
    return [tokens[: config.context] + tokens[start : start + TAIL] for start in starts]


def budgets_of(config: Config, shape: KVShape) -> Budgets:
    """Return the bytes of each tier."""
    tokens = config.context + TAIL + NUM_NEW + 16 * config.group_blocks
    whole = tokens * shape.bytes_per_token
    device = max(int(config.device * whole), int(2.2 * whole / shape.num_layers))
    return Budgets(device // 64 * 64, int(config.dram * whole) + 80 * MIB * (config.dram < 1), 4 * whole + (64 << 20))


Run = tuple[list[Turn], list[list[int]]]  # turns, and the tokens of their answers


def run_config(
    config: Config, args: argparse.Namespace, loaded: LoadedModel, root: Path, shape: KVShape, slept: MeasuredCompute
) -> list[Run]:
    """Return what real runs of one configuration did."""
    layout, budgets = SlotLayout(shape, 16, config.group_blocks), budgets_of(config, shape)
    runs = []
    for _ in range(args.repeats):
        shutil.rmtree(root, ignore_errors=True)
        gc.collect()
        go = run_model if config.kind == "run" else run_replay
        runs.append(go(loaded, layout, root, budgets, turns_of(loaded, config), slept))
    return runs


def compare(
    config: Config, shape: KVShape, prompts: list[list[int]], runs: list[Run], drive: Any, host: HostCosts,
    compute: MeasuredCompute,
) -> dict[str, Any]:  # fmt: skip
    """Return measured and predicted figures of one configuration."""
    layout, budgets = SlotLayout(shape, 16, config.group_blocks), budgets_of(config, shape)
    # A model on the CPU splits its work evenly over all cores, so it loses what the mover takes of one. Where the model
    # only sleeps, the mover holds up what little the main thread does, by the interpreter's lock: about half the time.
    steal = 1.0 if config.kind == "run" else 0.5
    calls = replace(host, call_ns=0.0) if config.kind == "run" else host  # a measured step has them in it
    predicted = run_virtual(layout, budgets, drive, calls, compute, prompts, runs[0][1], steal=steal)
    measured = [turns for turns, _ in runs]
    told = [counts_of(turn) for turn in predicted]
    times = {
        "ttft_computed_ms": ([turns[0].ttft_ms for turns in measured], predicted[0].ttft_ms),
        "ttft_restored_ms": ([turn.ttft_ms for turns in measured for turn in turns[1:]],
                             float(np.median([turn.ttft_ms for turn in predicted[1:]]))),
        "itl_ms": ([turn.itl_ms for turns in measured for turn in turns],
                   float(np.median([turn.itl_ms for turn in predicted]))),
    }  # fmt: skip
    if config.kind == "replay":
        del times["ttft_computed_ms"]  # slept, so that it says nothing
    return {
        "config": asdict(config),
        "budgets": asdict(budgets),
        "measured": {name: summary(samples) for name, (samples, _) in times.items()},
        "predicted": {name: value for name, (_, value) in times.items()},
        "errors": {name: value / float(np.median(samples)) - 1 for name, (samples, value) in times.items()},
        "counts_measured": [[counts_of(turn) for turn in turns] for turns in measured],
        "counts_predicted": told,
        "counts_equal": all([counts_of(turn) for turn in turns] == told for turns in measured),
    }


def counts_of(turn: Turn) -> tuple[int, int, int]:
    """Return operations, bytes read and bytes written."""
    return turn.num_ops, turn.read_bytes, turn.written_bytes


def figures(times: TurnTimes, recorder: Recorder, start: int) -> Turn:
    """Return what a driven turn did."""
    ops = recorder.ops_between(start, recorder.counts()[1])
    writes, length = ops["is_write"], ops["length"].astype(np.int64)
    itl = float(np.median(times.step_ns)) / 1e6 if times.step_ns else 0.0
    return Turn(times.ttft_ns / 1e6, itl, len(ops), int(length[~writes].sum()), int(length[writes].sum()),
                times.matched.num_tokens)  # fmt: skip


def run_model(
    loaded: LoadedModel, layout: SlotLayout, root: Path, budgets: Budgets, prompts: list[list[int]],
    compute: MeasuredCompute,
) -> Run:  # fmt: skip
    """Run the turns on the model, with a restart between them."""
    del compute
    options = StoreOptions(
        device_bytes=budgets.device_bytes, dram_bytes=budgets.dram_bytes, disk_bytes=budgets.disk_bytes,
        directory=root, group_blocks=layout.group_blocks,
    )  # fmt: skip
    made, answers = [], []
    for prompt in prompts:
        recorder = Recorder()
        with KvStore(loaded, options, recorder=recorder) as store:
            start, began = recorder.counts()[1], time.perf_counter_ns()
            session = store.session(prompt)
            session.prefill(reserve_tokens=NUM_NEW)
            prepared = (time.perf_counter_ns() - began) / 1e6
            gaps = generate(session, prompt, NUM_NEW)
            answers.append([*session.kv.sequences[0].tokens[len(prompt) :], 0])
            session.release()
            store.cache.drain()
            ops = recorder.ops_between(start, recorder.counts()[1])
            writes, length = ops["is_write"], ops["length"].astype(np.int64)
            made.append(
                Turn(prepared + gaps[0] / 1e6, float(np.median(gaps[1:])) / 1e6, len(ops),
                     int(length[~writes].sum()), int(length[writes].sum()), session.matched.num_tokens)
            )  # fmt: skip
    return made, answers


def run_replay(
    loaded: LoadedModel, layout: SlotLayout, root: Path, budgets: Budgets, prompts: list[list[int]],
    compute: Compute,
) -> Run:  # fmt: skip
    """Run the turns on real tiers without a model, with a restart between them."""
    from kvtide.spec import Identity

    identity = Identity.of(loaded.spec, layout.shape, block_tokens=layout.block_tokens,
                           group_blocks=layout.group_blocks, weights_digest="0" * 64, tokenizer_digest="0" * 64,
                           revision="", adapter="")  # fmt: skip
    rows = np.random.default_rng(1).integers(0, 256, (512, 4096), dtype=np.uint8)
    made, answers = [], []
    for prompt in prompts:
        recorder = Recorder()
        namespace = open_namespace(root, identity, layout, capacity_bytes=budgets.disk_bytes, recorder=recorder,
                                   depth_max=DEPTH_MAX)  # fmt: skip
        try:
            cache = TieredCache(
                layout, identity.digest(), CpuArena(budgets.device_bytes), CacheOptions(dram_bytes=budgets.dram_bytes),
                tier=namespace.tier, recorder=recorder,
            )  # fmt: skip
            driver = Driver(cache, compute, clock=time.perf_counter_ns, advance=Sleeper(),
                            make_rows=lambda tokens, size: rows[:tokens, :size])  # fmt: skip
            answer = list(range(NUM_NEW))
            start = recorder.counts()[1]
            times = driver.turn(prompt, answer)
            made.append(figures(times, recorder, start))
            answers.append(answer)
            cache.close()
        finally:
            namespace.close()
    return made, answers


def run_virtual(
    layout: SlotLayout, budgets: Budgets, drive: Any, host: HostCosts, compute: Compute, prompts: list[list[int]],
    answers: list[list[int]], *, steal: float,
) -> list[Turn]:  # fmt: skip
    """Run the turns on virtual tiers, with a restart between them."""
    recorder = Recorder()
    virtual = virtual_cache(layout, budgets, drive, costs=host, depth_max=DEPTH_MAX, recorder=recorder, steal=steal)
    made = []
    for turn, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if turn:
            virtual = reopened(virtual)
        driver = virtual.driver(compute, host if host.call_ns else FREE)
        start = recorder.counts()[1]
        made.append(figures(driver.turn(prompt, answer), recorder, start))
    return made


def line_of(row: dict[str, Any]) -> str:
    """Return a row as text."""
    config, times = row["config"], []
    for name, value in row["predicted"].items():
        times.append(f"{name[:-3]} {row['measured'][name]['median']:.1f} -> {value:.1f} ({row['errors'][name]:+.0%})")
    counts = (
        "counts equal" if row["counts_equal"] else f"COUNTS DIFFER {row['counts_measured']} {row['counts_predicted']}"
    )
    return (
        f"{config['kind']:6} {config['context']:5} tokens, groups of {config['group_blocks']:2}, "
        f"device {config['device']:.1f}, DRAM {config['dram']:.1f}: {'; '.join(times)}; {counts}"
    )


def show(payload: dict[str, Any]) -> None:
    """Print the table."""
    for row in payload["rows"]:
        print(line_of(row))
    print(
        f"{payload['counts_equal']} of {payload['num_configs']} with equal operations and bytes; error of times: "
        f"median {payload['median_error']:.1%}, worst {payload['worst_error']:.1%}"
    )


if __name__ == "__main__":
    sys.exit(main())
