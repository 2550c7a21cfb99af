"""Where a file lies on its device: the map between ops and block commands. Next: attribute.

Asks the file system through FIEMAP (Documentation/filesystems/fiemap.rst of the kernel) and sysfs through
kvtide.probe.caps. Knows no trace.
"""

from __future__ import annotations

import fcntl
import struct
from pathlib import Path

from kvtide.errors import KvtideError
from kvtide.probe.caps import caps_of
from kvtide.trace.file import Extent, TracedFile

FIEMAP = 0xC020660B  # FS_IOC_FIEMAP
SYNC = 0x1  # write what is delayed first, so that it has a place
LAST = 0x1
NO_PLACE = 0x2 | 0x4 | 0x8 | 0x200  # unknown, delayed, encoded, inline: no bytes of a device to point at
_HEAD, _EXTENT = struct.Struct("<QQIIII"), struct.Struct("<QQQ16xI12x")
_BATCH = 512  # extents a call


def traced_file(path: Path, fd: int) -> tuple[TracedFile, str]:
    """Return what a trace needs to know of an open file, and why its extents are unknown (empty if they are known)."""
    try:
        caps = caps_of(path)
        file = TracedFile(path=str(path), fd=fd, device=caps.number)
        if not caps.name:
            return file, f"no block device is under {path}"
        if len(caps.stack) > 1 and caps.stack[0].startswith(("dm-", "md")):
            return file, f"{path} lies on {caps.stack[0]}, whose map to {caps.name} is not known"
        file.extents = [
            Extent(each.logical, each.physical + caps.partition_start_bytes, each.length) for each in extents_of(fd)
        ]
    except (OSError, KvtideError) as error:
        return TracedFile(path=str(path), fd=fd, device=0), f"the extents of {path} cannot be told: {error}"
    return file, "" if file.extents else f"{path} has no extents on {caps.name}"


def extents_of(fd: int, *, is_synced: bool = True) -> list[Extent]:
    """Return the extents of an open file that lie on its device, in order; `physical` counts from the partition.

    `is_synced`: what waits in memory is written first, so that it has a place.

    Raises: OSError if the file system does not tell.
    """
    found: list[Extent] = []
    start, is_last = 0, False
    while not is_last:
        buffer = bytearray(_HEAD.size + _BATCH * _EXTENT.size)
        _HEAD.pack_into(buffer, 0, start, 2**64 - 1 - start, SYNC if is_synced else 0, 0, _BATCH, 0)
        fcntl.ioctl(fd, FIEMAP, buffer)
        num = _HEAD.unpack_from(buffer)[3]
        is_last = num == 0
        for index in range(num):
            logical, physical, length, flags = _EXTENT.unpack_from(buffer, _HEAD.size + index * _EXTENT.size)
            start, is_last = logical + length, bool(flags & LAST)
            if not flags & NO_PLACE:
                found.append(Extent(logical, physical, length))
    return found
