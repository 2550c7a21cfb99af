"""Logs of other tools: what each line becomes, and that no line is lost silently."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.errors import ConfigError, FormatError
from kvtide.trace.file import TraceFile
from kvtide.trace.importers import Imported, import_file, records

SAMPLES = {
    "cheops": "1000, R, 131072, 2048, 256\n2000, WS, 4096, 8, 8\n",
    "biosnoop": (
        "TIME(s)     COMM           PID    DISK    T SECTOR     BYTES   LAT(ms)\n"
        "0.500000    my worker/1    1950   sda     R 16         4096       0.50\n"
        "0.600000    fio            7      sda     W 32         8192       1.00\n"
    ),
    "blkparse": (
        "  8,0    3        1     0.000000000   697  Q   W 223490 + 8 [kjournald]\n"
        "  8,0    3        2     0.000010000   697  D   W 223490 + 8 [kjournald]\n"
        "  8,0    1        3     0.000510000     0  C   W 223490 + 8 [0]\n"
    ),
    "perf": (
        "   kworker/4:1H    533 [004] 5.100000: block:block_rq_issue: 259,0 RM 4096 () 64 + 8 [kworker/4:1H]\n"
        "        swapper      0 [004] 5.100100: block:block_rq_complete: 259,0 RM () 64 + 8 [0]\n"
    ),
    "strace": (
        '12 1700000000.000001 pread64(3</kv/x>, "", 4096, 8192) = 4096 <0.000100>\n'
        "12 1700000000.100000 pread64(3</kv/x>,  <unfinished ...>\n"
        '12 1700000000.100300 <... pread64 resumed>"", 4096, 0) = 4096 <0.000300>\n'
    ),
    "msr": "128166372003061629,host,1,Read,8192,4096,1331\n128166372003071629,host,1,Write,0,512,20\n",
    "alibaba": "419,W,8192,16384,1577808144360767\n419,R,0,4096,1577808144360867\n",
    "fio-iolog": "fio version 2 iolog\n/f add\n/f open\n/f read 0 4096\n/f write 4096 8192\n/f close\n",
    "iostat": "Device r/s rkB/s r_await w/s wkB/s w_await aqu-sz %util\nsda 10.0 40.0 0.5 0.0 0.0 0.0 0.01 1.0\n",
}


def imported(folder: Path, text: str | bytes, form: str = "auto", name: str = "log") -> tuple[Imported, TraceFile]:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    found = import_file(path, folder / "out.kvtrace", format=form)
    return found, TraceFile(folder / "out.kvtrace")


@pytest.mark.parametrize("name", SAMPLES)
def test_a_format_is_recognised_and_all_lines_are_used(name: str, tmp_path: Path) -> None:
    found, trace = imported(tmp_path, SAMPLES[name])
    assert found.format == name
    assert found.about.health.num_malformed == 0
    assert sum(trace.about.rows.values()) > 0


def test_biosnoop_tells_completions_and_keeps_names_with_spaces(tmp_path: Path) -> None:
    _, trace = imported(tmp_path, SAMPLES["biosnoop"])
    block = trace.frame("block")
    assert block["comm"].to_list() == ["my worker/1", "fio"]
    assert block["offset"].to_list() == [16 * 512, 32 * 512]
    assert block["length"].to_list() == [4096, 8192]
    assert (block["complete_ns"] - block["time_ns"]).to_list() == [500_000, 1_000_000]


def test_blkparse_joins_queue_issue_and_completion(tmp_path: Path) -> None:
    _, trace = imported(tmp_path, SAMPLES["blkparse"])
    block = trace.frame("block")
    assert len(block) == 1
    assert block["time_ns"][0] - block["queue_ns"][0] == 10_000
    assert block["complete_ns"][0] - block["time_ns"][0] == 500_000
    assert block["device"][0] == 8 << 20
    assert block["length"][0] == 4096


def test_strace_stitches_a_call_that_was_interrupted(tmp_path: Path) -> None:
    _, trace = imported(tmp_path, SAMPLES["strace"])
    call = trace.frame("call")
    assert call["offset"].to_list() == [8192, 0]
    assert call["result"].to_list() == [4096, 4096]
    assert (call["complete_ns"] - call["time_ns"]).to_list() == [100_000, 300_000]


def test_binary_blktrace_is_decoded(tmp_path: Path) -> None:
    def event(seq: int, time_ns: int, action: int) -> bytes:
        write = 1 << (1 + 16)  # BLK_TC_WRITE << BLK_TC_SHIFT
        fields = (0x65617407, seq, time_ns, 1024, 4096, write | action, 77, 8 << 20, 0, 0, 0)
        return struct.pack("<IIQQIIIIIHH", *fields)

    found, trace = imported(tmp_path, event(1, 1000, 7) + event(2, 51_000, 8))
    assert found.format == "blktrace"
    block = trace.frame("block")
    assert block["offset"].to_list() == [1024 * 512]
    assert (block["complete_ns"] - block["time_ns"]).to_list() == [50_000]


def test_malformed_lines_are_shown_with_their_numbers(tmp_path: Path) -> None:
    text = SAMPLES["alibaba"] + "419,Q,zero,4096,15\n" + SAMPLES["alibaba"]
    found, trace = imported(tmp_path, text)
    assert found.about.health.malformed == [(3, "419,Q,zero,4096,15")]
    assert trace.about.health.num_malformed == 1
    assert sum(trace.about.rows.values()) == 4


def test_gzip_is_read_through(tmp_path: Path) -> None:
    found, trace = imported(tmp_path, gzip.compress(SAMPLES["cheops"].encode()), name="log.gz")
    assert found.format == "cheops"
    assert trace.about.rows["block"] == 2
    assert not trace.about.health.has_completions


@pytest.mark.parametrize("text", [b"", b"\0" * 5000, b"hello\nworld\n", bytes(range(256)) * 20])
def test_what_is_no_log_is_refused(text: bytes, tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        imported(tmp_path, text)
    assert not (tmp_path / "out.kvtrace").exists()


def test_the_wrong_format_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="expected"):
        imported(tmp_path, SAMPLES["msr"], form="blkparse")
    with pytest.raises(ConfigError, match="unknown format"):
        imported(tmp_path, SAMPLES["msr"], form="tea-leaves")


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(SAMPLES)),
    cut=st.integers(0, 200),
    junk=st.binary(max_size=60),
    form=st.sampled_from(["auto", "same"]),
)
def test_damaged_logs_raise_named_errors_only(
    tmp_path_factory: pytest.TempPathFactory, name: str, cut: int, junk: bytes, form: str
) -> None:
    raw = SAMPLES[name].encode()
    text = raw[:cut] + junk + raw[cut:]
    try:
        found, trace = imported(tmp_path_factory.mktemp("fuzz"), text, form if form == "auto" else name)
    except (FormatError, ConfigError):
        return
    health = trace.about.health
    assert found.num_lines == found.num_events + health.num_malformed + health.num_foreign


def test_records_of_another_engine_become_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "engine.kvtrace"
    times = np.arange(5) * 1000
    num = records(file, {"time_ns": times, "complete_ns": times + 10, "offset": times, "length": np.full(5, 4096)})
    assert num == 5
    assert TraceFile(file).frame("op")["length"].to_list() == [4096] * 5
    rows = [{"time_ns": 1, "length": 8, "cause": "restore"}, {"time_ns": 2, "length": 9, "layer": 3}]
    assert records(file, rows) == 2
    assert TraceFile(file).frame("op")["cause"].to_list() == ["restore", "unknown"]
    for bad in (
        {"time_ns": [1], "colour": [2]},
        {"length": [1]},
        {"time_ns": ["x"]},
        {"time_ns": [1], "cause": ["why"]},
    ):
        with pytest.raises(ConfigError):
            records(file, bad)


DATA = Path(__file__).parent.parent.parent / "shared" / "data"


@pytest.mark.skipif(not DATA.exists(), reason="the collection of real logs is not here")
def test_real_logs_import_or_are_refused_for_a_reason(tmp_path: Path) -> None:
    refused = set()
    for path in sorted([*(DATA / "formats").iterdir(), *(DATA / "block").iterdir()]):
        if path.name.startswith(("biolatency", "biopattern", "btt")):
            with pytest.raises(FormatError, match="no single events"):
                import_file(path, tmp_path / "out.kvtrace")
            refused.add(path.name.split("_")[0])
            continue
        found = import_file(path, tmp_path / "out.kvtrace")
        assert found.about.health.num_malformed == 0
        assert sum(found.about.rows.values()) > 0
    assert refused == {"biolatency", "biopattern", "btt"}
