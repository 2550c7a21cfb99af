"""Where a store's files lie on the device, looked at again and again while it runs: files come and go.

Next: explain.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtide.probe.caps import caps_of
from kvtide.stores.causes import Held
from kvtide.trace.extents import extents_of
from kvtide.trace.file import Extent

PERIOD_S = 0.05


class Watch:
    """Looks at `folder` until it is closed; `files` are what was seen.

    Asks for no sync: what has no place yet is seen at the next look.
    Threads: one of its own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.caps = caps_of(folder)
        self._files: dict[tuple[str, int], Held] = {}
        self._sizes: dict[tuple[str, int], tuple[int, int]] = {}
        self._halt = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtide-watch", daemon=True)

    @property
    def files(self) -> list[Held]:
        """All files seen, also those that are gone."""
        return list(self._files.values())

    def look(self, *, is_last: bool = False) -> None:
        """Look once."""
        now = time.monotonic_ns()
        for where, _, names in os.walk(self.folder):
            for name in names:
                path = Path(where) / name
                try:
                    stat = path.lstat()
                    key = (str(path.relative_to(self.folder)), stat.st_ino)
                    held = self._files.get(key)
                    if held is None:
                        held = self._files[key] = Held(key[0], [], now)
                    held.last_ns = now
                    size = (stat.st_size, stat.st_blocks)
                    if is_last or self._sizes.get(key) != size or not held.extents:
                        self._map(path, held)
                        self._sizes[key] = size
                except OSError:  # gone in the meantime
                    continue
        if is_last:
            for held in self._files.values():
                held.last_ns = held.last_ns if held.last_ns < now else 1 << 62

    def _map(self, path: Path, held: Held) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = extents_of(fd, is_synced=False)
        finally:
            os.close(fd)
        start = self.caps.partition_start_bytes
        known = {(each.physical, each.length) for each in held.extents}
        held.extents += [
            Extent(each.logical, each.physical + start, each.length)
            for each in found
            if (each.physical + start, each.length) not in known
        ]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._halt.set()
        self._thread.join()
        self.look(is_last=True)

    def _run(self) -> None:
        while not self._halt.wait(PERIOD_S):
            self.look()
