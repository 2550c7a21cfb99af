"""What a trace holds: the columns of each level, and what its numbers mean. Next: file.

One schema for our own records, for captures of the kernel and for imported logs. Knows no file and no format.

Theory. Five levels, from what the cache wanted down to what the drive did; each row has a start and an end:

    object   one layer of one step, as the cache wanted it         kvtide.trace.record
    op       one operation of an engine                            kvtide.trace.record
    call     one system call, or one io_uring request              kernel capture, strace
    block    one command of the block layer                        kernel capture, blkparse, biosnoop, ...
    sample   one figure of a time series                           iostat, /proc, nvidia-smi

In memory a column has no nulls: UNKNOWN (-1) stands for a figure the source does not have. On disk it is null.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

MEMORY_CAUSES = ("memory-log", "memory-segment", "memory-read")  # of `kvtide.recall`
CAUSES = ("prefill-write", "decode-read", "restore", "prefetch", "demote", "metadata", *MEMORY_CAUSES)
UNKNOWN_CAUSE = "unknown"
UNKNOWN = -1
LEVELS = ("object", "op", "call", "block", "sample")

# `flags` of a block command, as the letters of the kernel's rwbs field. None of the first four: a flush alone.
READ, WRITE, DISCARD, FLUSH, READAHEAD, SYNC, META, FUA = (1 << bit for bit in range(8))

# Column: type, as polars spells it. Every time is ns of one monotonic clock, every size in bytes.
COLUMNS: dict[str, dict[str, str]] = {
    "object": {
        "time_ns": "Int64",  # wanted
        "cause": "cause",
        "layer": "Int32",
        "sequence_id": "Int64",
        "num_tokens": "Int32",
        "wanted_bytes": "Int64",
        "dram_bytes": "Int64",  # copied to the device from DRAM
        "file_bytes": "Int64",  # read from the tier below
        "wait_ns": "Int64",  # how long the caller stood still
        "step": "Int64",  # of the cache, counted from 0
        "step_tokens": "Int32",  # new tokens the step computes: 1 in decode
    },
    "op": {
        "time_ns": "Int64",  # submitted
        "cause": "cause",
        "layer": "Int32",  # of the first fragment
        "complete_ns": "Int64",
        "is_write": "Boolean",
        "fd": "Int32",
        "offset": "Int64",  # in the file
        "length": "Int64",
        "num_fragments": "Int32",
        "depth": "Int32",  # in flight, itself included
        "error": "Int32",  # errno
        "slot": "Int64",  # of the first fragment
    },
    "call": {
        "time_ns": "Int64",  # entered or submitted
        "complete_ns": "Int64",
        "name": "String",  # pread64, io_uring:READ, ...
        "pid": "Int32",
        "comm": "String",
        "is_write": "Boolean",
        "fd": "Int32",
        "offset": "Int64",
        "length": "Int64",  # wanted
        "result": "Int64",  # bytes moved; negative: -errno
    },
    "block": {
        "time_ns": "Int64",  # issued to the driver; UNKNOWN: not seen
        "complete_ns": "Int64",  # UNKNOWN: not seen
        "queue_ns": "Int64",  # handed to the block layer
        "device": "Int64",  # major << 20 | minor
        "offset": "Int64",  # from the start of the device
        "length": "Int64",
        "flags": "Int32",
        "error": "Int32",
        "pid": "Int32",
        "comm": "String",
        "cause": "cause",  # joined, see attribute
        "layer": "Int32",
        "op": "Int64",  # row of the op it carries, joined
    },
    "sample": {
        "time_ns": "Int64",
        "source": "String",  # iostat, gpu, psi, ...
        "subject": "String",  # device, process or GPU
        "name": "String",  # of the figure, with its unit last
        "value": "Float64",
    },
}


def schema(level: str) -> dict[str, pl.DataType]:
    """Return the polars type of each column of `level`."""
    from kvtide.tables import pl

    cause = pl.Enum([*CAUSES, UNKNOWN_CAUSE])
    return {name: cause if kind == "cause" else getattr(pl, kind)() for name, kind in COLUMNS[level].items()}


def empty(level: str) -> pl.DataFrame:
    """Return a frame of `level` without rows."""
    from kvtide.tables import pl

    return pl.DataFrame(schema=schema(level))


def shaped(level: str, frame: pl.DataFrame) -> pl.DataFrame:
    """Return `frame` with exactly the columns of `level`; what is missing or null becomes unknown.

    Unknown is UNKNOWN in numbers, false in booleans, empty in texts, `unknown` in causes and NaN in fractions.
    Raises: polars' errors where a column does not convert.
    """
    from kvtide.tables import pl

    columns = []
    for name, dtype in schema(level).items():
        if name == "error":
            fill: object = 0
        elif isinstance(dtype, pl.Enum):
            fill = UNKNOWN_CAUSE
        else:
            fill = {pl.String(): "", pl.Boolean(): False, pl.Float64(): float("nan")}.get(dtype, UNKNOWN)
        column = pl.col(name).cast(dtype).fill_null(pl.lit(fill, dtype)) if name in frame else pl.lit(fill, dtype)
        columns.append(column.alias(name))
    return frame.select(columns) if len(frame) else empty(level)


def flags_of(rwbs: pl.Expr) -> pl.Expr:
    """Return the flags that an expression of rwbs texts means, such as `RA`, `WS` or `FWFSM`.

    A leading F is a flush before the write, an F after it is forced unit access.
    Source: blk_fill_rwbs, kernel/trace/blktrace.c.
    """
    from kvtide.tables import pl

    body = rwbs.str.strip_prefix("F")
    kinds = {"R": READ, "W": WRITE, "D": DISCARD, "E": DISCARD, "Z": WRITE}
    first = body.str.slice(0, 1).replace_strict(kinds, default=0, return_dtype=pl.Int32)
    rest = body.str.slice(1)
    flags = first + pl.when(rwbs.str.starts_with("F")).then(FLUSH).otherwise(0)
    for letter, flag in {"A": READAHEAD, "S": SYNC, "M": META, "F": FUA}.items():
        flags += pl.when(rest.str.contains(letter, literal=True)).then(flag).otherwise(0)
    return flags.cast(pl.Int32)
