"""Why a store wrote: each block command gets a cause from the file it lies in. Next: explain.

Pure: names, extents and commands in; causes out. The rules of each store are one table.

Theory. A file's name says what it is for in every store known here. Where it lies on the device, and when, says which
commands were its. Files come and go, and their space is used again: a file claims what was written in its place up to
the time it was last seen, the file that was seen first claims first.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np
import numpy.typing as npt

from kvtide.stores.rocksdb import Tables
from kvtide.trace.file import Extent

CAUSES = (
    "log", "flush", "compaction", "table", "index", "manifest", "notes", "journal", "metadata", "read", "unknown"
)  # fmt: skip
SLACK_NS = 1_000_000_000  # between a file's last look and its end

# Store, pattern of a path below the store's folder, cause. The first that fits holds.
RULES: tuple[tuple[str, str, str], ...] = (
    ("rocksdb", "*.log", "log"),
    ("rocksdb", "*.sst", "table"),  # flush or compaction where its LOG tells
    ("rocksdb", "*.blob", "flush"),
    ("rocksdb", "*MANIFEST-*", "manifest"),
    ("rocksdb", "*CURRENT*", "manifest"),
    ("rocksdb", "*OPTIONS-*", "manifest"),
    ("rocksdb", "*IDENTITY", "manifest"),
    ("rocksdb", "*LOG*", "notes"),
    ("sqlite", "*-wal", "log"),
    ("sqlite", "*-journal", "log"),
    ("sqlite", "*-shm", "notes"),
    ("sqlite", "*.db", "table"),
    ("sqlite", "*.sqlite*", "table"),
    ("lance", "*_indices/*", "index"),
    ("lance", "*_versions/*", "manifest"),
    ("lance", "*_transactions/*", "manifest"),
    ("lance", "*_latest.manifest", "manifest"),
    ("lance", "*_deletions/*", "table"),
    ("lance", "*data/*.lance", "flush"),  # a merge's output looks the same
    ("kvtide", "*.kvl", "log"),
    ("kvtide", "*memory.json", "manifest"),
    ("kvtide", "*owner.lock", "notes"),
    ("diskann", "*_disk.index*", "index"),
    ("diskann", "*ann_*", "index"),
    ("usearch", "*.usearch", "index"),
    ("hnswlib", "*index.bin", "index"),
    ("faiss", "*.faiss", "index"),
    ("faiss", "*.ivfdata", "table"),
    ("milvus", "*wal*", "log"),
    ("milvus", "*insert_log*", "flush"),
    ("milvus", "*index_files*", "index"),
    ("milvus", "*manifest*", "manifest"),
    ("any", "*.wal", "log"),
    ("any", "*.parquet", "table"),
    ("any", "*.idx", "index"),
)
_NUMBER = re.compile(r"(\d{1,18})\.sst$")


def cause_of(name: str, tables: Tables | None = None) -> tuple[str, str]:
    """Return the store and the cause that a file's path, below the store's folder, tells of."""
    path = PurePath(name).as_posix()
    for store, pattern, cause in RULES:
        if fnmatch.fnmatchcase(path, pattern):
            number = _NUMBER.search(path)
            if number and tables is not None:
                which = int(number[1])
                told = "flush" if which in tables.flush else "compaction" if which in tables.compaction else cause
                return store, told
            return store, cause
    return "any", "unknown"


@dataclass(slots=True)
class Held:
    """A file and where it lay. `physical` of its extents counts from the start of the whole device."""

    name: str
    extents: list[Extent]
    first_ns: int = 0  # seen first
    last_ns: int = 1 << 62  # seen last


def owners(
    files: Sequence[Held], offset: npt.NDArray[np.int64], time_ns: npt.NDArray[np.int64]
) -> npt.NDArray[np.intp]:
    """Return for each command the index of the file it lies in, -1 for none. Shapes: offset, time_ns [n]."""
    owner = np.full(len(offset), -1, np.intp)
    order = np.argsort(offset, kind="stable")
    sorted_offset = offset[order]
    for index in sorted(range(len(files)), key=lambda which: files[which].first_ns):
        file = files[index]
        for extent in file.extents:
            low = np.searchsorted(sorted_offset, extent.physical, side="left")
            high = np.searchsorted(sorted_offset, extent.physical + extent.length, side="left")
            here = order[low:high]
            owner[here[(owner[here] < 0) & (time_ns[here] <= file.last_ns + SLACK_NS)]] = index
    return owner
