"""Decoding the kernel's pages, pairing its events, and joining them with ops: without root, on bytes made here."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.errors import FormatError
from kvtide.trace.attribute import OpIndex
from kvtide.trace.events import empty, shaped
from kvtide.trace.extents import extents_of, traced_file
from kvtide.trace.file import Extent, TracedFile
from kvtide.trace.kernel import commands
from kvtide.trace.kernel.pages import locate, records
from kvtide.trace.kernel.spool import Spool
from kvtide.trace.kernel.tracefs import EventFormat, parse_format
from kvtide.trace.live import Gauges

PAGE = 4096
FORMAT = """name: sample
ID: 77
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
\tfield:unsigned char common_flags;\toffset:2;\tsize:1;\tsigned:0;
\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;

\tfield:sector_t sector;\toffset:8;\tsize:8;\tsigned:0;
\tfield:char rwbs[10];\toffset:16;\tsize:10;\tsigned:0;
\tfield:__data_loc char[] cmd;\toffset:28;\tsize:4;\tsigned:0;
"""
LAYOUT = parse_format(FORMAT)


def record(sector: int, pid: int = 5) -> bytes:
    return struct.pack("<HBBiQ10sHI", 77, 0, 0, pid, sector, b"RA\0junk", 0, 0)


def page(start_ns: int, events: list[tuple[int, bytes]], *, is_long: bool = False) -> bytes:
    """Return a page whose events come at the times given, as the kernel writes it."""
    body, now = b"", start_ns
    for time_ns, data in events:
        delta = time_ns - now
        if delta >= 1 << 27:
            body += struct.pack("<II", 30 | (delta & ((1 << 27) - 1)) << 5, delta >> 27)
            delta = 0
        if is_long:
            body += struct.pack("<II", delta << 5, len(data) + 4) + data
        else:
            body += struct.pack("<I", len(data) // 4 | delta << 5) + data
        now = time_ns
    return (struct.pack("<QQ", start_ns, len(body)) + body).ljust(PAGE, b"\0")


def pages_of(*raw: bytes) -> np.ndarray:
    return np.frombuffer(b"".join(raw), np.uint8).reshape(-1, PAGE)


def test_a_format_file_becomes_a_layout() -> None:
    assert LAYOUT.number == 77
    assert LAYOUT.dtype.itemsize == 32
    assert LAYOUT.dtype["rwbs"] == np.dtype("S10")
    with pytest.raises(FormatError):
        parse_format("nothing of the kind")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1 << 40), max_size=60), max_size=5), st.booleans())
def test_every_record_is_found_with_its_time(gaps: list[list[int]], is_long: bool) -> None:
    raw, expected, now = [], [], 1000
    for page_gaps in gaps:
        start, events = now, []
        for gap in page_gaps:
            now += gap
            events.append((now, record(len(expected))))
            expected.append(now)
        raw.append(page(start, events, is_long=is_long))
    if not raw:
        return
    pages = pages_of(*raw)
    rows, times = records(pages, locate(pages), LAYOUT)
    assert times.tolist() == expected
    assert rows["sector"].tolist() == list(range(len(expected)))


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=0, max_size=300))
def test_damaged_pages_raise_named_errors_only(junk: bytes) -> None:
    pages = pages_of((struct.pack("<QQ", 5, len(junk)) + junk).ljust(PAGE, b"\0"))
    try:
        records(pages, locate(pages), LAYOUT)
    except FormatError:
        return


def events(*rows: tuple[int, int, int]) -> np.ndarray:
    made = np.zeros(len(rows), commands.EVENT)
    for index, (time_ns, kind, sector) in enumerate(rows):
        made[index]["time_ns"], made[index]["kind"], made[index]["sector"] = time_ns, kind, sector
        made[index]["length"], made[index]["rwbs"], made[index]["comm"] = 4096, b"R", b"fio"
    return made


def test_start_issue_and_completion_become_one_command_across_pieces() -> None:
    pairing = commands.Commands()
    first = pairing.add(events((10, commands.START, 8), (20, commands.ISSUE, 8), (25, commands.ISSUE, 16)))
    assert len(first) == 0
    last = pairing.add(events((90, commands.COMPLETE, 8)), is_last=True).sort("time_ns")
    assert last["queue_ns"].to_list() == [10, -1]
    assert last["time_ns"].to_list() == [20, 25]
    assert last["complete_ns"].to_list() == [90, -1]  # the second was still in flight
    assert last["offset"].to_list() == [8 * 512, 16 * 512]


def test_a_command_that_was_handed_back_counts_from_its_last_issue() -> None:
    rows = events((5, 0, 8), (10, 1, 8), (30, 1, 8), (50, 2, 8), (60, 0, 8), (61, 1, 8), (70, 2, 8))
    frame = commands.Commands().add(rows, is_last=True).sort("time_ns")
    assert frame["time_ns"].to_list() == [30, 61]
    assert frame["queue_ns"].to_list() == [5, 60]
    assert frame["complete_ns"].to_list() == [50, 70]


def test_a_completion_without_issue_is_kept_as_such() -> None:
    frame = commands.Commands().add(events((50, commands.COMPLETE, 8)), is_last=True)
    assert frame["time_ns"].to_list() == [-1]
    assert frame["complete_ns"].to_list() == [50]


@pytest.mark.parametrize("memory_bytes", [1 << 20, 3 * PAGE])
def test_a_spool_gives_pages_back_in_order_of_time(memory_bytes: int, tmp_path: Path) -> None:
    with Spool(2, page_bytes=PAGE, memory_bytes_max=memory_bytes, folder=tmp_path) as spool:
        for index in range(10):
            spool.append(index % 2, page(1000 * index, []))
        pieces = list(spool.pieces())
        assert [len(each) for each in pieces[0][0]] == [5, 5]
        assert pieces[-1][1] is None
        assert spool.is_spilled == (memory_bytes < 1 << 20)
    assert list(tmp_path.iterdir()) == []


def ops_frame(rows: list[tuple[int, int, int, int]]) -> pl.DataFrame:
    names = ("time_ns", "complete_ns", "offset", "length")
    frame = pl.DataFrame(rows, schema=names, orient="row")
    extra = {"fd": 3, "cause": "restore", "layer": np.arange(len(rows))}
    return shaped(
        "op", frame.with_columns(*(pl.lit(v).alias(k) if k != "layer" else pl.Series(k, v) for k, v in extra.items()))
    )


def test_a_command_finds_the_op_that_was_in_flight_at_its_place() -> None:
    files = [TracedFile("f", 3, 7, [Extent(0, 1 << 20, 1 << 20), Extent(1 << 20, 64 << 20, 1 << 20)])]
    ms = 1_000_000
    ops = ops_frame(
        [(10 * ms, 11 * ms, 0, 65536), (50 * ms, 51 * ms, 0, 65536), (10 * ms, 12 * ms, (1 << 20) - 4096, 8192)]
    )
    index = OpIndex(ops, files)
    base = 1 << 20
    device = np.full(7, 7)
    offset = np.array([base, base + 32768, base + 65536, base + (1 << 20) - 4096, 64 << 20, base, 5])
    time_ns = np.array([10, 50, 50, 10, 11, 30, 10]) * ms
    assert index.find(device, offset, time_ns).tolist() == [0, 1, -1, 2, 2, -1, -1]
    assert index.find(np.array([8]), np.array([base]), np.array([10 * ms])).tolist() == [-1]
    block = shaped("block", pl.DataFrame({"time_ns": [10 * ms], "device": [7], "offset": [base], "length": [4096]}))
    joined = shaped("block", index.attribute(block))
    assert joined["cause"].to_list() == ["restore"]
    assert joined["layer"].to_list() == [0]


def test_no_ops_join_nothing() -> None:
    block = shaped("block", pl.DataFrame({"time_ns": [1], "device": [7], "offset": [0], "length": [4096]}))
    assert OpIndex(empty("op"), []).attribute(block)["op"].to_list() == [-1]


def test_extents_cover_a_written_file_or_say_why_not(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 4096)
    with path.open("rb") as file:
        known, why = traced_file(path, file.fileno())
        if why:
            assert not known.extents
            return
        assert sum(extent.length for extent in extents_of(file.fileno())) >= 1 << 20
    assert known.extents[0].logical == 0


def test_gauges_turn_counters_into_rates(tmp_path: Path) -> None:
    times = iter([0, 2_000_000_000])
    stat = tmp_path / "sys/block/sda/stat"
    stat.parent.mkdir(parents=True)
    stat.write_text("100 0 800 50 0 0 0 0 0 10 50\n")
    gauges = Gauges("sda", root=tmp_path, clock_ns=lambda: next(times))
    stat.write_text("300 0 2400 150 0 0 0 0 0 10 150\n")
    found = dict(gauges.sample().filter(source="diskstats").select("name", "value").iter_rows())
    assert found["r/s"] == 100
    assert found["rkB/s"] == 400
    assert found["r_await"] == 0.5
    assert found["aqu-sz"] == 0.05


def test_layouts_of_calls_with_arrays_are_understood() -> None:
    text = "name: x\nID: 3\nformat:\n\tfield:unsigned long args[6];\toffset:16;\tsize:48;\tsigned:0;\n"
    layout: EventFormat = parse_format(text)
    assert layout.dtype["args"].shape == (6,)
