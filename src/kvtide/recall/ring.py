"""A small file that is written over and over: where groups are durable before the log has them. Next: log.

Decides how groups share pages, here and in a log; knows nothing of what they hold.

Theory. A sync costs ext4 a journal write of 12 KiB whenever space is written for the first time. So a group goes into
the ring, whose space was written before, and many together into the log, at the cost of one journal write. The ring
then starts anew: what it still holds is in the log, too. Groups name their log and count up, so those of an earlier
round are told from those of this one.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvtide.io.ops import READ, WRITE, aligned_buffer
from kvtide.recall.ops import MemoryIo
from kvtide.recall.pack import PACK_MAGIC, packed, unpacked
from kvtide.recall.records import ALIGN_BYTES, group_at, groups_of

RING_BYTES = 128 << 10  # written once with zeros: 3 % of the first 5 MB; a smaller one is emptied more often
GROUP_BYTES_MAX = 64 << 10  # that are looked at: larger groups are better off in the log at once


class Tail:
    """Where the next group goes, in whole pages: right behind the one before if that makes no more pages, else on the
    next page. The page in which a group ends is then written again: its first bytes stay as they are, so a write that
    is torn between sectors leaves what was acknowledged.
    """

    def __init__(self, page_bytes: int, end: int = 0, held: bytes = b"") -> None:
        """Groups end at byte `end`; `held` is what the page there holds of them."""
        self.page_bytes, self.end, self._held = page_bytes, end, held

    def pages_for(self, num_bytes: int) -> tuple[int, int]:
        """Return where a group goes, and where the last page that is written for it ends."""
        page, filled = self.page_bytes, len(self._held)
        is_behind = filled and -(-(filled + num_bytes) // page) <= -(-num_bytes // page)
        at = self.end if is_behind else -(-self.end // page) * page
        return at, -(-(at + num_bytes) // page) * page

    def pages(self, raw: bytes, *, least_bytes: int = 0) -> tuple[int, int, npt.NDArray[np.uint8]]:
        """Return where a group goes, where its pages begin, and the pages: at least `least_bytes` of them."""
        at, end = self.pages_for(len(raw))
        first = at // self.page_bytes * self.page_bytes
        buffer = aligned_buffer(max(end - first, least_bytes))
        body = (self._held if at > first else b"") + raw
        buffer[: len(body)] = np.frombuffer(body, np.uint8)
        return at, first, buffer

    def wrote(self, at: int, raw: bytes) -> None:
        """Note that a group was written."""
        body = (self._held if at == self.end else b"") + raw
        self.end = at + len(raw)
        self._held = body[len(body) - self.end % self.page_bytes :] if self.end % self.page_bytes else b""


class Ring:
    """The ring of a memory.

    Threads: one at a time.
    """

    def __init__(self, io: MemoryIo, fd: int, *, page_bytes: int, size_bytes: int, name: str) -> None:
        """Take over an open file of `size_bytes` that were written once. It is full until it was cleared."""
        self.fd, self.name = fd, name
        self._io, self._page_bytes, self._size_bytes = io, page_bytes, size_bytes
        self._tail = Tail(page_bytes, RING_BYTES)
        self._ratio = 1.0  # of bytes packed and not, as it was of late

    def load(self, *, log: int, dim: int, salt: bytes) -> dict[int, bytes]:
        """Return the groups of a log that it holds, by their sequence.

        Raises: IoError.
        """
        raw = aligned_buffer(min(self._size_bytes, RING_BYTES))
        if len(raw):
            self._io.move(READ, self.fd, raw, 0, cause="memory-read", what=self.name)
        found = groups_of(raw.data, log=log, dim=dim, salt=salt)
        hay = raw.tobytes()
        at = hay.find(PACK_MAGIC)
        while at >= 0:
            group = unpacked(raw.data, at, bytes_max=GROUP_BYTES_MAX)
            if sequence := group_at(memoryview(group), log=log, dim=dim, salt=salt):
                found[sequence] = group
            at = hay.find(PACK_MAGIC, at + ALIGN_BYTES)
        return found

    def clear(self) -> None:
        """Let the next group begin anew: all that it holds is durable in the log."""
        self._tail = Tail(self._page_bytes)

    def packed(self, raw: bytes) -> bytes:
        """Return a group as it is written here; packed if it has more than a page."""
        if not self._page_bytes < len(raw) <= GROUP_BYTES_MAX:
            return raw
        made = packed(raw)
        ratio = len(made) / len(raw)
        self._ratio = max(ratio, 0.9 * self._ratio + 0.1 * ratio)
        return made

    def guess(self, num_bytes: int) -> int:
        """Return the bytes that a group of `num_bytes` would write, and 0 if it does not fit."""
        is_packed = self._page_bytes < num_bytes <= GROUP_BYTES_MAX
        return self.room(math.ceil(num_bytes * self._ratio) if is_packed else num_bytes)

    def room(self, num_bytes: int) -> int:
        """Return the bytes that a group of `num_bytes`, packed, writes, and 0 if it does not fit."""
        at, end = self._tail.pages_for(num_bytes)
        return end - at // self._page_bytes * self._page_bytes if end <= RING_BYTES else 0

    @property
    def filled(self) -> float:
        return self._tail.end / RING_BYTES

    def write(self, raw: bytes) -> None:
        """Make a group, packed, durable.

        Raises: IoError; then the next group takes its place.
        """
        is_new = self._size_bytes < RING_BYTES
        at, first, pages = self._tail.pages(raw, least_bytes=RING_BYTES if is_new else 0)
        self._io.move(WRITE, self.fd, pages, first, cause="memory-log", what=self.name)
        self._io.sync(self.fd, what=self.name)
        self._size_bytes = max(self._size_bytes, first + pages.nbytes)
        self._tail.wrote(at, raw)
