"""What every engine promises: right bytes, right tags, exactly once, never more than `depth_max` in flight."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvtide.errors import ConfigError, UnsupportedError
from kvtide.io.drive import DeviceModel, SimDrive
from kvtide.io.ops import COMPLETION, FSYNC, IOVEC, OP, READ, WRITE, Engine, address_of, aligned_buffer
from kvtide.io.sim import SimEngine, VirtualClock
from kvtide.io.threads import ThreadEngine
from kvtide.io.uring import UringEngine

MODEL = DeviceModel(
    read_latency_ns=80_000,
    write_latency_ns=20_000,
    sync_latency_ns=50_000,
    iops_max=500_000,
    read_bytes_per_s=6_000_000_000,
    write_bytes_per_s=3_000_000_000,
    parallelism=64,
)


@dataclass
class World:
    """One engine's way to make files: real ones, or those of a simulated drive."""

    name: str
    folder: Path
    drive: SimDrive

    def engine(self, depth_max: int = 16) -> Engine:
        if self.name == "sim":
            return SimEngine(self.drive, VirtualClock(), depth_max=depth_max)
        if self.name == "threads":
            return ThreadEngine(depth_max=depth_max)
        return UringEngine(depth_max=depth_max, fixed_buffers=self.name == "uring-fixed")

    def open(self, contents: bytes, *, writable: bool = True, direct: bool = False) -> int:
        if self.name == "sim":
            fd = self.drive.open("file", size_bytes=len(contents))
            self.drive.lookup(fd).file.write(0, contents)
            return self.drive.open("file", writable=writable, direct=direct)
        path = self.folder / "file"
        path.write_bytes(contents)
        flags = (os.O_RDWR if writable else os.O_RDONLY) | (os.O_DIRECT if direct else 0)
        return os.open(path, flags)

    def contents(self) -> bytes:
        return self.drive.contents("file") if self.name == "sim" else (self.folder / "file").read_bytes()

    def close(self, fd: int) -> None:
        self.drive.close(fd) if self.name == "sim" else os.close(fd)


