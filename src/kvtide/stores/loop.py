"""A loop device that clears itself, from its first moment on. Next: device.

Theory. LOOP_CONFIGURE sets up a device in one call, its flags with it: with "autoclear" the kernel frees it when the
last one who has it open closes it, a mount included. `losetup` cannot set that flag (its --detach does, too late for a
process that is killed before). Source: linux/loop.h, drivers/block/loop.c (LOOP_CONFIGURE: Linux 5.8).
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from kvtide.errors import IoError, UnsupportedError

CONTROL = "/dev/loop-control"
LOOP_CTL_GET_FREE, LOOP_CONFIGURE = 0x4C82, 0x4C0A
AUTOCLEAR, DIRECT_IO = 4, 16
# struct loop_config: the image's descriptor, the block size (0: the default), loop_info64 (its flags at 52), reserved.
_CONFIG = struct.Struct("=II 52x I 176x 64x")
_TRIES = 50  # another process may take the free one first


def open_loop(image: int) -> tuple[int, str]:
    """Return a read-only descriptor of a new loop device over the open file `image`, and the device's name.

    The device bypasses the page cache where the file system of `image` can, and is freed when neither the descriptor
    nor a mount uses it. Raises: UnsupportedError where the kernel is too old; IoError where there is no free device.
    """
    try:
        control = os.open(CONTROL, os.O_RDWR | os.O_CLOEXEC)
        try:
            for _ in range(_TRIES):
                name = f"loop{fcntl.ioctl(control, LOOP_CTL_GET_FREE)}"
                device = _configured(name, image)
                if device is not None:
                    return device, name
        finally:
            os.close(control)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTTY):
            raise UnsupportedError(
                f"cannot set up a loop device: {error.strerror}; Linux 5.8 or newer is needed"
            ) from error
        raise IoError(error.errno or errno.EIO, f"no loop device: {error.strerror}") from error
    raise IoError(errno.EBUSY, f"no loop device: others took each of {_TRIES} free ones first; try again")


def _configured(name: str, image: int) -> int | None:
    """Return a read-only descriptor of the device `name`, now over `image`; None where another process was first."""
    device = os.open(f"/dev/{name}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(device, LOOP_CONFIGURE, _CONFIG.pack(image, 0, AUTOCLEAR | DIRECT_IO))
        # One that may write would keep kernels that guard mounted devices from mounting it.
        return os.open(f"/dev/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return None
        raise
    finally:
        os.close(device)
