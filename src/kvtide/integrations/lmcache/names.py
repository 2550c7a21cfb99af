"""LMCache's own names of the chunks in a store, so that they can be listed and counted after a restart. Next: adapter.

*Theory.* `names.jsonl` beside the data file has one line a key. A name hashes to the key of its chunk, so a line proves
itself: what is torn, or names a chunk that is not there, is passed over. A name that was lost only keeps its chunk from
being listed. Lines are appended as chunks are stored. Opening writes the file anew, and so does an
append that finds it mostly of chunks that are gone, so it stays within twice the names and a little.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TextIO

from lmcache.v1.distributed.api import ObjectKey

from kvtide.blocks import KeyArray
from kvtide.integrations.lmcache.forms import from_told, keys_of, text_of
from kvtide.tiers.guard import open_file, read_file, write_whole
from kvtide.tiers.inspect import NAMES

NAMES_BYTES_MAX = 1 << 30  # of millions of chunks
SLACK_LINES = 1000  # of chunks that are gone, before a small file is written anew
_log = logging.getLogger("kvtide.lmcache")


class Names:
    """The names of chunks by their keys.

    Threads: one at a time, but for `write` and `close`, which any may call.
    """

    def __init__(self, folder: Path, present: KeyArray) -> None:
        """Take over those names in `folder` whose chunks are among `present`. Shapes: [n]."""
        self._path = folder / NAMES
        self._file: TextIO | None = None
        there = set(present.tolist())
        found = _read(self._path)
        self.of: dict[bytes, ObjectKey] = {
            key: name for key, name in zip(keys_of(found).tolist(), found, strict=True) if key in there
        }
        self._unwritten: collections.deque[ObjectKey] = collections.deque()
        self._num_lines = 0
        self._writing = threading.Lock()
        self._attempt(self._write_anew)

    def add(self, names: Iterable[tuple[bytes, ObjectKey]]) -> None:
        """Note the names of chunks that were stored. `write` is to follow."""
        new = dict(names)
        self.of.update(new)
        self._unwritten.extend(new.values())

    def write(self) -> None:
        """Write what was noted. Waits for the disk, so no lock that others need may be held."""
        with self._writing:
            new = [self._unwritten.popleft() for _ in range(len(self._unwritten))]
            if self._file is None or not new:
                return
            is_long = self._num_lines + len(new) > 2 * len(self.of) + SLACK_LINES
            self._attempt(self._write_anew if is_long else lambda: self._append(new))

    def _append(self, new: list[ObjectKey]) -> None:
        assert self._file is not None, "written to before it was opened"
        self._file.write("".join(map(_line, new)))
        self._file.flush()
        self._num_lines += len(new)

    def _write_anew(self) -> None:
        names = list(self.of.values())  # at once: others may add and take meanwhile
        write_whole(self._path, "".join(map(_line, names)).encode())
        self._shut()
        fd = open_file(self._path, os.O_WRONLY | os.O_APPEND)
        self._file, self._num_lines = os.fdopen(fd, "a", encoding="utf-8"), len(names)

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            _log.warning("kvtide: after a restart chunks will not be listed: %s", error)
            self._shut()

    def take(self, keys: Iterable[bytes]) -> list[ObjectKey]:
        """Forget chunks, and return the names of those that had one."""
        return [name for name in (self.of.pop(key, None) for key in keys) if name is not None]

    def close(self) -> None:
        """Give up the file. Idempotent."""
        with self._writing:
            self._shut()

    def _shut(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # it flushes what could not be written before
                file.close()


def _line(name: ObjectKey) -> str:
    return text_of(name) + "\n"


def _read(path: Path) -> list[ObjectKey]:
    """Return what names a file holds; none where there is no file."""
    try:
        lines = read_file(path, NAMES_BYTES_MAX).decode(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(from_told(json.loads(line)))
        except (ValueError, TypeError, RecursionError):
            continue  # torn, or not ours
    return found
