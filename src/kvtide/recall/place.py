"""The directory of a memory: its description, its owner, its logs. Next: memory.

    memory.json          what it is: format, dimensions, metric, the secret that seeds its checksums, a checksum
    owner.lock           held by the one process that has it open; says which
    log-00000001.kvl     logs, in order
    spare-00000001.kvl   logs whose rows are in segments: the next logs take their space, which was written before
    ring.kvl             groups that are not in the newest log yet

Nothing in it is trusted: names that are not ours are left alone, links are refused, a description that does not agree
with its checksum is no description.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvtide.errors import ConfigError, FormatError
from kvtide.recall.contract import DIM_MAX
from kvtide.recall.scores import METRICS, Metric
from kvtide.tiers.guard import make_directory, open_file, read_file, sync_directory, write_whole
from kvtide.tiers.owner import lock, named
from kvtide.units import printable

FORMAT = "kvtide-memory"
VERSION = 1
LOG_NAME = re.compile(r"log-([0-9]{8})\.kvl")
SPARE_NAME = re.compile(r"spare-[0-9]{8}\.kvl")
LOG_BYTES_MAX = 2 << 30  # larger files are none of ours
JSON_BYTES_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Description:
    """What a memory is, fixed when it was made."""

    dim: int
    metric: Metric
    salt: bytes
    of: str = ""  # what the vectors are of, empty if nobody said


class Place:
    """An owned directory.

    Threads: one begins logs, another may retire them.
    """

    def __init__(self, path: Path, dim: int, metric: Metric, of: str = "") -> None:
        """Own the directory, made where there is none.

        Raises: ConfigError if it holds something else, or a memory of other vectors; FormatError if its description
        was changed; IoError, with EBUSY while another process owns it.
        """
        self.path = path
        self._spare_lock = threading.Lock()
        _make(path)
        self._lock_fd = lock(path, option="--memory")
        try:
            self.description = self._describe(dim, metric, of)
        except BaseException:
            self.close()
            raise

    def _describe(self, dim: int, metric: Metric, of: str) -> Description:
        found = read_json(self.path / "memory.json")
        if found is None:
            self._refuse_foreign()
            made = Description(dim, metric, secrets.token_bytes(16), of)
            what = {"format": FORMAT, "version": VERSION, "dim": dim, "metric": metric, "salt": made.salt.hex()}
            what |= {"of": of} if of else {}
            write_json(self.path / "memory.json", what, is_named=False)  # with the name of the first log
            return made
        kept = _description(self.path, found)
        if kept.dim != dim:
            raise ConfigError(
                f"{self.path} keeps vectors of {kept.dim} dimensions, asked for {dim}; "
                f"open it with dim={kept.dim}, or choose another directory"
            )
        if kept.of and of and kept.of != of:
            raise ConfigError(
                f"{self.path} keeps vectors of {kept.of}, asked for those of {of}: they cannot be compared; "
                "choose another directory, or the model it was made with"
            )
        if kept.metric != metric:
            raise ConfigError(f"{self.path} compares by {kept.metric}, asked for {metric}; type metric='{kept.metric}'")
        return kept

    def _refuse_foreign(self) -> None:
        foreign = sorted({one.name for one in self.path.iterdir()} - {"owner.lock", "memory.json.partial"})
        if foreign:
            (self.path / "owner.lock").unlink(missing_ok=True)
            raise ConfigError(
                f"{self.path} is no memory: it holds {foreign[0]!r} and no memory.json; choose an empty directory"
            )

    def logs(self) -> list[int]:
        """Return the numbers of the logs there are, in order."""
        with named(self.path):
            names = [one.name for one in self.path.iterdir()]
        return sorted(int(match[1]) for name in names if (match := LOG_NAME.fullmatch(name)))

    def log_path(self, number: int) -> Path:
        return self.path / f"log-{number:08}.kvl"

    def retire_logs(self, numbers: list[int]) -> None:
        """Keep these logs, whose rows are in segments, as spares, and remove other spares. Not durable yet.

        Raises: IoError.
        """
        with named(self.path), self._spare_lock:
            for spare in self._spares():
                spare.unlink()
            for number in numbers:
                self.log_path(number).rename(self.path / f"spare-{number:08}.kvl")

    def reuse_spare(self, number: int) -> None:
        """Let a spare, if there is one, be log `number`: what is in it is of another log, and so counts as nothing.

        Raises: IoError.
        """
        with named(self.path), self._spare_lock:
            for spare in self._spares()[:1]:
                spare.rename(self.log_path(number))

    def _spares(self) -> list[Path]:
        return sorted(one for one in self.path.iterdir() if SPARE_NAME.fullmatch(one.name))

    def open_log(self, number: int) -> tuple[int, int]:
        """Return a descriptor of a log, made where there is none, and its size in bytes.

        Raises: IoError; FormatError if it is no plain file or too large.
        """
        return self._open(self.log_path(number))

    @property
    def ring_path(self) -> Path:
        return self.path / "ring.kvl"

    def open_ring(self) -> tuple[int, int]:
        """Return a descriptor of the ring, made where there is none, and its size in bytes; raises as `open_log`."""
        return self._open(self.ring_path)

    def _open(self, path: Path) -> tuple[int, int]:
        flags = os.O_RDWR | os.O_CREAT
        with named(path):
            try:
                fd = open_file(path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                fd = open_file(path, flags)  # a file system without direct I/O, or no file: that raises again
        size = os.fstat(fd).st_size
        if size > LOG_BYTES_MAX:
            os.close(fd)
            raise FormatError(f"{path}: expected a file of at most {LOG_BYTES_MAX} bytes, found {size}")
        return fd, size // 4096 * 4096

    def sync(self) -> None:
        """Make the names in the directory durable."""
        sync_folder(self.path)

    def close(self) -> None:
        """Let another process own it. Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _make(path: Path) -> None:
    with named(path):
        make_directory(path, parents=True)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable.

    Raises: IoError.
    """
    with named(path):
        sync_directory(path)


def read_json(path: Path) -> dict[str, object] | None:
    """Return an object written by `write_json`, None if there is no such file.

    Raises: FormatError if it was changed since; IoError.
    """
    with named(path):
        try:
            raw = read_file(path, JSON_BYTES_MAX)
        except FileNotFoundError:
            return None
    try:
        found = json.loads(raw)
        check = found.pop("check")
        is_whole = check == _check(found)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise FormatError(f"{path}: byte 0: expected JSON with a checksum that agrees, found {raw[:40]!r}")
    return dict(found)


def write_json(path: Path, what: dict[str, object], *, is_named: bool = True) -> None:
    """Replace a file by an object and its checksum, whole or not at all, and durable; its name only with `is_named`.

    Raises: IoError.
    """
    with named(path):
        write_whole(path, json.dumps(what | {"check": _check(what)}).encode())
    if is_named:
        sync_folder(path.parent)


def _check(what: dict[str, object]) -> str:
    return str(xxhash.xxh3_64_hexdigest(json.dumps(what, sort_keys=True).encode()))


def _description(path: Path, found: dict[str, object]) -> Description:
    dim, metric, salt = found.get("dim"), found.get("metric"), found.get("salt")
    if found.get("format") != FORMAT or found.get("version") != VERSION:
        got = f"{found.get('format')!r} version {found.get('version')!r}"
        raise FormatError(f"{path / 'memory.json'}: expected {FORMAT} version {VERSION}, found {got}")
    is_salt = isinstance(salt, str) and re.fullmatch("[0-9a-f]{32}", salt)
    if not isinstance(dim, int) or not 1 <= dim <= DIM_MAX or metric not in METRICS or not is_salt:
        raise FormatError(f"{path / 'memory.json'}: expected dim, metric and salt, found {dim!r}, {metric!r}, a salt")
    name: Metric = next(one for one in ("cosine", "dot", "l2") if one == metric)
    return Description(dim, name, bytes.fromhex(str(salt)), printable(str(found.get("of", ""))))
