"""What the cache wanted, step by step: phases of inference, hits, and what waiting cost. Next: series, slices.

Decides which phase a moment belongs to. Knows object rows and no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtide.trace.figures import Kv

if TYPE_CHECKING:
    import polars as pl

PHASES = ("", "prefill", "restore", "decode")  # the first: before the cache wanted anything
PREFILL, RESTORE, DECODE = 1, 2, 3
PREFILL_TOKENS_MIN = 16  # steps of fewer tokens do not tell what computing a token costs: one block of the cache
COLUMNS_USED = (
    "time_ns",
    "cause",
    "layer",
    "num_tokens",
    "wanted_bytes",
    "dram_bytes",
    "file_bytes",
    "wait_ns",
    "step",
    "step_tokens",
)

Ints = npt.NDArray[np.int64]


class Phases:
    """The phase of every moment: that of the object wanted last. Rows must come about in order of time."""

    def __init__(self) -> None:
        self._times: Ints = np.zeros(0, np.int64)  # where the phase changes
        self._codes: Ints = np.zeros(0, np.int64)

    @property
    def is_empty(self) -> bool:
        return not len(self._times)

    def add(self, times_ns: Ints, codes: Ints) -> None:
        """Note phases as they begin. Shapes: [n] each."""
        times, codes = np.concatenate([self._times, times_ns]), np.concatenate([self._codes, codes])
        order = np.argsort(times, kind="stable")
        times, codes = times[order], codes[order]
        is_change = np.diff(codes, prepend=0) != 0
        self._times, self._codes = times[is_change], codes[is_change]

    def at(self, times_ns: Ints) -> Ints:
        """Return the number in PHASES of each moment. Shapes: [n] to [n]."""
        if self.is_empty:
            return np.zeros(len(times_ns), np.int64)
        return np.concatenate([[0], self._codes])[np.searchsorted(self._times, times_ns, side="right")]

    def windows_ns(self, start_ns: int, end_ns: int) -> Ints:
        """Return how long each phase lasts between two moments. Shapes: [len(PHASES)]."""
        edges = np.clip(np.concatenate([[start_ns], self._times, [end_ns]]), start_ns, end_ns)
        codes = np.concatenate([[0], self._codes])
        return np.bincount(codes, np.diff(edges), minlength=len(PHASES)).astype(np.int64)


@dataclass(slots=True)
class _Totals:
    wanted_bytes: int = 0
    dram_bytes: int = 0
    file_bytes: int = 0
    wait_ns: int = 0
    load_ns: int = 0
    restored: float = 0.0  # tokens brought back, in each layer


class ObjectMeter:
    """Adds up object rows. Memory: a few numbers for each step."""

    def __init__(self) -> None:
        self.phases = Phases()
        self._totals = _Totals()
        self._num_layers = 1
        self._steps: pl.DataFrame | None = None

    def add(self, frame: pl.DataFrame) -> None:
        """Add object rows, columns as COLUMNS_USED."""
        from kvtide.tables import pl

        moved = pl.col("dram_bytes").clip(0) + pl.col("file_bytes").clip(0)
        is_restore = (pl.col("cause") == "restore") & (moved > 0)
        is_decode = (pl.col("step_tokens") == 1) | (pl.col("cause") == "decode-read")
        code = (
            pl.when(is_restore)
            .then(RESTORE)
            .when(is_decode)
            .then(DECODE)
            .when(pl.col("step_tokens") > 1)
            .then(PREFILL)
            .otherwise(0)
        )
        frame = frame.with_columns(code.cast(pl.Int64).alias("phase"))
        self.phases.add(frame["time_ns"].to_numpy(), frame["phase"].to_numpy())
        self._add_totals(frame, moved, is_restore)
        steps = frame.group_by("step").agg(
            pl.col("time_ns").min().alias("first_ns"),
            (pl.col("time_ns") + pl.col("wait_ns").clip(0)).max().alias("last_ns"),
            pl.col("wait_ns").clip(0).sum().alias("wait_ns"),
            pl.col("step_tokens").max().alias("num_tokens"),
            (pl.col("phase") == DECODE).all().alias("is_decode"),
        )
        joined = steps if self._steps is None else pl.concat([self._steps, steps])
        self._steps = joined.group_by("step").agg(
            pl.col("first_ns").min(),
            pl.col("last_ns").max(),
            pl.col("wait_ns").sum(),
            pl.col("num_tokens").max(),
            pl.col("is_decode").all(),
        )

    def _add_totals(self, frame: pl.DataFrame, moved: pl.Expr, is_restore: pl.Expr) -> None:
        from kvtide.tables import pl

        wanted = pl.col("wanted_bytes").clip(0)
        share = (moved / wanted.clip(1)).clip(0, 1)
        told = frame.select(
            wanted.sum().alias("wanted_bytes"),
            pl.col("dram_bytes").clip(0).sum(),
            pl.col("file_bytes").clip(0).sum(),
            pl.col("wait_ns").clip(0).sum(),
            pl.col("wait_ns").clip(0).filter(is_restore).sum().alias("load_ns"),
            (pl.col("num_tokens").clip(0) * share).filter(is_restore).sum().alias("restored"),
            pl.col("layer").max().alias("layer"),
        ).row(0, named=True)
        self._num_layers = max(self._num_layers, int(told.pop("layer") or 0) + 1)
        for name, value in told.items():
            setattr(self._totals, name, getattr(self._totals, name) + (value or 0))

    def result(self, window_ns: int, block_read_bytes: int | None) -> Kv | None:
        """Return the figures, None without rows. `block_read_bytes`: what the device read, None if not traced."""
        if self._steps is None:
            return None
        totals, steps = self._totals, self._steps.sort("first_ns")
        wanted = max(1, totals.wanted_bytes)
        kv = Kv(wanted_bytes=totals.wanted_bytes, dram_bytes=totals.dram_bytes, file_bytes=totals.file_bytes)
        kv.device_hit_share = max(0.0, 1 - (totals.dram_bytes + totals.file_bytes) / wanted)
        kv.dram_hit_share = min(1.0, totals.dram_bytes / wanted)
        if block_read_bytes is not None and totals.file_bytes:
            kv.device_bytes_ratio = block_read_bytes / totals.file_bytes
        kv.num_steps = len(steps)
        kv.stall_ns_step = totals.wait_ns / len(steps)
        kv.stall_share = min(1.0, totals.wait_ns / window_ns) if window_ns else 0.0
        kv.load_ns = totals.load_ns
        first, is_decode = steps["first_ns"].to_numpy(), steps["is_decode"].to_numpy()
        gaps = np.diff(first)[is_decode[:-1] & is_decode[1:]]
        kv.decode_step_ns = float(gaps.mean()) if len(gaps) else None
        kv.recompute_ns = self._recompute_ns(steps)
        return kv

    def _recompute_ns(self, steps: pl.DataFrame) -> int | None:
        """Return what computing the restored tokens would take at the pace of the trace's own prefill steps.

        A step lasts until the next one begins, less what it waited. The growth of attention with length is left out.
        """
        first, last = steps["first_ns"].to_numpy(), steps["last_ns"].to_numpy()
        tokens = steps["num_tokens"].to_numpy()
        until = np.append(first[1:], last[-1])
        compute_ns = np.maximum(0, until - first - steps["wait_ns"].to_numpy())
        is_prefill = (tokens >= PREFILL_TOKENS_MIN) & ~steps["is_decode"].to_numpy()
        if not is_prefill.any() or not self._totals.restored:
            return None
        token_ns = compute_ns[is_prefill].sum() / tokens[is_prefill].sum()
        return int(token_ns * self._totals.restored / self._num_layers)
