"""The probe file: one JSON object with what was measured of a machine, and where it is kept for later commands.

Decides the format (docs/probe.md) and the default place: one file a device, under the user's cache. Reads no
environment: the caller gives the cache directory. Next: survey.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvtide.errors import ConfigError, FormatError, IoError, KvtideError
from kvtide.probe.caps import DeviceCaps, caps_of
from kvtide.probe.fit import RoofFit, measured_knee_bytes
from kvtide.probe.measure import Cell
from kvtide.probe.memory import Dram, GpuCopies
from kvtide.roofline import Roofline
from kvtide.spec import PAGE_BYTES

FORMAT = "kvtide probe"
VERSION = 1
KNEE_BYTES_MIN, KNEE_BYTES_MAX = 64 << 10, 1 << 20  # below, IOPS limit every drive; above, a group is too coarse
DEPTH = 64  # of the file tier's queue, unless it is told otherwise: kvtide.tiers.namespace
HOST_NS_MIN = 1e-3  # an op cannot cost less, and a rate without end is no roof
FILE_BYTES_MAX = 16 << 20  # a full grid takes about 100 KB


@dataclass(slots=True)
class Probe:
    """All that was measured under one path."""

    caps: DeviceCaps
    cells: list[Cell]
    read: RoofFit
    write: RoofFit
    engine: str
    is_direct: bool  # false: the page cache was measured
    file_bytes: int
    seconds: float  # budget
    num_rounds: int
    seed: int
    dram: Dram | None = None
    gpu: GpuCopies = field(default_factory=GpuCopies)
    warnings: list[str] = field(default_factory=list)
    kvtide_version: str = ""
    date: str = ""  # ISO 8601, UTC
    host: str = ""
    kernel: str = ""

    @property
    def roofline(self) -> Roofline:
        """Return the roofs of both directions."""
        return Roofline(self.read.roof, self.write.roof)


def knee_bytes_of(probe: Probe) -> int:
    """Return the smallest power of two at which deep random reads reach 90 % of the device's bandwidth."""
    return measured_knee_bytes(probe.cells, probe.read)


def gap_bytes_max(probe: Probe, *, fragment_bytes: int = PAGE_BYTES, depth: int = DEPTH) -> int:
    """Return the widest gap over which reads of `fragment_bytes` may be joined and be no slower, in whole pages.

    At most KNEE_BYTES_MAX. `Roof.gap_bytes` has the formula; the roofs are those of reads, the host's time included.
    """
    gap = probe.read.roof.gap_bytes(fragment_bytes, depth)
    return int(min(gap, KNEE_BYTES_MAX)) // PAGE_BYTES * PAGE_BYTES


def default_path(cache_dir: Path, caps: DeviceCaps) -> Path:
    """Return where the probe of this device is kept under `cache_dir`.

    The name holds a digest of what tells the drive apart, so that another drive that is given the same device name
    later does not inherit its probe. Where no device is under the path, the mount stands for it.
    """
    name = caps.name or caps.file_system or "unknown"
    told = [caps.model, caps.serial_digest, str(caps.capacity_bytes), "" if caps.name else caps.mount_point]
    digest = hashlib.sha256("\0".join(told).encode(errors="surrogateescape")).hexdigest()[:12]
    return cache_dir / "probe" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}-{digest}.json"


@dataclass(frozen=True, slots=True)
class Knee:
    """The read size a store should reach, and where that number comes from."""

    num_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class Gap:
    """How far apart fragments may lie that a store reads together, and where that number comes from."""

    num_bytes: int
    source: str


def find_probe(cache_dir: Path, directory: Path) -> tuple[Probe | None, str]:
    """Return the probe of the device that `directory` is on, or will be, and its file; or None and the reason."""
    absolute = directory.absolute()
    try:
        existing = next(parent for parent in (absolute, *absolute.parents) if parent.exists())
        path = default_path(cache_dir, caps_of(existing))
        if not path.exists():
            return None, "default: this device was never probed"
        return load(path), f"probe: {path}"
    except (KvtideError, OSError) as error:
        return None, f"default: {error}"


