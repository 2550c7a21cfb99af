"""From the naive state to the best, one cure a rung: what does a decoded token cost over a long context on the SSD?

One 8k-token prompt lies in the file tier; DRAM holds a small part of it. Each rung keeps the cures of the rungs before
it. Floors: the same attention with all KV in memory, and computing everything again. Beside what was measured stands
what was predicted from a probe of the drive, the processor's costs, and the floor's time. `--trace` adds the depth at
the device, from a kernel capture of each rung's decoding (needs root and tracefs). The last table is the same ladder
for Llama-3-70B, by `kvtide plan`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import _bench as bench
from _model import add_dtype, run_on_model, tokens_of
from kvtide import __version__
from kvtide.hardware import load as load_catalogue
from kvtide.integrations.transformers import KvStore, LoadedModel, StoreOptions
from kvtide.integrations.transformers.store import SelectOptions
from kvtide.planner.calibrate import measure_host
from kvtide.planner.closed import plan
from kvtide.planner.options import PlanOptions, build
from kvtide.planner.virtual import HostCosts
from kvtide.probe.caps import caps_of
from kvtide.probe.survey import ProbeOptions, probe_path
from kvtide.roofline import Roof
from kvtide.select.contract import Budget
from kvtide.spec import KVShape, SlotLayout
from kvtide.trace.events import READ
from kvtide.trace.kernel import Capture, CaptureOptions
from kvtide.trace.record import Recorder

BUDGET = 512
GROUP_BLOCKS = 8
NEW_SHARE = 0.25  # of a selection that DRAM does not have from earlier steps; the measured rungs show their own
REAPED = 8  # completions of one round: an eighth of the depth, kvtide.io.uring.REFILL_PARTS
SKIPPED = 3  # steps until a rung reads what it reads from then on
STEPS = {"full": 8, "selected": 40}


@dataclass(frozen=True, slots=True)
class Rung:
    """One state. `cure` is what it adds to the rung above."""

    name: str
    cure: str
    group_blocks: int = 1
    depth: int = 1
    is_ahead: bool = False
    method: str | None = None
    dram_mib: int = 64
    is_in_memory: bool = False

    @property
    def num_steps(self) -> int:
        """Tokens that are timed."""
        return STEPS["full" if self.method is None else "selected"]


RUNGS = [
    Rung("naive", "block-first, one read at a time, read when wanted"),
    Rung("depth", "64 reads in flight", depth=64),
    Rung("grouping", f"groups of {GROUP_BLOCKS} blocks", group_blocks=GROUP_BLOCKS, depth=64),
    Rung("prefetch", "a layer ahead", group_blocks=GROUP_BLOCKS, depth=64, is_ahead=True),
    Rung("selection", f"quest, budget {BUDGET}, no room to reuse", depth=64, method="quest", dram_mib=12),
    Rung("sharing", "lowrank: one list for all heads", depth=64, method="lowrank", dram_mib=12),
    Rung("reuse", "DRAM keeps what was chosen before", depth=64, method="lowrank"),
    Rung("ahead", "chosen and read a layer ahead", depth=64, is_ahead=True, method="lowrank"),
    Rung("drafts", "several tokens a step (pmr)", depth=64, is_ahead=True, method="pmr"),
]
FLOORS = [
    Rung("full in memory", "all KV in memory", is_in_memory=True, is_ahead=True, depth=64),
    Rung("lowrank in memory", "all KV in memory", is_in_memory=True, is_ahead=True, depth=64, method="lowrank"),
    Rung("pmr in memory", "all KV in memory", is_in_memory=True, is_ahead=True, depth=64, method="pmr"),
]


def main() -> int:
    """Measure and tell."""
    made = bench.parser(__doc__ or "")
    add_dtype(made)
    made.add_argument("--context", type=int, default=8000, help="tokens of the prompt")
    made.add_argument("--trace", action="store_true", help="capture the device's commands of each rung")
    made.add_argument("--probe-seconds", type=float, default=20.0)
    made.set_defaults(repeats=3)
    args = made.parse_args()
    if args.smoke:
        args.repeats, args.probe_seconds, args.context = 1, 1.0, 600
    return run_on_model("ladder", args, measure, show)


def measure(args: argparse.Namespace, loaded: LoadedModel) -> dict[str, Any]:
    """Return the whole result."""
    root = args.dir / "ladder"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    found = probe_path(args.dir, ProbeOptions(seconds=args.probe_seconds), version=__version__)
    host = measure_host(op_ns=found.read.roof.host_ns)
    rungs = [RUNGS[0], RUNGS[7], *FLOORS[:1]] if args.smoke else [*RUNGS, *FLOORS]
    prompt = tokens_of(loaded, args.context)
    runs: dict[str, list[dict[str, Any]]] = {rung.name: [] for rung in rungs}
    try:
        prefill_ns = {
            group: fill(loaded, root, prompt, group) for group in sorted({rung.group_blocks for rung in rungs})
        }
        for turn in range(args.repeats):
            for rung in rungs:
                runs[rung.name].append(run(loaded, root, prompt, rung, is_traced=args.trace, smoke=args.smoke))
                print(f"turn {turn + 1}: {rung.name}", file=sys.stderr)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    shape = KVShape.of(loaded.spec, loaded.dtype)
    rows = [summarised(rung, runs[rung.name]) for rung in rungs]
    floors = {row["name"]: row["itl_ms"]["median"] for row in rows if row["is_in_memory"]}
    for rung, row in zip(rungs, rows, strict=True):
        if not rung.is_in_memory:
            row["predicted"] = predicted(rung, row, shape, args.context, found.read.roof, host, floors)
    return {
        "question": "what does each cure win for a decoded token?",
        "label": "measured; predictions: simulated",
        "environment": bench.environment(args.dir),
        "seed": args.seed,
        "repeats": args.repeats,
        "context": args.context,
        "dtype": loaded.dtype.value,
        "budget_tokens": BUDGET,
        "kv_bytes": args.context * shape.bytes_per_token,
        "probe": {"label": "measured", "read": asdict(found.read.roof)},
        "host": {"label": "measured", **asdict(host)},
        "recompute_ms": min(prefill_ns.values()) / 1e6,
        "rungs": rows,
        "llama_3_70b": planned(),
    }


def options(loaded: LoadedModel, root: Path, rung: Rung, num_tokens: int) -> StoreOptions:
    """Return the store of a rung; rungs of one group size share its files."""
    shape = KVShape.of(loaded.spec, loaded.dtype)
    whole = num_tokens * shape.bytes_per_token
    layer_bytes = max(layer.token_bytes for layer in shape.layers) * num_tokens
    select = SelectOptions(rung.method, Budget(tokens=BUDGET)) if rung.method else None
    return StoreOptions(
        device_bytes=whole * 5 // 4 if rung.is_in_memory and select is None else layer_bytes * 21 // 10,
        dram_bytes=whole * 3 // 2 if rung.is_in_memory else rung.dram_mib << 20,
        disk_bytes=2 * whole + (64 << 20),
        directory=root / f"group-{rung.group_blocks}",
        group_blocks=rung.group_blocks,
        depth_max=rung.depth,
        is_prefetching=rung.is_ahead,
        select=select,
        reuse="always",
    )


def fill(loaded: LoadedModel, root: Path, prompt: list[int], group_blocks: int) -> int:
    """Compute the prompt's KV into the store of this group size; return how long that took, in ns."""
    rung = Rung("fill", "", group_blocks=group_blocks, depth=64, is_ahead=True, dram_mib=512)
    with KvStore(loaded, options(loaded, root, rung, len(prompt) + 128)) as store:
        session = store.session(prompt)
        started = time.perf_counter_ns()
        session.prefill(reserve_tokens=128)
        session.generate(max_new_tokens=1, do_sample=False)
        took = time.perf_counter_ns() - started
        session.release()
        store.cache.flush()
    return took


