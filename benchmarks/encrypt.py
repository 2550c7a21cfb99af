"""What does encryption at rest cost a store and a load of the file tier?

Groups of a known model are stored and loaded in turns by two tiers on the same disk: one plain, one that encrypts with
AES-256-GCM. Times are of whole calls of the tier, checksums included; CPU is of the process.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from _bench import RESULTS, environment, parser, summary, warnings_of, write_result
from _tier import COLD, MIB, UNKNOWN_ACCESS, Run, timed
from kvtide.blocks import KEY
from kvtide.io.ops import PAGE_BYTES, address_of, aligned_buffer
from kvtide.spec import Identity, KVShape, SlotLayout
from kvtide.spec.presets import preset
from kvtide.tiers.cipher import MasterKey
from kvtide.tiers.contract import OK, READ_REQUEST, GroupRecords
from kvtide.tiers.namespace import open_namespace

KINDS = ("plain", "encrypted")
GROUP_BLOCKS = 4


class Store:
    """A tier with room for `num` groups, and memory for the KV of all of them."""

    def __init__(self, args: argparse.Namespace, kind: str, num: int) -> None:
        master = MasterKey(np.random.default_rng(args.seed).bytes(32)) if kind == "encrypted" else None
        spec = preset(args.model)
        shape = KVShape.of(spec, "bf16")
        self.layout = layout = SlotLayout(shape, 16, GROUP_BLOCKS, is_encrypted=master is not None)
        zeros = "0" * 64
        identity = Identity.of(
            spec, shape, block_tokens=16, group_blocks=GROUP_BLOCKS, weights_digest=zeros, tokenizer_digest=zeros
        )
        identity = replace(identity, encryption=master.name if master else "")
        capacity = PAGE_BYTES + num * layout.slot_bytes
        self.space = open_namespace(args.dir / kind, identity, layout, capacity_bytes=capacity, master=master)
        lengths = np.array(layout.fragment_padded_bytes, np.int64)
        self.num_bytes = num * int(lengths.sum())
        self.memory = aligned_buffer(self.num_bytes)
        self.memory[:] = np.frombuffer(np.random.default_rng(args.seed).bytes(self.num_bytes), np.uint8)
        sizes = np.broadcast_to(lengths, (num, len(lengths)))
        starts = np.cumsum(sizes).reshape(sizes.shape) - sizes
        self.addresses = (address_of(self.memory) + starts).astype(np.uint64)
        rng = np.random.default_rng(args.seed)
        keys = np.frombuffer(rng.bytes(32 * num), KEY)
        blocks = np.frombuffer(rng.bytes(32 * num * GROUP_BLOCKS), KEY).reshape(num, GROUP_BLOCKS)
        tokens = np.full(num, layout.tokens_per_group)
        self.records = GroupRecords(keys, keys, tokens, np.full(num, GROUP_BLOCKS), blocks)
        requests = np.zeros((num, len(lengths)), READ_REQUEST)
        requests["row"], requests["fragment"] = np.arange(num)[:, None], np.arange(len(lengths))
        requests["address"] = self.addresses
        self.requests = requests.ravel()

    def store(self) -> None:
        self.space.tier.drop(self.records.keys)
        assert (self.space.tier.write(self.records, self.addresses, cause="demote") == OK).all(), "not all was stored"

    def load(self) -> None:
        done = self.space.tier.read(self.records.keys, self.requests, cause="restore")
        assert (done == OK).all(), "not all was loaded"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the whole result."""
    args.dir.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(args.dir / "encrypt", ignore_errors=True)
    args.dir = args.dir / "encrypt"
    args.dir.mkdir(mode=0o700)
    group = SlotLayout(KVShape.of(preset(args.model), "bf16"), 16, GROUP_BLOCKS).slot_bytes
    num = max(1, args.mib * MIB // group)
    stores = {kind: Store(args, kind, num) for kind in KINDS}
    runs: dict[tuple[str, str], list[Run]] = {(kind, what): [] for kind in KINDS for what in ("store", "load")}
    try:
        for repeat in range(args.repeats):
            for kind in KINDS if repeat % 2 == 0 else KINDS[::-1]:
                one = stores[kind]
                runs[kind, "store"].append(timed(one.store, one.num_bytes))
                runs[kind, "load"].append(timed(one.load, one.num_bytes))
        is_direct = stores["plain"].space.is_direct
        equal = bool((stores["plain"].memory == stores["encrypted"].memory).all())
    finally:
        for one in stores.values():
            one.space.close()
        shutil.rmtree(args.dir, ignore_errors=True)
    cases, warnings = [], []
    for (kind, what), found in runs.items():
        rates = [run.mib_per_s for run in found]
        cpu = float(np.median([run.cpu_s_per_gib for run in found]))
        cases.append({"kind": kind, "what": what, "mib_per_s": summary(rates), "cpu_s_per_gib": cpu})
        warnings += warnings_of(f"{kind} {what}", rates)
    return {
        "label": "measured",
        "environment": environment(args.dir.parent),
        "access": COLD if is_direct else UNKNOWN_ACCESS,
        "model": args.model,
        "bytes": stores["plain"].num_bytes,
        "repeats": args.repeats,
        "seed": args.seed,
        "bytes_equal": equal,
        "cases": cases,
        "warnings": warnings,
    }


def show(payload: dict[str, Any]) -> None:
    """Print a line a case."""
    print(f"measured: {payload['bytes'] / MIB:.0f} MiB of KV of {payload['model']}, {payload['access']}")
    print(f"{'':12}{'':8}{'MiB/s':>10}{'spread':>10}{'CPU s/GiB':>12}")
    for case in payload["cases"]:
        rate = case["mib_per_s"]
        print(
            f"{case['kind']:12}{case['what']:8}{rate['median']:10.0f}{rate['spread']:10.0%}{case['cpu_s_per_gib']:12.2f}"
        )
    for line in payload["warnings"]:
        print(f"warning: {line}", file=sys.stderr)


def main() -> int:
    """Measure and report."""
    made = parser(__doc__ or "")
    made.add_argument("--model", default="llama-3-8b", help="whose KV it is")
    made.add_argument("--mib", type=int, default=512, help="KV to store and load")
    args = made.parse_args()
    if args.smoke:
        args.mib, args.repeats = 16, 1
    payload = measure(args)
    if args.json:
        print(json.dumps(payload, indent=1, default=str))
    else:
        show(payload)
    write_result("encrypt", payload, args.out or (None if args.smoke else RESULTS / "encrypt.json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
