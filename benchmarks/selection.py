"""How well does selected attention do, and what does it read: all methods, floors and oracles on the embedded model.

In parts, as `kvtide bench select` runs each: many texts for one question at short contexts, where a text costs little;
few for the other questions; attention mass alone at long ones. --seeds-max bounds the texts of each part. --methods
runs some methods alone, and --update takes the rows of all others from a result that is there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from _bench import environment, parser, summary, write_result
from _model import add_dtype, run_on_model, versions
from kvtide.integrations.transformers import LoadedModel
from kvtide.integrations.transformers.comparing import CompareOptions, Comparison
from kvtide.report.select import SelectReport, print_select, select_json
from kvtide.select.compared import default_methods

K = 1024
BUDGETS = [64, 128, 256, 512, 1024]
ASKED = [name for name in default_methods() if name not in {"random", "oracle-head"}]  # of many texts, to save time
PARTS = (
    CompareOptions(ASKED, [K], [64, 256], ["needles"], num_seeds=30),
    CompareOptions([], [K, 2 * K], BUDGETS, ["mass"], num_seeds=1),
    CompareOptions(ASKED, [2 * K], [64, 256], ["needles", "passkey", "variables", "perplexity"], num_seeds=5),
    CompareOptions([], [4 * K, 8 * K], BUDGETS, ["mass"], num_seeds=1),
)
SMOKE = (CompareOptions(["full", "lowrank"], [256], [64], ["passkey", "mass"], num_seeds=1),)


def main() -> int:
    """Measure and report."""
    made = parser(__doc__ or "")
    made.set_defaults(repeats=1, seed=0)
    made.add_argument("--seeds-max", type=int, default=30, help="most texts of a part")
    made.add_argument("--methods", type=lambda text: text.split(","), default=[], help="run these alone")
    made.add_argument("--update", type=Path, help="a result that keeps its rows of all other methods")
    add_dtype(made)
    return run_on_model("selection", made.parse_args(), measure, show)


def measure(args: argparse.Namespace, loaded: LoadedModel) -> dict[str, Any]:
    """Run all parts; one that is interrupted ends the run, and what there is is kept and labelled."""
    report = SelectReport(loaded.name, loaded.dtype.value)
    parts: list[dict[str, Any]] = []
    for part in SMOKE if args.smoke else PARTS:
        methods = [name for name in part.methods or default_methods() if name in (args.methods or [name])]
        if not methods:
            continue
        seeds = min(part.num_seeds, args.seeds_max)
        options = replace(part, methods=methods, num_seeds=seeds, seed=args.seed)
        started = time.perf_counter()
        report.is_partial = _run(loaded, options, report)
        parts.append(asdict(options) | {"seconds": summary([time.perf_counter() - started])})
        report.about = {
            "question": "what does selected attention lose against all of it, and what does it read?",
            "environment": environment(args.dir),
            **versions(),
            "seed": args.seed,
            "repeats": args.repeats,
            "smoke": args.smoke,
            "parts": parts,
        }
        if report.is_partial:
            break
        if args.out:  # what is done is kept, whatever becomes of the next part
            write_result("selection", {"benchmark": "selection", **select_json(report)}, args.out)
    if not args.json:
        print_select(report, Console(highlight=False, width=190))
    return updated({"benchmark": "selection", **select_json(report)}, args.update)


def updated(payload: dict[str, Any], former: Path | None) -> dict[str, Any]:
    """Return `payload` with the rows that `former` has of methods not run here, and its parts before these."""
    if former is None:
        return payload
    found = json.loads(former.read_text())
    ran = {name for part in payload["parts"] for name in part["methods"]}
    for rows in ("answers", "mass"):
        payload[rows] = [row for row in found[rows] if row["method"] not in ran] + payload[rows]
    return payload | {"parts": found["parts"] + payload["parts"], "environment_of_others": found["environment"]}


def show(payload: dict[str, Any]) -> None:
    """Print how long it took; the tables are printed."""
    for part in payload["parts"]:
        print(f"{', '.join(part['tasks'])} at {part['contexts']}: {part['seconds']['median']:.0f} s")


def _run(loaded: LoadedModel, options: CompareOptions, report: SelectReport) -> bool:
    """Run one part and take in what it found; say whether it was interrupted."""
    console = Console(stderr=True)
    columns = (BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task, last = bar.add_task("", total=None), ""

        def told(done: int, total: int, what: str) -> None:
            nonlocal last
            bar.update(task, completed=done, total=total, description=what)
            if not console.is_terminal and what != last:
                console.print(f"{done} of {total}: {what}")
            last = what

        comparison = Comparison(
            loaded,
            options,
            on_progress=told,
        )
        try:
            comparison.run()
        except KeyboardInterrupt:
            return True
        finally:
            report.answers += comparison.found.answers
            report.replays += comparison.found.replays
    return False


if __name__ == "__main__":
    sys.exit(main())
