"""What a measured run is said to have been bound by, and the marks its phases are cut at."""

from __future__ import annotations

import io

import numpy as np
import pytest

pytest.importorskip("torch")

from kvtide.integrations.transformers.turns import Phase, Turn
from kvtide.report.turns import verdict
from kvtide.trace.record import OP_EVENT, Recorder


def decode_verdict(**measures: object) -> str:
    return verdict([Turn(0, "?", decode=Phase(total_ns=100, **measures))])[1]


def test_a_phase_is_bound_by_what_its_time_went_into() -> None:
    assert "computing" in decode_verdict(wait_ns=10)
    reads = {"wait_ns": 80, "num_ops": 4}
    assert "small operations" in decode_verdict(**reads, read_bytes=4 << 12, op_bytes_mean=4096.0)
    assert "limited by bytes" in decode_verdict(**reads, read_bytes=4 << 20, op_bytes_mean=2.0**20)
    assert "nothing was read from the file" in decode_verdict(wait_ns=80)


def test_operations_between_marks_are_told_apart_also_when_older_ones_are_lost() -> None:
    recorder, marks = Recorder(max_events=8), [0]
    for num in (3, 4, 5):
        rows = np.zeros(num, OP_EVENT)
        rows["slot"] = np.arange(marks[-1], marks[-1] + num)
        recorder.record_ops(rows)
        marks.append(recorder.counts()[1])
    assert recorder.ops_between(marks[2], marks[3])["slot"].tolist() == [7, 8, 9, 10, 11]
    assert recorder.ops_between(marks[1], marks[2])["slot"].tolist() == [4, 5, 6]  # 3 was lost
    assert len(recorder.ops_between(marks[0], marks[1])) == 0


def test_a_narrow_terminal_gets_a_column_a_turn() -> None:
    from rich.console import Console

    from kvtide.integrations.transformers.turns import Turn
    from kvtide.report.turns import MEASURES, turn_table

    turns = [Turn(0, "?", prompt_tokens=4039, matched_tokens=400 + index) for index in range(6)]
    for width, shown in ((80, 4), (170, 6)):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(turn_table(turns, 1024, width=width))
        text = console.export_text()
        assert sum(str(turn.matched_tokens) in text for turn in turns) == shown
        assert all(name in text for name in MEASURES)
