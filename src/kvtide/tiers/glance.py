"""A look at a namespace that takes nothing, not even its lock: what it holds, and what left it. Next: why.

Another process may own it. Then headers are read as they are in the file, and the journal tells which of them are of
groups that were dropped since; what the owner did in the last moments, and what it has in memory alone, is not seen.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvtide.errors import ConfigError, FormatError, IoError
from kvtide.io.opening import open_engine
from kvtide.io.ops import PAGE_BYTES
from kvtide.spec import Identity
from kvtide.tiers.checkpoint import adopt_checkpoint, read_checkpoint
from kvtide.tiers.departures import DEPARTURES, Departure, read_departures
from kvtide.tiers.file import FileTier
from kvtide.tiers.guard import open_file
from kvtide.tiers.inspect import find_namespaces
from kvtide.tiers.namespace import DIGEST_CHARS, read_identity, read_superblock
from kvtide.tiers.owner import named


@dataclass(frozen=True, slots=True)
class Glance:
    """What namespace `digest` holds. `owner` is the pid of the process that has it open, 0 if none has.

    `held` has the key of every block that is there; `departures` the newest reason for each that is not, as far back
    as the journal goes. `problem` is empty unless it cannot be read; then nothing is held.
    """

    digest: str
    identity: Identity | None = None
    problem: str = ""
    owner: int = 0
    num_groups: int = 0
    num_slots: int = 0
    held: frozenset[bytes] = frozenset()
    departures: dict[bytes, Departure] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        """Whether every slot holds a group."""
        return 0 < self.num_slots == self.num_groups


def glance(root: Path) -> list[Glance]:
    """Return what every namespace of the store `root` holds. Changes nothing, waits for nobody.

    Raises: ConfigError if `root` is missing or foreign; FormatError for a store of another version.
    """
    return [glance_at(path) for path in find_namespaces(root)]


def glance_at(path: Path) -> Glance:
    """Return what namespace `path` holds, or why that cannot be said."""
    identity, owner = None, 0
    try:
        identity = read_identity(path)
        owner = _owner(path)
        with named(path):
            return _look(path, identity, owner)
    except (FormatError, ConfigError, OSError) as error:
        told = error.args[-1] if isinstance(error, OSError) else str(error)
        return Glance(path.name, identity, str(told), owner)


def _look(path: Path, identity: Identity, owner: int) -> Glance:
    file, layout, digest = path / "data.kvt", identity.slot(), identity.digest()
    if digest.hex()[:DIGEST_CHARS] != path.name:
        raise FormatError(f"{path / 'identity.json'} states another identity than its directory's name")
    fd = _open(file)
    try:
        with closing(open_engine("auto")) as engine:
            row = read_superblock(fd, file, engine)
            stated = (int(row["header_bytes"]), int(row["slot_bytes"]), row["identity"].tobytes())
            if stated != (layout.header_bytes, layout.slot_bytes, digest):
                raise FormatError(f"{file}: made for another identity or geometry; type `kvtide store drop`")
            there = (os.fstat(fd).st_size - PAGE_BYTES) // layout.slot_bytes  # whatever the superblock says
            tier = FileTier(engine, fd, layout, digest, max(0, min(int(row["num_slots"]), there)))
            if owner or not _adopt(path, tier, digest):
                tier.scan()
    finally:
        os.close(fd)
    departures = read_departures(path / DEPARTURES)
    table = tier.table
    slots = np.flatnonzero(table.used)
    sequences = table.sequences[slots]
    if owner:
        keys = table.keys[slots].tolist()
        gone = [key in departures and departures[key].ends(n) for key, n in zip(keys, sequences.tolist(), strict=True)]
        slots = slots[~np.array(gone, np.bool_)]
    held = frozenset(table.records(slots).valid_block_keys().tolist())
    return Glance(path.name, identity, "", owner, len(slots), tier.num_slots, held, departures)


def _adopt(path: Path, tier: FileTier, digest: bytes) -> bool:
    """Fill the tier's table from what a clean close left, if there is such a thing."""
    return adopt_checkpoint(read_checkpoint(path / "checkpoint.kvt", tier), tier, tier.layout, digest)


def _open(file: Path) -> int:
    try:
        return open_file(file, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return open_file(file, os.O_RDONLY)


def _owner(path: Path) -> int:
    """Return the pid of the process that has namespace `path` open, 0 if none has."""
    try:
        fd = open_file(path / "owner.lock", os.O_RDONLY)
    except FileNotFoundError:
        return 0
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back at once
    except OSError as error:
        if error.errno not in {errno.EAGAIN, errno.EACCES}:
            raise IoError(error.errno or 0, f"cannot look at the lock of {path}: {error.strerror}") from None
        text = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        return int(text) if text.isdecimal() else -1
    finally:
        os.close(fd)
    return 0
