"""The simulated drive keeps its device model's figures, its seed's promises, and breaks as it was told to."""

from __future__ import annotations

import errno
from dataclasses import replace

import numpy as np
import pytest

from kvtide.errors import ConfigError
from kvtide.io.drive import FIRST_FD, DeviceModel, SimDrive, sectors
from kvtide.io.ops import COMPLETION, FSYNC, OP, READ, WRITE, address_of
from kvtide.io.sim import Faults, SimEngine, VirtualClock

MODEL = DeviceModel(
    read_latency_ns=80_000,
    write_latency_ns=20_000,
    sync_latency_ns=500_000,
    iops_max=400_000,
    read_bytes_per_s=4_096_000_000,
    write_bytes_per_s=2_048_000_000,
    parallelism=64,
)
SECOND_NS = 10**9


class Bench:
    """A drive with one file, an engine on it, and memory for `num` operations of `size` bytes."""

    def __init__(
        self,
        *,
        num: int = 100,
        size: int = 4096,
        depth_max: int = 1,
        faults: Faults | None = None,
        seed: int = 1,
        model: DeviceModel = MODEL,
        capacity_bytes: int = 1 << 40,
        keeps_unsynced: bool = False,
    ) -> None:
        self.num, self.size = num, size
        self.clock = VirtualClock()
        self.drive = SimDrive(model, capacity_bytes=capacity_bytes, keeps_unsynced=keeps_unsynced)
        self.fd = self.drive.open("data")
        self.engine = SimEngine(self.drive, self.clock, faults or Faults(), depth_max=depth_max, seed=seed)
        self.arena = np.zeros(num * size, np.uint8)
        self.source = np.random.default_rng(9).integers(1, 256, num * size, np.uint8)

    def fill(self) -> None:
        self.drive.lookup(self.fd).file.write(0, self.source.tobytes())

    def ops(self, kind: int) -> np.ndarray:
        ops = np.zeros(self.num, OP)
        ops["fd"], ops["kind"], ops["length"], ops["tag"] = self.fd, kind, self.size, np.arange(self.num)
        ops["offset"] = np.arange(self.num) * self.size
        ops["address"] = address_of(self.source if kind == WRITE else self.arena) + ops["offset"]
        return ops

    def run(self, kind: int) -> np.ndarray:
        self.engine.submit(self.ops(kind))
        return self.engine.reap(self.num)


def test_depth_one_costs_latency_and_transfer() -> None:
    bench = Bench(num=10, depth_max=1)
    bench.fill()
    done = bench.run(READ)
    assert (done["complete_ns"] - done["submit_ns"]).tolist() == [81_000] * 10
    assert bench.clock.now_ns() == 810_000
    assert (done["depth"] == 1).all()
    assert bench.arena.tobytes() == bench.source.tobytes()
    bench.run(WRITE)
    assert bench.clock.now_ns() == 810_000 + 10 * 22_000


@pytest.mark.parametrize(
    ("depth_max", "size", "model", "iops"),
    [
        (8, 512, MODEL, 8 / 80_125e-9),  # depth over latency
        (64, 512, MODEL, 400_000),  # the roof of the device
        (64, 512, replace(MODEL, parallelism=16), 16 / 80_125e-9),  # its channels
        (64, 1 << 17, MODEL, 4_096_000_000 / (1 << 17)),  # its bus
    ],
    ids=["latency", "iops", "parallelism", "bandwidth"],
)
def test_a_deep_queue_runs_into_the_lowest_roof(depth_max: int, size: int, model: DeviceModel, iops: float) -> None:
    bench = Bench(num=2000, size=size, depth_max=depth_max, model=model)
    done = bench.run(READ)
    assert bench.num / bench.clock.now_ns() * SECOND_NS == pytest.approx(iops, rel=0.05)
    assert done["depth"].max() == depth_max


def test_reads_and_writes_have_their_own_bus() -> None:
    size = 1 << 20
    bench = Bench(num=100, size=size, depth_max=100)
    bench.run(WRITE)
    assert bench.num * size / bench.clock.now_ns() * SECOND_NS == pytest.approx(2_048_000_000, rel=0.02)


def test_waiting_moves_the_clock_and_polling_does_not() -> None:
    bench = Bench(num=4, depth_max=4)
    bench.engine.submit(bench.ops(READ))
    assert len(bench.engine.reap(0)) == 0
    assert len(bench.engine.reap(2)) == 2
    now = bench.clock.now_ns()
    bench.clock.advance_to(now + SECOND_NS)
    bench.clock.advance_to(now)
    assert bench.clock.now_ns() == now + SECOND_NS
    done = bench.engine.reap(0)
    assert len(done) == 2
    assert done["complete_ns"].max() < now + SECOND_NS


