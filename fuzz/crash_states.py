"""Crash states: what a loss of power may leave of a tier's writes, at every boundary, opened and compared.

`tests/crash_states.py` says which states there are and what must hold in each; the suite checks a few hundred.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import _paths
from _bench import environment, write_result
from crash_states import check_states
from oracle import WrongStoreError


def main() -> int:
    """Check as many states as asked for, and report."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--states", type=int, default=20_000, help="how many different ones")
    made.add_argument("--seed", type=int, default=1, help="of the operations and of what is torn")
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    made.add_argument("-o", "--out", type=Path, default=None, help="write the result as JSON to this file")
    args = made.parse_args()
    print(f"seed {args.seed}", file=sys.stderr)
    began = time.monotonic()
    try:
        counts = check_states(args.states, args.seed)
    except WrongStoreError as error:
        again = f"python fuzz/crash_states.py --states {args.states} --seed {args.seed}"
        print(f"{error}\nagain: {again}", file=sys.stderr)
        return 1
    payload = {
        "label": "simulated",
        "environment": environment(_paths.ROOT),
        "seed": args.seed,
        "duration_s": round(time.monotonic() - began, 1),
        "states": counts.states,
        "states_of_a_volatile_cache": counts.volatile_states,
        "write_boundaries": counts.boundaries,
        "corrupt_groups_found_out": counts.corrupt_groups,
        "verified_bytes": counts.verified_bytes,
        "wrong_bytes": 0,
        "acknowledged_values_lost_with_a_safe_cache": 0,
    }
    write_result("crash_states", payload, args.out)
    print(json.dumps(payload, indent=1, default=str) if args.json else told(payload))
    return 0


def told(payload: dict[str, object]) -> str:
    """Return the figures in short."""
    return f"{payload['states']} states at {payload['write_boundaries']} boundaries: every one is right"


if __name__ == "__main__":
    raise SystemExit(main())
