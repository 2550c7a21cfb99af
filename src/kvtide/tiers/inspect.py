"""Looking into a store from outside: what its namespaces hold, and removing them. Next: verify.

Decides what is ours in a directory: regular files with the names below, in a directory named by a digest. All else is
left alone, and no link is followed. While another process owns a namespace nothing here touches it. Knows no model
and no terminal.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvtide.errors import ConfigError, FormatError, IoError
from kvtide.io.opening import open_engine
from kvtide.io.ops import PAGE_BYTES, Engine
from kvtide.spec import Identity, SlotLayout
from kvtide.tiers.checkpoint import adopt_checkpoint, read_checkpoint
from kvtide.tiers.file import FileTier
from kvtide.tiers.namespace import (
    DIGEST_CHARS,
    MARKER,
    check_root,
    open_data,
    read_identity,
    read_superblock,
)
from kvtide.tiers.owner import locked

NAMES = "names.jsonl"  # what a plug-in calls the chunks it keeps
# In the order they are deleted: whatever is left of an interrupted drop opens as an empty namespace.
OUR_FILES = (
    "checkpoint.kvt",
    "checkpoint.kvt.partial",
    "data.kvt",
    "departures.kvt",
    "pace.json",
    "pace.json.partial",
    NAMES,
    f"{NAMES}.partial",
    "identity.json.partial",
    "identity.json",
    "owner.lock",
)
_NAME = re.compile(rf"[0-9a-f]{{{DIGEST_CHARS}}}")
_PREFIX = re.compile(rf"[0-9a-f]{{1,{DIGEST_CHARS}}}")


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """What one namespace says of itself; `problem` is empty unless it cannot be opened.

    `file_bytes` is the length of all its files, `age_s` the seconds since its data file was written.
    """

    digest: str
    identity: Identity | None = None
    problem: str = ""
    capacity_bytes: int = 0
    used_bytes: int = 0
    file_bytes: int = 0
    num_groups: int = 0
    num_tokens: int = 0
    age_s: int | None = None
    is_direct: bool | None = None
    is_clean: bool = False


def list_namespaces(
    root: Path, *, prefix: str | None = None, clock: Callable[[], int] = time.time_ns
) -> list[NamespaceInfo]:
    """Return what every namespace of the store `root` holds, changing none of them.

    Raises: ConfigError if `root` is missing or foreign; FormatError for a store of another version; IoError(EBUSY)
    while another process owns a namespace.
    """
    return [_info(path, clock()) for path in find_namespaces(root, prefix)]


def find_namespaces(root: Path, prefix: str | None = None) -> list[Path]:
    """Return the namespace directories of the store `root`, in the order of their names; links are none.

    Raises: as `list_namespaces`, and ConfigError unless `prefix` is the start of exactly one name.
    """
    try:
        check_root(root)
        with os.scandir(root) as entries:
            names = sorted(e.name for e in entries if _NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False))
    except IoError:
        raise
    except OSError as error:
        raise IoError(error.errno or 0, f"cannot read {root}: {error.strerror}") from None
    if prefix is None:
        return [root / name for name in names]
    if not _PREFIX.fullmatch(prefix):
        raise ConfigError(f"namespace {prefix[:40]!r} is no start of a name: type 1..{DIGEST_CHARS} digits of 0-9a-f")
    found = [root / name for name in names if name.startswith(prefix)]
    if len(found) != 1:
        raise ConfigError(
            f"{len(found)} namespaces in {root} start with {prefix!r}; type more digits of one of: "
            f"{', '.join(path.name for path in found) or ', '.join(names) or 'none'}"
        )
    return found


def _info(path: Path, now_ns: int) -> NamespaceInfo:
    """Say what namespace `path` holds, or why that cannot be said."""
    identity, age_s, file_bytes = None, None, 0
    try:
        ours = check_entries(path)
        file_bytes = sum(status.st_size for status in ours.values())
        if "data.kvt" in ours:
            age_s = max(0, (now_ns - ours["data.kvt"].st_mtime_ns) // 10**9)
        identity = read_identity(path)
        with looking_at(path, identity) as seen:
            stats, table = seen.tier.stats(), seen.tier.table
            return NamespaceInfo(
                digest=path.name,
                identity=identity,
                problem=seen.problem,
                capacity_bytes=stats.capacity_bytes,
                used_bytes=stats.used_bytes,
                file_bytes=file_bytes,
                num_groups=stats.num_groups,
                num_tokens=int(table.num_tokens[table.used].sum()),
                age_s=age_s,
                is_direct=seen.is_direct,
                is_clean=seen.was_clean,
            )
    except (FormatError, ConfigError, OSError) as error:
        problem = problem_of(path, error)
    return NamespaceInfo(path.name, identity, problem, file_bytes=file_bytes, age_s=age_s)


def problem_of(path: Path, error: Exception) -> str:
    """Return why `path` cannot be opened; that another process owns it is no problem of its files and is raised."""
    if isinstance(error, IoError) and error.errno == errno.EBUSY:
        raise error
    if isinstance(error, OSError) and not isinstance(error, IoError):
        return f"cannot open {error.filename or path}: {error.strerror}"
    return error.args[-1] if isinstance(error, IoError) else str(error)


def check_entries(path: Path) -> dict[str, os.stat_result]:
    """Return the status of each file in `path` that has one of our names.

    Raises: ConfigError if one of them is a link, a pipe or anything but a file; IoError(EBUSY) if it is owned.
    """
    ours = {}
    for name in OUR_FILES:
        try:
            status = (path / name).lstat()
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path / name} is not a regular file, so it is not ours; remove it by hand")
        ours[name] = status
    if "owner.lock" in ours:
        with locked(path):
            pass
    return ours


@dataclass(frozen=True, slots=True)
class Seen:
    """A namespace while it is looked at; `problem` says what is wrong with a file that can still be read."""

    tier: FileTier
    engine: Engine
    fd: int
    digest: bytes
    is_direct: bool
    was_clean: bool
    problem: str


@contextmanager
def looking_at(path: Path, identity: Identity) -> Iterator[Seen]:
    """Own namespace `path`, opened the way it says it was made.

    Nothing in it is written, resized or used up, so an interruption leaves it as it was.
    """
    digest = identity.digest()
    if digest.hex()[:DIGEST_CHARS] != path.name:
        raise FormatError(f"{path / 'identity.json'} states another identity than its directory's name")
    layout = identity.slot()
    file = path / "data.kvt"
    with ExitStack() as stack:
        stack.enter_context(locked(path))
        if not file.exists():
            raise FormatError(f"{file} is missing; type `kvtide store drop` to remove the namespace")
        fd, is_direct = open_data(file)
        stack.callback(os.close, fd)
        engine = stack.enter_context(closing(open_engine("auto")))
        num_slots = _num_slots(fd, file, engine, layout, digest)
        tier = FileTier(engine, fd, layout, digest, num_slots)
        checkpoint = path / "checkpoint.kvt"
        was_clean = adopt_checkpoint(read_checkpoint(checkpoint, tier), tier, layout, digest)
        if not was_clean:
            tier.scan()
        yield Seen(tier, engine, fd, digest, is_direct, was_clean, _cut_short(fd, file, tier))


def _num_slots(fd: int, file: Path, engine: Engine, layout: SlotLayout, digest: bytes) -> int:
    """Return how many slots the superblock of `file` states.

    Raises: FormatError if it states anything that does not follow from the identity.
    """
    row = read_superblock(fd, file, engine)
    stated = (int(row["header_bytes"]), int(row["slot_bytes"]), row["identity"].tobytes())
    if stated != (layout.header_bytes, layout.slot_bytes, digest):
        raise FormatError(f"{file}: made for another identity or geometry; type `kvtide store drop` to remove it")
    num_slots, room = int(row["num_slots"]), os.fstatvfs(fd)
    num_max = room.f_blocks * room.f_frsize or os.fstat(fd).st_size  # some file systems do not tell
    if not 1 <= num_slots <= num_max // layout.slot_bytes:  # before a row is kept for each
        raise FormatError(
            f"{file}: expected slots that fit the file system, found {num_slots}; type `kvtide store drop` to remove it"
        )
    return num_slots


def _cut_short(fd: int, file: Path, tier: FileTier) -> str:
    found, expected = os.fstat(fd).st_size, PAGE_BYTES + tier.num_slots * tier.layout.slot_bytes
    return f"{file} is cut short: expected {expected} bytes, found {found}" if found < expected else ""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A namespace that is to be deleted, or was: its directory's name and the length of its files."""

    digest: str
    file_bytes: int


