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
                 "eio-read"),
    "Litters": ("orphans",),
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
SAME = {
    "short-write",
    "eio-write",
    "short-read",
    "eio-open",
    "eio-fsync",
}  # as these two, of another operation or error
SLOW = SAME | {
    "lookup",
    "several-processes",
    "no-memory",
    "killed-at-random",
}  # or one of time: tried with kvtide's own


@pytest.fixture(autouse=True)
def _targets_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT / 'tests'}")


def run(name: str, ids: tuple[str, ...], **options: float) -> dict[str, Verdict]:
    report = run_checks(f"check_targets:{name}", checks_named(ids), is_quick=True, **options)
    return {result.check.id: result.verdict for result in report.results}


def test_every_check_has_a_planted_fault() -> None:
    planted = {one for ids in PLANTED.values() for one in ids} | SAME
    assert planted == {check.id for check in CHECKS}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name: str) -> None:
    found = run(name, PLANTED[name], call_s=3.0)
    needs = {check.id: set(check.needs) & {"faultfs", "loop"} for check in CHECKS}
    for one, verdict in found.items():
        wanted = "fail" if needs[one] <= machine_has() else "cannot tell"
        assert verdict.outcome == wanted, f"{one}: {verdict}"
        assert verdict.evidence


def test_a_store_without_faults_passes() -> None:
    found = run("Right", tuple(check.id for check in CHECKS if check.id not in SLOW))
    missing = {"faultfs", "loop"} - machine_has()
    for one, verdict in found.items():
        assert verdict.outcome == "pass" or (missing and verdict.outcome == "cannot tell"), f"{one}: {verdict}"


def row(what: str, version: int, begun: int, ended: int) -> Row:
    return (what, 0, version, begun, ended)


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        ([row("put", 1, 0, 10), row("get", 1, 5, 6)], ""),
        ([row("put", 1, 0, 10), row("get", MISS, 20, 30), row("get", 1, 40, 50)], ""),
        ([row("put", 1, 10, 20), row("get", 1, 0, 5)], "before it was written"),
        ([row("get", 7, 0, 5)], "never written"),
        ([row("put", 1, 0, 10), row("get", WRONG, 20, 30)], "wrong bytes"),
        ([row("put", 1, 0, 10), row("put", 2, 20, 30), row("get", 1, 40, 50)], "taken its place"),
        ([row("put", 1, 0, 10), row("put", 2, 20, 60), row("get", 1, 40, 50)], ""),
        ([row("put", 1, 0, 10), row("drop", 9, 20, 30), row("get", 1, 40, 50)], "taken its place"),
        ([row("put", 1, 0, 10), row("drop", 9, 20, 60), row("get", 1, 40, 50)], ""),
        (
            [
                *(row("put", 1, 0, 10), row("put", 2, 0, 10)),
                *(row("get", 1, 20, 30), row("get", 2, 40, 50), row("get", 1, 60, 70)),
            ],
            "after that",
        ),
        ([row("put", 1, 0, 10), row("put", 2, 0, 10), row("get", 1, 20, 30), row("get", 1, 60, 70)], ""),
    ],
)
def test_histories(rows: list[Row], wrong: str) -> None:
    found, key = what_breaks(rows, can_overwrite=True)
    assert (wrong in found and key == 0) if wrong else not found


def test_writes_that_leave_what_is_there_say_nothing() -> None:
    rows = [row("put", 1, 0, 10), row("put", 2, 20, 30), row("get", 1, 40, 50)]
    assert what_breaks(rows, can_overwrite=False) == ("", -1)


def test_values_name_what_is_wrong() -> None:
    size = 4096
    good, other, old = value_of(3, 5, size), value_of(4, 5, size), value_of(3, 4, size)
    flipped = good[:2000] + bytes([good[2000] ^ 1]) + good[2001:]
    got = [good, None, other, old, flipped, good[:99], good[:2048] + bytes(2048)]
    wrong = wrong_values(got, [3] * len(got), size, 5)
    assert [one.place for one in wrong] == [2, 3, 4, 5, 6]
    for word, one in zip(["key 4", "version 4", "first at 2000", "99 bytes", "zeros"], wrong, strict=True):
        assert word in one.what
    assert version_of(good, 3, size) == 5
    assert version_of(flipped, 3, size) is None


