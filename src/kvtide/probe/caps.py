"""What the kernel says of the device under a path: its limits, its scheduler, and how it is stacked.

Decides which whole disk stands for a path, and where sysfs says what. Measures nothing: that is `measure`. What the
kernel does not tell is 0 or empty.

Theory. The mount that holds a path names a device number. A partition lies inside a whole disk; a dm or md device
lies on its `slaves`. With one slave we go on down to the disk, because that is where block commands are seen. With
several (RAID, spanned volumes) no single disk stands for the path, so the stacked device is the answer.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvtide.errors import ConfigError, IoError
from kvtide.trace.file import Device

SECTOR_BYTES = 512  # of `size` and `start` in sysfs, whatever the drive's own sector is
NO_LIMIT_KIB = (1 << 31) - 1  # what drivers without a limit report, virtio_blk for one
STACK_MAX = 16  # levels of dm and md; the kernel's own limit is below
SYS, PROC = Path("/sys"), Path("/proc")
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"})
# Drives that a hypervisor or a cloud makes up name themselves so.
VIRTUAL_MODELS = ("virtual", "qemu", "vmware", "vbox", "persistentdisk", "elastic block store")
VIRTUAL_DRIVERS = frozenset({"virtio_blk", "vbd", "xen-blkfront", "hv_storvsc"})


@dataclass(frozen=True, slots=True)
class DeviceCaps:
    """One whole disk, and the mount it was found through. Sizes in bytes; 0 or empty: not known, or no limit."""

    name: str = ""  # empty: no block device is under the path
    number: int = 0  # major << 20 | minor, as block commands name the whole disk
    partition_start_bytes: int = 0  # of the partition the path is on; add it to offsets inside that partition
    read_ahead_bytes: int = 0
    max_sectors_bytes: int = 0  # largest command
    max_hw_sectors_bytes: int = 0  # largest command the drive would take
    nr_requests: int = 0
    scheduler: str = ""
    is_rotational: bool = False
    is_virtual: bool = False
    capacity_bytes: int = 0
    model: str = ""
    serial_digest: str = ""  # tells two drives of one model apart, and does not give the serial number away
    stack: tuple[str, ...] = ()  # names from the mount's device down to the whole disk
    file_system: str = ""
    mount_point: str = ""

    @property
    def is_memory(self) -> bool:
        """Whether the path's files live in memory only."""
        return self.file_system in MEMORY_FILE_SYSTEMS

    def as_traced(self) -> Device:
        """Return what a trace keeps of this device."""
        return Device(
            name=self.name,
            read_ahead_bytes=self.read_ahead_bytes,
            max_sectors_bytes=self.max_sectors_bytes,
            capacity_bytes=self.capacity_bytes,
            scheduler=self.scheduler,
            is_rotational=self.is_rotational,
        )


def caps_of(path: Path) -> DeviceCaps:
    """Return the device under `path`, a file or directory that exists.

    Raises: ConfigError if it does not exist; IoError if it may not be looked at.
    """
    try:
        fd = os.open(path, os.O_PATH)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path} does not exist; type a directory, or a file in it") from None
    except OSError as error:
        raise IoError(error.errno or errno.EIO, f"cannot look at {path}: {error.strerror}") from None
    try:
        mount_id = re.search(r"^mnt_id:\s*(\d+)", _text(PROC / "self" / "fdinfo" / str(fd)), re.MULTILINE)
        number = os.fstat(fd).st_dev
    finally:
        os.close(fd)
    major, minor, file_system, mount_point = os.major(number), os.minor(number), "", ""
    for line in _text(PROC / "self" / "mountinfo").splitlines():
        found = parse_mount(line)
        if found is not None and mount_id is not None and found.mount_id == int(mount_id[1]):
            file_system, mount_point = found.file_system, found.mount_point
            major, minor = found.device or _number_of_source(found.source) or (major, minor)
    return caps_of_number(major << 20 | minor, file_system=file_system, mount_point=mount_point)


