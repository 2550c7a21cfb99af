from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtide.check import faultfs
from kvtide.check.contract import FaultRule
from kvtide.check.faultfs import Mount
from kvtide.check.faults import Fault
from kvtide.errors import ConfigError
from kvtide.io.opening import open_engine
from kvtide.io.ops import OP, READ, WRITE, address_of, aligned_buffer

pytestmark = pytest.mark.skipif(faultfs.unavailable() is not None, reason=str(faultfs.unavailable()))
DATA = np.random.default_rng(7).bytes(300_000)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Mount]:
    with faultfs.mount(tmp_path / "below", tmp_path / "at") as mounted:
        yield mounted


def below(disk: Mount) -> Path:
    return disk.path.parent / "below"


def test_files_pass_through(disk: Mount) -> None:
    at = disk.path
    (at / "a").write_bytes(DATA)
    assert (below(disk) / "a").read_bytes() == DATA == (at / "a").read_bytes()
    os.truncate(at / "a", 1000)
    assert (at / "a").stat().st_size == 1000 == (below(disk) / "a").stat().st_size
    (below(disk) / "a").write_bytes(b"changed")
    assert (at / "a").read_bytes() == b"changed"
    (at / "deep" / "er").mkdir(parents=True)
    (at / "a").rename(at / "deep" / "er" / "b")
    os.link(at / "deep/er/b", at / "hard")
    (at / "soft").symlink_to("hard")
    assert (at / "soft").read_bytes() == b"changed"
    assert (at / "hard").stat().st_nlink == 2
    with (at / "hard").open("rb") as file:
        (at / "hard").unlink()
        (at / "deep/er/b").unlink()
        assert file.read() == b"changed"  # open files outlive their names
    with pytest.raises(FileNotFoundError):
        (at / "hard").stat()
    os.utime(at / "deep", ns=(10**9, 2 * 10**9 + 5))
    (at / "deep").chmod(0o700)
    found = (below(disk) / "deep").stat()
    assert (found.st_mtime_ns, found.st_mode & 0o777) == (2 * 10**9 + 5, 0o700)


def test_append_allocation_space_and_many_names(disk: Mount) -> None:
    with (disk.path / "log").open("ab", buffering=0) as file:
        file.write(b"one")
    with (disk.path / "log").open("ab", buffering=0) as file:
        file.write(b"two")
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
        os.fsync(file.fileno())
    assert (below(disk) / "log").stat().st_size == 1 << 20
    assert (below(disk) / "log").read_bytes()[:6] == b"onetwo"
    assert os.statvfs(disk.path).f_blocks == os.statvfs(below(disk)).f_blocks
    for number in range(1500):
        (below(disk) / f"file-{number:05}").touch()
    assert len(list(disk.path.iterdir())) == 1501
    assert disk.counts()["fsync"] == 1


def test_locks_and_shared_memory(disk: Mount) -> None:
    path = disk.path / "a"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as first, path.open("r+b") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with mmap.mmap(first.fileno(), 8192) as shared:
            shared[4096:4100] = b"here"
            shared.flush()
    assert (below(disk) / "a").read_bytes()[4096:4100] == b"here"
    code = f"import fcntl; f = open({str(path)!r}, 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with path.open("r+b") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        assert b"BlockingIOError" in subprocess.run([sys.executable, "-c", code], capture_output=True).stderr  # noqa: PLW1510


