"""The probe against drives whose speed is known, fits under noise, its file, and what it leaves behind: nothing."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide import ConfigError, FormatError, IoError
from kvtide.io.drive import DeviceModel, DeviceQueue, SimDrive
from kvtide.io.opening import open_engine
from kvtide.io.ops import aligned_buffer
from kvtide.io.sim import NO_FAULTS, Faults, SimEngine, VirtualClock
from kvtide.probe import scratch as scratch_module
from kvtide.probe import survey
from kvtide.probe.caps import DeviceCaps
from kvtide.probe.file import (
    KNEE_BYTES_MAX,
    Probe,
    as_json,
    default_path,
    find_gap,
    find_knee,
    gap_bytes_max,
    knee_bytes_of,
    load,
    save,
)
from kvtide.probe.fit import SHARE, fit
from kvtide.probe.measure import (
    DISAGREE,
    IN_FLIGHT_BYTES_MAX,
    Bench,
    Cell,
    Measured,
    Reading,
    Spot,
    choose_spots,
    combine,
    measure,
    run_spot,
)
from kvtide.probe.memory import Dram, GpuCopies, measure_dram, measure_gpu_copies
from kvtide.probe.scratch import PIECE_BYTES, Scratch
from kvtide.roofline import Roof

MIB = 1 << 20
SSD = DeviceModel(
    read_latency_ns=80_000,
    write_latency_ns=20_000,
    sync_latency_ns=1000,
    iops_max=200_000,
    read_bytes_per_s=2_000_000_000,
    write_bytes_per_s=1_000_000_000,
    parallelism=128,
)
DISK = dataclasses.replace(SSD, read_latency_ns=8_000_000, write_latency_ns=8_000_000, parallelism=1)
FILE_BYTES = 256 * MIB


class Sim:
    """A bench on a modelled drive under a virtual clock; the host costs a fixed time an op."""

    def __init__(self, model: DeviceModel = SSD, faults: Faults = NO_FAULTS, host_ns: int = 0) -> None:
        self.clock, self.drive = VirtualClock(), SimDrive(model)
        self.engine = SimEngine(self.drive, self.clock, faults, depth_max=256)
        self.num_done, self.host_ns, self.num_settled = 0, host_ns, 0
        fd = self.drive.open("scratch", size_bytes=FILE_BYTES, direct=True)
        self.bench = Bench(
            self.engine, fd, FILE_BYTES, aligned_buffer(4 * MIB), self.clock.now_ns, self._settle,
            np.random.default_rng(0), cpu_ns=lambda: self.num_done * self.host_ns,
        )  # fmt: skip
        reap = self.engine.reap

        def counted(wait_num=0):
            done = reap(wait_num)
            self.num_done += len(done)
            return done

        self.engine.reap = counted

    def _settle(self) -> None:
        self.num_settled += 1


def spot(size: int, depth: int, *, is_write: bool = False) -> Spot:
    return Spot(is_write, is_random=True, size_bytes=size, depth=depth)


def spots_of(sizes=(4096, 65536, 262144, MIB), depths=(1, 8, 32, 128), *, is_write: bool = False) -> list[Spot]:
    return [spot(size, depth, is_write=is_write) for size in sizes for depth in depths if size * depth <= 32 * MIB]


# Measuring and fitting a drive whose speed is known.


def test_fit_recovers_the_drive_that_was_measured() -> None:
    sim = Sim(host_ns=1000)
    spots = spots_of() + spots_of(is_write=True)
    measured = measure(sim.bench, spots, end_ns=300_000_000)
    read, write = (fit([cell for cell in measured.cells if cell.is_write == kind]) for kind in (False, True))
    assert read.roof.latency_ns == pytest.approx(SSD.read_latency_ns, rel=0.05)
    assert read.roof.channel_bytes_per_s == pytest.approx(SSD.read_bytes_per_s, rel=0.05)
    assert read.roof.iops_max == pytest.approx(SSD.iops_max, rel=0.05)
    assert read.roof.bytes_per_s_max == pytest.approx(SSD.read_bytes_per_s, rel=0.05)
    assert write.roof.latency_ns == pytest.approx(SSD.write_latency_ns, rel=0.1)
    assert write.roof.bytes_per_s_max == pytest.approx(SSD.write_bytes_per_s, rel=0.05)
    assert read.roof.host_ns == pytest.approx(1000)
    assert not read.is_host_bound
    assert read.error_median < 0.05
    assert read.error_max < 0.5  # near the bend the model's two lines meet in a corner
    assert read.knee_bytes == pytest.approx(10_000, rel=0.1)


def test_a_busy_host_is_told_from_a_slow_drive() -> None:
    sim = Sim(host_ns=1_000_000_000 // SSD.iops_max)
    measured = measure(sim.bench, spots_of(), end_ns=150_000_000)
    assert fit(measured.cells).is_host_bound
    assert any("IOPS roof of reads is this machine's" in line for line in survey._of_fit("reads", fit(measured.cells)))


def test_time_is_kept_and_every_cell_runs_twice() -> None:
    sim = Sim()
    sizes, told = (65536, 262144, MIB), []
    spots = spots_of(sizes, (1, 8)) + spots_of(sizes, (1, 8), is_write=True)
    measured = measure(sim.bench, spots, end_ns=400_000_000, on_progress=lambda *step: told.append(step))
    assert sim.clock.now_ns() <= 440_000_000
    assert measured.num_missing == measured.num_too_slow == 0
    assert {cell.spot for cell in measured.cells} == set(spots)
    assert min(cell.num_rounds for cell in measured.cells) >= 2
    assert told[-1] == (len(told), len(told))
    assert sim.num_settled >= len(told)
    assert max(cell.spread for cell in measured.cells) < DISAGREE


def test_rounds_that_disagree_are_named() -> None:
    sim = Sim()
    slow = dataclasses.replace(SSD, read_latency_ns=3 * SSD.read_latency_ns)

    def degrade(done: int, total: int) -> None:
        if done == total // 2:
            sim.drive.device = DeviceQueue(slow)
            sim.drive.device._gate_ps = [sim.clock.now_ns() * 1000] * 2

    measured = measure(sim.bench, spots_of(sizes=(4096,), depths=(1, 8)), 100_000_000, on_progress=degrade)
    assert all(cell.spread > 1 for cell in measured.cells)
    lines = survey._of_runs(measured, 256)
    assert lines[0].startswith("runs of 2 of 2 cells disagree by more than 20%")
    assert "random reads of 4 KiB at depth 1 (" in lines[0]


def test_a_slow_drive_gets_only_cells_it_can_drain() -> None:
    sim = Sim(DISK)
    spots = [spot(4096, depth) for depth in (1, 4, 256)] + [spot(4096, 1, is_write=True)]
    measured = measure(sim.bench, spots, end_ns=1_000_000_000)
    assert measured.num_too_slow == 1
    assert spot(4096, 256) not in {cell.spot for cell in measured.cells}
    assert sim.clock.now_ns() <= 1_200_000_000
    assert any("1 cells were left out" in line for line in survey._of_runs(measured, 256))


def test_a_budget_that_runs_out_is_told() -> None:
    sim = Sim(DISK)
    measured = measure(sim.bench, [spot(4096, 1), spot(4096, 1, is_write=True)], end_ns=70_000_000)
    assert measured.num_missing > 0
    assert any("ran fewer than 2 times" in line for line in survey._of_runs(measured, 256))


def test_reading_obeys_little_and_counts_what_it_did() -> None:
    sim = Sim()
    reading = run_spot(sim.bench, spot(4096, 8), 20_000_000)
    assert reading.num_ops == sim.num_done
    assert reading.ops_per_s == pytest.approx(8 / (SSD.read_latency_ns / 1e9), rel=0.06)
    assert reading.depth_mean == pytest.approx(reading.ops_per_s * reading.latency_ns_mean / 1e9)
    assert reading.latency_ns_p50 <= reading.latency_ns_p99


@pytest.mark.parametrize("faults", [Faults(eio=0.2), Faults(short=0.2)])
def test_a_failing_device_is_an_error_that_names_the_cell(faults: Faults) -> None:
    with pytest.raises(IoError, match=r"random reads of 64 KiB at depth 8"):
        run_spot(Sim(faults=faults).bench, spot(65536, 8), 10_000_000)


@given(budget_s=st.floats(0.01, 4000), depth_max=st.integers(1, 256), file_mib=st.integers(16, 1024))
def test_grid_fits_engine_file_and_memory(budget_s: float, depth_max: int, file_mib: int) -> None:
    spots = choose_spots(budget_s * 1e9, depth_max=depth_max, file_bytes=file_mib * MIB)
    assert len(spots) == len(set(spots))
    assert {spot.is_write for spot in spots} == {False, True}
    assert all(1 <= spot.depth <= depth_max for spot in spots)
    assert max(spot.depth * spot.size_bytes for spot in spots) <= min(IN_FLIGHT_BYTES_MAX, file_mib * MIB)


def test_a_minute_covers_the_whole_grid() -> None:
    spots = choose_spots(45e9, depth_max=256, file_bytes=1024 * MIB)
    assert {spot.size_bytes for spot in spots} >= {4096 << shift for shift in range(0, 11, 2)}
    assert {spot.depth for spot in spots} == {1, 4, 16, 32, 64, 128, 256}
    assert {spot.is_random for spot in spots} == {False, True}


def test_of_many_rounds_a_few_far_off_do_not_count() -> None:
    usual = Reading(1000, 10**9, 1e6, 1e6, 1e6, 0.0, 1.0)
    odd = dataclasses.replace(usual, window_ns=10**10)
    assert combine(spot(4096, 1), [usual, odd]).spread == pytest.approx(9)
    assert combine(spot(4096, 1), [usual] * 9 + [odd]).spread == 0


# Fits.


def cell_of(one: Spot, rate: float, took_ns: float) -> Cell:
    return Cell(
        one.is_write,
        one.is_random,
        one.size_bytes,
        one.depth,
        num_rounds=2,
        num_ops=1000,
        ops_per_s=rate / one.size_bytes,
        bytes_per_s=rate,
        latency_ns_mean=took_ns,
        latency_ns_p50=took_ns,
        latency_ns_p99=took_ns,
        host_ns=500.0,
        depth_mean=float(one.depth),
        spread=0.0,
    )


def cells_of(roof: Roof, noise=lambda: 1.0, *, is_write: bool = False) -> list[Cell]:
    """Return cells as a drive with these roofs would give, their rates multiplied by noise."""
    cells = []
    for one in spots_of(
        is_write=is_write, sizes=(4096, 16384, 65536, 262144, MIB, 4 * MIB), depths=(1, 4, 16, 64, 256)
    ):
        rate = float(roof.bytes_per_s(one.size_bytes, one.depth)) * noise()
        cells.append(cell_of(one, rate, one.depth / (rate / one.size_bytes) * 1e9))
    return cells


TRUE = Roof(latency_ns=90_000, channel_bytes_per_s=1.5e9, iops_max=300_000, bytes_per_s_max=3e9, host_ns=500)


def test_exact_cells_give_the_exact_roofs() -> None:
    found = fit(cells_of(TRUE))
    for name in ("latency_ns", "channel_bytes_per_s", "iops_max", "bytes_per_s_max"):
        assert getattr(found.roof, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    assert found.error_max < 1e-6
    assert [advice.size_bytes for advice in found.depths] == [4096, 65536, 131072, MIB]


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32))
def test_a_noisy_fit_stays_near_the_truth(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cells = cells_of(TRUE, noise=lambda: math.exp(rng.normal(0, 0.15)))
    wrong = int(rng.integers(len(cells)))
    cells[wrong] = dataclasses.replace(cells[wrong], bytes_per_s=cells[wrong].bytes_per_s / 10)
    found = fit(cells)
    for name in ("latency_ns", "channel_bytes_per_s", "iops_max", "bytes_per_s_max"):
        assert 0.4 < getattr(found.roof, name) / getattr(TRUE, name) < 2.5, name
    assert found.error_median < 0.4
    assert 4096 <= knee_bytes_of(probe_of(cells)) <= 4 * MIB


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.integers(9, 24), st.integers(0, 8), st.floats(1, 1e12), st.floats(1, 1e12),
            st.just(0.0) | st.floats(1e-3, 1e9), st.floats(1e-6, 300), st.booleans(),
        ),
        min_size=1, max_size=30,
    )
)  # fmt: skip
def test_any_cells_give_positive_finite_roofs(rows) -> None:
    cells = []
    for size, depth, rate, took, host, mean, is_random in rows:
        made = cell_of(dataclasses.replace(spot(1 << size, 1 << depth), is_random=is_random), rate, took)
        cells.append(dataclasses.replace(made, host_ns=host, depth_mean=mean))
    found = fit(cells)
    roof = found.roof
    values = (roof.latency_ns, roof.channel_bytes_per_s, roof.iops_max, roof.bytes_per_s_max, found.knee_bytes)
    assert all(0 < value < math.inf for value in values)
    assert 0 <= found.error_median <= found.error_max < math.inf
    assert all(1 <= advice.depth <= 256 * (1 + 1e-9) for advice in found.depths)
    assert knee_bytes_of(probe_of(cells)).bit_count() == 1


def test_no_cells_ask_for_more_time() -> None:
    with pytest.raises(ConfigError, match="--seconds"):
        fit([])


def test_depth_advice_is_where_the_cells_reach_it() -> None:
    found = fit(cells_of(TRUE))
    for advice in found.depths:
        least = TRUE.depth_for(SHARE, advice.size_bytes)
        assert least <= advice.depth * 1.001
        assert advice.depth <= 4 * least  # the depths of the cells are a factor of four apart


def test_knee_is_the_smallest_size_that_reaches_the_bandwidth() -> None:
    probe = probe_of(cells_of(TRUE))
    knee = knee_bytes_of(probe)
    assert TRUE.bytes_per_s(knee, 64) >= 0.9 * TRUE.bytes_per_s_max
    assert TRUE.bytes_per_s(knee // 2, 64) < 0.9 * TRUE.bytes_per_s_max * 1.1
    shallow = probe_of([cell for cell in probe.cells if cell.depth < 32])
    assert knee_bytes_of(shallow).bit_count() == 1


# The temporary file.


def test_the_file_has_no_name_and_is_written_in_full(tmp_path: Path) -> None:
    arena = aligned_buffer(PIECE_BYTES)
    arena[:] = np.random.default_rng(0).integers(0, 256, len(arena), np.uint8)
    done: list[int] = []
    with Scratch(tmp_path, file_bytes_max=2 * PIECE_BYTES) as scratch, open_engine(depth_max=8) as engine:
        scratch.fill(engine, arena, 1 << 62, on_progress=done.append)
        assert list(tmp_path.iterdir()) == []
        assert done == [PIECE_BYTES, 2 * PIECE_BYTES]
        status = os.fstat(scratch.fd)
        assert (status.st_size, status.st_nlink) == (2 * PIECE_BYTES, 0)
        buffer = aligned_buffer(PIECE_BYTES)
        pieces = set()
        for first in (0, PIECE_BYTES):
            os.preadv(scratch.fd, [buffer.data], first)
            assert np.unique(buffer).size == 256
            pieces.add(buffer.tobytes()[:4096])
        assert len(pieces) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("refused", "is_direct"), [(os.O_TMPFILE, True), (os.O_DIRECT, False)])
def test_a_file_system_without_it_is_still_measured(
    refused: int, is_direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, number = os.open, errno.EOPNOTSUPP if refused == os.O_TMPFILE else errno.EINVAL

    def refusing(path, flags, *rest, **options):
        if flags & refused == refused:
            raise OSError(number, os.strerror(number))
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(scratch_module.os, "open", refusing)
    with Scratch(tmp_path, file_bytes_max=PIECE_BYTES) as scratch:
        assert scratch.is_direct == is_direct
        assert list(tmp_path.iterdir()) == []
        lines = survey._of_device(DeviceCaps(name="vdx"), scratch, "")
        assert any("page cache was measured" in line for line in lines) != is_direct


def test_too_little_room_says_how_much_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = os.statvfs(tmp_path)
    full = os.statvfs_result((space.f_bsize, 4096, space.f_blocks, 100, 100, *tuple(space)[5:]))
    monkeypatch.setattr(scratch_module.os, "statvfs", lambda _: full)
    with pytest.raises(ConfigError, match=r"has 400 KiB free; a probe needs 128 MiB"):
        Scratch(tmp_path)


def test_a_disk_that_fills_up_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    class Full:
        depth_max = 8

        def submit(self, batch):
            self.num = len(batch)

        def reap(self, _):
            from kvtide.io.ops import COMPLETION

            done = np.zeros(self.num, COMPLETION)
            done["error"] = errno.ENOSPC
            return done

    with (
        pytest.raises(IoError, match="No space left"),
        Scratch(tmp_path, file_bytes_max=PIECE_BYTES) as scratch,
    ):
        scratch.fill(Full(), aligned_buffer(PIECE_BYTES), 1 << 62, on_progress=print)
    assert list(tmp_path.iterdir()) == []


# The probe file.


def probe_of(cells: list[Cell]) -> Probe:
    return Probe(
        caps=DeviceCaps(name="nvme0n1", model="Fast 9", serial_digest="ab", capacity_bytes=1 << 40, stack=("nvme0n1",)),
        cells=cells,
        read=fit(cells),
        write=fit(cells),
        engine="uring",
        is_direct=True,
        file_bytes=1 << 30,
        seconds=60.0,
        num_rounds=2,
        seed=0,
        dram=Dram(1 << 29, 1 << 25, 2, 1e10, 2e10),
        gpu=GpuCopies(reason="no NVIDIA driver is loaded"),
        warnings=["a <b> \x1b[31m"],
        kvtide_version="0",
        date="2025-01-01T00:00:00+00:00",
    )


def test_a_probe_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    probe = probe_of(cells_of(TRUE))
    save(probe, tmp_path / "p.json")
    assert load(tmp_path / "p.json") == probe
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]
    assert load(tmp_path / "p.json").roofline.read == probe.read.roof


def test_the_gap_is_what_an_op_costs_in_bytes() -> None:
    deep = Roof(latency_ns=100_000, channel_bytes_per_s=1e9, iops_max=100_000, bytes_per_s_max=4e9)
    assert deep.gap_bytes(4096, 64) == pytest.approx(40_000 - 4096)  # the knee is 40,000 bytes: 4e9 / 1e5
    assert deep.gap_bytes(40_000, 64) == pytest.approx(0, abs=1e-6)
    assert deep.gap_bytes(1 << 20, 64) == pytest.approx(0, abs=1e-6)
    assert deep.gap_bytes(4096, 1) == pytest.approx(100_000)  # 100 us at 1 GB/s
    host = dataclasses.replace(deep, host_ns=20_000)  # one thread submits 50,000 a second: 80,000 bytes each
    assert host.gap_bytes(4096, 64) == pytest.approx(80_000 - 4096)


@given(
    st.floats(1e3, 1e7), st.floats(1e8, 1e10), st.floats(1e3, 1e6), st.floats(1e8, 1e10),
    st.integers(1, 1 << 20), st.integers(1, 256), st.integers(2, 64),
)  # fmt: skip
def test_reads_joined_over_the_gap_are_never_slower(
    latency_ns: float, channel: float, iops: float, rate: float, size: int, depth: int, num: int
) -> None:
    roof = Roof(latency_ns, channel, iops, rate)

    def took(count: float, length: float) -> float:
        return count * length / float(roof.bytes_per_s(length, depth))

    gap = roof.gap_bytes(size, depth)
    assert took(1, num * size + (num - 1) * gap) <= took(num, size) * (1 + 1e-9)
    if gap > 0:  # a little wider, and a long row is slower
        assert took(1, 1e6 * (size + 1.01 * gap + 1)) > took(1e6, size)


def test_the_gap_of_a_probe_is_whole_pages_for_the_fragments_at_hand(tmp_path: Path) -> None:
    probe = probe_of(cells_of(TRUE))  # knee 10,000 bytes, but one thread at 500 ns an op: 2 million ops, no bound
    assert gap_bytes_max(probe) == (10_000 - 4096) // 4096 * 4096
    assert gap_bytes_max(probe, fragment_bytes=16 << 10) == 0
    assert gap_bytes_max(probe, depth=1) == int(90_000e-9 * 1.5e9) // 4096 * 4096
    assert find_gap(tmp_path, tmp_path, 4096).num_bytes == 0
    assert "never probed" in find_gap(tmp_path, tmp_path, 4096).source


def _without(values, name):
    return {key: value for key, value in values.items() if key != name}


def _roof(values, **changed):
    return {**values, "read": {**values["read"], "roof": {**values["read"]["roof"], **changed}}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda v: {**v, "more": 1}, "more"),
        (lambda v: {**v, "version": 2}, "version 2"),
        (lambda v: {**v, "version": True}, "version True"),
        (lambda v: {**v, "format": "kvtide trace"}, "no probe file"),
        (lambda v: _without(v, "cells"), "cells"),
        (lambda v: {**v, "seed": "0"}, "seed"),
        (lambda v: {**v, "caps": {**v["caps"], "extra": 1}}, "extra"),
        (lambda v: _roof(v, iops_max=0.0), "positive"),
        (lambda v: _roof(v, latency_ns=math.nan), "read.roof.latency_ns|positive"),
        (lambda v: _roof(v, bytes_per_s_max=math.inf), "read.roof.bytes_per_s_max|positive"),
        (lambda v: {**v, "cells": [{**v["cells"][0], "bytes_per_s": -1.0}]}, "rate"),
        (lambda v: [v], "no probe file"),
    ],
)
def test_a_file_that_is_no_probe_is_refused(change, says: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(change(as_json(probe_of(cells_of(TRUE))))))
    with pytest.raises(FormatError, match=says):
        load(path)


@pytest.mark.parametrize("raw", [b"", b"\xff\xfe", b"{", b"[" * 100_000, b"null", b'{"format": "kvtide probe"}'])
def test_bytes_that_are_no_probe_are_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes(raw)
    with pytest.raises(FormatError):
        load(tmp_path / "p.json")
    with pytest.raises(ConfigError, match="kvtide probe"):
        load(tmp_path / "missing.json")


def test_place_tells_drives_apart_and_is_a_plain_name(tmp_path: Path) -> None:
    caps = DeviceCaps(name="sd/a b\n", model="M", serial_digest="1", capacity_bytes=5)
    path = default_path(tmp_path, caps)
    assert path.parent == tmp_path / "probe"
    assert path.name.startswith("sd_a_b_-")
    others = [dataclasses.replace(caps, **change) for change in ({"model": "N"}, {"serial_digest": "2"})]
    assert len({path, *(default_path(tmp_path, other) for other in others)}) == 3
    assert default_path(tmp_path, DeviceCaps(mount_point="/a")) != default_path(tmp_path, DeviceCaps(mount_point="/b"))


def test_knee_comes_from_the_probe_of_the_stores_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = probe_of(cells_of(TRUE))
    monkeypatch.setattr("kvtide.probe.file.caps_of", lambda _: probe.caps)
    store = tmp_path / "not" / "yet" / "there"
    assert find_knee(tmp_path, store, 777) == find_knee(tmp_path, tmp_path, 777)
    assert find_knee(tmp_path, store, 777).num_bytes == 777
    path = default_path(tmp_path, probe.caps)
    path.parent.mkdir()
    save(probe, path)
    knee = find_knee(tmp_path, store, 777)
    assert (knee.num_bytes, str(path) in knee.source) == (max(64 << 10, knee_bytes_of(probe)), True)
    slow_start = dataclasses.replace(TRUE, iops_max=500)
    save(probe_of(cells_of(slow_start)), path)
    assert find_knee(tmp_path, store, 777).num_bytes == KNEE_BYTES_MAX
    path.write_text("{}")
    assert find_knee(tmp_path, store, 777).num_bytes == 777
    assert "no probe file" in find_knee(tmp_path, store, 777).source


# Memory.


def test_memory_is_copied_by_one_and_by_all() -> None:
    dram = measure_dram(0.03)
    assert min(dram.bytes_per_s_one, dram.bytes_per_s_all) > 0
    assert dram.num_threads == len(os.sched_getaffinity(0))
    assert dram.buffer_bytes % MIB == 0


def test_without_a_gpu_the_reason_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kvtide.probe.memory.PROC", tmp_path)
    assert measure_gpu_copies() == GpuCopies(reason="no NVIDIA driver is loaded")


@pytest.mark.gpu
def test_gpu_copies_have_a_rate_for_each_size() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA here")
    found = measure_gpu_copies()
    assert not found.reason
    assert len(found.sizes_bytes) == len(found.to_device_bytes_per_s) == len(found.to_host_bytes_per_s) > 0


def test_a_buffer_that_fits_the_cache_is_told() -> None:
    assert survey._of_dram(Dram(1 << 20, 1 << 25, 2, 1.0, 1.0))[0].endswith("may be that of the cache")
    assert survey._of_dram(Dram(1 << 26, 1 << 25, 2, 1.0, 1.0)) == []
    assert survey._of_runs(Measured([], 0, 0, 2), 32) == [
        "depths beyond 32 were not measured: this engine does not go deeper"
    ]
