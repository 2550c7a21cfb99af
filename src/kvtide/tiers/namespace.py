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
from dataclasses import dataclass, field
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
from kvtide.tiers.departures import DEPARTURES, Departures
from kvtide.tiers.file import FileTier
from kvtide.tiers.header import FORMAT_VERSION, HeaderCodec
from kvtide.tiers.owner import lock, named, unlock
from kvtide.tiers.slotio import move_page
from kvtide.trace.record import Recorder
from kvtide.units import format_bytes

MARKER = "kvtide-store"
PACE, PACE_BYTES_MAX = "pace.json", 4096
MARKER_TEXT = '{"format": "kvtide store", "version": 1}\n'
DIGEST_CHARS = 32
_FILE_MAGIC, _CHECKPOINT_MAGIC = b"KVTFILE", b"KVTCHKP2"
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
_CHECKPOINT = np.dtype(
    [("magic", "S8"), ("version", "<u4"), ("header_bytes", "<u4"), ("num_slots", "<u8"), ("sequence", "<u8")]
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
            with (self.path / PACE).open("rb") as file:
                return file.read(PACE_BYTES_MAX).decode(errors="replace")
        except OSError:
            return ""

    def write_pace(self, text: str) -> None:
        """Note the pace for the next owner, while the lock is held; where that fails, it measures anew."""
        if self.fd < 0 or not self.opener.is_here:
            return
        with contextlib.suppress(OSError):
            _write_whole(self.path / PACE, text.encode())

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
            os.close(self.fd)
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
) -> OpenNamespace:
    """Open, or make, the namespace of `identity` under `root`, with room for `capacity_bytes` of slots.

    `gap_bytes_max` and `is_packed` are those of `FileTier`.

    Raises: ConfigError for a foreign directory or a capacity below one slot; FormatError for files that are not what
    they claim; IoError when another process owns it or the disk refuses.
    """
    num_slots = (capacity_bytes - PAGE_BYTES) // layout.slot_bytes
    if num_slots < 1:
        raise ConfigError(
            f"a disk capacity of {format_bytes(capacity_bytes)} holds no group: one slot takes "
            f"{format_bytes(layout.slot_bytes)}; type --disk {-(-(layout.slot_bytes + PAGE_BYTES) // 2**20)}MiB or more"
        )
    prepare_root(root)
    path = root / identity.digest().hex()[:DIGEST_CHARS]
    with named(path):
        path.mkdir(mode=0o700, exist_ok=True)
    lock_fd = lock(path)
    fd = -1
    try:
        with named(path):
            _check_identity(path, identity)
        fd, is_direct = open_data(path / "data.kvt")
        backend = open_engine(engine, depth_max=depth_max)
        try:
            with named(path):
                _prepare_data(path, fd, backend, layout, identity.digest(), num_slots)
            departures = Departures(path / DEPARTURES)
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
            )
            with named(path):
                was_clean = _load_checkpoint(path, tier, layout, identity.digest())
            if not was_clean:
                tier.scan()
                departures.note_scan()
        except BaseException:
            backend.close()
            raise
    except BaseException:
        if fd >= 0:
            os.close(fd)
        unlock(lock_fd)
        raise
    name = "uring" if isinstance(backend, UringEngine) else "threads"
    return OpenNamespace(path, tier, backend, name, is_direct, was_clean, fd, lock_fd, departures)


def prepare_root(root: Path) -> None:
    """Make `root` a store, or find that it is one.

    Raises: ConfigError if it holds something else.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        marker = root / MARKER
        if marker.exists():
            check_root(root)
        elif any(entry.name != _partial(marker).name for entry in root.iterdir()) and not marker.exists():
            raise ConfigError(f"{root} is not empty and not a kvtide store; name a new or empty directory (--dir)")
        else:
            _write_whole(marker, MARKER_TEXT.encode())
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
    if not marker.is_file():
        raise ConfigError(f"{root} is not a kvtide store: it has no file {MARKER}; type the directory given to --dir")
    text = marker.read_bytes()[:4096]
    if text != MARKER_TEXT.encode():
        raise FormatError(f"{marker}: expected {MARKER_TEXT.strip()}, found {text[:80]!r}; use another --dir")


def open_data(path: Path) -> tuple[int, bool]:
    """Open the data file past the page cache where the file system allows it; say whether it did."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise IoError(error.errno or 0, f"cannot open {path}: {error.strerror}") from None
        with named(path):
            return os.open(path, flags, 0o600), False
    return fd, True