def run(
    loaded: LoadedModel, root: Path, prompt: list[int], rung: Rung, *, is_traced: bool, smoke: bool
) -> dict[str, Any]:
    """Decode some tokens; return what each of them cost once the rung reads steadily."""
    recorder, marks = Recorder(), Marks()
    marks.recorder = recorder
    num_tokens = SKIPPED + (6 if smoke else rung.num_steps)
    with KvStore(loaded, options(loaded, root, rung, len(prompt) + 128), recorder=recorder) as store:
        if store.namespace is not None:
            marks.folder = store.namespace.path if is_traced else None
        session = store.session(prompt)
        session.prefill(reserve_tokens=128)
        try:
            session.generate(max_new_tokens=num_tokens, do_sample=False, streamer=marks)
        finally:
            depth = marks.stop()
        counts = asdict(store.selecting.counts) if store.selecting else {}
        fast_bytes = store.selecting.selector.fast_bytes() if store.selecting else 0
        session.release()
    ops = recorder.ops_between(marks.first_op, marks.last_op)
    reads = ops[~ops["is_write"]]
    num = len(marks.times) - 1 - SKIPPED
    itl = (marks.times[-1] - marks.times[SKIPPED]) / num
    return {
        "itl_ms": itl / 1e6,
        "ops": len(reads) / num,
        "mib": float(reads["length"].sum()) / num / 2**20,
        "op_kib": float(reads["length"].mean()) / 1024 if len(reads) else 0.0,
        "depth": float(reads["depth"].mean()) if len(reads) else 0.0,
        "device": depth,
        "fast_bytes": fast_bytes,
        "counts": counts,
    }