@pytest.mark.parametrize("seed", [1, 2])
def test_one_seed_gives_one_history(seed: int) -> None:
    faults = Faults(short=0.2, eio=0.1, enospc=0.1, reordered=0.3, delayed=0.2, torn=0.2, flipped=0.2)
    histories = []
    for used in (seed, seed, seed + 100):
        bench = Bench(depth_max=16, faults=faults, seed=used)
        done = [bench.run(WRITE), bench.run(READ)]
        bench.drive.crash(used)
        histories.append((np.concatenate(done).tobytes(), bench.drive.contents("data"), bench.arena.tobytes()))
    assert histories[0] == histories[1]
    assert histories[0] != histories[2]


def test_one_fault_more_leaves_the_others_where_they_were() -> None:
    errors = []
    for flipped in (0.0, 1.0):
        bench = Bench(faults=Faults(eio=0.3, flipped=flipped))
        errors.append(bench.run(READ)["error"].tolist())
    assert errors[0] == errors[1]
    assert 0 < errors[0].count(errno.EIO) < 100


def test_fault_eio_moves_nothing() -> None:
    bench = Bench(faults=Faults(eio=1.0))
    bench.fill()
    for kind in (READ, WRITE, FSYNC):
        done = bench.run(kind)
        assert set(done["error"].tolist()) == {errno.EIO}
        assert not done["length"].any()
    assert not bench.arena.any()


def test_fault_enospc_strikes_writes_only() -> None:
    bench = Bench(faults=Faults(enospc=1.0))
    assert set(bench.run(WRITE)["error"].tolist()) == {errno.ENOSPC}
    assert bench.drive.contents("data") == b""
    assert not bench.run(READ)["error"].any()


def test_fault_short_moves_a_part_then_ends_or_fails() -> None:
    bench = Bench(faults=Faults(short=1.0))
    bench.fill()
    done = bench.run(READ)
    assert (done["length"] < bench.size).all()
    assert set(done["error"].tolist()) == {0, errno.EIO}
    for row in done:
        start = int(row["tag"]) * bench.size
        cut = start + int(row["length"])
        assert bench.arena[start:cut].tobytes() == bench.source[start:cut].tobytes()
        assert not bench.arena[cut : start + bench.size].any()
    assert set(Bench(faults=Faults(short=1.0)).run(WRITE)["error"].tolist()) == {errno.EIO, errno.ENOSPC}


def test_fault_delayed_takes_the_factor_longer() -> None:
    bench = Bench(num=1, faults=Faults(delayed=1.0, delay_factor=7))
    assert bench.run(READ)["complete_ns"].tolist() == [7 * 81_000]


def test_fault_reordered_changes_the_order_of_completions() -> None:
    assert Bench(depth_max=32).run(READ)["tag"].tolist() == list(range(100))
    tags = Bench(depth_max=32, faults=Faults(reordered=0.5)).run(READ)["tag"].tolist()
    assert tags != list(range(100))
    assert sorted(tags) == list(range(100))


def test_fault_torn_reports_success_and_keeps_some_sectors() -> None:
    bench = Bench(faults=Faults(torn=1.0))
    done = bench.run(WRITE)
    assert not done["error"].any()
    assert (done["length"] == bench.size).all()
    kept = sector_states(bench)
    assert {"old", "new"} == kept


def test_fault_flipped_turns_one_bit() -> None:
    bench = Bench(faults=Faults(flipped=1.0))
    bench.fill()
    bench.run(READ)
    assert bits_apart(bench.arena, bench.source) == [1] * bench.num
    bench = Bench(faults=Faults(flipped=1.0))
    bench.run(WRITE)
    assert bits_apart(np.frombuffer(bench.drive.contents("data"), np.uint8), bench.source) == [1] * bench.num


def bits_apart(left: np.ndarray, right: np.ndarray) -> list[int]:
    return np.unpackbits((left ^ right).reshape(-1, 4096), axis=1).sum(axis=1).tolist()


