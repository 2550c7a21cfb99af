"""How many events a second does measuring a trace take, and how much memory? Reading the file is not counted.

Baseline, on the same rows: what one writes first with polars, exact percentiles and sums by cause and direction of the
whole table. It needs all rows at once, and knows neither depth nor busy time nor runs; ours takes piece after piece.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from _bench import RESULTS, environment, parser, summary, warnings_of, write_result
from kvtide.trace.events import READ, WRITE, shaped
from kvtide.trace.file import About
from kvtide.trace.indicators import Meter

if TYPE_CHECKING:
    import polars as pl

PIECE_ROWS = 1 << 20
NUM_EVENTS = 10_000_000
GAP_NS, LATENCY_LOG_MEAN, LATENCY_LOG_SIGMA = 1000, 11.0, 0.4  # a million events a second, 60 us median
CAUSES_USED = ("decode-read", "restore", "demote")
QUANTILES = (0.5, 0.9, 0.99, 0.999)


def main() -> None:
    """Measure the same rows both ways in turn, and print a table or JSON."""
    args = parser(__doc__ or "").parse_args()
    num_events = 100_000 if args.smoke else NUM_EVENTS
    repeats = 2 if args.smoke else max(args.repeats, 1)
    samples: dict[str, list[float]] = {"Meter": [], "polars group_by": []}
    num_baseline = min(num_events, PIECE_ROWS)
    peak_bytes = 0
    for _ in range(repeats):
        samples["Meter"].append(num_events / measure_pieces(num_events, args.seed))
        if not peak_bytes:  # before the baseline adds to it
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        samples["polars group_by"].append(num_baseline / measure_plainly(num_baseline, args.seed))
    payload = {
        "question": "how many events a second can be measured?",
        "environment": environment(Path()),
        "state": "warm: rows are made in memory, no file is read",
        "seed": args.seed,
        "repeats": repeats,
        "num_events": num_events,
        "peak_bytes": peak_bytes,
        "cases": {
            name: {"label": "measured", "events_per_s": summary(values), "samples": values}
            for name, values in samples.items()
        },
        "warnings": [line for name, values in samples.items() for line in warnings_of(name, values)],
    }
    if args.json:
        write_result("trace_indicators", payload, Path("/dev/stdout"))
    else:
        show(payload)
    write_result("trace_indicators", payload, args.out or (None if args.smoke else RESULTS / "trace_indicators.json"))


def make_piece(number: int, num_rows: int, seed: int) -> pl.DataFrame:
    """Return block commands as a busy drive makes them: three causes, three sizes, one write in ten."""
    import polars as pl

    rng = np.random.default_rng([seed, number])
    time_ns = number * PIECE_ROWS * GAP_NS + np.cumsum(rng.exponential(GAP_NS, num_rows)).astype(np.int64)
    took_ns = rng.lognormal(LATENCY_LOG_MEAN, LATENCY_LOG_SIGMA, num_rows).astype(np.int64)
    frame = pl.DataFrame({
        "time_ns": time_ns,
        "complete_ns": time_ns + took_ns,
        "queue_ns": time_ns - 500,
        "device": np.full(num_rows, 259 << 20),
        "offset": rng.integers(0, 1 << 28, num_rows) * 4096,
        "length": rng.choice([4096, 8192, 131072], num_rows),
        "flags": rng.choice([READ, WRITE], num_rows, p=[0.9, 0.1]),
        "cause": pl.Series(CAUSES_USED)[rng.integers(0, len(CAUSES_USED), num_rows)],
    })  # fmt: skip
    return shaped("block", frame)


def measure_pieces(num_events: int, seed: int) -> float:
    """Return the seconds that our meter takes for all events, piece after piece."""
    meter, took_s = Meter(About()), 0.0
    for number, start in enumerate(range(0, num_events, PIECE_ROWS)):
        piece = make_piece(number, min(PIECE_ROWS, num_events - start), seed)
        begin = time.perf_counter()
        meter.add("block", piece)
        took_s += time.perf_counter() - begin
    begin = time.perf_counter()
    figures = meter.result()
    took_s += time.perf_counter() - begin
    assert figures.whole.read.num_ops + figures.whole.write.num_ops == num_events, "every event is counted"
    return took_s


def measure_plainly(num_events: int, seed: int) -> float:
    """Return the seconds that polars takes for sums and exact percentiles by cause and direction."""
    import polars as pl

    piece = make_piece(0, num_events, seed)
    took = pl.col("complete_ns") - pl.col("time_ns")
    begin = time.perf_counter()
    piece.group_by("cause", "flags").agg(
        pl.len(), pl.col("length").sum(), pl.col("length").value_counts().alias("sizes"), *[
            took.quantile(share).alias(f"p{share}") for share in QUANTILES
        ]
    )  # fmt: skip
    return time.perf_counter() - begin


def show(payload: dict[str, Any]) -> None:
    """Print the cases as a table."""
    print(f"measured: {payload['num_events']:,} block commands, {payload['repeats']} repeats")
    for name, case in payload["cases"].items():
        rate = case["events_per_s"]
        print(f"{name:20}{rate['median'] / 1e6:10.2f} M events/s{rate['spread']:8.0%} spread")
    print(f"peak memory of the process with Meter alone: {payload['peak_bytes'] / (1 << 20):,.0f} MiB")
    for line in payload["warnings"]:
        print(f"warning: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