class Marks:
    """A streamer that notes when tokens come, and which operations lie between them."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.times: list[int] = []
        self.first_op = self.last_op = 0
        self.folder: Path | None = None
        self._capture: Capture | None = None

    def put(self, value: Any) -> None:
        """Take the prompt, then one token at a time."""
        if value.dim() > 1:
            return
        self.times.append(time.perf_counter_ns())
        self.last_op = self.recorder.counts()[1]
        if len(self.times) == SKIPPED + 1:
            self.first_op = self.last_op
            if self.folder is not None:
                number, pids = caps_of(self.folder).number, (os.getpid(),)
                self._capture = Capture(CaptureOptions(device=number, pids=pids, folder=self.folder.parent))
                self._capture.start()

    def end(self) -> None:
        """Nothing is left over."""

    def stop(self) -> dict[str, float]:
        """Return the mean depth at the device while it had anything to do, of reads; nothing if it was not captured."""
        if self._capture is None:
            return {}
        self._capture.stop()
        rows = [frame for name, frame in self._capture.frames() if name == "block"]
        self._capture.close()
        return device_depth(rows)


def device_depth(frames: list[Any]) -> dict[str, float]:
    """Return the reads at the device, and their depth: over the time that any was there, and over the whole window.

    The second is the effective depth of docs/indicators.md: the sum of device times over the window.
    """
    is_done = (pl.col("flags") & READ != 0) & (pl.col("time_ns") > 0) & (pl.col("complete_ns") > 0)
    spans = [frame.filter(is_done).select("time_ns", "complete_ns").to_numpy() for frame in frames]
    both = np.concatenate([np.zeros((0, 2), np.int64), *spans])
    if not len(both):
        return {"num_reads": 0.0, "depth": 0.0, "depth_effective": 0.0}
    both = both[np.argsort(both[:, 0])]
    reach = np.maximum.accumulate(both[:, 1])
    starts = np.append(both[0, 0], np.maximum(both[1:, 0], reach[:-1]))
    busy, total = np.maximum(0, reach - starts).sum(), (both[:, 1] - both[:, 0]).sum()
    return {
        "num_reads": float(len(both)),
        "depth": float(total / max(1, busy)),
        "depth_effective": float(total / max(1, reach[-1] - both[0, 0])),
    }


def summarised(rung: Rung, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a rung's figures over all turns."""
    row: dict[str, Any] = {"label": "measured", **asdict(rung)}
    for key in ("itl_ms", "ops", "mib", "op_kib", "depth"):
        row[key] = bench.summary([found[key] for found in runs])
    if all(found["device"] for found in runs):
        for name in ("depth", "depth_effective"):
            row[f"device_{name}"] = bench.summary([found["device"][name] for found in runs])
    row["fast_bytes"], row["counts"] = runs[-1]["fast_bytes"], runs[-1]["counts"]
    return row


