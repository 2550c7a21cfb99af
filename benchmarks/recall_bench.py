"""What does each vector store write for a row and read for a query? The tables of docs/recall_bench.md, all at once.

Five tables: rows that come one by one at 1,000 a second; the same with every row durable; a memory that lasts long
enough to merge; stores that take long, on fewer rows; and large graphs, which are read from the device. The plain
baseline is the bytes of the vectors: 1.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from _bench import environment, parser, summary, write_result
from kvtide.errors import UnsupportedError
from kvtide.report.recall import RecallReport, recall_json
from kvtide.stores.bench import BenchOptions, measure
from kvtide.stores.crash import crash
from kvtide.stores.device import why_not
from kvtide.stores.engines.names import ENGINES, is_installed

GIB = 1 << 30
MANY = ("kvtide", "rocksdb", "sqlite", "sqlite-vec", "usearch", "hnswlib", "faiss", "lancedb-256", "diskann")


@dataclass(frozen=True, slots=True)
class Table:
    """One table: its name, its engines, and how they are measured."""

    name: str
    engines: tuple[str, ...]
    options: BenchOptions


TABLES = (
    Table("one by one", MANY, BenchOptions(rate=1000, queries=30, disk_bytes=2 * GIB, kills=1, cuts_s=(0.0, 9.0))),
    Table("durable", ("kvtide", "rocksdb", "sqlite", "sqlite-vec"), BenchOptions(is_durable=True, disk_bytes=2 * GIB)),
    Table(
        "merged",
        ("kvtide",),
        BenchOptions(rows=160_000, rate=1000, queries=30, disk_bytes=2 * GIB, kills=0, cuts_s=()),
    ),
    Table(
        "slow",
        ("lancedb", "milvus-lite"),
        BenchOptions(rows=2000, rate=1000, queries=30, disk_bytes=2 * GIB, kills=1, cuts_s=(0.0, 9.0)),
    ),
    Table(
        "graphs",
        ("usearch", "diskann", "kvtide"),
        BenchOptions(rows=50_000, batch=64, queries=30, disk_bytes=2 * GIB, kills=0, cuts_s=()),
    ),
)
SMOKE = (Table("smoke", ("sqlite",), BenchOptions(rows=60, dim=8, queries=3, disk_bytes=64 << 20, kills=0, cuts_s=())),)


def run(arguments: Any, payload: dict[str, Any]) -> None:
    """Measure all tables into `payload`; the result file grows with each engine."""
    pythons = dict(word.split("=", 1) for word in arguments.python)
    tables: dict[str, Any] = {}
    payload["tables"] = tables
    for table in SMOKE if arguments.smoke else TABLES:
        report = RecallReport(table.options)
        for name in table.engines:
            if not is_installed(ENGINES[name]) and name not in pythons:
                report.absent.append(name)
                continue
            python = pythons.get(name, "")
            found = measure(ENGINES[name], table.options, arguments.dir, python=python, on=_say)
            crash(ENGINES[name], table.options, arguments.dir, found, python=python, on=_say)
            report.found.append(found)
            tables[table.name] = recall_json(report)
            if arguments.out is not None:
                write_result("recall_bench", payload, arguments.out)
    finished = [each["device_finished_x"] for table in tables.values() for each in table["engines"]]
    payload["amplification"] = summary([each for each in finished if each is not None] or [0.0])


def _say(what: str) -> None:
    print(what, file=sys.stderr)


def main() -> None:
    """Run and tell."""
    made = parser(__doc__ or "")
    made.add_argument("--python", action="append", default=[], help="ENGINE=PATH: an interpreter of its own")
    arguments = made.parse_args()
    arguments.dir.mkdir(parents=True, exist_ok=True)
    payload: dict[str, Any] = {"environment": environment(arguments.dir), "seed": arguments.seed, "repeats": 1}
    if why_not():
        payload |= {"result": "skipped", "reason": why_not()}
    else:
        try:
            run(arguments, payload)
        except UnsupportedError as error:
            payload |= {"result": "skipped", "reason": str(error)}
    if arguments.json:
        print(json.dumps(payload))
    write_result("recall_bench", payload, arguments.out)


if __name__ == "__main__":
    main()
