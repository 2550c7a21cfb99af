"""What a cache of given sizes would do for a log of requests: hits by tier, bytes moved, time saved. Next: timed.

Counts are exact for the rule of `hits` (block by block, no partial hits); times are modelled: a hit saves computing its
tokens and costs loading its bytes. Load or recompute is decided for each request, as the cache decides it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError
from kvtide.evict.admission import make_admission
from kvtide.planner.closed import compute_use, drive_use, link_use, overlap, read_pattern
from kvtide.planner.curve import Curve, lru_curve
from kvtide.planner.hits import TwoTierHits, simulate_two
from kvtide.planner.inputs import Job, Machine
from kvtide.sizing import step_work
from kvtide.workload import Workload

POLICIES = ("lru", "s3-fifo", "arc", "gdsf")
NUM_GRID = 48  # lengths at which times are computed; between them they are interpolated
NUM_SIZES = 24  # of a curve


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes in bytes and names of one row."""

    dram_bytes: int
    disk_bytes: int
    policy: str = "lru"
    admission: str = "always"
    writes_per_day: float = 1.0  # of the disk: what admission `endurance` allows


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What one case did. Blocks are those of the workload; times in ns over all requests, modelled."""

    case: Case
    dram_hits: int
    disk_hits: int
    hit_tokens: int
    read_bytes: int  # from disk
    written_bytes: int  # to disk
    reread_bytes: int  # of what was written, read at least once
    compute_ns: float  # without a cache
    saved_ns: float  # of it, after the loads

    @property
    def writes_per_reread(self) -> float | None:
        """Bytes written for each byte that was ever read again; None if none was."""
        return self.written_bytes / self.reread_bytes if self.reread_bytes else None


@dataclass(slots=True)
class Replayed:
    """A whole replay. Shapes: sizes_blocks, dram_curve [NUM_SIZES]: hits of an LRU tier of each size."""

    workload: Workload
    block_bytes: int
    ideal_blocks: int
    ideal_tokens: int
    curve: Curve
    results: list[CaseResult] = field(default_factory=list)

    def curve_rows(self) -> list[tuple[int, int]]:
        """Return (bytes, hits) of LRU tiers from one block up to all there are."""
        most = max(1, self.workload.num_unique)
        sizes = np.unique(np.geomspace(1, most, NUM_SIZES).astype(np.int64))
        return [
            (int(size) * self.block_bytes, int(hits)) for size, hits in zip(sizes, self.curve.hits(sizes), strict=True)
        ]


def replay(
    workload: Workload,
    job: Job,
    machine: Machine,
    cases: Sequence[Case],
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> Replayed:
    """Run every case over all requests; `job` gives model and layout, `machine` what times are modelled from.

    Raises: ConfigError for unknown policies or tiers too small for a block.
    """
    block_bytes = workload.block_tokens * job.shape().bytes_per_token
    blocks, tokens = workload.ideal_hits()
    found = Replayed(
        workload, block_bytes, int(blocks.sum()), int(tokens.sum()), lru_curve(workload.block_start, workload.block_ids)
    )
    times = _Times(workload, job, machine)
    for done, case in enumerate(cases):
        if on_progress is not None:
            on_progress(done, len(cases))
        found.results.append(_run(workload, case, block_bytes, times))
    return found


def _run(workload: Workload, case: Case, block_bytes: int, times: _Times) -> CaseResult:
    dram, disk = case.dram_bytes // block_bytes, case.disk_bytes // block_bytes
    if not dram and not disk:
        raise ConfigError(f"no tier holds a block of {block_bytes} bytes; type a larger --dram or --disk")
    admission = make_admission(
        case.admission, num_keys=max(1, workload.num_unique), bytes_per_day=int(case.writes_per_day * case.disk_bytes)
    )
    hits: TwoTierHits = simulate_two(
        workload.block_start,
        workload.block_ids,
        dram_blocks=dram,
        disk_blocks=disk,
        dram_policy=case.policy,
        disk_policy=case.policy,
        admission=admission,
        times_ns=workload.arrival_ns,
        block_bytes=block_bytes,
        costs=times.block_costs if case.policy == "gdsf" else None,
    )
    hit_tokens = np.minimum((hits.dram.hits + hits.disk.hits) * workload.block_tokens, workload.input_tokens)
    return CaseResult(
        case,
        int(hits.dram.hits.sum()),
        int(hits.disk.hits.sum()),
        int(hit_tokens.sum()),
        read_bytes=int(hits.disk.hits.sum()) * block_bytes,
        written_bytes=hits.disk.num_written * block_bytes,
        reread_bytes=hits.disk.num_reread * block_bytes,
        compute_ns=float(times.compute_ns(workload.input_tokens).sum()),
        saved_ns=float(times.saved_ns(workload.input_tokens, hit_tokens, hits.dram.hits, hits.disk.hits).sum()),
    )


class _Times:
    """Time to compute and to load prefixes of any length, from a grid of lengths."""

    def __init__(self, workload: Workload, job: Job, machine: Machine) -> None:
        self._block_tokens = workload.block_tokens
        most = int(max(2, workload.input_tokens.max(initial=2)))
        self._grid = np.unique(np.geomspace(1, most, NUM_GRID).astype(np.int64))
        one, shape = replace(job, batch=1, select=1.0), job.shape()
        computed, from_dram, from_disk = [], [], []
        for num in self._grid.tolist():
            work = step_work(job.model, shape, num_new=num, num_old=0, batch=1)
            computed.append(compute_use(work, one, machine).time_ns)
            ops, size, together = read_pattern(one, num)
            uses = {"link": link_use(ops * size, size, machine)}
            from_dram.append(overlap(uses, shape.num_layers, is_overlapped=True))
            if machine.ssd is not None:
                uses["ssd"] = drive_use(machine.ssd.read, ops * size, ops, size, machine, together=together)
            from_disk.append(overlap(uses, shape.num_layers, is_overlapped=True))
        self._computed, self._dram, self._disk = map(np.array, (computed, from_dram, from_disk))
        request_of = np.repeat(np.arange(workload.num_requests), np.diff(workload.block_start))
        place = np.arange(workload.num_blocks) - workload.block_start[request_of]
        ends = np.minimum((place + 1) * self._block_tokens, workload.input_tokens[request_of])
        begins = np.minimum(place * self._block_tokens, ends)
        self.block_costs = self.compute_ns(ends) - self.compute_ns(begins)

    def compute_ns(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the time to compute prompts of these lengths. Shapes: any."""
        return np.interp(tokens, self._grid, self._computed) * (tokens > 0)

    def saved_ns(
        self,
        tokens: npt.NDArray[np.int64],
        hit_tokens: npt.NDArray[np.int64],
        dram_hits: npt.NDArray[np.int64],
        disk_hits: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.float64]:
        """Return what hits save, none less than nothing: where loading takes longer, it is computed. Shapes: [R].

        The rest of a prompt is computed in any case, at least its last token; where reading weights is what takes time,
        that costs as much as the whole.
        """
        dram, disk = dram_hits * self._block_tokens, disk_hits * self._block_tokens
        loading = np.interp(dram, self._grid, self._dram) * (dram > 0)
        loading += np.interp(disk, self._grid, self._disk) * (disk > 0)
        rest = self.compute_ns(np.maximum(1, tokens - hit_tokens)) * (tokens > 0)
        computing = np.minimum(self.compute_ns(hit_tokens), self.compute_ns(tokens) - rest)
        return np.maximum(0.0, computing - loading)