def predicted(
    rung: Rung, row: dict[str, Any], shape: KVShape, context: int, roof: Roof, host: HostCosts, floors: dict[str, float]
) -> dict[str, Any]:
    """Return operations, bytes and time a token, from the probe and the floor of the same attention.

    Full attention reads what DRAM does not hold; how much of a selection is new to it is a property of the text, and
    taken as measured. A layer's reads are in flight together. Read when wanted, compute and reads add up; ahead of time
    the longer one counts, with one layer's share of the other.
    """
    slot = SlotLayout(shape, 16, rung.group_blocks)
    size, layers = slot.fragment_padded_bytes[0], shape.num_layers
    groups = -(-context // slot.tokens_per_group)
    if rung.method is None:
        num_frames = (rung.dram_mib << 20) // size
        num_ops = max(0.0, layers * groups - 0.9 * num_frames)
    else:
        num_ops = row["ops"]["median"]
    name = {None: "full in memory", "pmr": "pmr in memory"}.get(rung.method, "lowrank in memory")
    floor_ms = floors.get(name, floors["full in memory"])
    together = float(np.clip(num_ops / layers, 1, rung.depth))
    read_ms = num_ops * size / float(roof.bytes_per_s(size, together)) * 1e3
    rounds = max(layers, num_ops / min(REAPED, together))  # an engine hands back several completions at once
    copied = layers * groups * host.copy_time_ns(size) if rung.method is None else 0.0
    host_ms = (num_ops * (host.op_ns + host.check_time_ns(size)) + rounds * host.round_ns + copied) / 1e6
    host_ms += layers * host.job_ns / 1e6
    moving, longer = read_ms + host_ms, max(read_ms + host_ms, floor_ms)
    itl_ms = longer + (moving + floor_ms - longer) / layers if rung.is_ahead else moving + floor_ms
    return {"label": "simulated", "ops": num_ops, "mib": num_ops * size / 2**20, "itl_ms": itl_ms}


def planned() -> list[dict[str, Any]]:
    """Return the same ladder for Llama-3-70B in fp8 on one H100 and one NVMe drive: a batch of 8 at 8k tokens."""
    base = PlanOptions("llama-3-70b", batch=8, context=7936, weights="fp8_e4m3", dram="0", kv_on_device="0")
    share = BUDGET / base.context
    sparse, read = str(share), str(NEW_SHARE * share)
    states = {
        "naive": replace(base, layout="block_first", depth=1, overlap=False),
        "depth": replace(base, layout="block_first", overlap=False),
        "grouping": replace(base, group_blocks=GROUP_BLOCKS, overlap=False),
        "prefetch": replace(base, group_blocks=GROUP_BLOCKS),
        "selection": replace(base, layout="block_first", select=sparse, overlap=False),
        "reuse": replace(base, layout="block_first", select=read, overlap=False),
        "ahead": replace(base, layout="block_first", select=read),
    }
    rows = []
    for name, typed in states.items():
        job, machine = build(typed, load_catalogue())
        decode = plan(job, machine).phases["decode"]
        ssd = decode.uses["ssd"]
        rows.append(
            {"label": "simulated", "name": name, "itl_ms": decode.total_ns / 1e6, "ops": ssd.num_ops / job.batch,
             "mib": ssd.num_bytes / job.batch / 2**20, "op_kib": ssd.op_bytes / 1024, "depth": ssd.depth,
             "bound": decode.bound}
        )  # fmt: skip
    return rows


def show(payload: dict[str, Any]) -> None:
    """Print the tables."""
    size, recompute = payload["kv_bytes"] / 2**20, payload["recompute_ms"]
    print(f"{payload['context']} tokens, KV of {size:.0f} MiB; computing it takes {recompute:.0f} ms")
    print(f"{'rung':20} {'ops':>8} {'KiB':>7} {'depth':>6} {'device':>6} {'MiB':>8} {'ITL ms':>8} {'predicted':>9}")
    for row in payload["rungs"]:
        device = row.get("device_depth_effective", {}).get("median", float("nan"))
        told = f"{row['predicted']['itl_ms']:9.1f}" if "predicted" in row else ""
        figures = [row[key]["median"] for key in ("ops", "op_kib", "depth")]
        print(f"{row['name']:20} {figures[0]:8.0f} {figures[1]:7.0f} {figures[2]:6.1f} {device:6.1f} "
              f"{row['mib']['median']:8.1f} {row['itl_ms']['median']:8.1f} {told}")  # fmt: skip
    print("Llama-3-70B, simulated")
    for row in payload["llama_3_70b"]:
        print(f"{row['name']:20} {row['ops']:8.0f} {row['op_kib']:7.0f} {row['depth']:6.1f} {'':6} {row['mib']:8.1f} "
              f"{row['itl_ms']:8.1f}  {row['bound']}")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