@pytest.mark.parametrize("kind", ["auto", "threads"])
def test_engines_move_bytes_through_it_past_the_page_cache(disk: Mount, kind: str) -> None:
    sent, got = aligned_buffer(1 << 20), aligned_buffer(1 << 20)
    sent[:] = np.resize(np.frombuffer(DATA, np.uint8), sent.size)
    fd = os.open(disk.path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    with open_engine(kind, depth_max=8) as engine:
        for kind_of, memory in ((WRITE, sent), (READ, got)):
            ops = np.zeros(64, OP)
            ops["fd"], ops["kind"], ops["length"] = fd, kind_of, 16384
            ops["offset"] = np.arange(64) * 16384
            ops["address"] = address_of(memory) + ops["offset"]
            engine.submit(ops)
            assert not engine.reap(64)["error"].any()
        disk.arm(Fault("error", "read", after=3, errno="EIO"))
        engine.submit(ops)
        assert np.count_nonzero(engine.reap(64)["error"] == errno.EIO) == 1
    os.close(fd)
    assert np.array_equal(sent, got)


def failing(disk: Mount, fault: Fault) -> int:
    disk.arm(fault)
    with pytest.raises(OSError) as caught:  # noqa: PT011, PT012
        fd = os.open(disk.path / "victim", os.O_RDWR | os.O_CREAT)
        try:
            os.write(fd, DATA)
            os.fsync(fd)
            os.pread(fd, 10, 0)
        finally:
            os.close(fd)
    disk.clear()
    return caught.value.errno or 0


@pytest.mark.parametrize("op", ["open", "create", "write", "fsync"])
def test_operations_fail(disk: Mount, op: str) -> None:
    if op == "open":
        (below(disk) / "victim").touch()
    assert failing(disk, Fault("error", op, errno="EDQUOT")) == errno.EDQUOT


def test_read_fails_again_after_pages_were_cached(disk: Mount) -> None:
    path = disk.path / "a"
    path.write_bytes(DATA)
    with path.open("rb", buffering=0) as file:
        assert file.read() == DATA
        number = disk.arm(Fault("error", "read", times=0))
        file.seek(0)
        with pytest.raises(OSError, match="Input/output error"):
            file.read(100)
        assert disk.fired()[number] >= 1
        disk.clear(number)
        assert file.read() == DATA


def test_fault_waits_for_its_turn_and_its_file(disk: Mount) -> None:
    disk.arm(Fault("error", "write", after=1, times=1, match="deep/*.bin"))
    (disk.path / "deep").mkdir()
    (disk.path / "other").write_bytes(b"1")
    (disk.path / "deep/a.bin").write_bytes(b"1")
    with pytest.raises(OSError, match="Input/output"):
        (disk.path / "deep/b.bin").write_bytes(b"1")
    (disk.path / "deep/b.bin").write_bytes(b"1")


def test_disk_fills_up_and_has_room_again(disk: Mount) -> None:
    disk.arm(Fault("full", bytes=5000))
    assert os.statvfs(disk.path).f_bavail * os.statvfs(disk.path).f_frsize <= 5000
    fd = os.open(disk.path / "a", os.O_RDWR | os.O_CREAT)
    assert os.write(fd, DATA[:8000]) == 5000
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            os.write(fd, b"more")
    with pytest.raises(OSError, match="No space"):
        os.posix_fallocate(fd, 0, 1 << 20)
    disk.clear()
    assert os.write(fd, b"more") == 4
    os.close(fd)


def test_moves_are_short_torn_and_flipped(disk: Mount) -> None:
    path = disk.path / "a"
    disk.arm(Fault("short", "write", bytes=100))
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    assert os.write(fd, DATA[:4096]) == 100
    disk.arm(Fault("torn", "write"))
    assert os.pwrite(fd, DATA[:4096], 0) == 4096
    assert path.stat().st_size == 2048
    os.pwrite(fd, DATA[:4096], 0)
    disk.clear()
    disk.arm(Fault("flip", "read", bit=8 * 17 + 3, times=0))
    got = np.frombuffer(os.pread(fd, 4096, 0), np.uint8) ^ np.frombuffer(DATA[:4096], np.uint8)
    assert got.nonzero()[0].tolist() == [17]
    assert got[17] == 8
    disk.clear()
    disk.arm(Fault("short", "read", bytes=10))
    direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
    room = mmap.mmap(-1, 4096)
    assert os.preadv(direct, [room], 0) == 10
    assert os.preadv(direct, [room], 0) == 4096
    assert room[:] == DATA[:4096]
    os.close(direct)
    os.close(fd)


def test_held_up_writes_go_on_or_die_with_their_caller(disk: Mount) -> None:
    number = disk.arm(Fault("stall", "write", times=0, match="stuck*"))
    code = f"open({str(disk.path / 'stuck')!r}, 'wb', buffering=0).write(b'never')"
    stuck = subprocess.Popen([sys.executable, "-c", code])
    threads = [
        threading.Thread(target=(disk.path / f"stuck-{index}").write_bytes, args=(b"later",)) for index in range(12)
    ]
    for thread in threads:
        thread.start()
    while disk.fired()[number] < 13:
        time.sleep(0.01)
    (disk.path / "free").write_bytes(b"not held up")
    stuck.kill()
    assert stuck.wait(10) == -signal.SIGKILL
    assert (below(disk) / "stuck").read_bytes() == b""
    assert all(thread.is_alive() for thread in threads)
    disk.clear()
    for thread in threads:
        thread.join(10)
    assert (below(disk) / "stuck-3").read_bytes() == b"later"


def test_unmounts_when_its_user_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from kvtide.check.faultfs import mount\n"
        "disk = mount(Path(sys.argv[1]), Path(sys.argv[2])); print('up', flush=True); time.sleep(100)"
    )
    below, at = tmp_path / "below", tmp_path / "a name with spaces"
    user = subprocess.Popen([sys.executable, "-c", code, below, at], stdout=subprocess.PIPE)
    assert user.stdout is not None
    assert user.stdout.readline() == b"up\n"
    assert os.path.ismount(at)
    user.kill()
    user.communicate()
    for _ in range(200):
        if not os.path.ismount(at):
            break
        time.sleep(0.05)
    assert not os.path.ismount(at)


def test_unmounts_when_it_is_killed_itself(tmp_path: Path) -> None:
    disk = faultfs.mount(tmp_path / "below", tmp_path / "at")
    watcher = disk._watcher.pid
    os.kill(int(Path(f"/proc/{watcher}/task/{watcher}/children").read_text()), signal.SIGKILL)
    disk.close()
    disk.close()
    assert not os.path.ismount(tmp_path / "at")


@pytest.mark.parametrize(
    "said",
    [
        {"kind": "melt"},
        {"kind": "short", "op": "fsync"},
        {"kind": "error", "errno": "EVIL"},
        {"kind": "error", "after": "3"},
        {"op": "write"},
        [],
    ],
)
def test_impossible_faults_are_refused(said: object) -> None:
    with pytest.raises(ConfigError, match=r"a fault|an error"):
        Fault.from_json(said)


def test_rules_of_the_contract(disk: Mount) -> None:
    disk.set([FaultRule("fsync", "EIO"), FaultRule("write", "short", after=1, times=1)])
    fd = os.open(disk.path / "a", os.O_RDWR | os.O_CREAT)
    assert [os.write(fd, DATA[:1000]) for _ in range(3)] == [1000, 500, 1000]
    with pytest.raises(OSError, match="Input/output"):
        os.fsync(fd)
    counts = disk.counts()
    assert (counts["write"], counts["fsync"], counts["faults"]) == (3, 1, 2)
    disk.set([])
    os.fsync(fd)
    os.close(fd)
    assert disk.counts()["faults"] == 0