def sector_states(bench: Bench) -> set[str]:
    """Which kinds of sector the file holds after writes over zeros; a sector in between would be `mixed`."""
    contents = np.frombuffer(bench.drive.contents("data").ljust(len(bench.source), b"\0"), np.uint8)
    now, new = contents.reshape(-1, 512), bench.source.reshape(-1, 512)
    is_new, is_old = (now == new).all(axis=1), ~now.any(axis=1)
    assert (is_new | is_old).all()
    return {name for name, found in (("new", is_new), ("old", is_old)) if found.any()}


def test_a_crash_tears_what_is_in_flight_and_keeps_what_completed() -> None:
    bench = Bench(depth_max=100)
    bench.engine.submit(bench.ops(WRITE))
    done = bench.engine.reap(40)
    bench.drive.crash(seed=3)
    late = bench.engine.reap(60)
    assert set(late["error"].tolist()) == {errno.EIO}
    assert sector_states(bench) == {"old", "new"}
    contents = bench.drive.contents("data")
    for tag in done["tag"].tolist():
        at = tag * bench.size
        assert contents[at : at + bench.size] == bench.source[at : at + bench.size].tobytes()


def test_a_crash_may_lose_what_was_not_synced() -> None:
    bench = Bench(num=20, depth_max=4, keeps_unsynced=True)
    bench.run(WRITE)
    bench.engine.submit(np.array([(bench.fd, FSYNC, 0, 0, 0, 0, 1)], OP))
    assert bench.engine.reap(1)["error"].tolist() == [0]
    first = bench.source.copy()
    bench.source[:] = np.random.default_rng(5).integers(1, 256, len(first), np.uint8)
    bench.run(WRITE)
    bench.drive.crash(seed=4)
    now = np.frombuffer(bench.drive.contents("data"), np.uint8).reshape(-1, 512)
    is_first, is_second = ((now == side.reshape(-1, 512)).all(axis=1) for side in (first, bench.source))
    assert (is_first | is_second).all()
    assert is_first.any()
    assert is_second.any()


def test_a_sync_covers_only_what_was_complete_when_it_began() -> None:
    bench = Bench(num=50, depth_max=51, keeps_unsynced=True, model=replace(MODEL, sync_latency_ns=10**9))
    bench.engine.submit(np.concatenate([bench.ops(WRITE), np.array([(bench.fd, FSYNC, 0, 0, 0, 0, 99)], OP)]))
    assert bench.engine.reap(51)["tag"].tolist()[-1] == 99
    bench.drive.crash(seed=1)
    assert "old" in sector_states(bench)


def test_a_full_drive_takes_what_fits() -> None:
    bench = Bench(num=4, capacity_bytes=10_000)
    done = bench.run(WRITE)
    assert done["length"].tolist() == [4096, 4096, 1808, 0]
    assert done["error"].tolist() == [0, 0, errno.ENOSPC, errno.ENOSPC]
    assert bench.drive.used_bytes() == 10_000
    assert bench.run(WRITE)["error"].tolist() == [0, 0, errno.ENOSPC, errno.ENOSPC]


def test_writes_carry_what_memory_held_when_they_started() -> None:
    bench = Bench(num=2, depth_max=1)
    wanted = bench.source[:4096].tobytes()
    bench.engine.submit(bench.ops(WRITE))
    bench.source[:] = 7
    bench.engine.reap(2)
    assert bench.drive.contents("data") == wanted + b"\7" * 4096


def test_files_are_sparse_and_shared_by_path() -> None:
    drive = SimDrive(MODEL)
    first = drive.open("big", size_bytes=1 << 40)
    again = drive.open("big", writable=False)
    assert (first, again) == (FIRST_FD, FIRST_FD + 1)
    assert drive.lookup(first).file is drive.lookup(again).file
    assert drive.used_bytes() == 1 << 40
    assert drive.lookup(again).file.read((1 << 40) - 3, 10) == bytes(3)
    drive.close(first)
    assert drive.lookup(first) is None


def test_sectors_are_cut_at_multiples_of_512_in_the_file() -> None:
    assert [(at, len(piece)) for at, piece in sectors(500, bytes(600))] == [(500, 12), (512, 512), (1024, 76)]
    assert [(at, len(piece)) for at, piece in sectors(512, bytes(512))] == [(512, 512)]


def test_impossible_figures_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        replace(MODEL, iops_max=0)
    with pytest.raises(ConfigError, match=r"Faults\.eio"):
        Faults(eio=1.5)
    assert len(Bench(num=1).engine.reap(5)) == 0
    assert Bench(num=1).engine.reap(5).dtype == COMPLETION
