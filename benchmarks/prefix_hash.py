"""What does it cost to find the kept prefix of a long prompt: hashing its blocks, then looking their keys up?

Baselines, in the same run and in turn with ours: the scheme of vLLM (SHA-256 of a pickled tuple of the parent's hash,
the block's token ids and its extra keys), written here in our own words on its kind of input, a list; and the plain
loop over slices of an array. All three chain SHA-256 over every token, so their work is comparable.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from _bench import RESULTS, environment, parser, summary, warnings_of, write_result
from kvtide.blocks import PrefixIndex, chain_keys, chain_root

NUM_TOKENS = 131_072
BLOCK_TOKENS = 16
VOCABULARY = 128_256  # of Llama 3
ROOT = chain_root(bytes(32))
COMPARED = {  # baseline: ours on the same input
    "hash: vLLM-style, list": "hash: chain_keys, list",
    "hash: plain loop, array": "hash: chain_keys, array",
    "look up: plain dict": "look up: PrefixIndex.get",
}


def main() -> None:
    """Run all cases in turn, check that they agree, and print a table or JSON."""
    args = parser(__doc__ or "").parse_args()
    num_tokens = 4096 if args.smoke else NUM_TOKENS
    repeats = 2 if args.smoke else max(args.repeats, 1)
    ids = np.random.default_rng(args.seed).integers(0, VOCABULARY, num_tokens)
    cases = make_cases(ids)
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for run in range(repeats + 1):
        for name, case in cases.items():
            begin = time.perf_counter_ns()
            case()
            if run:  # the first round warms up
                samples[name].append(float(time.perf_counter_ns() - begin))
    payload = result(samples, args.seed, num_tokens)
    if args.json:
        write_result("prefix_hash", payload, Path("/dev/stdout"))
    else:
        show(payload)
    out = args.out or (None if args.smoke else RESULTS / "prefix_hash.json")
    write_result("prefix_hash", payload, out)


def make_cases(ids: npt.NDArray[np.int64]) -> dict[str, Callable[[], object]]:
    """Return what is timed, by name; each is checked once here."""
    tokens, keys = ids.tolist(), chain_keys(ids, block_tokens=BLOCK_TOKENS, parent=ROOT)
    assert keys.tolist() == hash_slices(ids, ROOT), "the plain loop and chain_keys define the same keys"
    assert len(set(hash_pickles(tokens, ROOT))) == len(keys)
    index, plain = PrefixIndex(), {}
    for unit in range(len(keys)):
        index.add(keys[unit : unit + 1], unit=unit, tokens=np.array([BLOCK_TOKENS]))
        plain[keys[unit].tobytes()] = unit
    names = keys.tolist()
    assert index.get(keys)[0].tolist() == list(range(len(keys)))
    return {
        "hash: chain_keys, array": lambda: chain_keys(ids, block_tokens=BLOCK_TOKENS, parent=ROOT),
        "hash: chain_keys, list": lambda: chain_keys(tokens, block_tokens=BLOCK_TOKENS, parent=ROOT),
        "hash: vLLM-style, list": lambda: hash_pickles(tokens, ROOT),
        "hash: plain loop, array": lambda: hash_slices(ids, ROOT),
        "look up: PrefixIndex.get": lambda: index.get(keys),
        "look up: plain dict": lambda: [plain.get(name) for name in names],
    }


def hash_pickles(tokens: Sequence[int], parent: bytes) -> list[bytes]:
    """Return keys the way vLLM's sha256 option makes them: a pickled tuple is hashed for each block."""
    keys = []
    for start in range(0, len(tokens), BLOCK_TOKENS):
        extra_keys = None  # of multi-modal inputs, adapters, a salt
        content = (parent, tuple(tokens[start : start + BLOCK_TOKENS]), extra_keys)
        parent = hashlib.sha256(pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)).digest()
        keys.append(parent)
    return keys


def hash_slices(ids: npt.NDArray[np.int64], parent: bytes) -> list[bytes]:
    """Return the keys of `chain_keys`, by the loop one writes first."""
    array, keys = ids.astype("<u4"), []
    for start in range(0, len(array), BLOCK_TOKENS):
        parent = hashlib.sha256(parent + array[start : start + BLOCK_TOKENS].tobytes()).digest()
        keys.append(parent)
    return keys


def result(samples: dict[str, list[float]], seed: int, num_tokens: int) -> dict[str, Any]:
    """Return the payload of the result file."""
    num_blocks = num_tokens // BLOCK_TOKENS
    ratios = {
        baseline: summary(np.divide(samples[baseline], samples[ours]).tolist()) for baseline, ours in COMPARED.items()
    }
    cases = {
        name: {
            "label": "measured",
            "total_ns": summary(values),
            "block_ns": summary(values)["median"] / num_blocks,
            "samples_ns": values,
        }
        for name, values in samples.items()
    }
    return {
        "question": "what does finding the kept prefix of a long prompt cost?",
        "environment": environment(Path()),
        "state": "warm: one unmeasured round first, no file is read",
        "seed": seed,
        "repeats": len(next(iter(samples.values()))),
        "num_tokens": num_tokens,
        "num_blocks": num_blocks,
        "block_tokens": BLOCK_TOKENS,
        "cases": cases,
        "baseline_over_ours": ratios,  # of times taken one after the other, so a busy machine slows both
        "warnings": [line for name, values in samples.items() for line in warnings_of(name, values)],
    }


def show(payload: dict[str, Any]) -> None:
    """Print the cases as a table."""
    print(f"measured: {payload['num_tokens']} tokens in {payload['num_blocks']} blocks, {payload['repeats']} repeats")
    print(f"{'case':26}{'median ms':>11}{'p99 ms':>9}{'spread':>8}{'ns/block':>10}")
    for name, case in payload["cases"].items():
        total = case["total_ns"]
        median_ms, p99_ms = total["median"] / 1e6, total["p99"] / 1e6
        print(f"{name:26}{median_ms:11.3f}{p99_ms:9.3f}{total['spread']:8.0%}{case['block_ns']:10.0f}")
    for baseline, ratio in payload["baseline_over_ours"].items():
        print(f"{baseline} takes {ratio['median']:.2f} x the time of {COMPARED[baseline].split(': ')[1]}")
    for line in payload["warnings"]:
        print(f"warning: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
