"""Every check fails on the fault it looks for, and passes on a store that has none."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from inprocess import kvtide
from kvtide.check.contract import Check, Traits, Verdict
from kvtide.check.linear import what_breaks
from kvtide.check.names import TARGETS
from kvtide.check.race import MISS, WRONG, Row
from kvtide.check.registry import CHECKS, checks_named
from kvtide.check.runner import Report, Result, machine_has, run_checks
from kvtide.check.values import value_of, version_of, wrong_values
from kvtide.report.check import check_page

ROOT = Path(__file__).parent.parent
DAMAGE = ("flipped", "torn", "truncated", "emptied", "swapped", "senseless")
PLANTED: dict[str, tuple[str, ...]] = {
    "NoChecksum": (*(f"damage-{name}" for name in DAMAGE), "lost-writes", "flipped-reads"),
    "Alike": ("identity-weights", "identity-revision", "identity-rope", "identity-dtype", "identity-layout",
              "identity-tp", "identity-adapter", "identity-build", "salt"),
    "Seeded": ("same-keys",),
    "LastChunk": ("whole-prefix",),
    "InPlace": ("failed-store", "read-while-written", "several-processes", "killed-at-random"),
    "Promises": ("damage-missing", "evicted-between", "one-missing", "inodes", "full-disk", "enospc-write",
                 "eio-write", "eio-open", "eio-read", "short-read"),
    "Forgets": ("restart", "killed"),
    "Unbounded": ("quota",),
    "CountsAnew": ("restart-bound",),
    "Flat": ("flat-directory",),
    "Unread": ("small-memory",),
    "NoMemory": ("no-memory",),
    "OneBuffer": ("long-requests",),
    "Stale": ("linearizable",),
    "Waits": ("locks",),
    "Leaks": ("leaks",),
    "SharedMemory": ("shared-memory",),
    "OneLock": ("unfinished-store",),
    "MixesJobs": ("jobs",),
    "KeyByKey": ("lookup",),
    "OneByOne": ("depth",),
    "Boasts": ("honest-bytes",),
    "Buffered": ("page-cache",),
}  # fmt: skip
SAME_AS = {"short-write": "enospc-write", "eio-fsync": "eio-open"}  # one function, another fault


@pytest.fixture(autouse=True)
def _targets_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT / 'tests'}")


def run(name: str, ids: tuple[str, ...], **options: float) -> dict[str, Verdict]:
    report = run_checks(f"check_targets:{name}", checks_named(ids), is_quick=True, **options)
    return {result.check.id: result.verdict for result in report.results}


def test_every_check_has_a_planted_fault() -> None:
    planted = {one for ids in PLANTED.values() for one in ids} | set(SAME_AS)
    assert planted == {check.id for check in CHECKS}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name: str) -> None:
    found = run(name, PLANTED[name], call_s=3.0)
    needs = {check.id: set(check.needs) & {"root", "faultfs", "loop", "cgroup"} for check in CHECKS}
    for one, verdict in found.items():
        wanted = "fail" if needs[one] <= machine_has() else "cannot tell"
        assert verdict.outcome == wanted, f"{one}: {verdict}"
        assert verdict.evidence


def test_a_store_without_faults_passes() -> None:
    found = run("Right", ())
    missing = {"faultfs", "loop"} - machine_has()
    for one, verdict in found.items():
        assert verdict.outcome == "pass" or missing or one == "eio-fsync", f"{one}: {verdict}"
        assert verdict.outcome != "fail", f"{one}: {verdict}"
