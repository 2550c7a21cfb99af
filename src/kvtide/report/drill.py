"""From a step of the model to its layers, from these to ops, and from ops to block commands. Next: drill_html.

Decides which steps are looked into, which op belongs to which layer of which step, and how much of it is kept. Pure
but for `drill_down`, which reads a trace piece by piece. Knows no page.

Theory. An object row is a layer that the cache wanted at `time_ns` and had at `time_ns + wait_ns`. A read was made for
the first object of its layer that was there at or after the read's end: one that waited for it, or, where it was
prefetched, the next one of that layer. A write-back carries many layers and nobody waits for it: it is shown with the
object that was wanted last when it was submitted. A block command says itself which op it carries.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtide.trace.events import UNKNOWN, empty
from kvtide.trace.file import TraceFile

if TYPE_CHECKING:
    import polars as pl

OBJECT_COLUMNS = (
    *("time_ns", "cause", "layer", "num_tokens", "wanted_bytes", "dram_bytes", "file_bytes", "wait_ns"),
    *("step", "step_tokens"),
)
OP_COLUMNS = ("time_ns", "complete_ns", "cause", "layer", "is_write", "offset", "length", "depth", "error")
COMMAND_COLUMNS = ("time_ns", "complete_ns", "queue_ns", "device", "offset", "length", "flags", "error", "comm", "op")

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DrillLimits:
    """How much is kept: rows in all, so that a page stays small however long the trace."""

    num_steps: int = 50  # half the slowest, half evenly spaced
    num_objects: int = 1600
    num_ops: int = 2400
    num_commands: int = 3200


@dataclass(slots=True)
class Drill:
    """The steps looked into and what lies below them; frames ascend by time.

    steps      step, start_ns, end_ns, wait_ns, num_tokens, wanted_bytes, dram_bytes, file_bytes, num_objects, phase
    objects    row, OBJECT_COLUMNS, num_ops, op_bytes: all ops of the object, also those not kept
    ops        row, object, OP_COLUMNS, num_commands, command_bytes
    commands   COMMAND_COLUMNS
    """

    num_steps: int  # in the trace
    num_unowned: int  # ops without an object
    steps: pl.DataFrame
    objects: pl.DataFrame
    ops: pl.DataFrame
    commands: pl.DataFrame


def drill_down(trace: TraceFile, limits: DrillLimits) -> Drill | None:
    """Return what lies below some steps of `trace`; None where its objects have no steps."""
    from kvtide.tables import pl

    table, keys = StepTable(), []
    for frame in trace.frames("object", OBJECT_COLUMNS):
        table.add(frame)
        keys.append(object_keys(frame))
    steps = table.result()
    if not len(steps):
        return None
    index = ObjectIndex(np.concatenate(keys, axis=1))
    chosen = choose_steps(steps, limits.num_steps)
    objects = _objects(trace, chosen, limits.num_objects)
    ops, of_object, num_unowned = _ops(trace, index, objects["row"].to_numpy(), limits.num_ops)
    commands, of_op = _commands(trace, ops["row"].to_numpy(), limits.num_commands)
    return Drill(
        num_steps=len(steps),
        num_unowned=num_unowned,
        steps=steps.filter(pl.col("step").is_in(chosen.tolist())),
        objects=with_totals(objects, of_object, key="object", num="num_ops", size="op_bytes"),
        ops=with_totals(ops, of_op, key="op", num="num_commands", size="command_bytes"),
        commands=commands,
    )


class StepTable:
    """Adds up object rows by step. Memory: one row a step."""

    def __init__(self) -> None:
        self._steps: pl.DataFrame | None = None

    def add(self, frame: pl.DataFrame) -> None:
        """Add object rows, columns as OBJECT_COLUMNS; those without a step are left out."""
        from kvtide.tables import pl

        moved = pl.col("dram_bytes").clip(0) + pl.col("file_bytes").clip(0)
        steps = (
            frame.filter(pl.col("step") != UNKNOWN)
            .group_by("step")
            .agg(
                pl.col("time_ns").min().alias("start_ns"),
                (pl.col("time_ns") + pl.col("wait_ns").clip(0)).max().alias("end_ns"),
                pl.col("step_tokens").max().alias("num_tokens"),
                ((pl.col("cause") == "restore") & (moved > 0)).any().alias("is_restore"),
                (pl.col("cause") == "decode-read").all().alias("is_decode"),
                pl.len().cast(pl.Int64).alias("num_objects"),
                *(pl.col(name).clip(0).sum() for name in ("wait_ns", "wanted_bytes", "dram_bytes", "file_bytes")),
            )
        )
        joined = steps if self._steps is None else pl.concat([self._steps, steps])
        self._steps = joined.group_by("step").agg(
            pl.col("start_ns").min(),
            pl.col("end_ns").max(),
            pl.col("num_tokens").max(),
            pl.col("is_restore").any(),
            pl.col("is_decode").all(),
            *(pl.col(name).sum() for name in ("num_objects", "wait_ns", "wanted_bytes", "dram_bytes", "file_bytes")),
        )

    def result(self) -> pl.DataFrame:
        """Return one row a step, ascending by start. `phase`: restore, decode, prefill, or empty if unknown."""
        from kvtide.tables import pl

        if self._steps is None:
            return pl.DataFrame(schema={"step": pl.Int64})
        phase = (
            pl.when(pl.col("is_restore"))
            .then(pl.lit("restore"))
            .when(pl.col("is_decode") | (pl.col("num_tokens") == 1))
            .then(pl.lit("decode"))
            .when(pl.col("num_tokens") > 1)
            .then(pl.lit("prefill"))
            .otherwise(pl.lit(""))
        )
        return self._steps.with_columns(phase.alias("phase")).drop("is_restore", "is_decode").sort("start_ns", "step")


def choose_steps(steps: pl.DataFrame, num: int) -> Ints:
    """Return up to `num` step numbers, ascending by start: half the slowest, the rest evenly spaced.

    Slow is what waited longest for KV; among equals, what lasted longest.
    """
    numbers = steps["step"].to_numpy()
    if len(numbers) <= num:
        return numbers
    lasted = steps["end_ns"].to_numpy() - steps["start_ns"].to_numpy()
    is_chosen = np.zeros(len(numbers), bool)
    is_chosen[np.lexsort((-lasted, -steps["wait_ns"].to_numpy()))[: num // 2]] = True
    others = np.flatnonzero(~is_chosen)
    is_chosen[others[np.linspace(0, len(others) - 1, num - num // 2).astype(np.int64)]] = True
    return numbers[is_chosen]


def object_keys(frame: pl.DataFrame) -> Ints:
    """Return what `ObjectIndex` needs of object rows. Shapes: [3, n], layer, start and end."""
    time_ns = frame["time_ns"].to_numpy()
    return np.stack([frame["layer"].to_numpy(), time_ns, time_ns + np.maximum(frame["wait_ns"].to_numpy(), 0)])


class ObjectIndex:
    """Finds the object that an op was for. `keys` of all object rows, in the order of the file. Shapes: [3, n]."""

    def __init__(self, keys: Ints) -> None:
        layer, self._start_ns, end_ns = keys
        self._by_start = np.argsort(self._start_ns, kind="stable")
        self._start_ns = self._start_ns[self._by_start]
        order = np.lexsort((end_ns, layer))
        layers, edges = np.unique(layer[order], return_index=True)
        bounds = [*edges.tolist(), len(order)]
        self._of_layer = {
            number: (end_ns[order[low:high]], order[low:high])
            for number, low, high in zip(layers.tolist(), bounds[:-1], bounds[1:], strict=True)
        }

    def reads(self, layer: Ints, complete_ns: Ints) -> Ints:
        """Return the row of the object each read was for, UNKNOWN where there is none. Shapes: all [n]."""
        owner = np.full(len(layer), UNKNOWN, np.int64)
        for number in np.unique(layer).tolist():
            if number == UNKNOWN or number not in self._of_layer:
                continue
            ends, rows = self._of_layer[number]
            chosen = np.flatnonzero((layer == number) & (complete_ns != UNKNOWN))
            place = np.searchsorted(ends, complete_ns[chosen], side="left")
            is_found = place < len(ends)
            owner[chosen[is_found]] = rows[place[is_found]]
        return owner

    def writes(self, time_ns: Ints) -> Ints:
        """Return the row of the object wanted last when each write was submitted, UNKNOWN before the first."""
        place = np.searchsorted(self._start_ns, time_ns, side="right") - 1
        return np.where(place >= 0, self._by_start[np.maximum(place, 0)], UNKNOWN)


def owners(index: ObjectIndex, ops: pl.DataFrame) -> Ints:
    """Return the row of the object that each op belongs to, UNKNOWN where there is none. Shapes: [n]."""
    layer, time_ns, complete_ns = (ops[name].to_numpy() for name in ("layer", "time_ns", "complete_ns"))
    return np.where(ops["is_write"].to_numpy(), index.writes(time_ns), index.reads(layer, complete_ns))


def longest(frame: pl.DataFrame, num: int, *, of: str, by: pl.Expr) -> pl.DataFrame:
    """Return up to `num` rows of each value of the column `of`: those with the largest `by`."""
    return frame.sort(by, descending=True, maintain_order=True).group_by(of, maintain_order=True).head(num)


def with_totals(frame: pl.DataFrame, totals: pl.DataFrame, *, key: str, num: str, size: str) -> pl.DataFrame:
    """Return `frame` with two more columns: how many rows below each row there are, and their bytes; 0 if none."""
    from kvtide.tables import pl

    totals = totals.rename({"num": num, "bytes": size})
    joined = frame.join(totals, left_on="row", right_on=key, how="left", maintain_order="left")
    return joined.with_columns(pl.col(num).fill_null(0), pl.col(size).fill_null(0))


def _share(limit: int, num: int, most: int) -> int:
    """Return how many rows each of `num` may have, so that all have at most about `limit`."""
    return max(1, min(most, limit // max(1, num)))


class _Kept:
    """Keeps the rows of each parent that took longest, and counts all."""

    def __init__(self, none: pl.DataFrame, *, parent: str, num: int) -> None:
        self._rows, self._parent, self._num = none, parent, num
        self._totals = self._counted(none)

    def _counted(self, frame: pl.DataFrame) -> pl.DataFrame:
        from kvtide.tables import pl

        size = pl.col("length").clip(0).sum().alias("bytes")
        return frame.group_by(self._parent).agg(pl.len().cast(pl.Int64).alias("num"), size)

    def add(self, frame: pl.DataFrame) -> None:
        from kvtide.tables import pl

        totals = pl.concat([self._totals, self._counted(frame)])
        self._totals = totals.group_by(self._parent).agg(pl.col("num", "bytes").sum())
        took = pl.col("complete_ns") - pl.col("time_ns")
        self._rows = longest(pl.concat([self._rows, frame]), self._num, of=self._parent, by=took)

    def result(self) -> tuple[pl.DataFrame, pl.DataFrame]:
        return self._rows.sort("time_ns", maintain_order=True), self._totals


def _numbered(frames: Iterable[pl.DataFrame]) -> Iterable[pl.DataFrame]:
    """Yield frames with `row`: the number of each row in the level."""
    from kvtide.tables import pl

    first = 0
    for frame in frames:
        yield frame.with_columns(pl.int_range(first, first + len(frame), dtype=pl.Int64).alias("row"))
        first += len(frame)


def _objects(trace: TraceFile, steps: Ints, limit: int) -> pl.DataFrame:
    from kvtide.tables import pl

    num = _share(limit, len(steps), most=limit)
    parts: list[pl.DataFrame] = []
    for frame in _numbered(trace.frames("object", OBJECT_COLUMNS)):
        mine = frame.filter(pl.col("step").is_in(steps.tolist()))
        parts = [longest(pl.concat([*parts, mine]), num, of="step", by=pl.col("wait_ns"))]
    return parts[0].sort("time_ns", maintain_order=True)


def _ops(trace: TraceFile, index: ObjectIndex, objects: Ints, limit: int) -> tuple[pl.DataFrame, pl.DataFrame, int]:
    """Return ops of `objects`, the totals of each object, and how many ops of the trace have no object."""
    from kvtide.tables import pl

    none = empty("op").select(OP_COLUMNS).with_columns(row=pl.lit(0, pl.Int64), object=pl.lit(0, pl.Int64))
    kept = _Kept(none, parent="object", num=_share(limit, len(objects), most=64))
    num_unowned = 0
    for frame in _numbered(trace.frames("op", OP_COLUMNS)):
        owner = owners(index, frame)
        num_unowned += int((owner == UNKNOWN).sum())
        is_mine = np.isin(owner, objects) & (owner != UNKNOWN)
        kept.add(frame.with_columns(pl.Series("object", owner, pl.Int64)).filter(pl.Series(is_mine, dtype=pl.Boolean)))
    return *kept.result(), num_unowned


def _commands(trace: TraceFile, ops: Ints, limit: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    from kvtide.tables import pl

    none = empty("block").select(COMMAND_COLUMNS)
    kept = _Kept(none, parent="op", num=_share(limit, len(ops), most=32))
    for frame in trace.frames("block", COMMAND_COLUMNS) if len(ops) else ():
        op = frame["op"].to_numpy()
        is_mine = np.isin(op, ops) & (op != UNKNOWN)
        kept.add(frame.filter(pl.Series(is_mine, dtype=pl.Boolean)))
    return kept.result()
