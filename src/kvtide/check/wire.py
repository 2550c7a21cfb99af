"""Messages between the suite and the process of a target: JSON, and raw bytes beside it. Next: child, then driver.

*Theory.* `[u32 length of the head][head, JSON][blobs]`. The head's "blobs" are the lengths of the blobs, -1 for None.
Neither side trusts a length beyond `HEAD_BYTES_MAX` and `BLOBS_BYTES_MAX`. Whoever waits, waits until a deadline.
"""

from __future__ import annotations

import json
import os
import select
import struct
import time
from collections.abc import Sequence
from typing import Any

from kvtide.errors import FormatError

HEAD_BYTES_MAX, BLOBS_BYTES_MAX = 64 << 20, 4 << 30
_LENGTH = struct.Struct("<I")
_STEP = 1 << 20
Blobs = Sequence[bytes | None]


class Late(Exception):  # noqa: N818
    """The deadline went by."""


class Gone(Exception):  # noqa: N818
    """The other side has closed its end."""


class Wire:
    """A pair of pipes. Where a deadline is given, descriptors must not block.

    Threads: one may send while another receives.
    """

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd

    def send(self, head: dict[str, Any], blobs: Blobs = (), *, until: float | None = None) -> None:
        """Send one message. `until` is of `time.monotonic`.

        Raises: Late, Gone.
        """
        told = {**head, "blobs": [-1 if blob is None else len(blob) for blob in blobs]}
        text = json.dumps(told).encode()
        self._write(_LENGTH.pack(len(text)) + text, until)
        for blob in blobs:
            if blob:
                self._write(blob, until)

    def receive(self, *, until: float | None = None) -> tuple[dict[str, Any], list[bytes | None]]:
        """Return the next message.

        Raises: Late, Gone; FormatError for what is no message.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, until))
        if length > HEAD_BYTES_MAX:
            raise FormatError(f"a head of {length} bytes; at most {HEAD_BYTES_MAX} are sent")
        head = json.loads(self._read(length, until))
        sizes = head.pop("blobs")
        if sum(max(0, size) for size in sizes) > BLOBS_BYTES_MAX:
            raise FormatError(f"blobs of {sum(sizes)} bytes; at most {BLOBS_BYTES_MAX} are sent")
        return head, [None if size < 0 else bytes(self._read(size, until)) for size in sizes]

    def close(self) -> None:
        """Close both ends."""
        os.close(self.read_fd)
        os.close(self.write_fd)

    def _write(self, data: bytes, until: float | None) -> None:
        view = memoryview(data)
        while view:
            _wait(self.write_fd, until, is_write=True)
            try:
                view = view[os.write(self.write_fd, view[:_STEP]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise Gone from error

    def _read(self, num: int, until: float | None) -> bytearray:
        found = bytearray(num)
        view, start = memoryview(found), 0
        while start < num:
            _wait(self.read_fd, until, is_write=False)
            try:
                moved = os.readv(self.read_fd, [view[start : start + _STEP]])
            except BlockingIOError:
                continue
            if not moved:
                raise Gone
            start += moved
        return found


def _wait(fd: int, until: float | None, *, is_write: bool) -> None:
    if until is None:
        return
    poll = select.poll()
    poll.register(fd, select.POLLOUT if is_write else select.POLLIN)
    if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
        raise Late