def caps_of_number(number: int, *, file_system: str = "", mount_point: str = "", sys: Path = SYS) -> DeviceCaps:
    """Return the whole disk of a block device, whose own number is `number` (major << 20 | minor).

    A number without a block device gives caps with an empty name.
    """
    start = sys / "dev" / "block" / f"{number >> 20}:{number & 0xFFFFF}"
    if not start.exists():
        return DeviceCaps(file_system=file_system, mount_point=mount_point)
    disk, names, offset_bytes = _whole_disk(start.resolve())
    queue = disk / "queue"
    model = _text(disk / "device" / "model").strip()
    serial = _first(disk / "wwid", disk / "device" / "wwid", disk / "serial", disk / "device" / "serial")
    return DeviceCaps(
        name=disk.name,
        number=_device_number(_text(disk / "dev")),
        partition_start_bytes=offset_bytes,
        read_ahead_bytes=_limit_bytes(queue / "read_ahead_kb"),
        max_sectors_bytes=_limit_bytes(queue / "max_sectors_kb"),
        max_hw_sectors_bytes=_limit_bytes(queue / "max_hw_sectors_kb"),
        nr_requests=_int(queue / "nr_requests"),
        scheduler=_chosen(_text(queue / "scheduler")),
        is_rotational=_int(queue / "rotational") == 1,
        is_virtual=_is_virtual(disk, model),
        capacity_bytes=_int(disk / "size") * SECTOR_BYTES,
        model=model,
        serial_digest=hashlib.sha256(serial.encode()).hexdigest()[:12] if serial else "",
        stack=names,
        file_system=file_system,
        mount_point=mount_point,
    )


def _whole_disk(device: Path) -> tuple[Path, tuple[str, ...], int]:
    """Return the disk under `device`, the names on the way, and where the lowest partition starts."""
    names, offset_bytes = [device.name], 0
    for _ in range(STACK_MAX):
        slaves = sorted((device / "slaves").iterdir()) if (device / "slaves").is_dir() else []
        if (device / "partition").exists():
            offset_bytes = _int(device / "start") * SECTOR_BYTES
            device = device.parent
        elif len(slaves) == 1:
            device = slaves[0].resolve()
        else:
            break
        names.append(device.name)
    return device, tuple(names), offset_bytes


def _is_virtual(disk: Path, model: str) -> bool:
    where = str(disk)
    # The heads of NVMe multipath are virtual to the kernel, and real drives to us.
    made_up = "/virtual/" in where and "/virtual/nvme-subsystem/" not in where
    driver = (disk / "device" / "driver").resolve().name
    named = any(word in model.lower() for word in VIRTUAL_MODELS)
    return made_up or "/virtio" in where or driver in VIRTUAL_DRIVERS or named


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo, proc_pid_mountinfo(5)."""

    mount_id: int
    device: tuple[int, int] | None  # major and minor; None: a number without a device, as btrfs has
    mount_point: str
    file_system: str
    source: str


def parse_mount(line: str) -> Mount | None:
    """Return what a line of mountinfo says, None if it is none."""
    before, dash, after = line.partition(" - ")
    head, tail = before.split(" "), after.split(" ")
    numbers = re.fullmatch(r"(\d+):(\d+)", head[2]) if len(head) > 5 else None
    if not dash or numbers is None or not head[0].isdigit() or len(tail) < 2:
        return None
    device = (int(numbers[1]), int(numbers[2]))
    return Mount(int(head[0]), device if device[0] else None, _unescape(head[4]), tail[0], _unescape(tail[1]))


def _unescape(text: str) -> str:
    """Spaces, tabs, line feeds and backslashes are written in octal."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _number_of_source(source: str) -> tuple[int, int] | None:
    if not source.startswith("/dev/"):
        return None
    try:
        number = os.stat(source).st_rdev  # noqa: PTH116  # a device node, maybe gone
    except OSError:
        return None
    return (os.major(number), os.minor(number)) if number else None


def _chosen(text: str) -> str:
    """Return the scheduler in brackets, or the only one."""
    found = re.search(r"\[([^\]]+)\]", text)
    return found[1] if found else text.strip()


def _device_number(text: str) -> int:
    found = re.fullmatch(r"(\d+):(\d+)", text.strip())
    return int(found[1]) << 20 | int(found[2]) if found else 0


def _limit_bytes(path: Path) -> int:
    kib = _int(path)
    return 0 if kib >= NO_LIMIT_KIB else kib << 10


def _first(*paths: Path) -> str:
    return next((text for path in paths if (text := _text(path).strip())), "")


def _int(path: Path) -> int:
    text = _text(path).strip()
    return int(text) if text.isdecimal() and text.isascii() else 0


def _text(path: Path) -> str:
    """Return what a file of the kernel holds, nothing where it is missing or refuses."""
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""
