"""Soak: owners of one store do everything in random order, fail, are paused and killed, and every byte is compared.

`make soak` runs it for an hour. `--kills N` instead kills owners of file tiers and chunk stores N times, each after a
random time, and checks after each that what was acknowledged is there. Seeds are printed; a failure says how to begin
with the same ones.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _paths  # noqa: F401 - first, for what comes from tests and benchmarks
from _bench import environment, write_result
from _workers import ROLES, Herd, Worker, small_filesystem
from kvtide.errors import KvtideError
from kvtide.tiers.inspect import find_namespaces
from kvtide.tiers.verify import verify_namespace

LIFE_S, KILL_LIFE_S = 20.0, 0.25
POLL_S = 0.002
SHARED_MEMORY = Path("/dev") / "shm"
GROWTH_BYTES_MAX = 512  # of one opening: an object that stays behind with each would be more
GROWTH_FLOOR_BYTES = 8 << 20  # of all openings: less is the allocator's


def main() -> int:
    """Run and report."""
    args = parse()
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {args.seed}", file=sys.stderr, flush=True)
    payload = soak(args)
    write_result("kills" if args.kills else "soak", payload, args.out)
    print(json.dumps(payload, indent=1, default=str) if args.json else told(payload))
    return 1 if payload["failures"] or payload["leaks"]["found"] else 0


def parse() -> argparse.Namespace:
    """Return what was typed."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--minutes", type=float, default=60.0, help="how long")
    made.add_argument("--kills", type=int, default=0, help="only kill owners, this many times, however long it takes")
    made.add_argument("--seed", type=int, default=None, help="of everything drawn at random; drawn itself if not given")
    made.add_argument("--only", type=int, default=None, help="run only the worker of this number")
    made.add_argument("--dir", type=Path, default=Path(".kvtide/soak"), help="where the store lies; emptied")
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    made.add_argument("-o", "--out", type=Path, default=None, help="write the result as JSON to this file")
    return made.parse_args()


def soak(args: argparse.Namespace) -> dict[str, Any]:
    """Run the workers and return the whole result."""
    folder = args.dir.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tmp").mkdir(parents=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")  # what is left there is a leak
    with small_filesystem(folder) as small:
        workers = workers_of(args, folder, small)
        rng = random.Random(args.seed)
        only_kills = bool(args.kills)
        herd = Herd(workers, rng, only_kills=only_kills, life_s_max=KILL_LIFE_S if only_kills else LIFE_S)
        began, num_fds = time.monotonic(), num_open_files()
        try:
            watch(herd, args, began)
        finally:
            herd.end()
        found = leaks(folder, workers, num_open_files() - num_fds)
        verified = verify(workers)
        payload = result(args, herd, time.monotonic() - began) | {"leaks": found, "verified_at_the_end": verified}
    if not payload["failures"] and not found["found"]:
        shutil.rmtree(folder, ignore_errors=True)
    return payload


def workers_of(args: argparse.Namespace, folder: Path, small: Path | None) -> list[Worker]:
    """Return the workers; all but the one on the small file system share one store directory of each kind."""
    roles = ("kills", "chunks", "kills", "chunks") if args.kills else ROLES
    workers = []
    for number, role in enumerate(roles):
        if role == "full" and small is None:
            continue
        root = small / "store" if role == "full" and small is not None else folder / f"{role}-{number}"
        ballast = small / "ballast" if role == "full" and small is not None else None
        if args.only in {None, number}:
            workers.append(Worker(number, role, root, args.seed, folder, ballast))
    return workers


def watch(herd: Herd, args: argparse.Namespace, began: float) -> None:
    """Keep workers going until the time is over, the kills are done, or something is wrong."""
    stop_at = began + 60 * args.minutes
    told_at = began
    while not herd.toll.failures:
        now = time.monotonic()
        is_over = herd.toll.signals.get("SIGKILL", 0) >= args.kills if args.kills else now >= stop_at
        if is_over:
            return
        for worker in herd.workers:
            if worker.pid:
                herd.look(worker)
            elif worker.role != "opening" or not worker.life:
                herd.start(worker, stop_at)
        if now - told_at > 60:
            told_at = now
            print(f"{(now - began) / 60:.0f} min: {herd.toll.signals}, {total(herd, 'operations')} operations, "
                  f"{total(herd, 'verified_bytes') >> 20} MiB compared", file=sys.stderr, flush=True)  # fmt: skip
        time.sleep(POLL_S)


