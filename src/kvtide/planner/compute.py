"""How long a model computes: from a GPU's roofline, or from what was measured of it. Pure. Next: simulate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtide.errors import ConfigError
from kvtide.planner.closed import compute_use
from kvtide.planner.inputs import Job, Machine
from kvtide.sizing import step_work

BEFORE_KV = 0.2  # part of a layer's work before its KV is needed: norm and projections of Q, K and V, of 12 in all


class RooflineCompute:
    """`driver.Compute` of a job's model on a machine's GPUs."""

    def __init__(self, job: Job, machine: Machine) -> None:
        self._job, self._machine, self._shape = job, machine, job.shape()
        self._seen: dict[tuple[int, int, int], float] = {}

    def layer_ns(self, num_new: int, num_old: int, rows: int) -> tuple[float, float]:
        """Return the time of one layer before it asks for its KV, and after."""
        total = self._total_ns(num_new, num_old, rows) / self._shape.num_layers
        return BEFORE_KV * total, (1 - BEFORE_KV) * total

    def step_ns(self, num_new: int, num_old: int, rows: int) -> float:
        """Return nothing: the head's work is counted with the layers'."""
        del num_new, num_old, rows
        return 0.0

    def turn_ns(self) -> float:
        """Return nothing: tokenising and scheduling are not modelled."""
        return 0.0

    def _total_ns(self, num_new: int, num_old: int, rows: int) -> float:
        key = (num_new, num_old, rows)
        if key not in self._seen:
            model = self._job.model
            work = step_work(model, self._shape, num_new=num_new, num_old=num_old, batch=rows)
            self._seen[key] = compute_use(work, self._job, self._machine).time_ns
        return self._seen[key]


@dataclass(frozen=True, slots=True)
class StepTime:
    """One measured step of one sequence: `num_new` tokens after `num_old`, in ns, without any wait for KV."""

    num_new: int
    num_old: int
    total_ns: float


class MeasuredCompute:
    """`driver.Compute` from measured steps: linear in what was there before, and between step sizes.

    Raises: ConfigError if there are fewer than two contexts for some step size, or none.
    """

    def __init__(
        self, steps: Sequence[StepTime], *, num_layers: int, outside_share: float = 0.0, turn_ns: float = 0.0
    ) -> None:
        """Take measured steps; `outside_share` of a step's time belongs to no layer, `turn_ns` comes once a turn."""
        sizes = sorted({step.num_new for step in steps})
        if not sizes:
            raise ConfigError("no steps were measured")
        lines = []
        for size in sizes:
            mine = [step for step in steps if step.num_new == size]
            olds, times = np.array([step.num_old for step in mine]), np.array([step.total_ns for step in mine])
            if len(set(olds.tolist())) < 2:
                raise ConfigError(f"steps of {size} tokens were measured at one context only; two are needed")
            slope, base = np.polyfit(olds, times, 1)
            lines.append((max(float(slope), 0.0), max(float(base), 0.0)))
        self._sizes = np.array(sizes, np.float64)
        self._slopes, self._bases = (np.array(column) for column in zip(*lines, strict=True))
        self._num_layers, self._outside, self._turn_ns = num_layers, outside_share, turn_ns

    def total_ns(self, num_new: int, num_old: int) -> float:
        """Return the time of a step."""
        slope = np.interp(num_new, self._sizes, self._slopes)
        base = np.interp(num_new, self._sizes, self._bases)
        scale = max(1.0, num_new / self._sizes[-1])  # beyond the largest step, work grows with its tokens
        return float((base + slope * num_old) * scale)

    def layer_ns(self, num_new: int, num_old: int, rows: int) -> tuple[float, float]:
        """Return the time of one layer before it asks for its KV, and after; rows are computed one by one."""
        each = rows * self.total_ns(num_new, num_old) * (1 - self._outside) / self._num_layers
        return BEFORE_KV * each, (1 - BEFORE_KV) * each

    def step_ns(self, num_new: int, num_old: int, rows: int) -> float:
        """Return the time of what belongs to no layer."""
        return rows * self.total_ns(num_new, num_old) * self._outside

    def turn_ns(self) -> float:
        """Return what comes once a turn."""
        return self._turn_ns
