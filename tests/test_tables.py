"""Ctrl-C with polars loaded."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

WAITS = {"a read of a pipe": "sys.stdin.readline()", "a wait for a thread": "threading.Event().wait()"}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_ctrl_c_ends_a_wait_although_polars_is_loaded(wait: str) -> None:
    code = f"import sys, threading, kvtide.tables; print('now', flush=True); {wait}"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=30)
    assert b"KeyboardInterrupt" in errors


def test_a_program_that_counts_ctrl_c_still_does_while_polars_works() -> None:
    code = """
import os, signal
pressed = []
signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
from kvtide.tables import pl

def press(rows):
    os.kill(os.getpid(), signal.SIGINT)
    return rows

pressing = pl.col("a").map_batches(press, return_dtype=pl.Int64)
print(pl.LazyFrame({"a": [1]}).select(pressing).collect()["a"].to_list(), len(pressed))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[1] 1\n", done.stderr
