"""LMCache's own names of the chunks in a store, so that they can be listed and counted after a restart. Next: adapter.

*Theory.* `names.jsonl` beside the data file has one line a key. A name hashes to the key of its chunk, so a line proves
itself: what is torn, or names a chunk that is not there, is passed over. A name that was lost only keeps its chunk from
being listed. Lines are appended as chunks are stored; opening writes the file anew.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from lmcache.v1.distributed.api import ObjectKey

from kvtide.blocks import KeyArray
from kvtide.integrations.lmcache.forms import from_told, keys_of, told
from kvtide.tiers.inspect import NAMES

_log = logging.getLogger("kvtide.lmcache")


class Names:
    """The names of chunks by their keys.

    Threads: one at a time.
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
        try:
            partial = self._path.with_name(NAMES + ".partial")
            partial.write_text("".join(map(_line, self.of.values())))
            partial.chmod(0o600)
            partial.replace(self._path)
            self._file = self._path.open("a")
        except OSError as error:
            _log.warning("kvtide: after a restart chunks will not be listed: %s", error)

    def add(self, names: Iterable[tuple[bytes, ObjectKey]]) -> None:
        """Note the names of chunks that were stored."""
        new = dict(names)
        self.of.update(new)
        if self._file is not None and new:
            try:
                self._file.write("".join(map(_line, new.values())))
                self._file.flush()
            except OSError as error:
                _log.warning("kvtide: after a restart chunks will not be listed: %s", error)
                self._file = None

    def take(self, keys: Iterable[bytes]) -> list[ObjectKey]:
        """Forget chunks, and return the names of those that had one."""
        return [name for name in (self.of.pop(key, None) for key in keys) if name is not None]

    def close(self) -> None:
        """Give up the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _line(name: ObjectKey) -> str:
    return json.dumps(told(name)) + "\n"


def _read(path: Path) -> list[ObjectKey]:
    """Return what names a file holds; none where there is no file."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(from_told(json.loads(line)))
        except (ValueError, TypeError):
            continue  # torn, or not ours
    return found
