"""Loads whose bound is known because we made it so, run on the simulated drive: each must get its name, and no other.

These calibrate trace/thresholds.py. The drive is like a fast NVMe one; its roofline is its own model, and the noisy
one is what a careless probe would say.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import polars as pl
import pytest

from kvtide.io.drive import DeviceModel, SimDrive
from kvtide.io.ops import OP, READ, WRITE, Completions, address_of, aligned_buffer
from kvtide.io.sim import SimEngine, VirtualClock
from kvtide.roofline import Roof, Roofline
from kvtide.trace import events
from kvtide.trace.events import shaped
from kvtide.trace.figures import Indicators
from kvtide.trace.file import About, Device
from kvtide.trace.indicators import Meter
from kvtide.trace.verdict import Verdict, judge

KIB, MIB = 1024, 1 << 20
DEVICE = 259 << 20
MODEL = DeviceModel(
    read_latency_ns=80_000,
    write_latency_ns=30_000,
    sync_latency_ns=500_000,
    iops_max=500_000,
    read_bytes_per_s=6_000_000_000,
    write_bytes_per_s=3_000_000_000,
    parallelism=128,
)
ROOFLINE = Roofline(
    read=Roof(latency_ns=80_000, channel_bytes_per_s=6e9, iops_max=500_000, bytes_per_s_max=6e9),
    write=Roof(latency_ns=30_000, channel_bytes_per_s=3e9, iops_max=500_000, bytes_per_s_max=3e9),
)
ABOUT = About(
    source="kernel",
    devices={
        str(DEVICE): Device("nvme0n1", read_ahead_bytes=128 * KIB, max_sectors_bytes=2 * MIB, capacity_bytes=1 << 40)
    },
)


def noisy(factor: float) -> Roofline:
    """Return what a probe says that is off by `factor`, each roof in its own direction."""

    def bend(roof: Roof) -> Roof:
        return Roof(
            roof.latency_ns * factor, roof.channel_bytes_per_s, roof.iops_max / factor, roof.bytes_per_s_max * factor
        )

    return Roofline(read=bend(ROOFLINE.read), write=bend(ROOFLINE.write))


@dataclass(frozen=True)
class Load:
    """What the program does."""

    size: int
    depth: int
    num: int
    kind: int = READ
    is_sequential: bool = False
    think_ns: int = 0  # of the program, after each op, at depth 1
    flags: int = 0


def run(load: Load, clock: VirtualClock | None = None) -> pl.DataFrame:
    """Return the block commands of a load."""
    clock = clock or VirtualClock(1)
    drive = SimDrive(MODEL)
    span = 1 << 36
    fd = drive.open("data", size_bytes=span)
    engine = SimEngine(drive, clock, depth_max=load.depth)
    rng = np.random.default_rng(1)
    batch = np.zeros(load.num, OP)
    batch["fd"], batch["kind"], batch["length"] = fd, load.kind, load.size
    at = np.arange(load.num) if load.is_sequential else rng.integers(0, span // load.size, load.num)
    batch["offset"], batch["tag"] = at * load.size, np.arange(load.num)
    memory = aligned_buffer(load.size)
    batch["address"] = address_of(memory)
    done: list[Completions] = []
    if load.think_ns:
        for op in range(load.num):
            engine.submit(batch[op : op + 1])
            done.append(engine.reap(1))
            clock.advance_to(clock.now_ns() + load.think_ns)
    else:
        engine.submit(batch)
        done.append(engine.reap(load.num))
    return frame_of(np.concatenate(done), batch, load)


def frame_of(done: Completions, batch: np.ndarray, load: Load) -> pl.DataFrame:
    rows = batch[done["tag"]]
    way = events.READ if load.kind == READ else events.WRITE
    frame = pl.DataFrame({
        "time_ns": done["submit_ns"].copy(),
        "complete_ns": done["complete_ns"].copy(),
        "queue_ns": done["submit_ns"] - 500,
        "device": np.full(len(done), DEVICE),
        "offset": rows["offset"].astype(np.int64),
        "length": rows["length"].astype(np.int64),
        "flags": np.full(len(done), way | load.flags, np.int32),
    })  # fmt: skip
    return shaped("block", frame.sort("time_ns"))


def measured(roofline: Roofline | None = None, about: About = ABOUT, **levels: pl.DataFrame) -> Indicators:
    meter = Meter(about, roofline)
    for level in ("object", "sample", "call", "block"):
        if level in levels:
            meter.add(level, levels[level])
    return meter.result()


def verdicts(**levels: pl.DataFrame) -> dict[str, Verdict]:
    """Return the verdict under each roofline a user may have."""
    rooflines = {"exact": ROOFLINE, "none": None, "pessimist": noisy(1.4), "optimist": noisy(1 / 1.4)}
    return {
        name: judge(measured(roofline, **levels), roofline=roofline, about=ABOUT)
        for name, roofline in rooflines.items()
    }


def calls(num: int, *, took_ns: int, gap_ns: int, size: int = 16 * KIB, name: str = "pread64") -> pl.DataFrame:
    start = 1 + np.arange(num) * gap_ns
    frame = pl.DataFrame({
        "time_ns": start,
        "complete_ns": start + took_ns,
        "name": [name] * num,
        "is_write": [False] * num,
        "fd": [3] * num,
        "offset": np.arange(num) * size,
        "length": [size] * num,
        "result": [size] * num,
    })  # fmt: skip
    return shaped("call", frame)


PLANTED = {
    "depth-starved": Load(4 * KIB, 1, 2000),
    "iops-bound": Load(4 * KIB, 128, 20_000),
    "bandwidth-bound": Load(MIB, 16, 400, is_sequential=True),
    "size-bound": Load(8 * KIB, 8, 4000),
}


@pytest.mark.parametrize("name", PLANTED)
def test_bounds_of_the_device_are_told_with_any_roofline_and_without(name: str) -> None:
    found = verdicts(block=run(PLANTED[name]))
    assert {verdict.name for verdict in found.values()} == {name}, {key: value.sentence for key, value in found.items()}
    assert found["exact"].is_certain
    assert not found["none"].is_certain
    assert "kvtide probe" in found["none"].sentence
    assert all(evidence.value for evidence in found["exact"].evidence)


def test_remedies_promise_what_the_drive_then_does() -> None:
    starved = PLANTED["depth-starved"]
    verdict = judge(measured(ROOFLINE, block=run(starved)), roofline=ROOFLINE, about=ABOUT)
    before = measured(block=run(starved)).whole.read.bytes_per_s
    after = measured(block=run(dataclasses.replace(starved, depth=32))).whole.read.bytes_per_s
    factor = verdict.remedies[0].factor
    assert factor is not None
    assert after / before == pytest.approx(factor, rel=0.1)
    small = PLANTED["size-bound"]
    verdict = judge(measured(ROOFLINE, block=run(small)), roofline=ROOFLINE, about=ABOUT)
    before = measured(block=run(small)).whole.read.bytes_per_s
    after = measured(block=run(dataclasses.replace(small, size=256 * KIB))).whole.read.bytes_per_s
    factor = verdict.remedies[0].factor
    assert factor is not None
    assert after / before == pytest.approx(factor, rel=0.15)


def test_buffered_sequential_reads_are_not_called_small() -> None:
    load = Load(128 * KIB, 2, 2000, is_sequential=True, flags=events.READAHEAD)
    for roofline in (ROOFLINE, None):
        figures = measured(roofline, block=run(load))
        assert figures.whole.read.sequential_share == pytest.approx(1, abs=0.01)
        verdict = judge(figures, roofline=roofline, about=ABOUT)
        assert verdict.name not in {"size-bound", "iops-bound"}
        assert any("read-ahead" in evidence.value and "cap" in evidence.value for evidence in verdict.evidence)


def test_a_small_cap_is_not_the_programs_size() -> None:
    about = About(source="kernel", devices={str(DEVICE): Device("vda", max_sectors_bytes=8 * KIB)})
    figures = measured(ROOFLINE, about, block=run(PLANTED["size-bound"]))
    assert judge(figures, roofline=ROOFLINE, about=ABOUT).name == "size-bound"
    verdict = judge(figures, roofline=ROOFLINE, about=about)
    assert verdict.name != "size-bound"
    assert any("cap" in evidence.value for evidence in verdict.evidence)


def test_ops_that_wait_in_front_of_a_short_queue_are_no_lack_of_depth() -> None:
    """As on a virtio disk: 16 reads of 1 MiB are outstanding, but the driver takes one at a time."""
    block = run(Load(MIB, 1, 400, is_sequential=True))
    took_ns = int((block["complete_ns"] - block["time_ns"]).to_numpy()[0])
    block = block.with_columns(pl.col("time_ns").sub(15 * took_ns).clip(1).alias("queue_ns"))
    found = verdicts(block=block)
    assert found["none"].name == "bandwidth-bound"
    assert "depth-starved" not in {verdict.name for verdict in found.values()}
    assert judge(measured(block=block.with_columns(queue_ns=pl.col("time_ns")))).name != "bandwidth-bound"


def test_bursts_of_writes() -> None:
    clock, parts = VirtualClock(1), []
    for burst in range(8):
        clock.advance_to(1 + burst * 1_000_000_000)
        parts.append(run(Load(MIB, 32, 50, kind=WRITE, is_sequential=True), clock))
    trickle = run(Load(16 * KIB, 1, 400, think_ns=19_000_000))
    for verdict in verdicts(block=pl.concat([*parts, trickle]).sort("time_ns")).values():
        assert verdict.name == "write-burst"
        assert verdict.remedies[0].factor is not None
    steady = verdicts(block=run(Load(MIB, 32, 400, kind=WRITE, is_sequential=True)))
    assert {verdict.name for verdict in steady.values()} == {"bandwidth-bound"}


def test_the_page_cache_hides_the_storage() -> None:
    cached = calls(2000, took_ns=6_000, gap_ns=10_000, size=64 * KIB)
    for verdict in verdicts(call=cached).values():
        assert verdict.name == "page-cache"
        assert verdict.is_certain
    few = run(Load(128 * KIB, 1, 5))
    assert judge(measured(call=cached, block=few), about=ABOUT).name == "page-cache"
    strace = About(source="strace")
    verdict = judge(measured(about=strace, call=cached), about=strace)
    assert (verdict.name, verdict.is_certain) == ("page-cache", False)
    slow = calls(2000, took_ns=90_000, gap_ns=100_000, size=64 * KIB)
    assert judge(measured(about=strace, call=slow), about=strace).name != "page-cache"


def test_a_host_that_takes_longer_than_the_device() -> None:
    block = run(Load(16 * KIB, 1, 2000, think_ns=400_000))
    for verdict in verdicts(block=block).values():
        assert (verdict.name, verdict.is_certain) == ("host-bound", False)
    gap_ns = int(np.diff(block["time_ns"].to_numpy())[0])
    asked = calls(2000, took_ns=gap_ns - 5_000, gap_ns=gap_ns)
    for verdict in verdicts(block=block, call=asked).values():
        assert (verdict.name, verdict.is_certain) == ("host-bound", True)
        assert verdict.remedies[0].factor == pytest.approx(5.7, rel=0.1)


def test_calls_on_a_full_device_are_not_called_host_bound() -> None:
    block = run(PLANTED["iops-bound"])
    waiting = calls(20_000, took_ns=1_000_000, gap_ns=2_000, size=4 * KIB)  # they wait for a place in the queue
    for verdict in verdicts(block=block, call=waiting).values():
        assert verdict.name == "iops-bound"


def test_metadata_takes_the_work() -> None:
    flagged = run(Load(4 * KIB, 1, 1000, kind=WRITE, flags=events.META | events.SYNC))
    data = run(Load(16 * KIB, 1, 1000, kind=WRITE))
    for verdict in verdicts(block=pl.concat([flagged, data]).sort("time_ns")).values():
        assert verdict.name == "metadata-bound"
    names = pl.concat([
        calls(500, took_ns=100_000, gap_ns=200_000, name=name) for name in ("openat", "pread64", "close", "unlink")
    ]).sort("time_ns")  # fmt: skip
    for verdict in verdicts(block=run(Load(16 * KIB, 1, 500)), call=names).values():
        assert verdict.name == "metadata-bound"


def objects(
    *, num_steps: int, step_ns: int, wait_ns: int, dram: int, file: int, cause: str = "decode-read"
) -> pl.DataFrame:
    time_ns = 1 + np.arange(num_steps) * step_ns
    frame = pl.DataFrame({
        "time_ns": time_ns,
        "cause": [cause] * num_steps,
        "layer": [0] * num_steps,
        "sequence_id": [0] * num_steps,
        "num_tokens": [1000] * num_steps,
        "wanted_bytes": [MIB] * num_steps,
        "dram_bytes": [dram] * num_steps,
        "file_bytes": [file] * num_steps,
        "wait_ns": [wait_ns] * num_steps,
        "step": np.arange(num_steps),
        "step_tokens": [1 if cause == "decode-read" else 100] * num_steps,
    })  # fmt: skip
    return shaped("object", frame)


def test_copies_from_dram_are_what_the_model_waits_for() -> None:
    wanted = objects(num_steps=400, step_ns=1_000_000, wait_ns=600_000, dram=MIB, file=0)
    block = run(Load(16 * KIB, 1, 200, think_ns=1_900_000))
    for verdict in verdicts(object=wanted, block=block).values():
        assert verdict.name == "copy-bound"


def test_a_model_that_hardly_waits_is_healthy() -> None:
    wanted = objects(num_steps=400, step_ns=1_000_000, wait_ns=10_000, dram=0, file=MIB)
    for verdict in verdicts(object=wanted, block=run(Load(4 * KIB, 1, 4000))).values():
        assert verdict.name == "healthy"
    idle = run(Load(4 * KIB, 1, 200, think_ns=20_000_000))
    assert {verdict.name for verdict in verdicts(block=idle).values()} == {"healthy"}


def test_loading_that_takes_longer_than_computing() -> None:
    prefill = objects(num_steps=10, step_ns=10_000_000, wait_ns=0, dram=0, file=0, cause="restore")
    load = objects(num_steps=20, step_ns=500_000_000, wait_ns=400_000_000, dram=0, file=MIB, cause="restore")
    load = load.with_columns(
        pl.col("time_ns") + 200_000_000, pl.col("step") + 10, pl.lit(1, pl.Int32).alias("step_tokens")
    )
    for verdict in verdicts(object=pl.concat([prefill, load]), block=run(Load(128 * KIB, 1, 2000))).values():
        assert verdict.name == "recompute-is-cheaper"


def test_remnants_of_split_requests_do_not_make_ops_small() -> None:
    """As on a virtio disk with 254 segments a command: each 1 MiB read becomes 1,016 KiB and 8 KiB."""
    large = run(Load(1016 * KIB, 8, 400, is_sequential=True))
    small = large.with_columns(pl.lit(8 * KIB, pl.Int64).alias("length"), pl.col("offset") + 1016 * KIB)
    parts = [large, small]
    figures = measured(ROOFLINE, block=pl.concat(parts).sort("time_ns"))
    assert figures.whole.read.sizes.median_bytes == 8 * KIB
    assert judge(figures, about=ABOUT).name == "bandwidth-bound"
    assert judge(figures, roofline=ROOFLINE, about=ABOUT).name == "bandwidth-bound"