def test_command(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    ids = ("--only", "whole-prefix", "--only", "damage-torn", "--only", "identity-rope")
    done = kvtide("check", "file", *ids, "--json", "--html", page, "--dir", tmp_path, "--quick")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [one["outcome"] for one in report["checks"]] == ["pass"] * 3
    assert report["traits"]["package"] == "kvtide"
    assert "damage-torn" in page.read_text()
    assert list(tmp_path.iterdir()) == [page]


def test_command_fails_with_evidence() -> None:
    done = kvtide("check", "check_targets:LastChunk", "--only", "whole-prefix", "--quick")
    assert done.returncode == 1
    assert "fail" in done.stdout
    assert "the first token" in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("nothing",), 2, "type one of file, chunks"),
        (("file", "--only", "nothing"), 2, "kvtide check --list"),
        ((), 2, "nothing to check was named"),
        (("file", "--dir", "/nowhere"), 2, "is no directory"),
        (("check_targets:Absent", "--only", "salt"), 1, "has no class Absent"),
        (("absent_module:Store", "--only", "salt"), 1, "does not start"),
    ],
)
def test_command_says_what_to_type(words: tuple[str, ...], code: int, said: str) -> None:
    done = kvtide("check", *words)
    assert done.returncode == code
    assert said in done.stderr


def test_all_of_kvtides_targets_start_and_pass_a_few() -> None:
    for name in ("chunks", "memory", *(["valkey"] if _has_server() else [])):
        report = run_checks(name, checks_named(["whole-prefix", "salt", "evicted-between"]), is_quick=True)
        assert [one.verdict.outcome for one in report.results] == ["pass"] * 3, name


def _has_server() -> bool:
    import importlib.util
    import shutil

    return bool(importlib.util.find_spec("valkey") and (shutil.which("valkey-server") or shutil.which("redis-server")))


def test_page_shows_several_side_by_side_and_escapes() -> None:
    check = Check("one", "<b>", "proves", "how", "LMCache#1", lambda _: Verdict("pass", ""))
    traits = Traits("<i>name", "package", "1.0")
    reports = [Report(f"t{n}", traits, [Result(check, Verdict("fail", "<script>", "1 value"))]) for n in range(2)]
    page = check_page(reports)
    assert "<script>" not in page
    assert "<b>" not in page
    assert page.count("&lt;script&gt;") == 2
    assert page.count('<td class="fail">fail</td>') == 4


def test_ids_are_unique_and_documented() -> None:
    ids = [check.id for check in CHECKS]
    assert len(set(ids)) == len(ids)
    text = (ROOT / "docs/check.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", text.partition("## All checks")[2], re.MULTILINE))
    for check in CHECKS:
        assert rows.pop(check.id, None) == f"{check.proves} | {check.how} | {check.report or '-'}", check.id
    assert not rows
    for name in TARGETS:
        assert f"`{name}`" in text


def test_the_adapter_in_the_documents_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs/check.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    assert code.count("\n") < 60
    (tmp_path / "mystore.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{tmp_path}")
    report = run_checks(
        "mystore:MyStore", checks_named(["restart", "identity-weights", "damage-flipped"]), is_quick=True
    )
    found = {one.check.id: one.verdict for one in report.results}
    assert dataclasses.asdict(report.traits)["name"] == "mystore"
    outcomes = {one: verdict.outcome for one, verdict in found.items()}
    assert outcomes == {"identity-weights": "fail", "damage-flipped": "fail", "restart": "pass"}


def test_ids_run_in_the_order_of_the_registry() -> None:
    assert [check.id for check in checks_named(["restart", "salt"])] == ["salt", "restart"]