def drop_namespace(
    root: Path, digest: str | None = None, *, confirm: Callable[[list[Dropped]], bool] = lambda _doomed: True
) -> list[Dropped]:
    """Delete one namespace, or all, and return what was deleted; with none left, the store's marker goes too.

    Everything is checked and owned before `confirm` is asked, and nothing is deleted unless it agrees. The directory
    `root` stays.

    Raises: ConfigError if `root` is missing or foreign, if there is no such namespace, or if one holds anything that
    is not ours; IoError while another process owns one.
    """
    paths = find_namespaces(root, digest)
    marker = root / MARKER
    try:
        for path in paths:
            _check_only_ours(path)
        with ExitStack() as stack:
            for path in paths:
                stack.enter_context(locked(path))
            doomed = [Dropped(path.name, _check_only_ours(path)) for path in paths]
            if not confirm(doomed):
                return []
            for path in paths:
                _delete(path)
        if not find_namespaces(root):
            marker.with_name(MARKER + ".partial").unlink(missing_ok=True)
            marker.unlink()
    except IoError:
        raise
    except OSError as error:
        raise IoError(error.errno or 0, f"cannot drop {error.filename or root}: {error.strerror}") from None
    return doomed


def _check_only_ours(path: Path) -> int:
    """Return the length of all files in `path`.

    Raises: ConfigError if anything in it is not a regular file with one of our names.
    """
    num_bytes = 0
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name not in OUR_FILES or not entry.is_file(follow_symlinks=False):
                raise ConfigError(f"{entry.path} is not ours, so nothing was dropped; move it away and try again")
            num_bytes += entry.stat(follow_symlinks=False).st_size
    return num_bytes


def _delete(path: Path) -> None:
    """Delete our files in `path` and then `path`, relative to descriptors so that no link can be slipped in."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name in OUR_FILES:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
    finally:
        os.close(fd)
    path.rmdir()
