"""Decoding the kernel's ring-buffer pages into records, all pages at once. Next: commands.

Pure: bytes in, arrays out. Knows the page format and the layouts it is given, not what the events mean.

Theory. A page is a header, then events one after another:

    [time u8][commit u8: bytes used | flags] [event][event]...
    event: u4 = type_len (5 bits) | time delta (27 bits)
      type_len 1..28   the record follows, type_len words
               0       a word with the length follows, then the record
               29      padding: to the end of the page where delta is 0, else a removed event
               30      time extend: the next word is delta >> 27
               31      time stamp: the next word is the time >> 27

Where an event ends is known only when it was read, so one page is a chain of steps. All pages take their n-th step
together: as many steps as the fullest page has events, however many pages there are.
Source: kernel/trace/ring_buffer.c, include/linux/ring_buffer.h.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.errors import FormatError
from kvtide.trace.kernel.tracefs import EventFormat

HEADER_BYTES = 16
USED_MASK = (1 << 20) - 1  # of `commit`; the flags above say that events were lost before this page
PADDING, TIME_EXTEND, TIME_STAMP = 29, 30, 31


@dataclass(slots=True)
class Located:
    """Where records lie. Shapes: all [num_events], in order of page, then of place."""

    at: npt.NDArray[np.int64]  # word of the pages, taken as one array of u4
    time_ns: npt.NDArray[np.int64]
    number: npt.NDArray[np.uint16]  # of the event's format
    num_words: npt.NDArray[np.int64]  # of the record


def used_bytes(page: bytes) -> int:
    """Return how many bytes of events one page holds."""
    return int.from_bytes(page[8:16], "little") & USED_MASK


def page_times(pages: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Return the time each page begins at. Shapes: pages [P, page_bytes], result [P]."""
    return pages[:, :8].copy().view("<i8")[:, 0]


def locate(pages: npt.NDArray[np.uint8]) -> Located:
    """Return where the records of `pages` lie.

    Shapes: pages [P, page_bytes], C-contiguous.
    Raises: FormatError if a page is not what the kernel writes.
    """
    num_pages, page_bytes = pages.shape
    words = pages.reshape(-1).view("<u4")
    time_ns = page_times(pages).copy()
    used = (pages[:, 8:16].copy().view("<u8")[:, 0] & USED_MASK).astype(np.int64)
    if num_pages and int(used.max()) > page_bytes - HEADER_BYTES:
        raise FormatError(f"a page of the kernel's buffer claims {int(used.max())} bytes of {page_bytes}")
    at = np.arange(num_pages, dtype=np.int64) * (page_bytes // 4) + HEADER_BYTES // 4
    end = at + used // 4
    found: list[tuple[npt.NDArray[np.int64], ...]] = []
    live = np.flatnonzero(at < end)
    while len(live):
        here = at[live]
        head = words[here]
        kind, delta = head & 31, (head >> 5).astype(np.int64)
        second = words[np.minimum(here + 1, len(words) - 1)].astype(np.int64)
        is_long = kind == 0
        num_words = np.where(is_long, (second + 3) // 4 + 1, kind.astype(np.int64) + 1)
        is_padding, is_extend, is_stamp = kind == PADDING, kind == TIME_EXTEND, kind == TIME_STAMP
        num_words = np.where(is_padding, np.where(delta == 0, page_bytes, (second + 3) // 4 + 1), num_words)
        num_words = np.where(is_extend | is_stamp, 2, num_words)
        stamp = (time_ns[live] & ~((1 << 59) - 1)) | (delta + (second << 27))
        later = time_ns[live] + np.where(is_extend, delta + (second << 27), delta)
        time_ns[live] = np.where(is_stamp, stamp, later)
        is_record = ~(is_padding | is_extend | is_stamp)
        start = here + 1 + is_long
        if bool(((here + num_words > end[live]) & ~is_padding).any()):
            raise FormatError("an event of the kernel's buffer reaches over the end of its page")
        keep = np.flatnonzero(is_record)
        found.append((live[keep], start[keep], time_ns[live[keep]], (here + num_words - start)[keep]))
        at[live] = here + num_words
        live = live[at[live] < end[live]]
    return _in_order(words, found)


def _in_order(words: npt.NDArray[np.uint32], found: list[tuple[npt.NDArray[np.int64], ...]]) -> Located:
    if not found:
        none = np.zeros(0, np.int64)
        return Located(none, none, none.astype(np.uint16), none)
    _, start, time_ns, num_words = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.argsort(start, kind="stable")
    start = start[order]
    return Located(start, time_ns[order], (words[start] & 0xFFFF).astype(np.uint16), num_words[order])


def records(
    pages: npt.NDArray[np.uint8], located: Located, layout: EventFormat
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
    """Return the records of one kind of event, and the time of each, in the order of `located`.

    Shapes: [n] of `layout.dtype`, [n].
    Raises: FormatError if a record is shorter than its layout.
    """
    words = pages.reshape(-1).view("<u4")
    num_words = layout.dtype.itemsize // 4
    chosen = np.flatnonzero(located.number == layout.number)
    if len(chosen) and int(located.num_words[chosen].min()) < num_words:
        raise FormatError(f"a record of {layout.name} is shorter than its format says")
    if not len(chosen):
        return np.zeros(0, layout.dtype), np.zeros(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(words, num_words)
    rows = np.ascontiguousarray(windows[located.at[chosen]])
    return rows.view(layout.dtype)[:, 0], located.time_ns[chosen]
