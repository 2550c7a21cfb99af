"""How near a tier's loads are to what the drive gives: kvtide, vLLM's own tier, and bare reads of kvtide's own file.

.venv-vllm/bin/python benchmarks/peers_ceiling.py

The ceiling is bare reads of the same bytes, 1 MiB at a time, into one piece of memory; nothing looks at them. Each way
has its turn in every round, so that a drive that changes its rate changes it for all.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from _bench import RESULTS, environment, parser, summary, write_result
from _peers import JOB_CHUNKS, KIB, SIZES, SMOKE, forget
from kvtide.io.ops import OP, address_of
from kvtide.io.uring import UringEngine
from peers_vllm import TIERS

OP_BYTES = 1 << 20
REST_S = 0.1  # before each turn

Load = Callable[[], object]


@contextmanager
def bare_reads(path: Path, num_bytes: int) -> Iterator[Load]:
    """Yield what reads the first `num_bytes` of a file past the page cache, all operations in flight at once."""
    num = -(-num_bytes // OP_BYTES)
    memory = np.frombuffer(mmap.mmap(-1, num * OP_BYTES), np.uint8)
    memory[:] = 1  # else its pages would be made by the first round
    fd, engine = os.open(path, os.O_RDONLY | os.O_DIRECT), UringEngine(depth_max=128)
    batch = np.zeros(num, OP)
    batch["fd"], batch["offset"], batch["tag"] = fd, np.arange(num) * OP_BYTES, np.arange(num)
    batch["address"], batch["length"] = address_of(memory) + batch["offset"], OP_BYTES

    def read() -> None:
        engine.submit(batch)
        done = engine.reap(num)
        assert not done["error"].any(), done
        assert int(done["length"].sum()) >= num_bytes - OP_BYTES, "the file is shorter than its chunks"
        assert memory.any()

    with closing(engine):
        yield read
    os.close(fd)


def run_size(directory: Path, size: int, num: int, repeats: int) -> list[dict[str, Any]]:
    """Load `num` chunks of `size` bytes in each way, in turn; return a row a way. MB/s are of chunks' bytes."""
    rows = np.frombuffer(mmap.mmap(-1, size * num), np.uint8).reshape(num, size)
    rows[:] = np.random.default_rng(size).integers(0, 256, rows.shape, np.uint8)
    wanted = rows.copy()
    jobs = [range(first, min(num, first + JOB_CHUNKS)) for first in range(0, num, JOB_CHUNKS)]
    with ExitStack() as stack:
        loads: dict[str, Load] = {}
        for name, make in TIERS.items():
            tier = stack.enter_context(closing(make(directory / name, rows)))
            tier.store(jobs)
            loads[name] = lambda tier=tier: tier.load(jobs)
        (file,) = (directory / "kvtide").rglob("data.kvt")
        loads["ceiling"] = stack.enter_context(bare_reads(file, size * num))
        seconds: dict[str, list[float]] = {name: [] for name in loads}
        draw = np.random.default_rng(0)
        for _ in range(repeats):
            for name in draw.permutation(list(loads)).tolist():
                rows[:] = 0
                forget(directory)
                time.sleep(REST_S)
                began = time.perf_counter()
                loads[name]()
                seconds[name].append(time.perf_counter() - began)
                assert name not in TIERS or np.array_equal(rows, wanted), f"{name}: wrong bytes"
            print(f"{size // KIB} KiB: round {len(seconds['kvtide'])} of {repeats}", file=sys.stderr)
    shutil.rmtree(directory)
    megabytes = size * num / 1e6
    return [
        {"way": name, "chunk_bytes": size, "num_chunks": num, "mb_per_s": summary([megabytes / one for one in taken])}
        for name, taken in seconds.items()
    ]


def main() -> int:
    """Run all sizes, print and keep the result; return the exit code."""
    args = parser(__doc__ or "").parse_args()
    found: list[dict[str, Any]] = []
    for size, num in (SMOKE if args.smoke else SIZES).items():
        found += run_size(Path(args.dir) / f"peers_ceiling-{os.getpid()}", size, num, args.repeats)
    for row in found:
        print(f"{row['way']:12} {row['chunk_bytes'] // KIB:5} KiB  {row['mb_per_s']['median']:6.0f} MB/s")
    payload = {
        "question": "how near are loads to what the drive gives?",
        "environment": environment(args.dir),
        "repeats": args.repeats,
        "rows": found,
    }
    write_result("peers_ceiling", payload, args.out or (None if args.smoke else RESULTS / "peers_ceiling.json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
