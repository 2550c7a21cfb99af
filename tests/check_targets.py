"""A small store that is right, and as many with one planted fault each. `tests/test_check.py` has them checked."""

from __future__ import annotations

import collections
import concurrent.futures
import fcntl
import hashlib
import itertools
import json
import mmap
import os
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path

from kvtide.check.contract import FACTS, Reported, Setup, Traits

TRAITS = Traits(
    "right", "tests", "1", is_bounded=True, is_durable=True, is_on_disk=True, is_checksummed=True, can_be_direct=True,
    has_memory=True, can_be_shared=True, can_overwrite=True, facts=tuple(FACTS), has_salt=True, chunk_tokens=4,
)  # fmt: skip
HEAD = 64


class Right:
    """A file a value, in folders by its first byte: SHA-256 of key and value, value. The oldest gives way."""

    traits = TRAITS
    unfinished = "new"

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.root = setup.directory
        self.root.mkdir(exist_ok=True)
        self.name = json.dumps([dict(setup.identity), setup.salt], sort_keys=True)
        self.lock = threading.Lock()
        self.pool = concurrent.futures.ThreadPoolExecutor(8)
        self.moved = [0, 0]
        self.jobs: dict[int, concurrent.futures.Future] = {}
        self.numbers = itertools.count()
        self.there = self.scan()

    def scan(self) -> collections.OrderedDict[str, None]:
        for path in self.root.glob("*/*.new"):  # of processes that were killed
            if not Path(f"/proc/{path.name.split('.')[0]}").exists():
                path.unlink(missing_ok=True)
        found = sorted(self.root.glob("*/*.kv"), key=lambda path: path.stat().st_mtime_ns)
        return collections.OrderedDict.fromkeys(path.stem for path in found)

    def keys(self, chains: list[list[int]]) -> list[bytes]:
        return [hashlib.sha256(self.name.encode() + json.dumps(chain).encode()).digest() for chain in chains]

    def path(self, key: bytes) -> Path:
        return self.root / key.hex()[:2] / f"{key.hex()}.kv"

    def seal(self, key: bytes, value: bytes) -> bytes:
        return hashlib.sha256(key + value).digest().ljust(HEAD, b"\0") + value

    def put(self, keys: list[bytes], values: list[bytes]) -> list[bool]:
        return [self.put_one(key, value) for key, value in zip(keys, values, strict=True)]

    def put_one(self, key: bytes, value: bytes) -> bool:
        path = self.path(key)
        new = path.with_name(f"{os.getpid()}.{uuid.uuid4().hex}.{self.unfinished}")
        try:
            path.parent.mkdir(exist_ok=True)
            self.write(new, self.seal(key, value))
            new.rename(path)
        except OSError:
            new.unlink(missing_ok=True)
            return False
        self.moved[1] += len(value) + HEAD
        with self.lock:
            self.there[key.hex()] = None
            self.there.move_to_end(key.hex())
            self.make_room()
        return True

    def write(self, path: Path, content: bytes) -> None:
        padded = mmap.mmap(-1, -(-len(content) // 4096) * 4096)
        padded[: len(content)] = content
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | (os.O_DIRECT if self.setup.direct else 0), 0o600)
        try:
            view = memoryview(padded)
            while view:
                wrote = os.write(fd, view)
                view = view[wrote:]
            os.ftruncate(fd, len(content))
        finally:
            os.close(fd)

    def make_room(self) -> None:
        step = -(-(self.setup.value_bytes + HEAD) // 4096) * 4096
        while self.setup.capacity_bytes and len(self.there) * step > self.setup.capacity_bytes:
            self.forget(bytes.fromhex(self.there.popitem(last=False)[0]))

    def forget(self, key: bytes) -> None:
        self.path(key).unlink(missing_ok=True)

    def has(self, keys: list[bytes]) -> list[bool]:
        names: dict[Path, set[str]] = {}
        for folder in {self.path(key).parent for key in keys}:
            names[folder] = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        return [self.path(key).name in names[self.path(key).parent] for key in keys]

    def get(self, keys: list[bytes]) -> list[bytes | None]:
        return list(self.pool.map(self.get_one, keys))

    def get_one(self, key: bytes) -> bytes | None:
        try:
            content = self.read(self.path(key))
        except OSError:
            self.drop([key])
            return None
        self.moved[0] += len(content)
        if self.seal(key, content[HEAD:]) == content:
            return content[HEAD:]
        self.drop([key])
        return None

    def read(self, path: Path) -> bytes:
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if self.setup.direct else 0))
        try:
            size = os.fstat(fd).st_size
            if not size:
                return b""
            room = mmap.mmap(-1, -(-size // 4096) * 4096)
            moved = os.readv(fd, [room])
            return room[: min(moved, size)]
        finally:
            os.close(fd)

    def drop(self, keys: list[bytes]) -> None:
        with self.lock:
            for key in keys:
                self.there.pop(key.hex(), None)
                self.forget(key)

    def reported(self) -> Reported:
        return Reported(self.moved[0], self.moved[1], None, len(self.scan()))

    def begin(self, kind: str, keys: list[bytes], values: list[bytes]) -> int:
        number = next(self.numbers)
        work = (self.put, keys, values) if kind == "put" else (lambda own: list(map(self.get_one, own)), keys)
        self.jobs[number] = self.pool.submit(*work)
        return number

    def finish(self, timeout_s: float) -> dict[int, list]:
        concurrent.futures.wait(self.jobs.values(), timeout_s, concurrent.futures.FIRST_COMPLETED)
        ended = [number for number, job in self.jobs.items() if job.done()]
        return {number: self.jobs.pop(number).result() for number in ended}

    def close(self) -> None:
        self.pool.shutdown()


class NoChecksum(Right):
    """Believes whatever bytes there are."""

    def get_one(self, key: bytes) -> bytes | None:
        try:
            return self.read(self.path(key))[HEAD:].ljust(self.setup.value_bytes, b"\0")
        except OSError:
            return None


class Alike(Right):
    """Knows tokens alone: no model, no tenant."""

    def keys(self, chains: list[list[int]]) -> list[bytes]:
        return [hashlib.sha256(json.dumps(chain).encode()).digest() for chain in chains]


class Seeded(Right):
    """Names chunks by Python's own hash."""

    def keys(self, chains: list[list[int]]) -> list[bytes]:
        return [hash(self.name + json.dumps(chain)).to_bytes(32, signed=True) for chain in chains]


class LastChunk(Right):
    """Names a chunk by its own tokens alone."""

    def keys(self, chains: list[list[int]]) -> list[bytes]:
        return super().keys([chain[-4:] for chain in chains])


class InPlace(Right):
    """Writes values where they are read from, says that all went well, and does not look at what it reads."""

    def put_one(self, key: bytes, value: bytes) -> bool:
        path = self.path(key)
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as file:
                for part in range(0, len(value) + HEAD, 4096):
                    file.write((bytes(HEAD) + value)[part : part + 4096])
                    file.flush()
                    time.sleep(0.001)  # so that whoever kills it hits the middle
        except OSError:
            pass
        return True

    get_one = NoChecksum.get_one


class Promises(Right):
    """Lists what it was given, whether it was written or not."""

    def put_one(self, key: bytes, value: bytes) -> bool:
        super().put_one(key, value)
        self.there[key.hex()] = None
        return True

    def drop(self, keys: list[bytes]) -> None:
        for key in keys:
            self.forget(key)

    def has(self, keys: list[bytes]) -> list[bool]:
        return [key.hex() in self.there for key in keys]


class Litters(Right):
    """Leaves what it had not written whole when it was killed."""

    unfinished = "part"

    def write(self, path: Path, content: bytes) -> None:
        super().write(path, content)
        time.sleep(0.05)


class Forgets(Right):
    """Keeps its index in memory alone."""

    def scan(self) -> collections.OrderedDict[str, None]:
        for path in self.root.glob("*/*.kv"):
            path.unlink()
        return collections.OrderedDict()


class Unbounded(Right):
    """Gives nothing up."""

    def make_room(self) -> None:
        """Do nothing."""


class CountsAnew(Right):
    """Counts what it holds from nothing when it is opened."""

    def scan(self) -> collections.OrderedDict[str, None]:
        return collections.OrderedDict()

    def reported(self) -> Reported:
        return replace(super().reported(), num_values=len(self.there))


class Flat(Right):
    """Puts all files into one folder."""

    def path(self, key: bytes) -> Path:
        return self.root / "all" / f"{key.hex()}.kv"


class Unread(Right):
    """Gives buffers that nothing was read to when its memory is used up."""

    def get(self, keys: list[bytes]) -> list[bytes | None]:
        most = (self.setup.memory_bytes or 1 << 40) // self.setup.value_bytes
        found = super().get(keys[:most])
        return found + [bytes(self.setup.value_bytes)] * (len(keys) - len(found))


class NoMemory(Right):
    """Gives zeros where it found no memory to read to."""

    def get(self, keys: list[bytes]) -> list[bytes | None]:
        found: list[bytes | None] = []
        zeros = bytes(self.setup.value_bytes)
        for key in keys:
            try:
                found.append(self.read(self.path(key))[HEAD:])
            except (MemoryError, OSError):
                found.append(zeros)
        return found


class OneBuffer(Right):
    """Reads everything to one buffer that all threads share."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.buffer = bytearray(setup.value_bytes)

    def get_one(self, key: bytes) -> bytes | None:
        found = super().get_one(key)
        if found is None:
            return None
        self.buffer[:] = found
        time.sleep(0.0005)
        return bytes(self.buffer)


class Stale(Right):
    """Keeps values in memory and does not hear of new ones."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.seen: dict[bytes, bytes] = {}

    def get_one(self, key: bytes) -> bytes | None:
        if key not in self.seen and (found := super().get_one(key)) is not None:
            self.seen[key] = found
        return self.seen.get(key)


class Waits(Right):
    """Waits for whoever has it open."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.owned = (self.root / "lock").open("w")
        fcntl.flock(self.owned, fcntl.LOCK_EX)

    def close(self) -> None:
        super().close()
        self.owned.close()


class Leaks(Right):
    """Leaves a descriptor open."""

    def close(self) -> None:
        super().close()
        os.open(self.root, os.O_RDONLY)


class SharedMemory(Right):
    """Leaves its shared memory when it is killed."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.shm = Path("/dev/shm") / f"kvtide-test-{uuid.uuid4().hex}"  # noqa: S108
        self.shm.write_bytes(bytes(4096))
        with self.shm.open("r+b") as file:
            self.mapped = mmap.mmap(file.fileno(), 0)

    def close(self) -> None:
        super().close()
        self.mapped.close()
        self.shm.unlink()


class OneLock(Right):
    """Holds one lock over everything it does."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.big = threading.Lock()

    def put(self, keys: list[bytes], values: list[bytes]) -> list[bool]:
        with self.big:
            return super().put(keys, values)

    def has(self, keys: list[bytes]) -> list[bool]:
        with self.big:
            return super().has(keys)


class MixesJobs(Right):
    """Gives the answers of jobs that ended together to one another."""

    def finish(self, timeout_s: float) -> dict[int, list]:
        concurrent.futures.wait(self.jobs.values(), timeout_s)
        found = super().finish(timeout_s)
        return dict(zip(found, [*list(found.values())[1:], *list(found.values())[:1]], strict=True))


class KeyByKey(Right):
    """Lets go of the interpreter for each key that it looks up."""

    def has(self, keys: list[bytes]) -> list[bool]:
        def there(key: bytes) -> bool:
            time.sleep(0.0001)
            return self.path(key).exists()

        return [there(key) for key in keys]


class OneByOne(Right):
    """Reads one value after another."""

    def get(self, keys: list[bytes]) -> list[bytes | None]:
        return [self.get_one(key) for key in keys]


class Boasts(Right):
    """Says it is a hundred times as fast as it is."""

    def reported(self) -> Reported:
        return replace(super().reported(), read_bytes_per_s=1e13)


class Buffered(Right):
    """Has direct I/O asked of it, and does it through the page cache."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(replace(setup, direct=False))
