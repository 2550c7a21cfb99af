"""Events that another program hands over, as a trace: the way in for engines without a log of their own.

Decides what is checked of them. Knows no program. Next: cli_import.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError
from kvtide.trace.events import CAUSES, LEVELS, UNKNOWN_CAUSE, schema
from kvtide.trace.file import About, TraceWriter
from kvtide.trace.importers.sink import Sink

if TYPE_CHECKING:
    import polars as pl

BATCH_ROWS = 100_000


def records(
    output: Path,
    rows: Mapping[str, npt.ArrayLike] | Iterable[Mapping[str, object]],
    *,
    level: str = "op",
    about: About | None = None,
) -> int:
    """Write events of another program as a trace at `output`; return the number of rows.

    `rows` are arrays by column, or one mapping an event. Columns are those of `level` in kvtide.trace.events; `time_ns`
    is needed, all others may be left out.

        records(Path("engine.kvtrace"), {"time_ns": t, "complete_ns": t + d, "offset": at, "length": size})

    Shapes: arrays [n], all of one length.
    Raises: ConfigError for an unknown level, column or cause, or what does not convert; IoError where the disk refuses.
    """
    if level not in LEVELS:
        raise ConfigError(f"level is {level!r}; choose one of {', '.join(LEVELS)}")
    with TraceWriter(output) as writer:
        sink = Sink(writer, about or About(source="records"))
        for frame in _frames(rows, level):
            sink.add(level, frame)
        sink.end()
        return writer.finish(sink.about)


def _frames(rows: Mapping[str, npt.ArrayLike] | Iterable[Mapping[str, object]], level: str) -> Iterator[pl.DataFrame]:
    if isinstance(rows, Mapping):
        yield _checked({name: np.asarray(values) for name, values in rows.items()}, level)
        return
    waiting = iter(rows)
    while batch := list(islice(waiting, BATCH_ROWS)):
        names = list(dict.fromkeys(name for row in batch for name in row))
        yield _checked({name: [row.get(name) for row in batch] for name in names}, level)


def _checked(columns: Mapping[str, object], level: str) -> pl.DataFrame:
    from kvtide.tables import pl

    known = schema(level)
    unknown = sorted(set(columns) - set(known))
    if unknown:
        raise ConfigError(f"{level} rows have no column {', '.join(unknown)}; choose from {', '.join(known)}")
    if "time_ns" not in columns:
        raise ConfigError(f"{level} rows need the column time_ns, in ns of one monotonic clock")
    try:
        frame = pl.DataFrame(dict(columns))
        if "cause" in frame:
            found = set(frame["cause"].cast(pl.String).drop_nulls().unique()) - {*CAUSES, UNKNOWN_CAUSE}
            if found:
                raise ConfigError(f"unknown cause {', '.join(sorted(found))}; choose from {', '.join(CAUSES)}")
        return frame.with_columns(pl.col(name).cast(known[name]) for name in frame.columns)
    except (pl.exceptions.PolarsError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"these are no {level} rows: {error}") from None
