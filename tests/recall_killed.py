"""A memory whose process is killed at random moments, again and again: no acknowledged row may be missing or changed.

`python tests/recall_killed.py --kills 200 --out benchmarks/results/recall_kills.json` runs the campaign.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvtide.recall import Memory

DIM, KEYS = 32, 400
LOG_BYTES = (64 << 10, 512 << 10)  # less than the ring, and more


def row(one: int, version: int) -> tuple[np.ndarray, bytes]:
    """Return vector and payload of a version of a row."""
    rng = np.random.default_rng([one, version])
    return rng.standard_normal((1, DIM)).astype(np.float32), rng.bytes(int(rng.integers(0, 3000)))


def work(path: Path, seed: int, write_fd: int) -> None:
    """Add and delete rows until killed; say of each what is begun, and when it is durable, in lines on `write_fd`."""
    rng = np.random.default_rng(seed)
    log_bytes, commit_ms = int(rng.choice(LOG_BYTES)), float(rng.choice([0, 1, 5]))
    with Memory.open(path, DIM, log_bytes=log_bytes, commit_ms=commit_ms) as memory:
        version = seed * 1_000_000
        while True:
            tickets = []
            for _ in range(int(rng.integers(1, 12))):
                one, version = int(rng.integers(0, KEYS)), version + 1
                is_put = bool(rng.random() < 0.8)
                os.write(write_fd, f"begin {one} {version if is_put else -version}\n".encode())
                vector, payload = row(one, version)
                put = memory.add([one], vector, [payload], wait=False) if is_put else memory.delete([one], wait=False)
                tickets.append((one, version if is_put else -version, put))
            for one, what, ticket in tickets:
                ticket.wait()
                os.write(write_fd, f"done {one} {what}\n".encode())


def judge(path: Path, allowed: dict[int, list[int]]) -> int:
    """Reopen; return the rows that were looked at. What is there must be the last acknowledged, or a later version."""
    with Memory.open(path, DIM) as memory:
        assert memory.num_bad == 0
        ids = sorted(allowed)
        there = {}
        for one, payload in zip(ids, memory.get(ids), strict=True):
            wanted = [row(one, what)[1] if what > 0 else None for what in allowed[one]]
            assert payload in wanted, f"row {one}: none of versions {allowed[one]}"
            allowed[one] = [allowed[one][wanted.index(payload)]]
            if payload is not None:
                there[one] = row(one, allowed[one][0])[0]
        if there:
            found, _ = memory.search(np.concatenate(list(there.values())), 1)
            assert found[:, 0].tolist() == list(there)
        return len(ids)


def campaign(root: Path, kills: int, seed: int) -> dict[str, object]:
    """Kill `kills` times; return what was seen."""
    allowed: dict[int, list[int]] = {}
    num_done = num_begun = 0
    rng = np.random.default_rng(seed)
    for kill in range(kills):
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(read_fd)
            try:
                work(root / "m", seed * 1000 + kill + 1, write_fd)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os.close(write_fd)
        with os.fdopen(read_fd) as told:
            first = told.readline()
            time.sleep(float(rng.uniform(0, 0.2)))
            os.kill(pid, signal.SIGKILL)
            lines = (first + told.read()).splitlines()
        status = os.waitpid(pid, 0)[1]
        assert os.WIFSIGNALED(status), f"seed {seed}, kill {kill}: the worker ended by itself"
        for line in lines:
            verb, one, what = line.split()
            versions = allowed.setdefault(int(one), [-1])
            if verb == "begin":
                versions.append(int(what))
                num_begun += 1
            else:
                del versions[: versions.index(int(what))]
                num_done += 1
        if kill == kills - 1 or rng.random() < 0.7:  # else the next one goes on with what this one has left
            judge(root / "m", allowed)
    return {"kills": kills, "seed": seed, "rows_begun": num_begun, "rows_acknowledged": num_done, "rows_lost": 0}


def main() -> None:
    """Run the campaign and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory(dir=given.dir) as root:
        seen = campaign(Path(root), given.kills, given.seed)
    print(json.dumps(seen))
    if given.out:
        given.out.write_text(json.dumps({"label": "measured", "kernel": os.uname().release, **seen}, indent=1) + "\n")


if __name__ == "__main__":
    main()
