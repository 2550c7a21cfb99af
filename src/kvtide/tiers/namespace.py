"""Opening and closing the directory of a file tier: identity, owner, data file, checkpoint. Next: kvtide.cache.

    ROOT/kvtide-store            says that ROOT is ours, and in which format
    ROOT/<identity digest>/      one namespace: all KV in it was made under one identity
        identity.json            the identity in words
        owner.lock               held with flock by the one process that has it open
        data.kvt                 superblock and slots
        checkpoint.kvt           headers of a clean close; gone while the namespace is open
        departures.kvt           which blocks left, when and why

Decides who may open, and what in a directory is believed. Knows no policy and no slot content.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from kvtide.blocks import KEY
from kvtide.errors import ConfigError, FormatError, IoError, ShortIo
from kvtide.io.opening import open_engine
from kvtide.io.ops import PAGE_BYTES, READ, WRITE, Engine, aligned_buffer
from kvtide.io.process import Opener
from kvtide.io.uring import UringEngine
from kvtide.spec import Identity, SlotLayout
from kvtide.tiers.checkpoint import take_checkpoint, write_checkpoint
from kvtide.tiers.cipher import Cipher, MasterKey
from kvtide.tiers.departures import DEPARTURES, Departures
from kvtide.tiers.file import FileTier
from kvtide.tiers.guard import (
    LOG,
    check_directory,
    make_directory,
    open_file,
    partial_of,
    read_file,
    write_whole,
)
from kvtide.tiers.header import FORMAT_VERSION
from kvtide.tiers.owner import lock, named, unlock
from kvtide.tiers.slotio import move_page
from kvtide.trace.record import Recorder
from kvtide.units import format_bytes, printable

MARKER = "kvtide-store"
PACE, PACE_BYTES_MAX = "pace.json", 4096
NAMESPACES_MAX = 1000  # looked at for a warning
IDENTITY_BYTES_MAX = 1 << 20  # of thousands of layers and facts, some 200 KiB
MARKER_TEXT = '{"format": "kvtide store", "version": 1}\n'
DIGEST_CHARS = 32
_FILE_MAGIC = b"KVTFILE"
_SUPER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("header_bytes", "<u4"),
        ("slot_bytes", "<u8"),
        ("num_slots", "<u8"),
        ("identity", KEY),
    ]
)


@dataclass(slots=True)
class OpenNamespace:
    """A file tier with what must be given back at the end."""

    path: Path
    tier: FileTier
    engine: Engine
    engine_name: str
    is_direct: bool
    was_clean: bool
    fd: int
    lock_fd: int
    departures: Departures
    opener: Opener = field(default_factory=Opener)

    def read_pace(self) -> str:
        """Return what the last owner noted of its pace, cut short; empty where nothing is to be read."""
        try:
            return read_file(self.path / PACE, PACE_BYTES_MAX).decode(errors="replace")
        except OSError:
            return ""

    def write_pace(self, text: str) -> None:
        """Note the pace for the next owner, while the lock is held; where that fails, it measures anew."""
        if self.fd < 0 or not self.opener.is_here:
            return
        with contextlib.suppress(OSError):
            write_whole(self.path / PACE, text.encode())

    def close(self) -> None:
        """Leave a checkpoint, then give up engine, file and lock; a forked child gives up its copies. Idempotent."""
        if self.fd < 0:
            return
        try:
            self.engine.close()
            if self.opener.is_here:
                self.departures.close()
                write_checkpoint(self.path, self.tier)
        finally:
            self.departures.abandon()  # a forked child's copy, too, or what could not be closed
            os.close(self.fd)
            if self.opener.is_here:  # a child gave its share up, and may have a lock of its own by that number
                unlock(self.lock_fd)
            self.fd = self.lock_fd = -1


def open_namespace(
    root: Path,
    identity: Identity,
    layout: SlotLayout,
    *,
    capacity_bytes: int,
    engine: str = "auto",
    depth_max: int = 64,
    recorder: Recorder | None = None,
    gap_bytes_max: int = 0,
    is_packed: bool = False,
    master: MasterKey | None = None,
) -> OpenNamespace:
    """Open, or make, the namespace of `identity` under `root`, with room for `capacity_bytes` of slots.

    `gap_bytes_max` and `is_packed` are those of `FileTier`. `master` is the key that an identity with encryption names.

    Raises: ConfigError for a foreign directory or a capacity below one slot; FormatError for files that are not what
    they claim; IoError when another process owns it or the disk refuses.
    """
    num_slots = (capacity_bytes - PAGE_BYTES) // layout.slot_bytes
    if num_slots < 1:
        raise ConfigError(
            f"a disk capacity of {format_bytes(capacity_bytes)} holds no group: one slot takes "
            f"{format_bytes(layout.slot_bytes)}; type --disk {-(-(layout.slot_bytes + PAGE_BYTES) // 2**20)}MiB or more"
        )
    cipher = cipher_for(identity, master)
    prepare_root(root)
    path = root / identity.digest().hex()[:DIGEST_CHARS]
    with named(path):
        is_new = not os.path.lexists(path)
        make_directory(path)
    if is_new:
        _warn_of_other_keys(root, identity)
    lock_fd = lock(path)
    fd = -1
    try:
        with named(path):
            _check_identity(path, identity)
        fd, is_direct = open_data(path / "data.kvt")
        backend = open_engine(engine, depth_max=depth_max)
        departures = Departures(path / DEPARTURES)
        try:
            with named(path):
                num_before = os.fstat(fd).st_size // layout.slot_bytes
                _prepare_data(path, fd, backend, layout, identity.digest(), num_slots)
            tier = FileTier(
                backend,
                fd,
                layout,
                identity.digest(),
                num_slots,
                recorder=recorder,
                gap_bytes_max=gap_bytes_max,
                is_packed=is_packed,
                departures=departures,
                cipher=cipher,
            )
            with named(path):
                was_clean = take_checkpoint(path, tier, layout, identity.digest(), num_before)
            if not was_clean:
                tier.scan()
                departures.note_scan()
        except BaseException:
            departures.abandon()
            backend.close()
            raise
    except BaseException:
        if fd >= 0:
            os.close(fd)
        unlock(lock_fd)
        raise
    name = "uring" if isinstance(backend, UringEngine) else "threads"
    return OpenNamespace(path, tier, backend, name, is_direct, was_clean, fd, lock_fd, departures)


def cipher_for(identity: Identity, master: MasterKey | None) -> Cipher | None:
    """Return what encrypts KV of `identity`; None where it is not encrypted.

    Raises: ConfigError unless `master` is the key that the identity names.
    """
    named_key, ours = identity.encryption, master.name if master is not None else ""
    if named_key != ours:
        raise ConfigError(
            f"this KV is encrypted with {named_key or 'no key'}, and the key given is {ours or 'none'}; "
            f"type --key-file with the file of that key"
        )
    return Cipher(master, identity.digest()) if master is not None else None


def _warn_of_other_keys(root: Path, identity: Identity) -> None:
    """Say once, in a new namespace, that there is KV of the same model that another key, or none, was used for."""
    plain = replace(identity, encryption="")
    for path in sorted(root.iterdir())[:NAMESPACES_MAX]:
        with contextlib.suppress(FormatError, ConfigError, OSError):
            theirs = read_identity(path) if path.name != MARKER else identity
            if theirs != identity and replace(theirs, encryption="") == plain:
                LOG.warning(
                    "KV of %s is here under %s (%s), which is not the key in use: all of it is missing",
                    printable(identity.model),
                    theirs.encryption or "no key",
                    path.name,
                )
                return


def prepare_root(root: Path) -> None:
    """Make `root` a store, or find that it is one.

    Raises: ConfigError if it holds something else.
    """
    try:
        make_directory(root, parents=True)
        marker = root / MARKER
        if marker.exists():
            check_root(root)
        elif any(entry.name != partial_of(marker).name for entry in root.iterdir()) and not marker.exists():
            raise ConfigError(f"{root} is not empty and not a kvtide store; name a new or empty directory (--dir)")
        else:
            write_whole(marker, MARKER_TEXT.encode())
    except FileExistsError:
        raise ConfigError(f"{root} is a file; type --dir with a directory") from None
    except OSError as error:
        raise IoError(error.errno or 0, f"cannot use {root} as a store: {error.strerror}; type another --dir") from None


def check_root(root: Path) -> None:
    """Raise unless `root` is a store this version can read.

    Raises: ConfigError if it is missing or foreign; FormatError for another version.
    """
    marker = root / MARKER
    if not root.is_dir():
        raise ConfigError(f"{root} is not a directory; type the directory that was given to --dir")
    check_directory(root, may_be_link=True)
    if marker.is_symlink():
        raise ConfigError(f"{marker} is a link, so it is not ours; remove it by hand")
    if not marker.is_file():
        raise ConfigError(f"{root} is not a kvtide store: it has no file {MARKER}; type the directory given to --dir")
    try:
        text = read_file(marker, 4096)
    except OSError as error:
        raise ConfigError(f"{marker} is not ours: {error.strerror}; use another --dir") from None
    if text != MARKER_TEXT.encode():
        raise FormatError(f"{marker}: expected {MARKER_TEXT.strip()}, found {text[:80]!r}; use another --dir")


def open_data(path: Path) -> tuple[int, bool]:
    """Open the data file past the page cache where the file system allows it; say whether it did."""
    flags = os.O_RDWR | os.O_CREAT
    try:
        fd = open_file(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise IoError(error.errno or 0, f"cannot open {path}: {error.strerror}") from None
        with named(path):
            return open_file(path, flags), False
    return fd, True


def read_identity(path: Path) -> Identity:
    """Return what namespace `path` says it holds.

    Raises: FormatError if the file is missing or not an identity.
    """
    file = path / "identity.json"
    try:
        text = read_file(file, IDENTITY_BYTES_MAX)
    except OSError as error:
        raise FormatError(f"{file}: {error.strerror}; type `kvtide store drop` to remove the namespace") from None
    return Identity.from_json(text.decode("utf-8", "replace"), where=str(file))


def read_superblock(fd: int, path: Path, engine: Engine) -> npt.NDArray[np.void]:
    """Return the geometry a data file states.

    Raises: FormatError if it is not a data file of this version.
    """
    page = aligned_buffer(PAGE_BYTES)
    hint = "type `kvtide store drop` on its directory, or another --dir"
    try:
        move_page(engine, fd, page, READ)
    except ShortIo:
        raise FormatError(f"{path}: expected a superblock of {PAGE_BYTES} bytes, found fewer; {hint}") from None
    row = page[: _SUPER.itemsize].copy().view(_SUPER)[0]
    if row["magic"] != _FILE_MAGIC:
        raise FormatError(f"{path}, offset 0: expected {_FILE_MAGIC!r}, found {bytes(page[:8])!r}; {hint}")
    if row["version"] != FORMAT_VERSION:
        raise FormatError(f"{path}: format version {row['version']}, this kvtide reads {FORMAT_VERSION}; {hint}")
    if xxhash.xxh3_64_digest(page[:-8].tobytes()) != page[-8:].tobytes():
        raise FormatError(f"{path}, offset 0: the superblock's checksum differs; {hint}")
    return row  # type: ignore[no-any-return]


def _prepare_data(
    path: Path, fd: int, engine: Engine, layout: SlotLayout, identity_digest: bytes, num_slots: int
) -> None:
    """Give the data file its size and superblock, keeping the slots it has."""
    file, wanted_bytes = path / "data.kvt", PAGE_BYTES + num_slots * layout.slot_bytes
    size = os.fstat(fd).st_size
    if size and not _is_unfinished(fd, size, engine):
        row = read_superblock(fd, file, engine)
        stated = (int(row["header_bytes"]), int(row["slot_bytes"]), row["identity"].tobytes())
        wanted = (layout.header_bytes, layout.slot_bytes, identity_digest)
        if stated != wanted:
            raise FormatError(
                f"{file}: made for another identity or geometry; type `kvtide store drop` or another --dir"
            )
    allocate(fd, wanted_bytes, file)
    if size > wanted_bytes:
        os.ftruncate(fd, wanted_bytes)
    page = aligned_buffer(PAGE_BYTES)
    fields = np.array(
        [(_FILE_MAGIC, FORMAT_VERSION, layout.header_bytes, layout.slot_bytes, num_slots, identity_digest)], _SUPER
    )
    page[: _SUPER.itemsize] = fields.view(np.uint8)
    page[-8:] = np.frombuffer(xxhash.xxh3_64_digest(page[:-8].tobytes()), np.uint8)
    move_page(engine, fd, page, WRITE)


def _is_unfinished(fd: int, size: int, engine: Engine) -> bool:
    """Say whether whoever made the file died between reserving its space and writing its superblock."""
    page = aligned_buffer(PAGE_BYTES)
    if size >= PAGE_BYTES:
        move_page(engine, fd, page, READ)
    return size >= PAGE_BYTES and not page.any()


def allocate(fd: int, num_bytes: int, path: Path) -> None:
    """Reserve disk space, so that a write never fails for want of it.

    Raises: IoError(ENOSPC) with what is needed and what is free.
    """
    size = os.fstat(fd).st_size
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        os.ftruncate(fd, size)  # what was reserved before it failed goes back
        if error.errno in {errno.EOPNOTSUPP, errno.EINVAL}:
            os.ftruncate(fd, max(num_bytes, size))
            return
        free = shutil.disk_usage(path.parent).free
        raise IoError(
            error.errno or 0,
            f"cannot reserve {format_bytes(num_bytes)} in {path.parent}: {error.strerror}, "
            f"{format_bytes(free)} are free; type a smaller --disk",
        ) from None


def _check_identity(path: Path, identity: Identity) -> None:
    file = path / "identity.json"
    if not os.path.lexists(file):
        write_whole(file, json.dumps(identity.describe(), indent=2, sort_keys=True).encode())
    elif read_identity(path).digest() != identity.digest():
        raise FormatError(f"{file} states another identity than its directory's name; type `kvtide store drop {path}`")
