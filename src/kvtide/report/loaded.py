"""A trace made ready for showing: what it says of itself, its figures, its verdict, and what charts need. Next: trace.

Decides which passes over the file a report takes. Knows no terminal and no page.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtide.report.collect import Collected, collect
from kvtide.report.drill import Drill, DrillLimits, drill_down
from kvtide.roofline import Roofline
from kvtide.trace.figures import Indicators
from kvtide.trace.file import ROWS_MAX, About, TraceFile
from kvtide.trace.findings import Verdict
from kvtide.trace.indicators import measure
from kvtide.trace.verdict import judge

if TYPE_CHECKING:
    import polars as pl

OnRows = Callable[[int], None]  # gets the number of rows just read


@dataclass(slots=True)
class TraceReport:
    """All that is shown of one trace. `collected` and `drill` are only there for pages."""

    path: Path
    about: About
    figures: Indicators
    verdict: Verdict
    collected: Collected | None = None
    drill: Drill | None = None


class WatchedTrace(TraceFile):
    """A trace that tells how many rows were read."""

    def __init__(self, path: Path, on_rows: OnRows) -> None:
        super().__init__(path)
        self._on_rows = on_rows

    def frames(
        self, level: str, columns: Sequence[str] | None = None, *, rows: int = ROWS_MAX
    ) -> Iterator[pl.DataFrame]:
        for frame in super().frames(level, columns, rows=rows):
            yield frame
            self._on_rows(len(frame))


def load_report(
    path: Path,
    *,
    roofline: Roofline | None = None,
    limits: DrillLimits | None = None,
    on_rows: OnRows = lambda _: None,
) -> TraceReport:
    """Return the report of the trace in `path`; with `limits`, also what a page shows.

    Raises: ConfigError if the file is missing; FormatError if it is no trace or does not hold what it says.
    """
    trace = WatchedTrace(path, on_rows)
    figures = measure(trace, roofline=roofline)
    verdict = judge(figures, roofline=roofline, about=trace.about)
    report = TraceReport(path, trace.about, figures, verdict)
    if limits is not None:
        report.collected = collect(trace, figures)
        report.drill = drill_down(trace, limits)
    return report


def as_values(value: Any) -> Any:
    """Return `value` as JSON has it: dataclasses as objects, arrays as lists; null for what is no finite number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value):
        return {field.name: as_values(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): as_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_values(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return as_values(value.tolist())
    return str(value) if isinstance(value, Path) else value