def num_open_files() -> int:
    """Return the descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def total(herd: Herd, name: str) -> int:
    """Return what all workers counted."""
    return sum(worker.ledger.count(name) for worker in herd.workers)


def result(args: argparse.Namespace, herd: Herd, duration_s: float) -> dict[str, Any]:
    """Return the figures, and of each failure how to begin with the same seed."""
    toll = herd.toll
    if toll.failures:
        number = toll.failures[0].split()[1]
        again = f"--kills {args.kills}" if args.kills else f"--minutes {args.minutes:g}"
        print(f"failed; again: python fuzz/soak.py --seed {args.seed} {again} --only {number}", file=sys.stderr)
        print("\n".join(toll.failures), file=sys.stderr)
    return {
        "label": "measured",
        "environment": environment(args.dir),
        "seed": args.seed,
        "duration_s": round(duration_s, 1),
        "workers": [f"{worker.number} {worker.role}" for worker in herd.workers],
        "lives": toll.num_lives,
        "kills": toll.signals.get("SIGKILL", 0),
        "killed_while_opening": int(toll.num_early),
        "signals": toll.signals,
        "stops": toll.num_stops,
        "operations": total(herd, "operations"),
        "faults_injected": total(herd, "faults"),
        "refused_writes": total(herd, "refused"),
        "verified_bytes": total(herd, "verified_bytes"),
        "reopened": total(herd, "reopened"),
        "checks_of_everything": total(herd, "checks"),
        "forks": total(herd, "forks"),
        "openings_in_one_process": 2 * total(herd, "cycles"),
        "failures": toll.failures,
    }


def leaks(folder: Path, workers: list[Worker], num_fds: int) -> dict[str, Any]:
    """Return what was left behind: memory, descriptors, threads, shared memory, temporary files, locks."""
    roots = [worker.root for worker in workers if worker.root.exists()]
    found: dict[str, Any] = {
        "parent_descriptors": num_fds,
        "temporary_files": sorted(path.name for path in (folder / "tmp").iterdir()),
        "shared_memory": sorted(path.name for path in SHARED_MEMORY.glob("*kvtide*")),
        "locks": sorted(str(path) for root in roots for path in root.rglob("owner.lock") if is_locked(path)),
        "partial_files": sorted(str(path) for root in roots for path in root.rglob("*.partial")),
    }
    samples = folder / "samples.json"
    if samples.exists():
        found |= slope(json.loads(samples.read_text()))
    names = ("parent_descriptors", "temporary_files", "shared_memory", "locks", "descriptors", "threads", "is_growing")
    found["found"] = [name for name in names if found.get(name)]
    return found


def slope(samples: list[list[int]]) -> dict[str, Any]:
    """Return how memory, descriptors and threads of the worker that only opens changed, after the first fifth."""
    late = samples[len(samples) // 5 :]
    if len(late) < 8:
        return {"samples": len(samples)}
    quarter = len(late) // 4
    first, last = late[:quarter], late[-quarter:]
    grown = statistics.median(row[1] for row in last) - statistics.median(row[1] for row in first)
    openings = 6 * (last[0][0] - first[0][0])  # a cycle opens three things, and each of them once more now and then
    return {
        "samples": len(samples),
        "resident_bytes": [samples[0][1], first[0][1], last[-1][1]],
        "grown_bytes_per_opening": round(grown / max(1, openings), 1),
        "is_growing": grown > max(GROWTH_FLOOR_BYTES, GROWTH_BYTES_MAX * openings),
        "descriptors": last[-1][2] - first[0][2],
        "threads": last[-1][3] - first[0][3],
    }


def is_locked(path: Path) -> bool:
    """Say whether somebody still owns a namespace."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def verify(workers: list[Worker]) -> dict[str, int]:
    """Read every group of every namespace as `kvtide store verify` does. What was cut off by a kill may be corrupt."""
    counts = {"namespaces": 0, "groups": 0, "corrupt": 0, "read_bytes": 0, "problems": 0}
    for worker in workers:
        roots = {path.parent.parent for path in worker.root.rglob("data.kvt")}
        for root in sorted(roots):
            try:
                reports = [verify_namespace(path) for path in find_namespaces(root)]
            except KvtideError as error:
                print(error, file=sys.stderr)
                counts["problems"] += 1
                continue
            counts["namespaces"] += len(reports)
            counts["groups"] += sum(report.num_groups for report in reports)
            counts["corrupt"] += sum(report.num_corrupt for report in reports)
            counts["read_bytes"] += sum(report.read_bytes for report in reports)
            counts["problems"] += sum(bool(report.problem) for report in reports)
    return counts


def told(payload: dict[str, Any]) -> str:
    """Return the figures in short."""
    return (
        f"{payload['duration_s']:.0f} s, seed {payload['seed']}: {payload['operations']} operations in "
        f"{payload['lives']} lives, {payload['kills']} kills, {payload['faults_injected']} faults, "
        f"{payload['verified_bytes'] >> 20} MiB compared, {payload['checks_of_everything']} checks of everything; "
        f"{len(payload['failures'])} failures, leaks: {', '.join(payload['leaks']['found']) or 'none'}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
