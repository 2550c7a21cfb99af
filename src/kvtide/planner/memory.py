"""What a vector store will write and read: `kvtide plan --memory`. Takes shapes of engines, gives figures.

Decides how an engine's defaults become a shape of `recall.model`; what was measured says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvtide.errors import ConfigError
from kvtide.recall.contract import MemoryOptions
from kvtide.recall.model import PAGE_BYTES, Tree, Written, b_tree, graph, leveled, segment_log, tiered
from kvtide.units import printable

COMMIT_S = 0.010  # kvtide's longest delay of a commit
READ_AHEAD_BYTES = 128 << 10  # the kernel's default: what a scan reads at once
JOURNAL_BYTES = 3 * PAGE_BYTES  # ext4, when a synced file grew: descriptor, inode table block, commit block
KEY_BYTES = 8
INDEX_SHARE = 0.116  # of the rows' bytes: 3 bits a dimension, and what belongs to a row (decision 12, measured)
CANDIDATES = 80  # of a segment, whose vectors are read to find 10 rows: 4 for each of 1.2 x 10 + 8
AT_ONCE = 1.8  # reads of candidates under way together, as Lance reads them (measured: results/recall_bench.json)
DEGREE, SEARCH_LIST, BEAM = 32, 64, 4  # of a DiskANN index, as kvtide recall bench builds it
ROWS_MAX = 10**12


@dataclass(frozen=True, slots=True)
class MemoryCase:
    """What is planned. `rate`: rows a second; `is_durable`: each row is on disk when it is acknowledged."""

    rows: int = 1_000_000
    rate: float = 10.0
    dim: int = 768
    is_durable: bool = False

    def check(self) -> None:
        """Raise ConfigError for what cannot be planned."""
        if not (1 <= self.rows <= ROWS_MAX and 1 <= self.dim <= 1 << 16 and 0 < self.rate <= 1e9):
            raise ConfigError(
                f"--memory with {self.rows} rows of {self.dim} dimensions at {self.rate} a second: type --rows 1 to "
                f"{ROWS_MAX}, --dim 1 to 65536, --rate above 0"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of a vector, float32."""
        return 4 * self.dim


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Predicted: bytes written over user bytes by cause; device reads of a cold query, and rounds of them."""

    engine: str
    written: Written
    reads: float
    rounds: float
    read_bytes: float
    how: str


def plan_memory(engine: str, case: MemoryCase) -> MemoryPlan:
    """Return what `engine` writes and reads for a case.

    Raises: ConfigError for an engine there is no model of, or a case that cannot be.
    """
    case.check()
    if engine not in ENGINES:
        raise ConfigError(
            f"--memory {printable(engine)[:40]}: no model of it; type one of {', '.join(ENGINES)}, or all"
        )
    return ENGINES[engine](case)


def memory_json(case: MemoryCase, plans: list[MemoryPlan]) -> dict[str, Any]:
    """Return plans as JSON values. Label: modelled."""
    rate = case.rate * case.row_bytes
    return {
        "label": "modelled",
        **asdict(case),
        "engines": [
            {
                "engine": each.engine,
                "amplification": each.written.total,
                "written": asdict(each.written),
                "written_bytes_per_s": each.written.total * rate,
                "reads_per_query": each.reads,
                "rounds_per_query": each.rounds,
                "read_bytes_per_query": each.read_bytes,
                "how": each.how,
            }
            for each in plans
        ],
    }


def _scan(case: MemoryCase) -> tuple[float, float, float]:
    """Reads, rounds and bytes of a search that reads all rows: one read-ahead after another."""
    size = case.rows * case.row_bytes
    reads = math.ceil(size / READ_AHEAD_BYTES)
    return reads, reads, size


def _kvtide(case: MemoryCase) -> MemoryPlan:
    """Rows of logs are compared in memory. A segment's index, too, is there; what it finds is read, row by row."""
    grouped = 1.0 if case.is_durable else max(1.0, case.rate * COMMIT_S)
    share = INDEX_SHARE if case.dim % 8 == 0 else 1 / 4
    written, segments = segment_log(
        row_bytes=case.row_bytes, rows_per_commit=grouped, rows=case.rows, index_share=share
    )
    indexed = [rows for rows in segments if rows >= MemoryOptions().index_rows]
    reads = CANDIDATES * len(indexed)
    compared = math.ceil((sum(segments) - sum(indexed)) * case.row_bytes / READ_AHEAD_BYTES)
    pages = math.ceil(case.row_bytes / PAGE_BYTES) + 1  # a row begins anywhere
    size = reads * pages * PAGE_BYTES + compared * READ_AHEAD_BYTES
    how = "each row durable" if case.is_durable else "group commit of 10 ms"
    return MemoryPlan(
        "kvtide",
        written,
        reads + compared,
        reads / AT_ONCE + compared,
        size,
        f"{how}, {len(segments)} segments in tiers x 8, codes in memory",
    )


def _tree(case: MemoryCase) -> Tree:
    log = 4.0
    if case.is_durable:  # whole pages, and the journal, for each row
        pages = math.ceil((case.row_bytes + KEY_BYTES) / PAGE_BYTES)
        log = pages * PAGE_BYTES + JOURNAL_BYTES - case.row_bytes - KEY_BYTES
    return Tree(row_bytes=case.row_bytes + KEY_BYTES, log_overhead_bytes=int(log))


def _rocksdb(case: MemoryCase) -> MemoryPlan:
    written = leveled(_tree(case), case.rows * (case.row_bytes + KEY_BYTES))
    return MemoryPlan("rocksdb", written, *_scan(case), "leveled, its defaults, random keys; a search reads all rows")


def _universal(case: MemoryCase) -> MemoryPlan:
    written = tiered(_tree(case), case.rows * (case.row_bytes + KEY_BYTES))
    return MemoryPlan("rocksdb-universal", written, *_scan(case), "tiered x 10, random keys; a search reads all rows")


def _sqlite(case: MemoryCase) -> MemoryPlan:
    written = b_tree(row_bytes=case.row_bytes + KEY_BYTES, is_synced=case.is_durable)
    return MemoryPlan("sqlite", written, *_scan(case), "one row a transaction, WAL, keys in order; reads all rows")


def _diskann(case: MemoryCase) -> MemoryPlan:
    node = case.row_bytes + 4 + 4 * DEGREE
    held = PAGE_BYTES / max(1, PAGE_BYTES // node) if node <= PAGE_BYTES else math.ceil(node / PAGE_BYTES) * PAGE_BYTES
    log = (
        1.0
        if not case.is_durable
        else (math.ceil(case.row_bytes / PAGE_BYTES) * PAGE_BYTES + JOURNAL_BYTES) / (case.row_bytes)
    )
    found = graph(search_list=SEARCH_LIST, beam=BEAM, node_bytes=node, degree=DEGREE, rows=case.rows)
    how = f"built once from a file of rows; degree {DEGREE}, list {SEARCH_LIST}, beam {BEAM}, nothing cached"
    written = Written(log, 0.0, (), held / case.row_bytes)
    return MemoryPlan("diskann", written, found.reads, found.rounds, found.bytes, how)


ENGINES: dict[str, Callable[[MemoryCase], MemoryPlan]] = {
    "kvtide": _kvtide,
    "rocksdb": _rocksdb,
    "rocksdb-universal": _universal,
    "sqlite": _sqlite,
    "diskann": _diskann,
}
