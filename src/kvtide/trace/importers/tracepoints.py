"""Text of `perf script` and of tracefs' `trace` file: events of block:* and io_uring:*. Next: strace.

Decides which events make rows. Lines of other events, of stacks and of titles are foreign. A file may mix both styles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtide.trace.events import UNKNOWN, flags_of
from kvtide.trace.importers.fields import SECONDS, device, integer, sector, sectors_bytes, small, time_ns
from kvtide.trace.importers.pairs import CANCEL, COMPLETE, ISSUE, QUEUE, SPREAD, BlockPairs, Stitches

if TYPE_CHECKING:
    import polars as pl

    from kvtide.trace.importers.sink import Sink

# perf: `comm pid[/tid] [cpu] time: group:event: ...`. ftrace: `comm-pid (tgid) [cpu] flags time: event: ...`
LINE = (
    r"^\s*(?P<comm>\S.*?)(?:\s+|-)(?P<pid>\d+)(?:/\d+)?\s+(?:\(\s*[-\d]+\)\s+)?(?:\[\d+\]\s+)?(?:[^\s:]{4,6}\s+)?"
    r"(?P<time>\d+\.\d+):\s+(?:\d+\s+)?(?:(?P<group>[\w-]+):)?(?P<event>[\w-]+):(?:\s+(?P<rest>.*))?$"
)
# Older kernels have no block_io_start; newer ones print the priority before the brackets.
COMMAND = (
    r"^(?P<major>\d+),(?P<minor>\d+) (?P<rwbs>[A-Z]{1,8}) (?:(?P<bytes>\d+) )?(?:\(.*\) )?"
    r"(?P<sector>-?\d+) \+ (?P<num>\d+)"
    r"(?: \S+,\S+,\S+)? \[(?P<who>.*)\]\s*$"
)
KINDS = {
    "block_bio_queue": QUEUE,
    "block_rq_insert": QUEUE,
    "block_io_start": QUEUE,
    "block_rq_issue": ISSUE,
    "block_rq_complete": COMPLETE,
    "block_rq_requeue": CANCEL,
}
SUBMITS = ("io_uring_submit_req", "io_uring_submit_sqe")
COMPLETES = "io_uring_complete"
OURS = r"^(?:block|io_uring)_"
LIKE = r"\s\d+\.\d{6,9}: +(?:\d+ +)?(?:(?:block|io_uring):)?(?:block|io_uring)_\w+:"
LOST = r"\[LOST (\d+) EVENTS\]|PERF_RECORD_LOST.* lost (\d+)"
IN_BUFFER = r"entries-in-buffer/entries-written: (\d+)/(\d+)"
# Opcodes that move or flush file data, by number in old kernels. Source: include/uapi/linux/io_uring.h.
OPCODES = {
    "1": "READV",
    "2": "WRITEV",
    "3": "FSYNC",
    "4": "READ_FIXED",
    "5": "WRITE_FIXED",
    "22": "READ",
    "23": "WRITE",
    "46": "URING_CMD",
}


class Tracepoints:
    """Reads lines; pairs block events into commands, and io_uring events into calls."""

    def __init__(self) -> None:
        self._pairs: BlockPairs | None = None
        self._calls = Stitches()
        self._has_bios = False

    def feed(self, lines: pl.DataFrame, sink: Sink) -> None:
        """Take a piece."""
        from kvtide.tables import pl

        self._pairs = self._pairs or BlockPairs(sink)
        told = lines.with_columns(pl.col("text").str.extract_groups(LINE).alias("found")).unnest("found")
        event = pl.col("event")
        told = told.with_columns(
            time_ns(pl.col("time"), SECONDS).alias("time_ns"),
            small(pl.col("pid")),
            event.replace_strict(KINDS, default=None, return_dtype=pl.UInt8).alias("kind"),
            (event.is_in(SUBMITS) | (event == COMPLETES)).fill_null(value=False).alias("is_call"),
        )
        told = _with_calls(_with_commands(told))
        is_line = pl.col("time_ns").is_not_null() & pl.col("pid").is_not_null()
        is_command, is_call = pl.col("is_command"), pl.col("key").is_not_null()
        is_other = event.str.contains(OURS) & pl.col("kind").is_null() & ~pl.col("is_call")
        sink.judge(
            told,
            is_event=is_line & (is_command | is_call | is_other),
            is_foreign=~pl.col("text").str.contains(LIKE),
        )
        _count_lost(lines, sink)
        self._pairs.add(self._block_events(told.filter(is_line & is_command)))
        self._add_calls(told.filter(is_line & is_call), sink)

    def close(self, sink: Sink) -> None:
        """Give up what is still in flight."""
        if self._pairs:
            self._pairs.close()
        waiting = self._calls.close()
        if waiting is not None:
            sink.add("call", _call_rows(waiting))

    def _block_events(self, told: pl.DataFrame) -> pl.DataFrame:
        """Return events as `BlockPairs` wants them. Of several that queue a command only the first kind counts."""
        from kvtide.tables import pl

        is_bio = pl.col("event") == "block_bio_queue"
        self._has_bios = self._has_bios or bool(told.select(is_bio.any()).item())
        if self._has_bios:
            told = told.filter((pl.col("kind") != QUEUE) | is_bio)
        is_end = pl.col("kind") == COMPLETE
        return told.select(
            "kind",
            "time_ns",
            "device",
            "sector",
            pl.when(pl.col("num") > 0).then("num").otherwise(pl.col("bytes").fill_null(0)).alias("length"),
            flags_of(pl.col("rwbs")).alias("flags"),
            pl.when(is_end).then(small(pl.col("who"))).fill_null(0).alias("error"),
            "pid",
            pl.when(~is_end).then("who").fill_null("").alias("comm"),
        )

    def _add_calls(self, told: pl.DataFrame, sink: Sink) -> None:
        """Add the io_uring requests that are done. An end without its start says too little: polls end like reads."""
        from kvtide.tables import pl

        sink.clock(told["time_ns"])
        is_end = pl.col("event") == COMPLETES
        events = told.select(
            "key", "time_ns", is_end.alias("is_end"), "opcode", pl.col("result").fill_null(0), "pid", "comm"
        )
        done, given_up, _ = self._calls.add(events)
        sink.add("call", _call_rows(done, is_done=True))
        sink.add("call", _call_rows(given_up))


def _with_commands(told: pl.DataFrame) -> pl.DataFrame:
    """Return `told` with the figures of block events, and whether it has all."""
    from kvtide.tables import pl

    told = told.with_columns(
        pl.when(pl.col("kind").is_not_null()).then("rest").str.extract_groups(COMMAND).alias("command")
    ).unnest("command")
    told = told.with_columns(
        device(pl.col("major"), pl.col("minor")).alias("device"),
        sector(pl.col("sector")),
        integer(pl.col("bytes")),
        sectors_bytes(pl.col("num")),
    )
    has_all = pl.all_horizontal(pl.col(name).is_not_null() for name in ("device", "sector", "num", "rwbs"))
    return told.with_columns((pl.col("kind").is_not_null() & has_all).alias("is_command"))


def _with_calls(told: pl.DataFrame) -> pl.DataFrame:
    """Return `told` with the key, opcode and result of io_uring events; the key is null if they are not whole."""
    from kvtide.tables import pl

    rest = pl.when("is_call").then("rest")
    opcode = rest.str.extract(r"\b(?:opcode|op):? (?:IORING_OP_)?(\w+)")
    ring, data = (
        rest.str.extract(r"\bring:? (?:0x)?([0-9a-f]+)"),
        rest.str.extract(r"\b(?:user_)?data:? (?:0x)?([0-9a-f]+)"),
    )
    told = told.with_columns(
        opcode.replace(OPCODES).alias("opcode"),
        integer(rest.str.extract(r"\bresult:? (-?\d+)")).alias("result"),
        ring.str.to_integer(base=16, dtype=pl.UInt64, strict=False).alias("ring"),
        data.str.to_integer(base=16, dtype=pl.UInt64, strict=False).alias("data"),
    )
    key = told["ring"].fill_null(0).to_numpy() * SPREAD ^ told["data"].fill_null(0).to_numpy()
    is_whole = pl.when(pl.col("event") == COMPLETES).then(pl.col("result").is_not_null())
    is_whole = is_whole.otherwise(pl.col("opcode").is_not_null())
    is_whole &= pl.col("ring").is_not_null() & pl.col("data").is_not_null() & pl.col("is_call")
    return told.with_columns(pl.when(is_whole).then(pl.Series(key, dtype=pl.UInt64)).alias("key"))


def _call_rows(starts: pl.DataFrame, *, is_done: bool = False) -> pl.DataFrame:
    """Return call rows of io_uring requests that move or flush file data. The events do not tell place or size."""
    from kvtide.tables import pl

    done = (
        starts
        if is_done
        else starts.with_columns(
            pl.lit(UNKNOWN, pl.Int64).alias("end_time_ns"), pl.lit(0, pl.Int64).alias("end_result")
        )
    )
    return done.filter(pl.col("opcode").is_in(OPCODES.values())).select(
        "time_ns",
        pl.col("end_time_ns").alias("complete_ns"),
        ("io_uring:" + pl.col("opcode")).alias("name"),
        "pid",
        "comm",
        pl.col("opcode").str.starts_with("WRITE").alias("is_write"),
        pl.when(pl.col("end_result") > 0).then("end_result").alias("length"),
        pl.col("end_result").alias("result"),
    )


def _count_lost(lines: pl.DataFrame, sink: Sink) -> None:
    """Count events that the recorder says it had no room for."""
    from kvtide.tables import pl

    text = pl.col("text")
    lost, kept = text.str.extract_groups(LOST), text.str.extract_groups(IN_BUFFER)
    told = lines.select(
        pl.coalesce(lost.struct.field("1", "2")).cast(pl.Int64, strict=False).alias("lost"),
        (
            kept.struct.field("2").cast(pl.Int64, strict=False) - kept.struct.field("1").cast(pl.Int64, strict=False)
        ).alias("unread"),
    )
    sink.lose(told["lost"])
    sink.lose(told["unread"])
