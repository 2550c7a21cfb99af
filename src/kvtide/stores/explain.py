"""What a store's trace says: bytes written by cause, small writes, chains of reads, and what would help.

Pure but for reading RocksDB's LOG. Knows no command line and prints nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtide.stores.causes import CAUSES, Held, cause_of, owners
from kvtide.stores.rocksdb import LOG_BYTES_MAX, Tables, tables_of, tickers
from kvtide.stores.rounds import rounds_of
from kvtide.stores.traced import SMALL_BYTES
from kvtide.trace.events import FLUSH, META, READ, UNKNOWN, WRITE

if TYPE_CHECKING:
    import polars as pl

GAP_NS_MIN = 2_000_000  # of silence between two bursts of reads; or ten times a read, whichever is longer
DOMINANT = 0.3  # share of the bytes from which a cause is worth a remedy
CHAIN_MIN = 4.0  # rounds
REMEDIES = {
    "log": "commits write little at a time: group them (a few milliseconds of delay), or sync less often",
    "journal": "the file system's journal is written at each sync: preallocate the log and overwrite it, and use "
    "fdatasync, so that sizes do not change",
    "compaction": "rows are merged again and again: a larger memtable, tiered (universal) compaction, or values kept "
    "apart from keys (BlobDB)",
    "flush": "rows are written once more after the log: read the sealed log in place, or make flushes larger",
    "table": "pages are written back for little that changed: larger transactions, rarer checkpoints, keys in order",
    "index": "the index is written as a whole: save it less often, and keep new rows in a log beside it",
    "manifest": "a list of everything is rewritten at each commit: more rows a commit, and drop old versions",
    "metadata": "files are made and dropped often: fewer, larger, preallocated files",
}


@dataclass(slots=True)
class Cause:
    """Bytes written for one cause."""

    name: str
    num_bytes: int = 0
    num_writes: int = 0
    num_small: int = 0


@dataclass(slots=True)
class Explained:
    """What a trace says of a store. Sizes in bytes; None: not known."""

    store: str = "unknown"
    causes: list[Cause] = field(default_factory=list)
    user_bytes: int | None = None
    num_flushes: int = 0
    num_reads: int = 0
    read_bytes: int = 0
    num_bursts: int = 0
    rounds_p50: float = 0.0
    rounds_max: int = 0
    reads_per_round: float = 0.0
    rocksdb: dict[str, int] = field(default_factory=dict)
    remedies: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def written_bytes(self) -> int:
        """All bytes written."""
        return sum(each.num_bytes for each in self.causes)

    @property
    def small_share(self) -> float:
        """Share of write commands below SMALL_BYTES."""
        num = sum(each.num_writes for each in self.causes)
        return sum(each.num_small for each in self.causes) / num if num else 0.0


def explain(
    block: pl.DataFrame, files: Sequence[Held], *, folder: Path | None = None, user_bytes: int | None = None
) -> Explained:
    """Return what block commands of one device say of the store whose files are `files`."""
    found = Explained(user_bytes=user_bytes)
    tables = _rocksdb(folder, found) if folder is not None else None
    known = [cause_of(file.name, tables) for file in files]
    stores = Counter(store for store, cause in known if store != "any")
    found.store = stores.most_common(1)[0][0] if stores else "unknown"
    _writes(block, files, [cause for _, cause in known], found)
    _reads(block, found)
    found.remedies = remedies_of(found)
    return found


def _writes(block: pl.DataFrame, files: Sequence[Held], causes: Sequence[str], found: Explained) -> None:
    flags = block["flags"].to_numpy()
    found.num_flushes = int((flags & FLUSH != 0).sum())
    writes = block.filter((flags & WRITE != 0) & (block["length"].to_numpy() > 0))
    length, offset = writes["length"].to_numpy(), writes["offset"].to_numpy()
    owner = owners(files, offset, writes["time_ns"].to_numpy())
    index = {name: at for at, name in enumerate(CAUSES)}
    table = np.array([*(index[cause] for cause in causes), index["unknown"]], np.intp)
    which = table[owner]  # -1 is the last: unknown
    is_lone = owner < 0
    is_journal = writes["comm"].str.starts_with("jbd2").to_numpy()
    which[is_lone & is_journal] = index["journal"]
    which[is_lone & ~is_journal & (writes["flags"].to_numpy() & META != 0)] = index["metadata"]
    for at, name in enumerate(CAUSES):
        here = which == at
        if here.any():
            sizes = length[here]
            found.causes.append(Cause(name, int(sizes.sum()), int(here.sum()), int((sizes < SMALL_BYTES).sum())))
    found.causes.sort(key=lambda each: -each.num_bytes)


def _reads(block: pl.DataFrame, found: Explained) -> None:
    """Chains of reads. Nobody says where a search begins, so bursts between silences stand for searches."""
    reads = block.filter((block["flags"] & READ != 0) & (block["length"] > 0))
    if not len(reads):
        return
    queued, issued, complete = (reads[name].to_numpy() for name in ("queue_ns", "time_ns", "complete_ns"))
    start = np.where(queued == UNKNOWN, issued, queued)
    order = np.argsort(start, kind="stable")
    start, complete = start[order], complete[order]
    burst = bursts(start, complete)
    rounds = rounds_of(burst, start, complete, num_queries=int(burst[-1]) + 1)
    found.num_reads, found.read_bytes, found.num_bursts = len(reads), int(reads["length"].sum()), len(rounds)
    found.rounds_p50, found.rounds_max = float(np.median(rounds)), int(rounds.max())
    found.reads_per_round = len(reads) / max(1, int(rounds.sum()))


def bursts(start_ns: npt.NDArray[np.int64], complete_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the burst of each read: a new one begins after a silence. Shapes: [r], in order of start."""
    took = np.maximum(0, complete_ns - start_ns)
    gap = max(GAP_NS_MIN, 10 * int(np.median(took)))
    quiet = start_ns[1:] - np.maximum.accumulate(np.maximum(complete_ns, start_ns))[:-1]
    return np.concatenate([[0], np.cumsum(quiet > gap)]).astype(np.int64)


def _rocksdb(folder: Path, found: Explained) -> Tables | None:
    """Return what LOG files of RocksDB in `folder` tell, and keep their counters."""
    tables = Tables()
    for path in sorted(folder.rglob("LOG*")):
        if not path.is_file() or path.is_symlink():
            continue
        with path.open("rb") as file:
            text = file.read(LOG_BYTES_MAX).decode(errors="replace")
        one = tables_of(text)
        tables.flush |= one.flush
        tables.compaction |= one.compaction
        found.rocksdb |= tickers(text)
    if not tables.flush:
        return None
    found.rocksdb |= {"tables flushed, bytes": tables.flush_bytes, "tables compacted, bytes": tables.compaction_bytes}
    return tables


def remedies_of(found: Explained) -> list[str]:
    """Return what would help, the largest cause first."""
    total = found.written_bytes
    lines = [
        f"{each.name} ({each.num_bytes / total:.0%} of the bytes): {REMEDIES[each.name]}"
        for each in found.causes
        if total and each.num_bytes >= DOMINANT * total and each.name in REMEDIES
    ]
    if found.rounds_p50 >= CHAIN_MIN and found.reads_per_round < 2:
        lines.append(
            f"reads wait for one another ({found.rounds_p50:.0f} rounds, {found.reads_per_round:.1f} reads each): "
            "a wider beam, more of the graph's upper part in memory, or lists that are read at once (IVF)"
        )
    return lines