@pytest.fixture(params=["uring", "uring-fixed", "threads", "sim"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    if request.param.startswith("uring"):
        try:
            UringEngine(depth_max=1).close()
        except UnsupportedError as refused:
            pytest.skip(str(refused))
    return World(request.param, tmp_path, SimDrive(MODEL))


@pytest.fixture
def engine(world: World) -> Iterator[Engine]:
    made = world.engine()
    yield made
    made.close()


def reap_all(engine: Engine, num: int, wait_num: int | None = None) -> np.ndarray:
    parts = [engine.reap(num if wait_num is None else wait_num)]
    while sum(map(len, parts)) < num:
        parts.append(engine.reap(wait_num or num))
    done = np.concatenate(parts)
    assert done.dtype == COMPLETION
    assert len(engine.reap(1)) == 0
    return done[np.argsort(done["tag"], kind="stable")]


def op(fd: int, kind: int, offset: int, buffer: np.ndarray, tag: int = 7) -> np.ndarray:
    return np.array([(fd, kind, offset, address_of(buffer), buffer.nbytes, 0, tag)], OP)


def num_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def pattern(num_bytes: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


@dataclass
class Mixed:
    """A random batch of plain and vectored reads, with what each should bring."""

    ops: np.ndarray
    vectors: list[np.ndarray]
    wanted: list[bytes]
    places: list[list[tuple[int, int]]]  # where in the arena each operation's pieces lie


def mixed_reads(fd: int, source: bytes, arena: np.ndarray, num: int, seed: int) -> Mixed:
    rng = np.random.default_rng(seed)
    ops, made = np.zeros(num, OP), Mixed(np.zeros(0, OP), [], [], [])
    room = len(arena) // num
    for index in range(num):
        length = int(rng.integers(1, room))
        offset = int(rng.integers(0, len(source) - length))
        start = index * room
        cuts = np.sort(rng.integers(0, length + 1, int(rng.integers(0, 4))))
        edges = [0, *cuts.tolist(), length]
        places = [(start + a, b - a) for a, b in itertools.pairwise(edges)][::-1]
        if len(places) == 1:
            ops[index] = (fd, READ, offset, address_of(arena) + start, length, 0, 1000 + index)
        else:
            rows = np.array([(address_of(arena) + at, size) for at, size in places], IOVEC)
            made.vectors.append(rows)
            ops[index] = (fd, READ, offset, address_of(rows), length, len(rows), 1000 + index)
        made.wanted.append(source[offset : offset + length])
        made.places.append(places)
    made.ops = ops
    return made


@pytest.mark.parametrize("num", [1, 3, 16, 17, 300])
def test_reads_bring_the_right_bytes_exactly_once(world: World, engine: Engine, num: int) -> None:
    source = pattern(200_000)
    fd = world.open(source)
    arena = np.zeros(num * 3000, np.uint8)
    engine.register(arena)
    made = mixed_reads(fd, source, arena, num, seed=num)
    engine.submit(made.ops)
    done = reap_all(engine, num)
    assert done["tag"].tolist() == list(range(1000, 1000 + num))
    assert not done["error"].any()
    assert done["length"].tolist() == [len(wanted) for wanted in made.wanted]
    for wanted, places in zip(made.wanted, made.places, strict=True):
        assert b"".join(arena[at : at + size].tobytes() for at, size in places) == wanted
    world.close(fd)


@pytest.mark.parametrize("vectored", [False, True])
def test_writes_land_where_they_should(world: World, engine: Engine, *, vectored: bool) -> None:
    num, size = 100, 1000
    fd = world.open(bytes(num * size))
    arena = np.frombuffer(pattern(num * size), np.uint8).copy()
    engine.register(arena)
    order = np.random.default_rng(3).permutation(num)
    ops = np.zeros(num, OP)
    ops["fd"], ops["kind"], ops["length"], ops["tag"] = fd, WRITE, size, np.arange(num)
    ops["offset"] = order * size
    ops["address"] = address_of(arena) + np.arange(num) * size
    vectors = np.zeros(2 * num, IOVEC)
    if vectored:
        vectors["address"] = address_of(arena) + np.arange(2 * num) * (size // 2)
        vectors["length"] = size // 2
        ops["num_vectors"] = 2
        ops["address"] = address_of(vectors) + np.arange(num) * 2 * IOVEC.itemsize
    engine.submit(ops)
    done = reap_all(engine, num, wait_num=7)
    assert done["length"].tolist() == [size] * num
    engine.submit(np.array([(fd, FSYNC, 0, 0, 0, 0, 9)], OP))
    assert [tuple(row)[:3] for row in engine.reap(1).tolist()] == [(9, 0, 0)]
    expected = np.zeros((num, size), np.uint8)
    expected[order] = arena.reshape(num, size)
    assert world.contents() == expected.tobytes()
    world.close(fd)


@pytest.mark.parametrize("depth_max", [1, 2, 8])
def test_depth_is_bounded_and_reached(world: World, depth_max: int) -> None:
    engine = world.engine(depth_max)
    fd = world.open(pattern(8192))
    arena = np.zeros(64, np.uint8)
    ops = np.repeat(op(fd, READ, 0, arena), 2000)
    ops["tag"] = np.arange(len(ops))
    engine.submit(ops[:1500])
    engine.submit(ops[1500:])
    done = reap_all(engine, len(ops), wait_num=5)
    assert done["tag"].tolist() == list(range(len(ops)))
    assert done["depth"].min() >= 1
    assert done["depth"].max() <= depth_max
    if world.name != "threads":  # threads may be so quick that they never meet
        assert done["depth"].max() == depth_max
    assert (done["complete_ns"] >= done["submit_ns"]).all()
    engine.close()
    world.close(fd)


@pytest.mark.parametrize("vectored", [False, True])
def test_a_read_over_the_end_of_the_file_is_short(world: World, engine: Engine, *, vectored: bool) -> None:
    source = pattern(5000)
    fd = world.open(source)
    buffer = np.zeros(3000, np.uint8)
    ops = np.concatenate([op(fd, READ, 4000, buffer, 1), op(fd, READ, 9000, buffer[1500:], 2)])
    rows = np.array([(address_of(buffer), 400), (address_of(buffer) + 400, 2600)], IOVEC)
    if vectored:
        ops["num_vectors"][0], ops["address"][0] = 2, address_of(rows)
    engine.submit(ops)
    done = reap_all(engine, 2)
    assert done["length"].tolist() == [1000, 0]
    assert done["error"].tolist() == [0, 0]
    assert buffer[:1000].tobytes() == source[4000:]
    assert not buffer[1000:].any()
    world.close(fd)


def test_refusals_are_values(world: World, engine: Engine) -> None:
    fd = world.open(pattern(8192), writable=False)
    buffer = np.zeros(100, np.uint8)
    bad_kind = op(fd, 9, 0, buffer, 4)
    ops = np.concatenate(
        [op(123456, READ, 0, buffer, 1), op(fd, WRITE, 0, buffer, 2), op(fd, READ, 0, buffer, 3), bad_kind]
    )
    expected = [errno.EBADF, errno.EBADF, 0, errno.EINVAL]
    for repeats in (1, 5):  # the short way and the way of whole batches
        engine.submit(np.tile(ops, repeats))
        done = reap_all(engine, 4 * repeats)
        assert done["error"].tolist() == np.repeat(expected, repeats).tolist()
        assert done["length"].tolist() == np.repeat([0, 0, 100, 0], repeats).tolist()
    world.close(fd)


def test_direct_io_must_be_aligned(world: World, engine: Engine) -> None:
    source = pattern(16384 + 1000)
    fd = world.open(source, direct=True)
    buffer = aligned_buffer(16384)
    engine.register(buffer)
    ops = np.concatenate([op(fd, READ, 0, buffer[:8192], 1), op(fd, READ, 100, buffer[8192:12288], 2)])
    engine.submit(ops)
    done = reap_all(engine, 2)
    assert done["error"].tolist() == [0, errno.EINVAL]
    assert buffer[:8192].tobytes() == source[:8192]
    engine.submit(op(fd, READ, 12288, buffer[:8192], 3))
    (end,) = reap_all(engine, 1)
    assert (end["length"], end["error"]) == (5096, 0)
    assert buffer[:5096].tobytes() == source[12288:]
    world.close(fd)


def test_nothing_to_do_is_fine(world: World, engine: Engine) -> None:
    engine.submit(np.empty(0, OP))
    assert len(engine.reap()) == 0
    assert len(engine.reap(0)) == 0
    assert len(engine.reap(10)) == 0
    fd = world.open(pattern(4096))
    engine.submit(op(fd, READ, 0, np.zeros(0, np.uint8), 5))
    assert [tuple(row)[:3] for row in engine.reap(1).tolist()] == [(5, 0, 0)]
    world.close(fd)


def test_reap_zero_does_not_wait(world: World) -> None:
    if world.name == "sim":
        drive, clock = SimDrive(MODEL), VirtualClock()
        engine: Engine = SimEngine(drive, clock)
        engine.submit(op(drive.open("x", size_bytes=100), READ, 0, np.zeros(100, np.uint8)))
        assert len(engine.reap(0)) == 0
        assert clock.now_ns() == 0
        return
    engine = world.engine()
    reader, writer = os.pipe()
    buffer = np.zeros(4, np.uint8)
    positioned = world.name == "threads"  # preadv refuses a pipe
    engine.submit(op(reader, READ, 0, buffer))
    if not positioned:
        assert len(engine.reap(0)) == 0
        os.write(writer, b"tide")
    (row,) = engine.reap(1)
    assert (row["length"], row["error"]) == ((0, errno.ESPIPE) if positioned else (4, 0))
    engine.close()
    os.close(reader)
    os.close(writer)


def test_a_batch_may_be_strided_and_forgotten(world: World, engine: Engine) -> None:
    source = pattern(4096)
    fd = world.open(source)
    buffer = np.zeros(1000, np.uint8)
    ops = np.zeros(200, OP)
    ops[::2] = np.repeat(op(fd, READ, 0, buffer), 100)
    ops["tag"] = np.arange(200)
    engine.submit(ops[::2])
    ops[:] = 0
    done = reap_all(engine, 100)
    assert done["tag"].tolist() == list(range(0, 200, 2))
    assert not done["error"].any()
    world.close(fd)


def test_close_waits_is_idempotent_and_leaks_nothing(world: World) -> None:
    world.engine().close()
    before = num_fds()
    for _ in range(3):
        engine = world.engine(depth_max=4)
        fd = world.open(bytes(100 * 512))
        arena = np.frombuffer(pattern(100 * 512), np.uint8).copy()
        ops = np.zeros(100, OP)
        ops["fd"], ops["kind"], ops["length"] = fd, WRITE, 512
        ops["offset"] = np.arange(100) * 512
        ops["address"] = address_of(arena) + np.arange(100) * 512
        engine.submit(ops)
        engine.close()
        engine.close()
        assert world.contents() == arena.tobytes()
        world.close(fd)
        with pytest.raises(ConfigError, match="closed"):
            engine.submit(ops)
    assert num_fds() == before


@pytest.mark.parametrize("depth_max", [0, -1, 1 << 20])
def test_an_impossible_depth_is_refused(world: World, depth_max: int) -> None:
    if world.name == "sim" and depth_max > 0:
        return
    with pytest.raises(ConfigError, match="depth_max"):
        world.engine(depth_max)