def read_identity(path: Path) -> Identity:
    """Return what namespace `path` says it holds.

    Raises: FormatError if the file is missing or not an identity.
    """
    file = path / "identity.json"
    try:
        text = file.read_bytes()
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
    if not file.exists():
        _write_whole(file, json.dumps(identity.describe(), indent=2, sort_keys=True).encode())
    elif read_identity(path).digest() != identity.digest():
        raise FormatError(f"{file} states another identity than its directory's name; type `kvtide store drop {path}`")


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _write_whole(path: Path, content: bytes) -> None:
    """Let `path` appear whole or not at all, readable by its owner only."""
    partial = _partial(path)
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_checkpoint(path: Path, tier: FileTier) -> None:
    """Leave what the next owner would otherwise have to scan for; where that fails, it scans."""
    slots, pages = tier.headers()
    head = np.array([(_CHECKPOINT_MAGIC, FORMAT_VERSION, pages.shape[1], tier.num_slots, tier.sequence)], _CHECKPOINT)
    body = b"".join(
        [
            head.tobytes(),
            np.uint64(len(slots)).tobytes(),
            slots.astype("<u8").tobytes(),
            pages.tobytes(),
            np.packbits(tier.table.has_header).tobytes(),  # free slots that must be wiped before use, too
        ]
    )
    try:
        _write_whole(path / "checkpoint.kvt", body + xxhash.xxh3_64_digest(body))
    except OSError:
        _partial(path / "checkpoint.kvt").unlink(missing_ok=True)  # the next open scans instead


def _load_checkpoint(path: Path, tier: FileTier, layout: SlotLayout, identity_digest: bytes) -> bool:
    """Adopt what a clean close left; say whether there was such a thing. It is used once."""
    file = path / "checkpoint.kvt"
    if not file.exists():
        return False
    body = file.read_bytes()
    file.unlink()
    _sync_directory(path)  # or a power cut could bring it back, older than the slots
    return adopt_checkpoint(body, tier, layout, identity_digest)


def adopt_checkpoint(body: bytes, tier: FileTier, layout: SlotLayout, identity_digest: bytes) -> bool:
    """Fill the tier's table from the bytes of a checkpoint; say whether they are one of this namespace."""
    start = _CHECKPOINT.itemsize
    if len(body) < start + 16 or xxhash.xxh3_64_digest(body[:-8]) != body[-8:]:
        return False
    head = np.frombuffer(body, _CHECKPOINT, 1)[0]
    num = int(np.frombuffer(body, "<u8", 1, start)[0])
    stated = (head["magic"], int(head["version"]), int(head["header_bytes"]))
    if stated != (_CHECKPOINT_MAGIC, FORMAT_VERSION, layout.header_bytes):
        return False
    flags_start = start + 8 + num * (8 + layout.header_bytes)
    if len(body) != flags_start + -(-int(head["num_slots"]) // 8) + 8:
        return False
    slots = np.frombuffer(body, "<u8", num, start + 8).astype(np.int64)
    pages = np.frombuffer(body, np.uint8, num * layout.header_bytes, start + 8 + 8 * num)
    decoded = HeaderCodec(layout, identity_digest).decode(pages.reshape(num, layout.header_bytes))
    kept = decoded.valid & (slots < tier.num_slots) & (slots >= 0)
    if not decoded.valid.all() or len(np.unique(slots)) != num:
        return False
    flags = np.unpackbits(np.frombuffer(body[flags_start:-8], np.uint8), count=int(head["num_slots"]))
    num_slots = min(tier.num_slots, len(flags))
    tier.table.has_header[:num_slots] = flags[:num_slots]
    tier.adopt(slots, decoded, kept)
    tier.write_after(int(head["sequence"]))
    return True


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
