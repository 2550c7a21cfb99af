"""What stores write for a row and read for a query, from their shape alone: trees, logs and graphs.

Pure, and nothing here is fitted: each figure follows from sizes, ratios and how a compaction chooses. Checked against
RocksDB in benchmarks/lsm_model.py. Knows no engine and opens no file.

Theory, leveled trees (LevelDB, RocksDB). A byte is written to the log and to a file of level 0. `l0_files` of these
are merged with the whole of level 1. From there on, a file of level i is merged with what it overlaps in level i + 1.
Bytes arrive in a level evenly over the keys, and a place is emptied when a sweep of compactions comes by: so where it
comes by, the level is twice as dense as on average, and one sweep carries down twice the level's size.

    level 1   |####|####|##..|#...|        just swept: empty; next to be swept: 2 x average
                ^ picked: overlaps what earlier sweeps left here in level 2
    level 2   |#########################|

The first sweep finds nothing below: its files are moved by name. The second finds one layer, and so on, until the level
below has its size, which is size_ratio / 2 layers. One end of a file lies in the midst of a file below (the other was
cut at its border when it was written), so half a file comes on top. Level 1 is picked from right after a batch came in,
so it is larger then by half a batch. Amplification therefore rises as data fills level after level. Models that
count keys find the same halving: Lim et al., FAST 2016.

Theory, tiered trees (universal compaction). Runs of one size class wait until there are `size_ratio` of them, and are
merged into one of the next: each byte is written once a class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtide.errors import ConfigError
from kvtide.recall.contract import LOG_BYTES_A_ROW, MemoryOptions

PAGE_BYTES = 4096
LEVELS_MAX = 7  # RocksDB's num_levels
RING_BYTES, JOURNAL_BYTES = 128 << 10, 12 << 10  # of a memory's ring; of ext4's journal, at a sync of new space
PACKED = 0.86  # of float32 whose byte of sign and exponent takes few values: it shrinks to 0.45
END = 0.5  # of a file: what a compaction rewrites beside what it overlaps


@dataclass(frozen=True, slots=True)
class Tree:
    """An LSM tree. Sizes in bytes on disk; `record_overhead_bytes` is what a row takes beside key and value."""

    memtable_bytes: int = 64 << 20
    l0_files: int = 4  # that start a compaction
    base_bytes: int = 256 << 20  # target of level 1
    size_ratio: float = 10.0
    file_bytes: int = 64 << 20
    row_bytes: int = 1032  # key and value
    record_overhead_bytes: int = 12  # sequence number and type 8, lengths 3 to 4
    log_overhead_bytes: int = 4  # of a row in a batch; a batch's own header is shared
    memory_overhead_bytes: int = 24  # of a row in the memtable: number and type 8, lengths 4, 4/3 pointers of 8

    def check(self) -> None:
        """Raise ConfigError where a tree of this shape cannot be."""
        sizes = (self.memtable_bytes, self.l0_files, self.base_bytes, self.file_bytes, self.row_bytes)
        if min(sizes) < 1 or self.size_ratio <= 1:
            raise ConfigError(
                f"a tree with {self}: sizes of 1 byte and more, and a size ratio above 1, are needed; "
                "type for example --memory rocksdb"
            )


@dataclass(frozen=True, slots=True)
class Written:
    """Bytes written over user bytes, by cause."""

    log: float
    flush: float
    compaction: tuple[float, ...]  # into level 1, 2, ...
    index: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.log + self.flush + sum(self.compaction) + self.index


def leveled(tree: Tree, user_bytes: float, *, is_random: bool = True) -> Written:
    """Return what a leveled tree has written when `user_bytes` of new rows were inserted.

    Keys that only grow are never merged: files are moved down by name.
    Raises: ConfigError for a shape that cannot be.
    """
    tree.check()
    per_user = (tree.row_bytes + tree.record_overhead_bytes) / tree.row_bytes
    log = (tree.row_bytes + tree.log_overhead_bytes) / tree.row_bytes
    if not is_random:
        return Written(log, per_user, ())
    stored = user_bytes * per_user
    flushed = tree.memtable_bytes * (tree.row_bytes + tree.record_overhead_bytes)
    batch = flushed / (tree.row_bytes + tree.memory_overhead_bytes) * tree.l0_files
    costs = [_into_first(tree, max(0.0, stored - batch), batch)]
    above, target = tree.base_bytes + batch / 2, tree.base_bytes * tree.size_ratio
    arrived = stored - batch - above
    while arrived > 0 and len(costs) < LEVELS_MAX - 1:
        is_last = len(costs) == LEVELS_MAX - 2
        costs.append(_into_next(arrived, above, math.inf if is_last else target))
        arrived -= target
        above, target = target, target * tree.size_ratio
    return Written(log, per_user, tuple(cost / user_bytes for cost in costs))


def _into_first(tree: Tree, arrived: float, batch: float) -> float:
    """Return bytes written into level 1: each batch of level 0 rewrites the level, which fills up to its target."""
    growing = min(arrived, tree.base_bytes)
    filled = growing * growing / 2 + (arrived - growing) * tree.base_bytes
    return arrived + filled / batch


def _into_next(arrived: float, above: float, target: float) -> float:
    """Return bytes written into a level of `target` bytes, into which `arrived` bytes came from one of `above`."""
    sweep, written, layers = 2 * above, 0.0, 0
    while arrived > 0 and layers < target / sweep:  # the level grows, by one layer a sweep
        carried = min(arrived, sweep)
        written += carried * (1 + layers + END) if layers else 0.0
        arrived -= carried
        layers += 1
    return written + max(0.0, arrived) * (1 + target / sweep + END if math.isfinite(target) else 0.0)


def tiered(tree: Tree, user_bytes: float) -> Written:
    """Return what a tiered tree has written: each byte once a size class, of which there are log(data / memtable).

    Raises: ConfigError for a shape that cannot be.
    """
    tree.check()
    per_user = (tree.row_bytes + tree.record_overhead_bytes) / tree.row_bytes
    log = (tree.row_bytes + tree.log_overhead_bytes) / tree.row_bytes
    flushed: float = tree.memtable_bytes * (tree.row_bytes + tree.record_overhead_bytes)
    flushed /= tree.row_bytes + tree.memory_overhead_bytes
    runs, ratio = user_bytes * per_user / flushed, tree.size_ratio
    costs: list[float] = []
    merged = math.floor(runs / ratio) * ratio  # runs that found enough others of their class
    while merged >= ratio:
        costs.append(merged * flushed / user_bytes)
        ratio *= tree.size_ratio
        merged = math.floor(runs / ratio) * ratio
    return Written(log, per_user, tuple(costs))


def segment_log(
    *,
    row_bytes: int,
    rows_per_commit: float,
    rows: int,
    header_bytes: int = 32,
    options: MemoryOptions = MemoryOptions(),  # noqa: B008 - it is frozen
    tier_ratio: int = 8,
    index_share: float = 0.0,
) -> tuple[Written, tuple[int, ...]]:
    """Return what a page-aligned log writes that is read in place until its rows are merged into segments, in tiers.

    And the rows of each segment in the end. A commit takes as many of the waiting rows as fill pages best. Space that
    was never written before (all of it, until the first merge leaves logs to write over) costs a group twice, in a
    packed ring and in the log, or a journal write. Whole logs are merged, once they hold `merge_rows`. `index_share`
    is an index's bytes, of its rows', for segments that have one. Theory: `recall.log`, `recall.ring`, `recall.pack`.
    Raises: ConfigError for sizes below 1.
    """
    if min(row_bytes, rows) < 1 or rows_per_commit < 1 or tier_ratio < 2:
        raise ConfigError(
            f"a log of {rows} rows of {row_bytes} bytes, {rows_per_commit} a commit, tiers x {tier_ratio}: "
            "rows, bytes and commits of 1 and more, and tiers x 2 and more, are needed"
        )
    whole = row_bytes + header_bytes
    again = _in_pages(whole, row_bytes, rows_per_commit)
    ring = _in_pages(whole, row_bytes, rows_per_commit, packed=PACKED)
    by_ring = ring + whole / row_bytes + ring * JOURNAL_BYTES / RING_BYTES
    at_once = again + JOURNAL_BYTES / (rows_per_commit * row_bytes)
    in_log = whole if by_ring < at_once else again * row_bytes  # bytes of a log that a row takes
    a_log = max(1, int(options.log_bytes / in_log))
    due = min(options.merge_rows, int(options.merge_rows * LOG_BYTES_A_ROW / in_log))
    size = -(-due // a_log) * a_log
    num_first = min(rows, size)
    segments: list[int] = []
    costs, indexed = [], 0.0
    while size <= rows:
        costs.append((rows // size) * size / rows)
        indexed += costs[-1] if size >= options.index_rows else 0.0
        segments = [size] * (rows // size % tier_ratio) + segments
        size *= tier_ratio
    log = (min(by_ring, at_once) * num_first + again * (rows - num_first)) / rows
    return Written(log, 0.0, tuple(costs), index_share * indexed), tuple(segments)


def _in_pages(whole: int, row_bytes: int, rows_max: float, packed: float = 1.0) -> float:
    """Return the pages that a group takes over the bytes of its rows, for the best of up to `rows_max` rows."""
    most = max(1, int(rows_max))
    found = []
    for num in range(max(1, most - 31), most + 1):
        size = num * whole * (packed if num * whole > PAGE_BYTES else 1.0)
        found.append(math.ceil(size / PAGE_BYTES) * PAGE_BYTES / (num * row_bytes))
    return min(found)


def b_tree(
    *,
    row_bytes: int,
    rows_per_commit: float = 1.0,
    page_bytes: int = PAGE_BYTES,
    frame_bytes: int = 24,
    is_random: bool = False,
    is_synced: bool = True,
    checkpoint_pages: int = 1000,
) -> Written:
    """Return what a B-tree with a log of pages writes (SQLite's WAL: frames of 24 + page_bytes bytes).

    A commit logs every page it touched: its rows' leaves, and a parent when a leaf is full. Frames are not aligned, so
    a synced commit writes one page of the device more than its bytes fill. A checkpoint writes each page back once that
    was logged since the last one: with keys in order that is once a leaf, at random about every frame.
    Raises: ConfigError for sizes below 1.
    """
    if min(row_bytes, page_bytes, checkpoint_pages) < 1 or rows_per_commit < 1:
        raise ConfigError(
            f"a B-tree of rows of {row_bytes} bytes, {rows_per_commit} a commit: 1 and more of each is needed"
        )
    spill = math.ceil(row_bytes / page_bytes)  # pages of a row that is larger than one
    fitting = max(1.0, (math.log(2) if is_random else 1.0) * (page_bytes // row_bytes))  # Yao 1978: ln 2 full
    leaves = rows_per_commit if is_random else max(1.0, rows_per_commit / fitting)
    touched = leaves * spill + rows_per_commit / fitting  # the leaves, and a parent a new leaf
    logged = touched * (page_bytes + frame_bytes) + (PAGE_BYTES if is_synced else 0)
    back = touched if is_random else rows_per_commit / fitting * spill
    user = rows_per_commit * row_bytes
    return Written(logged / user, back * page_bytes / user, ())


@dataclass(frozen=True, slots=True)
class GraphReads:
    """What a query reads from a graph on disk: device reads, of them one after another, and bytes."""

    reads: float
    rounds: float
    bytes: float


def graph(
    *, search_list: int, beam: int = 1, node_bytes: int, cached_share: float = 0.0, degree: int = 64, rows: int = 1
) -> GraphReads:
    """Return what a beam search of an on-disk graph reads (DiskANN): about one node for each place of its list.

    A search ends when all `search_list` candidates were expanded, so it reads that many nodes, and some that were
    pushed out of the list again: those of the way in, about log(rows) / log(degree) hops of a beam. A round
    reads `beam`.
    Source: greedy search of Subramanya et al., NeurIPS 2019.
    Raises: ConfigError for sizes below 1, or a share outside 0 to 1.
    """
    if min(search_list, beam, node_bytes, rows) < 1 or degree < 2 or not 0 <= cached_share <= 1:
        raise ConfigError(
            f"a graph search with list {search_list}, beam {beam}, degree {degree}, {cached_share} cached: "
            "1 and more of each, and a share from 0 to 1, are needed"
        )
    hops = math.log(max(rows, degree)) / math.log(degree)
    expanded = min(float(rows), search_list + hops * beam)
    reads = expanded * (1 - cached_share)
    pages = math.ceil(node_bytes / PAGE_BYTES) if node_bytes > PAGE_BYTES else 1
    return GraphReads(reads, reads / beam, reads * pages * PAGE_BYTES)
