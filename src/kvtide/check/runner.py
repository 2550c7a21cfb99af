"""Runs checks one after another and turns whatever happens into verdicts. Next: the checks, then kvtide.report."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvtide.check import faultfs
from kvtide.check.bench import Bench, Judged
from kvtide.check.contract import Check, Need, Traits, Verdict
from kvtide.check.driver import CALL_S, Trouble
from kvtide.errors import KvtideError, UnsupportedError
from kvtide.probe.mounts import own_mounts

_TRAITS = {
    "bounded": ("is_bounded", "keeps to no bound"),
    "durable": ("is_durable", "keeps nothing when it is closed"),
    "disk": ("is_on_disk", "has no files"),
    "direct": ("can_be_direct", "has no direct I/O"),
    "memory": ("has_memory", "takes no bound of its memory"),
    "shared": ("can_be_shared", "one process at a time may have it open"),
    "threads": ("can_be_threaded", "one thread at a time may call it"),
    "salt": ("has_salt", "knows no salt"),
}
_POWERS = {
    "drops": "cannot be told to forget a value",
    "reports": "says nothing of what it moved and holds",
    "begins": "has no jobs",
    "pools": "keeps every value in one part",
}
_MACHINE = {
    "faultfs": "a FUSE file system is needed that fails on demand: install fuse3 and make /dev/fuse accessible",
    "loop": "root, loop devices and mkfs.ext4 are needed",
}


@dataclass(frozen=True, slots=True)
class Result:
    """One check and what it found."""

    check: Check
    verdict: Verdict


@dataclass(slots=True)
class Report:
    """All checks of one target. `about` says on what machine."""

    target: str
    traits: Traits
    results: list[Result] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)

    @property
    def num_failed(self) -> int:
        """Checks that failed."""
        return sum(one.verdict.outcome == "fail" for one in self.results)


def run_checks(
    target: str,
    checks: Sequence[Check],
    *,
    directory: Path | None = None,
    on_begin: Callable[[Check], object] = lambda _: None,
    on_result: Callable[[Result], object] = lambda _: None,
    call_s: float = CALL_S,
    is_quick: bool = False,
    seed: int = 0,
) -> Report:
    """Check `target` in new directories under `directory`, which are gone afterwards.

    Raises: UnsupportedError if the target cannot be imported; ConfigError if there is none of that name.
    """
    with tempfile.TemporaryDirectory(prefix="kvtide-check-", dir=directory) as root:
        try:
            machine = machine_has()
            if not _has_own_mounts():  # before any child, which sees those of its parent
                machine -= {"loop"}
            bench = Bench(target, Path(root), machine=machine, call_s=call_s, is_quick=is_quick, seed=seed)
        except Trouble as error:
            raise UnsupportedError(f"the target {target} does not start: {error}") from None
        report = Report(target, bench.traits, about=_about(seed))
        try:
            for check in checks:
                on_begin(check)
                report.results.append(Result(check, judge(bench, check)))
                on_result(report.results[-1])
        finally:
            bench.close()
    return report


def judge(bench: Bench, check: Check) -> Verdict:
    """Run one check and return its verdict with the seconds it took."""
    begun = time.perf_counter()
    missing = [why for need in check.needs if (why := _why_not(bench, need))]
    if missing:
        return missing[0]
    try:
        verdict = check.function(bench)
    except Judged as judged:
        verdict = judged.verdict
    except Trouble as trouble:
        verdict = Verdict("fail", f"{type(trouble).__name__}: {trouble}")
    except (KvtideError, OSError, subprocess.SubprocessError) as error:  # of the suite's own doing
        verdict = Verdict("cannot tell", f"{type(error).__name__}: {error}")
    finally:
        bench.end_check()
    return replace(verdict, seconds=time.perf_counter() - begun)


def machine_has() -> frozenset[str]:
    """Return what this machine has of what checks need."""
    found = set()
    if os.geteuid() == 0 and Path("/dev/loop-control").exists() and shutil.which("mkfs.ext4"):
        found.add("loop")
    if not faultfs.unavailable():
        found.add("faultfs")
    return frozenset(found)


def _has_own_mounts() -> bool:
    """Let what is mounted from here on be gone with this process; say whether that may be done."""
    try:
        own_mounts()
    except UnsupportedError:
        return False
    return True


def _why_not(bench: Bench, need: Need) -> Verdict | None:
    if need in _TRAITS and not getattr(bench.traits, _TRAITS[need][0]):
        return Verdict("not applicable", f"the target {_TRAITS[need][1]}")
    if need in _POWERS and need not in bench.powers:
        return Verdict("not applicable", f"the target {_POWERS[need]}")
    if need in _MACHINE and need not in bench.machine:
        return Verdict("cannot tell", _MACHINE[need])
    return None


def _about(seed: int) -> dict[str, str]:
    return {"kernel": platform.release(), "python": platform.python_version(), "seed": str(seed)}
