"""Deliberate defects in kvtide's own tiers: each must be caught by a few tests. `make test-mutants` runs all of them.

A defect is a piece of source and what it becomes, made in a copy of the tree. Where the piece is not there once, or
where all its tests pass, this exits with 1: the table is out of date, or a test is missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _mutants import MUTANTS, Mutant
from _paths import ROOT

TIMEOUT_S = 300  # a defect may hang a test: that is caught, too


def main() -> int:
    """Try every defect, or those named, and say which were caught."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("names", nargs="*", help="only these; all if none")
    made.add_argument("--jobs", type=int, default=2, help="how many at once")
    args = made.parse_args()
    known = {mutant.name: mutant for mutant in MUTANTS}
    unknown = sorted(set(args.names) - set(known))
    if unknown:
        print(f"no such defect: {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    chosen = [known[name] for name in args.names] or list(MUTANTS)
    stale = [mutant.name for mutant in chosen if mutant.text().count(mutant.old) != 1]
    for name in stale:
        print(f"out of date  {name}: its old text is not once in {known[name].file}")
    began, verdicts = time.monotonic(), dict[str, str]()
    with (
        tempfile.TemporaryDirectory(prefix="kvtide-mutants-", ignore_cleanup_errors=True) as folder,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        tree, fresh = Path(folder) / "tree", [mutant for mutant in chosen if mutant.name not in stale]
        copy_tree(ROOT, tree)  # which may change meanwhile
        for mutant, verdict in zip(fresh, pool.map(lambda one: attempt(one, tree), fresh), strict=True):
            verdicts[mutant.name] = verdict
            print(f"{verdict:<12} {mutant.name}: {mutant.what}", flush=True)
    num_caught = sum(verdict == "caught" for verdict in verdicts.values())
    print(f"{num_caught} of {len(chosen)} caught in {time.monotonic() - began:.0f} s")
    return int(num_caught < len(chosen))


def copy_tree(source: Path, target: Path) -> None:
    """Copy what tests need."""
    for name in ("src", "tests", "fuzz", "benchmarks"):
        shutil.copytree(source / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(source / "pyproject.toml", target)


def attempt(mutant: Mutant, tree: Path) -> str:
    """Return what the tests say of a copy of the tree with this defect: caught, survived, or that none ran."""
    home = tree.with_name(mutant.name)
    copy_tree(tree, home)
    file = home / mutant.file
    file.write_text(file.read_text().replace(mutant.old, mutant.new))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--basetemp", str(home / "scratch"), *mutant.tests]
    environment = os.environ | {"PYTHONPATH": str(home / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=home, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "caught"
    finally:
        shutil.rmtree(home, ignore_errors=True)
    if done.returncode == 1:
        return "caught"
    if done.returncode == 0:
        return "survived"
    print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return "no tests"


if __name__ == "__main__":
    raise SystemExit(main())
