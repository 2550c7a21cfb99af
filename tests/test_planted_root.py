"""Six loads whose verdict is known, run by fio on this machine's disk and traced through the kernel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import inprocess
from kvtide.errors import UnsupportedError
from kvtide.probe.caps import caps_of
from kvtide.probe.file import load
from kvtide.roofline import Roofline
from kvtide.trace.figures import Indicators
from kvtide.trace.file import TraceFile
from kvtide.trace.indicators import measure
from kvtide.trace.kernel import find_tracefs
from kvtide.trace.verdict import Verdict, judge

PATIENCE_S = 300  # a machine that others use, too
KVTIDE = [sys.executable, "-m", "kvtide"]
SIZE = "256M"
TRIES = 2

pytestmark = pytest.mark.root


def why_not() -> str:
    if os.geteuid() == 0 and not Path("/sys/kernel/tracing/instances").exists():
        subprocess.run(["mount", "-t", "tracefs", "tracefs", "/sys/kernel/tracing"], check=False)
    try:
        find_tracefs()
    except UnsupportedError as refused:
        return str(refused)
    return "" if shutil.which("fio") else "fio is not installed"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("planted")
    if not caps_of(folder).name:
        pytest.skip(f"no block device is under {folder}")
    fio(folder, "--rw=write", "--bs=1M", "--direct=1", "--end_fsync=1")
    return folder


def probed(folder: Path) -> Roofline:
    probe = folder / "probe.json"
    kvtide("probe", str(folder), "--seconds", "6", "-o", str(probe), "--json")
    return load(probe).roofline


@pytest.fixture(scope="module")
def rooflines(folder: Path) -> list[Roofline]:
    return [probed(folder)]


def kvtide(*words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*KVTIDE, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done


def fio_words(folder: Path, *words: str) -> list[str]:
    file = str(folder / "data")
    return ["fio", "--name=planted", f"--filename={file}", f"--size={SIZE}", "--ioengine=io_uring", "--minimal", *words]


def fio(folder: Path, *words: str) -> None:
    subprocess.run(fio_words(folder, *words), check=True, capture_output=True)


def traced(folder: Path, *words: str, calls: bool = False, device: str = "") -> TraceFile:
    file = folder / "load.kvtrace"
    options = ["-o", str(file), "--device", device or str(folder), "--json", *(["--calls"] if calls else [])]
    kvtide("trace", *options, "--", *fio_words(folder, *words))
    return TraceFile(file)


def judged(trace: TraceFile, roofline: Roofline | None) -> tuple[Indicators, Verdict]:
    indicators = measure(trace, roofline=roofline)
    return indicators, judge(indicators, roofline=roofline, about=trace.about)


TIMED = ("--time_based", "--runtime=2")
LOADS = {
    "depth-starved": ("--rw=randread", "--bs=4k", "--iodepth=1", "--direct=1", *TIMED),
    "iops-bound": ("--rw=randread", "--bs=4k", "--iodepth=128", "--direct=1", *TIMED),
    "bandwidth-bound": ("--rw=read", "--bs=1M", "--iodepth=16", "--direct=1", *TIMED),
    "write-burst": ("--rw=randwrite", "--bs=256k", "--iodepth=16", "--direct=1", "--time_based", "--runtime=5"),
}
IN_FLIGHT_MAX = 128  # what may be in flight when recording begins, and when it ends
BURST_S = 0.15
SWING_MAX = 1.3  # roofs of one device, probed minutes apart, differ by less, unless others use it


def words_of(name: str, roofline: Roofline) -> tuple[str, ...]:
    """Return fio's words; those of a burst last about as long on a fast disk as on a slow one."""
    if name != "write-burst":
        return LOADS[name]
    num = max(64, round(BURST_S * roofline.write.bytes_per_s_max / (256 << 10)))
    return (*LOADS[name], "--thinktime=1s", f"--thinktime_blocks={num}", "--thinktime_blocks_type=issue")


def swing(rooflines: list[Roofline]) -> float:
    """Return by how much the roofs of one disk differ from probe to probe."""
    roofs = [
        (line.read.iops_max, line.read.bytes_per_s_max, line.read.latency_ns, line.write.bytes_per_s_max)
        for line in rooflines
    ]
    return max(max(each) / max(min(each), 1e-9) for each in zip(*roofs, strict=True))


