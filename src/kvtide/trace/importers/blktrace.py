"""Binary files of blktrace, one of each CPU, or merged by `blkparse -d`. Next: tracepoints.

Decides where records begin, also after damage, and which make rows. Reads files of both byte orders.

Theory. A record is 48 bytes and then a payload, whose length the record says:

    magic u32 | sequence u32 | time u64 | sector u64 | bytes u32 | action u32 | pid u32 | device u32 | cpu u32
    | error u16 | payload length u16 | payload

So the place of a record is known from the one before. To walk this chain without a Python step for each record,
every place where a magic number stands is a candidate, and each candidate points to the one that follows it. The
candidates reached from the first are the records; they are found by doubling the length of the jumps.
Source: struct blk_io_trace, include/uapi/linux/blktrace_api.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtide.trace.events import DISCARD, FLUSH, FUA, META, READ, READAHEAD, SYNC, WRITE
from kvtide.trace.importers.fields import BYTES_MAX, SECTOR_BYTES, TIME_NS_MAX
from kvtide.trace.importers.pairs import CANCEL, COMPLETE, ISSUE, QUEUE, BlockPairs

if TYPE_CHECKING:
    import polars as pl

    from kvtide.trace.importers.sink import Sink
    from kvtide.trace.importers.source import Source

MAGIC = 0x65617407  # "eat", and version 7
FIELDS = [
    ("magic", "u4"),
    ("sequence", "u4"),
    ("time", "u8"),
    ("sector", "u8"),
    ("bytes", "u4"),
    ("action", "u4"),
    ("pid", "u4"),
    ("device", "u4"),
    ("cpu", "u4"),
    ("error", "u2"),
    ("payload_bytes", "u2"),
]
RECORD_BYTES = 48
# Low half of `action`: what happened. High half: of which kinds. Source: enum blktrace_act, enum blktrace_cat.
KINDS = {1: QUEUE, 7: ISSUE, 8: COMPLETE, 6: CANCEL}
NOTIFY, PASSTHROUGH = 1 << 10, 1 << 9
PROCESS, TIMESTAMP = 0, 1  # low half of a notice: name of a process; clock of the day
FLAGS = {0: READ, 1: WRITE, 2: FLUSH, 3: SYNC, 11: READAHEAD, 12: META, 13: DISCARD, 15: FUA}  # bit: ours
NO_KIND = 255
NAMES_MAX = 100_000  # processes whose name is kept

Bytes = npt.NDArray[np.uint8]


def order_of(head: bytes) -> str | None:
    """Return the byte order of a binary trace, `<` or `>`; None if it is none."""
    return {MAGIC.to_bytes(4, "little"): "<", MAGIC.to_bytes(4, "big"): ">"}.get(head[:4])


def read(source: Source, sink: Sink) -> None:
    """Read a whole file."""
    reader, rest, at = Blktrace(order_of(source.head) or "<", sink), b"", 0
    for piece in source.pieces():
        data = rest + piece
        used = reader.feed(data, at)
        rest, at = data[used:], at + used
    reader.close(rest, at)
    if source.path.name.removesuffix(".gz").rpartition(".blktrace.")[2].isdigit():
        sink.note(
            "This is the file of one CPU: commands that another CPU completed lack their completion. "
            f"Type blkparse -i {source.path.name.rpartition('.blktrace.')[0]} -d all.bin and import all.bin."
        )


class Blktrace:
    """Reads records piece by piece."""

    def __init__(self, order: str, sink: Sink) -> None:
        self._record = np.dtype([(name, order + kind) for name, kind in FIELDS])
        self._magic = np.frombuffer(MAGIC.to_bytes(4, "little" if order == "<" else "big"), np.uint8)
        self._sink = sink
        self._pairs = BlockPairs(sink)
        self._name_of_pid: dict[int, str] = {}

    def feed(self, data: bytes, at: int) -> int:
        """Take a piece that begins at byte `at` of the file; return how many bytes of it were used."""
        raw = np.frombuffer(data, np.uint8)
        places, records = self._candidates(raw)
        ends = places + RECORD_BYTES + records["payload_bytes"]
        index = _chain(places, ends)
        index = index[ends[index] <= len(raw)]
        places, ends, records = places[index], ends[index], records[index]
        begins = np.concatenate([[0], ends])
        for gap in np.flatnonzero(begins[:-1] != places).tolist():
            self._sink.malformed_bytes(at + int(begins[gap]), f"{int(places[gap] - begins[gap])} bytes are no record")
        self._take(records, places, data, at)
        used = int(ends[-1]) if len(ends) else 0
        if len(raw) - used > RECORD_BYTES + (1 << 16):  # more than any record: nothing there will become one
            self._sink.malformed_bytes(at + used, f"{len(raw) - used - 3} bytes are no record")
            used = len(raw) - 3  # a magic number may be cut
        return used

    def close(self, rest: bytes, at: int) -> None:
        """Count what is left at the end of the file, and give up what is still in flight."""
        if rest:
            self._sink.malformed_bytes(at, f"the last {len(rest)} bytes are no whole record")
        self._pairs.close()

    def _candidates(self, raw: Bytes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.void]]:
        """Return the places where a whole record may begin, and what stands there."""
        num = max(len(raw) - RECORD_BYTES + 1, 0)
        is_magic = np.ones(num, bool)
        for index in range(4):
            is_magic &= raw[index : index + num] == self._magic[index]
        places = np.flatnonzero(is_magic).astype(np.int64)
        rows = raw[places[:, None] + np.arange(RECORD_BYTES)]
        return places, np.ascontiguousarray(rows).view(self._record).reshape(-1)

    def _take(self, records: npt.NDArray[np.void], places: npt.NDArray[np.int64], data: bytes, at: int) -> None:
        """Judge whole records, and pair those that are events of commands."""
        category, what = records["action"] >> 16, records["action"] & 0xFFFF
        is_notice = (category & NOTIFY) != 0
        self._read_notices(records, places, data, is_notice)
        is_bad = (records["time"] >= TIME_NS_MAX) | (
            (records["sector"] >= BYTES_MAX // SECTOR_BYTES) & (records["sector"] != np.iinfo(np.uint64).max)
        )
        is_bad &= ~is_notice
        for index in np.flatnonzero(is_bad).tolist():
            self._sink.malformed_bytes(at + int(places[index]), "its time or sector is too large")
        self._sink.num_events += int(np.count_nonzero(~is_bad))
        table = np.full(1 << 16, NO_KIND, np.uint8)
        for number, kind in KINDS.items():
            table[number] = kind
        kinds = table[what]
        chosen = ~is_bad & ~is_notice & (kinds != NO_KIND) & ((category & PASSTHROUGH) == 0)
        self._pairs.add(self._events(records[chosen], kinds[chosen], category[chosen]))

    def _events(
        self, records: npt.NDArray[np.void], kinds: npt.NDArray[np.uint8], category: npt.NDArray[np.uint32]
    ) -> pl.DataFrame:
        from kvtide.tables import pl

        flags = np.zeros(len(records), np.int32)
        for bit, flag in FLAGS.items():
            flags |= np.where(category >> bit & 1, flag, 0).astype(np.int32)
        flags = np.where(flags & DISCARD, flags & ~(READ | WRITE), flags)
        pids = pl.Series(records["pid"].astype(np.int64).astype(np.int32), dtype=pl.Int32)
        return pl.DataFrame(
            {
                "kind": pl.Series(kinds, dtype=pl.UInt8),
                "time_ns": records["time"].astype(np.int64),
                "device": records["device"].astype(np.int64),
                "sector": records["sector"].astype(np.uint64),
                "length": records["bytes"].astype(np.int64),
                "flags": flags.astype(np.int32),
                "error": records["error"].astype(np.uint16).view(np.int16).astype(np.int32),
                "pid": pids,
                "comm": pids.replace_strict(
                    pl.Series(list(self._name_of_pid), dtype=pl.Int32),
                    pl.Series(list(self._name_of_pid.values()), dtype=pl.String),
                    default="",
                ),
            }
        )

    def _read_notices(
        self,
        records: npt.NDArray[np.void],
        places: npt.NDArray[np.int64],
        data: bytes,
        is_notice: npt.NDArray[np.bool_],
    ) -> None:
        """Keep names of processes, and when the trace began by the clock of the day. One each process, so few."""
        order: str = "big" if self._magic[0] == MAGIC >> 24 else "little"
        for index in np.flatnonzero(is_notice).tolist():
            record, begin = records[index], int(places[index]) + RECORD_BYTES
            payload = data[begin : begin + int(record["payload_bytes"])]
            what = int(record["action"]) & 0xFFFF
            if what == PROCESS and len(self._name_of_pid) < NAMES_MAX and record["pid"] < 1 << 31:
                self._name_of_pid[int(record["pid"])] = payload.split(b"\0")[0].decode(errors="replace")
            elif what == TIMESTAMP and len(payload) >= 8 and not self._sink.about.epoch_ns:
                seconds, ns = (int.from_bytes(payload[at : at + 4], order) for at in (0, 4))  # type: ignore[arg-type]
                self._sink.about.epoch_ns = seconds * 1_000_000_000 + ns


def _chain(places: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return which candidates are reached from the first, each time going to the next at or after the end."""
    num = len(places)
    jump = np.append(np.searchsorted(places, ends), num)  # the last one stands for the end
    is_reached = np.zeros(num + 1, bool)
    is_reached[:1] = True
    for _ in range(num.bit_length()):
        is_reached[jump[is_reached]] = True
        jump = jump[jump]
    return np.flatnonzero(is_reached[:num])
