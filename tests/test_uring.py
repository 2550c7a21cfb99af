"""The odd paths of io_uring: partial transfers, a kernel that is busy, old, or says no."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvtide.errors import ConfigError, IoError, UnsupportedError
from kvtide.io import ring as ring_module
from kvtide.io import uring as uring_module
from kvtide.io.opening import open_engine
from kvtide.io.ops import IOVEC, OP, READ, WRITE, Engine, address_of
from kvtide.io.ring import SETUP_COOP_TASKRUN, SYS_SETUP
from kvtide.io.threads import ThreadEngine
from kvtide.io.uring import RETRIES_MAX, UringEngine
from kvtide.io.vectors import Regions, remaining_vectors


def uring(*, depth_max: int = 8, fixed_buffers: bool = False) -> UringEngine:
    try:
        return UringEngine(depth_max=depth_max, fixed_buffers=fixed_buffers)
    except UnsupportedError as refused:
        pytest.skip(str(refused))


@pytest.fixture
def engine() -> Iterator[UringEngine]:
    with uring() as made:
        yield made


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    fd = os.open(path, os.O_RDWR)
    yield fd
    os.close(fd)


def reads(fd: int, arena: np.ndarray, num: int) -> np.ndarray:
    size = len(arena) // num
    ops = np.zeros(num, OP)
    ops["fd"], ops["length"], ops["tag"] = fd, size, np.arange(num)
    ops["offset"] = np.arange(num) * size
    ops["address"] = address_of(arena) + ops["offset"]
    return ops


@pytest.mark.parametrize("how", ["plain", "vectored", "fixed"])
def test_a_partial_read_is_continued_at_the_right_byte(how: str) -> None:
    engine = uring(fixed_buffers=how == "fixed")
    reader, writer = os.pipe()
    arena = np.zeros(12, np.uint8)
    engine.register(arena)
    base = address_of(arena)
    rows = np.array([(base, 2), (base + 2, 0), (base + 2, 5), (base + 7, 5)], IOVEC)
    vectored = how == "vectored"
    engine.submit(np.array([(reader, READ, 0, address_of(rows) if vectored else base, 12, 4 * vectored, 3)], OP))
    for part in (b"a", b"bcd", b"efghij"):
        os.write(writer, part)
        assert len(engine.reap(0)) == 0
    os.write(writer, b"kl")
    assert [tuple(row)[:3] for row in engine.reap(1).tolist()] == [(3, 12, 0)]
    assert arena.tobytes() == b"abcdefghijkl"
    assert not engine._odd
    engine.submit(np.array([(reader, READ, 0, base, 12, 0, 4)], OP))
    os.write(writer, b"end")
    assert len(engine.reap(0)) == 0
    os.close(writer)
    assert [tuple(row)[:3] for row in engine.reap(1).tolist()] == [(4, 3, 0)]
    os.close(reader)
    engine.close()


@pytest.mark.parametrize("make", [uring, lambda: ThreadEngine(depth_max=2)], ids=["uring", "threads"])
def test_a_write_that_stops_midway_tells_how_far_it_came(make: Callable[[], Engine], file: int) -> None:
    engine = make()
    data = np.frombuffer(b"x" * 30_000, np.uint8)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        engine.submit(np.array([(file, WRITE, 0, address_of(data), 30_000, 0, 1)], OP))
        (row,) = engine.reap(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (row["length"], row["error"]) == (20_000, errno.EFBIG)
    engine.close()


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EINTR])
@pytest.mark.parametrize("times", [1, RETRIES_MAX, RETRIES_MAX + 1])
def test_an_operation_that_is_not_ready_is_retried_and_given_up_in_the_end(
    engine: UringEngine, file: int, monkeypatch: pytest.MonkeyPatch, code: int, times: int
) -> None:
    real, seen = uring_module._CQE_ROW.unpack_from, []

    def not_ready(buffer: memoryview, offset: int) -> tuple[int, int]:
        slot, result = real(buffer, offset)
        seen.append(result)
        return slot, -code if len(seen) <= times else result

    monkeypatch.setattr(uring_module, "_CQE_ROW", SimpleNamespace(unpack_from=not_ready))
    engine.submit(reads(file, np.zeros(8, np.uint8), 1))
    expected = (0, 0, code) if times > RETRIES_MAX else (0, 8, 0)
    assert [tuple(row)[:3] for row in engine.reap(1).tolist()] == [expected]
    assert not engine._odd


def test_a_fixed_buffer_never_spoils_a_later_sync(file: int) -> None:
    engine = uring(depth_max=1, fixed_buffers=True)
    arenas = [np.zeros(4096, np.uint8) for _ in range(3)]
    for arena in arenas:
        engine.register(arena)
    for arena in arenas:
        ops = reads(file, arena, 1)
        engine.submit(ops)
        assert engine.reap(1)["error"].tolist() == [0]
        ops["kind"] = 2
        engine.submit(ops)
        assert engine.reap(1)["error"].tolist() == [0]
    engine.close()


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ENOMEM])
@pytest.mark.parametrize("num", [1, 50])
def test_a_busy_kernel_is_asked_again(
    engine: UringEngine, file: int, monkeypatch: pytest.MonkeyPatch, code: int, num: int
) -> None:
    enter, calls, naps = engine._ring.enter, [], []

    def refuse(submit_num: int, wait_num: int) -> int:
        calls.append((submit_num, wait_num))
        return -code if len(calls) % 3 else enter(submit_num, wait_num)

    monkeypatch.setattr(engine._ring, "enter", refuse)
    monkeypatch.setattr(time, "sleep", naps.append)
    arena = np.zeros(num * 16, np.uint8)
    engine.submit(reads(file, arena, num))
    got = 0
    while got < num:
        done = engine.reap(1)
        assert not done["error"].any()
        got += len(done)
    assert arena.tobytes() == (bytes(range(256)) * 4)[: num * 16]
    assert len(calls) < 20 * num
    assert (len(naps) > 0) == (code != errno.EINTR)


def test_a_kernel_that_takes_one_entry_at_a_time_is_fed_the_rest(
    engine: UringEngine, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = engine._ring.enter
    monkeypatch.setattr(engine._ring, "enter", lambda submit, wait: enter(min(submit, 1), wait if submit <= 1 else 0))
    engine.submit(reads(file, np.zeros(400, np.uint8), 40))
    tags = [tag for _ in range(10) for tag in engine.reap(4)["tag"].tolist()]
    assert sorted(tags) == list(range(40))


def test_any_other_refusal_is_an_error(engine: UringEngine, file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine._ring, "enter", lambda *_: -errno.ENXIO)
        with pytest.raises(IoError, match="io_uring_enter"):
            engine.submit(reads(file, np.zeros(8, np.uint8), 1))
    assert len(engine.reap(1)) == 1


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (errno.ENOSYS, "no io_uring"),
        (errno.EPERM, "io_uring_disabled"),
        (errno.ENOMEM, "ulimit"),
        (errno.EIO, "failed"),
    ],
)
def test_a_kernel_without_io_uring_is_named_and_stood_in_for(
    monkeypatch: pytest.MonkeyPatch, code: int, says: str
) -> None:
    monkeypatch.setattr(ring_module, "syscall", lambda *_: -code)
    with pytest.raises(UnsupportedError, match=says) as refused:
        open_engine("uring", depth_max=4)
    assert "threads" in str(refused.value)
    engine = open_engine("auto", depth_max=4)
    assert isinstance(engine, ThreadEngine)
    assert says in engine.fallback_reason
    engine.close()


def test_an_older_kernel_gets_fewer_flags(monkeypatch: pytest.MonkeyPatch, file: int) -> None:
    uring().close()
    real, tried = ring_module.syscall, []

    def old(number: int, *words: int) -> int:
        if number == SYS_SETUP:
            flags = ring_module.PARAMS.unpack(ring_module.ctypes.string_at(words[1], ring_module.PARAMS.size))[2]
            tried.append(flags)
            if flags & SETUP_COOP_TASKRUN:
                return -errno.EINVAL
        return real(number, *words)

    monkeypatch.setattr(ring_module, "syscall", old)
    with uring() as engine:
        engine.submit(reads(file, np.zeros(8, np.uint8), 1))
        assert len(engine.reap(1)) == 1
    assert tried == list(ring_module.SETUP_FLAGS[:2])


def test_refused_registration_costs_nothing(monkeypatch: pytest.MonkeyPatch, file: int) -> None:
    engine = uring(fixed_buffers=True)
    arena = np.zeros(4096, np.uint8)
    monkeypatch.setattr(ring_module.Ring, "register_buffer", lambda *_: -errno.ENOMEM)
    engine.register(arena)
    assert len(engine._regions) == 0
    engine.submit(reads(file, arena, 1))
    assert engine.reap(1)["length"].tolist() == [4096]
    engine.close()


def test_engines_are_opened_by_name() -> None:
    with pytest.raises(ConfigError, match="choose one of"):
        open_engine("aio", depth_max=4)
    with open_engine("threads", depth_max=3) as engine:
        assert (engine.depth_max, engine.fallback_reason) == (3, "")


@pytest.mark.parametrize("moved", range(13))
def test_remaining_vectors_cover_the_rest(moved: int) -> None:
    vectors = np.array([(100, 4), (200, 0), (300, 8)], np.uint64)
    places = [100 + i for i in range(4)] + [300 + i for i in range(8)]
    rest = remaining_vectors(vectors, moved)
    assert [at + i for at, size in rest.tolist() for i in range(size)] == places[moved:]


def test_regions_know_what_they_hold() -> None:
    regions = Regions()
    for start, end in ((1000, 2000), (100, 200), (2000, 2500)):
        regions.add(start, end)
    addresses = np.array([1000, 150, 150, 50, 1900, 2000, 2400], np.uint64)
    lengths = np.array([1000, 50, 51, 10, 200, 500, 200], np.uint64)
    inside, numbers = regions.find(addresses, lengths)
    assert inside.tolist() == [True, True, False, False, False, True, False]
    assert numbers[inside].tolist() == [0, 1, 2]