@pytest.mark.parametrize("name", LOADS)
def test_a_planted_load_gets_its_name(name: str, folder: Path, rooflines: list[Roofline]) -> None:
    first = len(rooflines) - 1
    for _ in range(TRIES):
        trace = traced(folder, *words_of(name, rooflines[-1]))
        indicators, verdict = judged(trace, rooflines[-1])
        assert trace.about.health.num_lost == 0
        assert indicators.trust.unmatched_share * indicators.trust.num_events < 2 * IN_FLIGHT_MAX
        if verdict.name == name:
            return
        rooflines.append(probed(folder))
    if swing(rooflines[first:]) > SWING_MAX:
        pytest.skip(f"the disk is not steady enough: its roofs differ {swing(rooflines[first:]):.2g}-fold; {verdict}")
    if verdict.name == "cannot-say" and "probed in another state" in verdict.sentence:  # right names: the sim has them
        pytest.skip(f"the disk is not what its probes say, and the verdict says so: {verdict}")
    pytest.fail(str(verdict))


def test_hits_of_the_page_cache_do_not_exercise_the_storage(folder: Path, rooflines: list[Roofline]) -> None:
    (folder / "data").read_bytes()
    words = ("--rw=randread", "--bs=4k", "--direct=0", "--invalidate=0", "--ioengine=psync", "--rate_iops=50000")
    trace = traced(folder, *words, *TIMED, calls=True)
    _, verdict = judged(trace, rooflines[-1])
    assert verdict.name == "page-cache", verdict


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[str]:
    """Give an own device with the usual read-ahead of 128 KiB, so that no other's settings are touched."""
    if reason := why_not():
        pytest.skip(reason)
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(256 << 20)
    done = subprocess.run(["losetup", "--find", "--show", str(image)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no loop device: {done.stderr}")
    device = done.stdout.strip()
    try:
        Path(f"/sys/block/{device[5:]}/queue/read_ahead_kb").write_text("128")
        yield device
    finally:
        for _ in range(20):
            if subprocess.run(["losetup", "--detach", device], check=False, capture_output=True).returncode == 0:
                break
            time.sleep(0.1)


def test_read_ahead_is_not_called_small_io(loop: str, tmp_path: Path) -> None:
    file = tmp_path / "buffered.kvtrace"
    load = [
        "fio",
        "--name=buffered",
        f"--filename={loop}",
        "--size=256M",
        "--rw=read",
        "--bs=4k",
        "--direct=0",
        "--fadvise_hint=0",
    ]
    kvtide("trace", "-o", str(file), "--device", loop, "--json", "--", *load, "--ioengine=psync", "--minimal")
    indicators, verdict = judged(TraceFile(file), None)
    assert indicators.cap_bytes == 128 << 10
    assert indicators.whole.read.sizes.median_bytes == 128 << 10
    assert indicators.whole.read.readahead_share > 0.5
    assert verdict.name not in {"size-bound", "iops-bound"}
    assert any("cap" in each.name.lower() or "cap" in each.value.lower() for each in verdict.evidence), verdict


@pytest.mark.model
@pytest.mark.usefixtures("models")
def test_block_reads_of_the_store_name_their_cause_and_layer(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    if not caps_of(tmp_path).name:
        pytest.skip(f"no block device is under {tmp_path}")
    import polars as pl

    file = tmp_path / "run.kvtrace"
    document = tmp_path / "document.txt"
    document.write_text(" ".join(f"Fact {i}: tide {i * 7 % 101} follows {i}." for i in range(30)))
    run = ["run", "--dir", str(tmp_path / "store"), "--document", str(document), "--max-new-tokens", "2", "--json"]
    stored = inprocess.kvtide(*run)  # what is traced then reads it
    assert stored.returncode == 0, stored.stderr
    options = ["--device", str(tmp_path), "--json"]
    told = kvtide("trace", "-o", str(file), *options, "--", *KVTIDE, *run)
    assert json.loads(told.stdout.splitlines()[-1])["num_lost"] == 0
    trace = TraceFile(file)
    assert trace.about.files, trace.about.notes
    block, ops = trace.frame("block"), trace.frame("op")
    inside = pl.any_horizontal(
        pl.col("offset").is_between(extent.physical, extent.physical + extent.length - 1)
        for extent in trace.about.files[0].extents
    )
    reads = block.filter(inside & (pl.col("flags") & 1 == 1))
    joined = reads.filter((pl.col("cause") != "unknown") & (pl.col("layer") >= 0) & (pl.col("op") >= 0))
    assert reads["length"].sum() > 0
    assert joined["length"].sum() >= 0.99 * reads["length"].sum()
    # What is joined is right: the op was in flight, is a read, and no smaller than the command.
    of = ops[joined["op"]]
    assert (of["time_ns"].to_numpy() <= joined["complete_ns"].to_numpy()).all()
    assert (of["complete_ns"].to_numpy() >= joined["time_ns"].to_numpy()).all()
    assert not of["is_write"].any()
    assert (of["layer"].to_numpy() == joined["layer"].to_numpy()).all()
    asked = ops.filter(~pl.col("is_write") & (pl.col("layer") >= 0))  # the others read headers
    assert asked["length"].sum() == joined["length"].sum()
