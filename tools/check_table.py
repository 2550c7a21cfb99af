"""What `kvtide check` says of the disk tiers of other projects, each in the environment it is installed in.

`run TARGET FILE` checks one target with this interpreter and writes FILE after every check. `table FILE...` joins such
files into benchmarks/results/check.json and docs/check_table.md. `faults PROJECT` runs the scripts of
benchmarks/faults that use that project alone and prints which of its faults are still there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULT, PAGE, FAULTS = (
    ROOT / name for name in ("benchmarks/results/check.json", "docs/check_table.md", "benchmarks/faults")
)
SIGNS = {"pass": "pass", "fail": "**fail**", "not applicable": "n/a", "cannot tell": "?"}
INTRO = """# What the checks say of each target

Written by `make check-peers`: `kvtide check` of kvtide's tiers and of every other target that installs where it ran,
each with its own configuration objects and keys, unmodified, faults injected from outside. What a check does:
docs/check.md. Verdicts: pass, fail, n/a (the target has nothing of the kind, or is never told of what differs),
? (cannot tell).

As they are configured here, none of the other projects' targets promises to checksum values, to sync them to the drive
or to put the build of the engine into keys: a fail says what users see, and not that a promise is broken. A failure is
confirmed by the script named beside it, which uses only that project and exits with 1 while the fault is there.
"""


def run(name: str, out: Path, *, is_quick: bool, deadline: float) -> None:
    """Check one target and write what was found after each check."""
    from kvtide.check.names import load_target
    from kvtide.check.registry import CHECKS
    from kvtide.check.runner import Report, Result, run_checks
    from kvtide.errors import UnsupportedError

    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        traits, rows = load_target(name).traits, list[dict[str, Any]]()
    except ImportError as problem:
        out.write_text(json.dumps({"target": name, "problem": str(problem)}, indent=1) + "\n")
        return
    about = {"package": traits.package, "version": traits.version, "note": traits.note, "is_quick": is_quick}

    def note(result: Result) -> None:
        verdict = result.verdict
        said = {"outcome": verdict.outcome, "evidence": verdict.evidence, "smallest": verdict.smallest}
        rows.append(
            {"id": result.check.id, "report": result.check.report, **said, "seconds": round(verdict.seconds, 1)}
        )
        out.write_text(json.dumps({"target": name, **about, "checks": rows}, indent=1) + "\n")
        print(f"{name} {result.check.id}: {verdict.outcome}: {verdict.evidence}", file=sys.stderr, flush=True)

    try:
        report: Report = run_checks(name, CHECKS, on_result=note, call_s=deadline, is_quick=is_quick)
    except UnsupportedError as problem:
        out.write_text(json.dumps({"target": name, "problem": str(problem)}, indent=1) + "\n")
        return
    date = datetime.now(UTC).isoformat(timespec="seconds")
    whole = {"target": name, **about, "about": report.about, "date": date, "checks": rows}
    out.write_text(json.dumps(whole, indent=1) + "\n")


def table(files: list[Path]) -> None:
    """Join what `run` wrote."""
    found = {one["target"]: one for path in files for one in [json.loads(path.read_text())]}
    if RESULT.exists():
        found = {one["target"]: one for one in json.loads(RESULT.read_text())["targets"]} | found
    targets = sorted(found.values(), key=lambda one: str(one["target"]))
    RESULT.write_text(json.dumps({"benchmark": "check", "targets": targets}, indent=1) + "\n")
    PAGE.write_text(page([one for one in targets if "checks" in one], [one for one in targets if "problem" in one]))


def page(targets: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
    """Return the document."""
    verdicts = {(one["target"], row["id"]): row for one in targets for row in one["checks"]}
    ids = list(dict.fromkeys(row["id"] for one in targets for row in one["checks"]))
    names = [str(one["target"]) for one in targets]
    lines = [INTRO, "| target | version | driven | checks |", "|---|---|---|---|"]
    for one in targets:
        about, driven = one.get("about", {}), f"{one.get('package', '')} {one.get('version', '?')}"
        shown = (
            f"{len(one['checks'])}{', fewer repeats' if one.get('is_quick') else ''}, kernel {about.get('kernel', '?')}"
        )
        lines.append(f"| `{one['target']}` | {driven} | {one.get('note', '')} | {shown} |")
    lines += [f"\n`{one['target']}` did not start: {one['problem']}" for one in others]
    lines += ["\n## Verdicts\n", f"| check | {' | '.join(names)} | public report |", "|---" * (len(names) + 2) + "|"]
    for check in ids:
        rows = [verdicts.get((name, check)) for name in names]
        report = next(row["report"] for row in rows if row)
        cells = " | ".join(SIGNS[row["outcome"]] if row else "-" for row in rows)
        lines.append(f"| `{check}` | {cells} | {report} |")
    lines += ["\n## Failures\n", "| target | check | found | smallest | confirmed by |", "|---|---|---|---|---|"]
    scripts = confirming()
    for one in targets:
        for row in one["checks"]:
            if row["outcome"] == "fail":
                script = scripts.get((str(one["target"]), row["id"]), "")
                by = f"`benchmarks/faults/{script}`" if script else "not confirmed"
                cells = (f"`{one['target']}`", f"`{row['id']}`", row["evidence"], row["smallest"], by)
                lines.append(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def confirming() -> dict[tuple[str, str], str]:
    """Return for a target and a check the script that says in its `Confirms:` line that it shows the fault."""
    found = {}
    for path in sorted(FAULTS.glob("*.py")):
        for line in path.read_text().splitlines():
            if line.startswith("Confirms: "):
                target, _, checks = line.removeprefix("Confirms: ").partition(" ")
                found |= {(target, check.strip(" ,.")): path.name for check in checks.split(",")}
    return found


def faults(project: str) -> int:
    """Run the scripts of one project; return how many could not tell."""
    unclear = 0
    for path in sorted(FAULTS.glob(f"{project}_*.py")):
        done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False, timeout=600)
        said = {0: "fault absent", 1: "fault PRESENT"}.get(done.returncode, "cannot tell")
        unclear += done.returncode not in {0, 1}
        print(f"{path.name}: {said}\n{done.stdout if done.returncode in {0, 1} else done.stderr[-2000:]}")
    return unclear


def main() -> int:
    """Do what the first word says."""
    parser = argparse.ArgumentParser(description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    one = actions.add_parser("run")
    one.add_argument("target")
    one.add_argument("out", type=Path)
    one.add_argument("--quick", action="store_true", help="fewer repeats")
    one.add_argument("--start", type=float, default=180.0, help="seconds an engine may take to be imported")
    one.add_argument("--deadline", type=float, default=30.0, help="seconds after which a call hangs")
    actions.add_parser("table").add_argument("files", type=Path, nargs="*")
    actions.add_parser("faults").add_argument("project")
    asked = parser.parse_args()
    if asked.action == "run":
        from kvtide.check import driver

        driver.START_S = asked.start
        run(asked.target, asked.out, is_quick=asked.quick, deadline=asked.deadline)
    elif asked.action == "table":
        table(asked.files)
    else:
        return faults(asked.project)
    return 0


if __name__ == "__main__":
    sys.exit(main())