def find_knee(cache_dir: Path, directory: Path, default_bytes: int) -> Knee:
    """Return the knee of the device that `directory` is on, or will be, from its probe file under `cache_dir`.

    It is held between KNEE_BYTES_MIN and KNEE_BYTES_MAX: a disturbed probe must not make a store of tiny or huge
    groups. Without a probe file that can be read, `default_bytes` is returned, with the reason.
    """
    probe, source = find_probe(cache_dir, directory)
    if probe is None:
        return Knee(default_bytes, source)
    return Knee(min(max(knee_bytes_of(probe), KNEE_BYTES_MIN), KNEE_BYTES_MAX), source)


def find_gap(cache_dir: Path, directory: Path, fragment_bytes: int) -> Gap:
    """Return the gap for fragments of `fragment_bytes` from the same probe; without one none is read over."""
    probe, source = find_probe(cache_dir, directory)
    return Gap(0 if probe is None else gap_bytes_max(probe, fragment_bytes=fragment_bytes), source)


def as_json(probe: Probe) -> dict[str, Any]:
    """Return the probe file's content as JSON values."""
    return {"format": FORMAT, "version": VERSION, "label": "measured", **asdict(probe)}


def check_place(path: Path) -> None:
    """Say early that nothing can be written to `path`.

    Raises: ConfigError if its directory is missing or it cannot be a regular file.
    """
    parent = path.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"{parent} is no directory; make it, or type another file")
    if os.path.lexists(path) and not path.is_file():  # a device would be replaced by a file
        raise ConfigError(f"{path} is no regular file; type another one")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{parent} may not be written to; type another file")


def save(probe: Probe, path: Path) -> None:
    """Write the probe file, whole or not at all.

    Raises: ConfigError if `path` cannot be a file; IoError where the disk refuses.
    """
    write_whole(path, json.dumps(as_json(probe), indent=1, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path` through a file beside it, so that a reader sees the old or the new one.

    Raises: as `save`.
    """
    check_place(path)
    part = path.absolute().parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        part.replace(path)
    except OSError as error:
        raise IoError(error.errno or errno.EIO, f"cannot write {path}: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def load(path: Path) -> Probe:
    """Return the probe in `path`.

    Raises: ConfigError if it cannot be read; FormatError if it is no probe file, of another version, or holds what no
    probe can have measured.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; type the path of a probe file, or run kvtide probe") from None
    try:
        values = json.loads(raw) if len(raw) <= FILE_BYTES_MAX else None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise FormatError(f"{path} is no probe file: expected a JSON object with format {FORMAT!r}; run kvtide probe")
    version = values.pop("version", None)
    if type(version) is not int or version != VERSION:
        raise FormatError(f"{path} has probe version {version!r}, this kvtide reads {VERSION}: run kvtide probe again")
    values.pop("label", None)
    try:
        probe = TypeAdapter(Probe).validate_json(json.dumps(values), strict=True, extra="forbid")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise FormatError(f"{path}: {where}: {first['msg']}; run kvtide probe again") from None
    _check(path, probe)
    return probe


def _check(path: Path, probe: Probe) -> None:
    """Refuse figures with which every later division would fail, or lie."""
    for name, fitted in (("read", probe.read), ("write", probe.write)):
        roof = fitted.roof
        positive = (roof.latency_ns, roof.channel_bytes_per_s, roof.iops_max, roof.bytes_per_s_max, fitted.knee_bytes)
        if not all(0 < value < math.inf for value in positive) or not (
            roof.host_ns == 0 or HOST_NS_MIN <= roof.host_ns < math.inf
        ):
            raise FormatError(f"{path}: the roofs of {name} are not positive numbers; run kvtide probe again")
    for cell in probe.cells:
        if cell.size_bytes < 1 or cell.depth < 1 or not 0 < cell.bytes_per_s < math.inf:
            raise FormatError(f"{path}: a cell of {cell.size_bytes} B has no positive rate; run kvtide probe again")
