"""What the benchmarks of the file tier share: a tier filled with random KV of a known model, and fio on the same disk.

Decides how a prefix lies in file and memory; knows no question and no report.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KEY
from kvtide.io.ops import OP, PAGE_BYTES, READ
from kvtide.io.schedule import Merged, merge
from kvtide.spec import Identity, KVShape, SlotLayout
from kvtide.spec.presets import preset
from kvtide.tiers.contract import OK, READ_REQUEST, GroupRecords
from kvtide.tiers.memory import FramePool
from kvtide.tiers.namespace import OpenNamespace, open_namespace
from kvtide.tiers.slotio import OP_BYTES_MAX

MIB, GIB = 1 << 20, 1 << 30
COLD, UNKNOWN_ACCESS = "cold: O_DIRECT", "NO O_DIRECT on this file system: the page cache takes part"
STORED_NUM = 4  # groups the cache hands to the tier at once: kvtide.cache.room.STORE_UNITS_MAX
SEED_KEYS = 7


@dataclass(frozen=True, slots=True)
class Run:
    """What one run moved, in what time, for how much CPU of the process: user and system time of all its threads."""

    num_bytes: int
    seconds: float
    cpu_s: float

    @property
    def mib_per_s(self) -> float:
        return self.num_bytes / MIB / self.seconds

    @property
    def cpu_s_per_gib(self) -> float:
        return self.cpu_s / (self.num_bytes / GIB)


class Prefix:
    """KV of `num_tokens` tokens in a file tier, and as many preallocated frames, which lie in random order."""

    def __init__(self, root: Path, model: str, *, num_tokens: int, group_blocks: int, engine: str, seed: int) -> None:
        spec = preset(model)
        shape = KVShape.of(spec, "bf16")
        self.layout = layout = SlotLayout(shape, 16, group_blocks)
        self.num_groups = num = -(-num_tokens // layout.tokens_per_group)
        identity = Identity.of(
            spec, shape, block_tokens=16, group_blocks=group_blocks, weights_digest="0" * 64, tokenizer_digest="0" * 64
        )
        shutil.rmtree(root, ignore_errors=True)
        capacity_bytes = PAGE_BYTES + num * layout.slot_bytes
        self.namespace: OpenNamespace = open_namespace(
            root, identity, layout, capacity_bytes=capacity_bytes, engine=engine
        )
        self.root, self.tier = root, self.namespace.tier
        self.pool = FramePool(num * layout.num_fragments, max(layout.fragment_padded_bytes))
        rng = np.random.default_rng(seed)
        frames = rng.permutation(self.pool.num_frames)
        self.addresses = self.pool.addresses(frames).reshape(num, layout.num_fragments)
        self.records = _records(layout, num, seed)
        for row in self.pool.rows:
            row[:] = np.frombuffer(rng.bytes(len(row)), np.uint8)
        self.write()

    @property
    def data_path(self) -> Path:
        return self.namespace.path / "data.kvt"

    @property
    def access(self) -> str:
        return COLD if self.namespace.is_direct else UNKNOWN_ACCESS

    def requests(self, layers: list[int]) -> npt.NDArray[np.void]:
        """Return what reads `layers` of every group into its frames."""
        fragments = [part for layer in layers for part in self.layout.layer_fragments(layer)]
        made = np.zeros((self.num_groups, len(fragments)), READ_REQUEST)
        made["row"], made["fragment"] = np.arange(self.num_groups)[:, None], fragments
        made["address"] = self.addresses[:, fragments]
        return made.ravel()

    def joined(self) -> Merged:
        """Return the operations that read every layer, joined as the tier joins them."""
        layout, table = self.layout, self.tier.table
        slot_of = {key: slot for slot, key in enumerate(table.keys.tolist()) if table.used[slot]}
        slots = np.array([slot_of[key] for key in self.records.keys.tolist()])
        batch = np.zeros(self.addresses.size, OP)
        batch["fd"], batch["kind"], batch["address"] = self.namespace.fd, READ, self.addresses.ravel()
        starts = PAGE_BYTES + slots[:, None] * layout.slot_bytes + np.array(layout.fragment_offset)
        batch["offset"], batch["length"] = starts.ravel(), np.tile(layout.fragment_padded_bytes, len(slots))
        return merge(batch, bytes_max=OP_BYTES_MAX)

    def read_unverified(self) -> None:
        """Let the engine alone do the operations of a read: no checksums, no tier."""
        merged, engine = self.joined(), self.namespace.engine
        engine.submit(merged.batch)
        assert not engine.reap(len(merged.batch))["error"].any(), "an operation failed"

    def read(self, requests: npt.NDArray[np.void]) -> None:
        """Read, and see that every fragment came and was verified."""
        statuses = self.tier.read(self.records.keys, requests, cause="restore")
        assert (statuses == OK).all(), "a fragment was not read"

    def write(self) -> None:
        """Write the frames as the cache does, a few groups a call, into slots that held other groups before."""
        self.tier.drop(self.records.keys)
        for first in range(0, self.num_groups, STORED_NUM):
            some = slice(first, first + STORED_NUM)
            statuses = self.tier.write(self.records.take(some), self.addresses[some], cause="prefill-write")
            assert (statuses == OK).all(), "a group was not written"

    def close(self) -> None:
        """Close the tier and remove its directory."""
        self.namespace.close()
        shutil.rmtree(self.root)


def _records(layout: SlotLayout, num: int, seed: int) -> GroupRecords:
    rng = np.random.default_rng([seed, SEED_KEYS])
    block_keys = np.frombuffer(rng.bytes(32 * num * layout.group_blocks), KEY).reshape(num, layout.group_blocks)
    keys = block_keys[:, -1].copy()
    parents = np.concatenate([np.zeros(1, KEY), keys[:-1]])
    tokens, blocks = np.full(num, layout.tokens_per_group), np.full(num, layout.group_blocks)
    return GroupRecords(keys, parents, tokens, blocks, block_keys)


def timed(body: Callable[[], object], num_bytes: int) -> Run:
    """Run `body`, which moves `num_bytes`."""
    before, start_ns = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter_ns()
    body()
    seconds = (time.perf_counter_ns() - start_ns) / 1e9
    after = resource.getrusage(resource.RUSAGE_SELF)
    return Run(num_bytes, seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def can_pin(path: Path, *, depth: int, is_direct: bool) -> bool:
    """Say whether fio may lock the memory that fixed buffers need here, by trying."""
    try:
        run_fio(path, "read", num_bytes=MIB, depth=depth, is_direct=is_direct, is_fixed=True)
    except subprocess.CalledProcessError:
        return False
    return True


def has_fio() -> bool:
    """Say whether fio is there, and on standard error if not."""
    if shutil.which("fio") is None:
        print("fio is not installed (apt install fio): there is no yardstick in this run", file=sys.stderr)
        return False
    return True


def fio_version() -> str:
    """Return what fio calls itself."""
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def run_fio(path: Path, kind: str, *, num_bytes: int, depth: int, is_direct: bool, is_fixed: bool = False) -> Run:
    """Read or write `num_bytes` of the file from its beginning, 1 MiB at a time, with fio's io_uring engine.

    It goes through the file twice, so that its start weighs less. With `is_fixed` buffers and file are registered.
    """
    command = [
        "fio",
        "--name=sequential",
        f"--filename={path}",
        f"--rw={kind}",
        "--bs=1M",
        f"--size={num_bytes // MIB * MIB}",
        "--loops=2",
        f"--iodepth={depth}",
        f"--direct={int(is_direct)}",
        "--ioengine=io_uring",
        "--output-format=json",
        *(["--readonly"] if kind == "read" else []),
        *(["--fixedbufs", "--registerfiles"] if is_fixed else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout)["jobs"][0]
    moved = job[kind]
    seconds = moved["runtime"] / 1e3  # whole milliseconds: use enough bytes
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return Run(int(moved["io_bytes"]), max(seconds, 1e-3), cpu_s)
