"""What sysfs and mountinfo say, on trees as the kernel lays them out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide import ConfigError
from kvtide.probe.caps import Mount, caps_of, caps_of_number, parse_mount


class Sys:
    """A sysfs in a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "dev" / "block").mkdir(parents=True)

    def add(self, where: str, number: str, **files: str) -> Path:
        """Add a device; keys of `files` name files, with __ for a slash."""
        path = self.root / "devices" / where
        path.mkdir(parents=True, exist_ok=True)
        for name, text in {"dev": number, **files}.items():
            file = path / name.replace("__", "/")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text + "\n")
        (self.root / "dev" / "block" / number).symlink_to(path)
        return path

    def stack(self, upper: Path, *lower: Path) -> None:
        (upper / "slaves").mkdir()
        for path in lower:
            (upper / "slaves" / path.name).symlink_to(path)


QUEUE = {
    "queue__read_ahead_kb": "128",
    "queue__max_sectors_kb": "1280",
    "queue__max_hw_sectors_kb": "2147483647",
    "queue__nr_requests": "1023",
    "queue__scheduler": "[none] mq-deadline kyber",
    "queue__rotational": "0",
    "size": "2048",
}


@pytest.fixture
def sys(tmp_path: Path) -> Sys:
    return Sys(tmp_path)


def number(major: int, minor: int) -> int:
    return major << 20 | minor


def add_drive(sys: Sys) -> tuple[Path, Path]:
    disk = sys.add("pci0/nvme/nvme0/nvme0n1", "259:0", **QUEUE, device__model="Fast 9  ", wwid="eui.1")
    part = sys.add("pci0/nvme/nvme0/nvme0n1/nvme0n1p2", "259:2", partition="2", start="4096", size="1024")
    return disk, part


def test_a_partition_leads_to_its_disk(sys: Sys) -> None:
    add_drive(sys)
    caps = caps_of_number(number(259, 2), sys=sys.root)
    assert (caps.name, caps.number, caps.partition_start_bytes) == ("nvme0n1", number(259, 0), 4096 * 512)
    assert (caps.read_ahead_bytes, caps.max_sectors_bytes, caps.max_hw_sectors_bytes) == (128 << 10, 1280 << 10, 0)
    assert (caps.nr_requests, caps.scheduler, caps.capacity_bytes) == (1023, "none", 1 << 20)
    assert (caps.model, caps.is_rotational, caps.is_virtual) == ("Fast 9", False, False)
    assert caps.stack == ("nvme0n1p2", "nvme0n1")
    assert len(caps.serial_digest) == 12
    assert "eui" not in caps.serial_digest
    assert caps_of_number(number(259, 0), sys=sys.root).partition_start_bytes == 0
    assert caps.as_traced().max_sectors_bytes == 1280 << 10


def test_one_slave_is_followed_and_several_are_not(sys: Sys) -> None:
    disk, part = add_drive(sys)
    inner = sys.add("virtual/block/dm-0", "253:0", **QUEUE)
    outer = sys.add("virtual/block/dm-1", "253:1", **QUEUE)
    sys.stack(inner, part)
    sys.stack(outer, inner)
    caps = caps_of_number(number(253, 1), sys=sys.root)
    assert (caps.name, caps.stack) == ("nvme0n1", ("dm-1", "dm-0", "nvme0n1p2", "nvme0n1"))
    assert caps.partition_start_bytes == 4096 * 512
    array = sys.add("virtual/block/md0", "9:0", **QUEUE)
    sys.stack(array, disk, inner)
    caps = caps_of_number(number(9, 0), sys=sys.root)
    assert (caps.name, caps.stack, caps.is_virtual) == ("md0", ("md0",), True)


@pytest.mark.parametrize(
    ("where", "model", "is_virtual"),
    [
        ("virtual/block/loop0", "", True),
        ("pci0/virtio1/block/vda", "", True),
        ("pci0/ata1/block/sda", "QEMU HARDDISK", True),
        ("pci0/ata1/block/sda", "Amazon Elastic Block Store", True),
        ("pci0/ata1/block/sda", "ST4000", False),
        ("virtual/nvme-subsystem/nvme-subsys0/nvme0n1", "Fast 9", False),
    ],
)
def test_drives_that_are_made_up(sys: Sys, where: str, model: str, is_virtual: bool) -> None:
    sys.add(where, "8:0", **QUEUE, device__model=model)
    assert caps_of_number(number(8, 0), sys=sys.root).is_virtual is is_virtual


def test_what_is_missing_or_odd_is_empty(sys: Sys) -> None:
    sys.add("pci0/block/sda", "8:0", queue__nr_requests="-3", queue__rotational="1", size="many")
    caps = caps_of_number(number(8, 0), sys=sys.root)
    assert (caps.nr_requests, caps.capacity_bytes, caps.scheduler, caps.serial_digest) == (0, 0, "", "")
    assert caps.is_rotational
    assert caps_of_number(number(8, 1), sys=sys.root, file_system="nfs").name == ""


def test_the_directory_of_this_test_has_a_mount(tmp_path: Path) -> None:
    caps = caps_of(tmp_path)
    assert str(tmp_path.resolve()).startswith(caps.mount_point)
    assert caps.file_system
    (tmp_path / "file").write_text("")
    assert caps_of(tmp_path / "file") == caps
    with pytest.raises(ConfigError, match="does not exist"):
        caps_of(tmp_path / "missing")


def test_proc_is_no_device() -> None:
    caps = caps_of(Path("/proc"))
    assert (caps.name, caps.number, caps.file_system) == ("", 0, "proc")


def test_mountinfo_lines() -> None:
    line = r"36 35 98:0 /mnt1 /mnt/two\040words rw,noatime master:1 - ext3 /dev/ro\134ot rw,errors=continue"
    assert parse_mount(line) == Mount(36, (98, 0), "/mnt/two words", "ext3", "/dev/ro\\ot")
    btrfs = parse_mount("36 35 0:31 / /data rw - btrfs /dev/nvme0n1p2 rw")
    assert btrfs is not None
    assert (btrfs.device, btrfs.source) == (None, "/dev/nvme0n1p2")


@given(st.text())
def test_a_line_that_is_none_is_nothing(text: str) -> None:
    found = parse_mount(text)
    assert found is None or " - " in text
