"""Checks of keys: values of another model, form or tenant are never hits, and keys do not depend on the process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvtide.check.bench import Bench, fail, not_applicable, passed
from kvtide.check.contract import FACTS, Check, Setup, Verdict
from kvtide.check.driver import Child

NUM = 4
_TOLD = {
    "weights": ("weights of the model", "the same name and directory, other weights", "vLLM#49261"),
    "revision": ("revision of the model", "the same name and directory, another revision", "vLLM#49261"),
    "rope": ("RoPE scaling", "RoPE scaling changed from default to YaRN", "vLLM#56311"),
    "dtype": ("dtype of equal size", "fp8 e4m3, then fp8 e5m2", "SGLang#38362"),
    "layout": ("layout of equal shape", "layers first, then pages first", "LMCache#4467, vLLM#55904"),
    "tp": ("number of ranks", "one rank, then rank 0 of two, values of one size", "vLLM#49440, vLLM#55191"),
    "adapter": ("adapter", "no adapter, then a LoRA", "LMCache#4825"),
    "build": ("build of the engine", "two versions of the engine", "rtx6kpro#55"),
}


def other_fact(bench: Bench, name: str) -> Verdict:
    """Store under one identity and ask under one that differs in a fact."""
    if name not in bench.traits.facts:
        not_applicable(f"the target is told nothing of the {_TOLD[name][0]}")
    first, second = FACTS[name]
    setup = bench.setup(room=8 * NUM)
    told = replace(setup, identity={**setup.identity, name: second})
    return _apart(bench, setup, told, f"{_TOLD[name][0]} {first[:20]!r}, then {second[:20]!r}")


def other_salt(bench: Bench) -> Verdict:
    """Store under one salt and ask under another."""
    setup = bench.setup(room=8 * NUM, salt="tenant A")
    return _apart(bench, setup, replace(setup, salt="tenant B"), "salt of tenant A, then of tenant B")


def _apart(bench: Bench, setup: Setup, other: Setup, words: str) -> Verdict:
    child = bench.open(setup)
    keys = bench.filled(child, NUM)
    child.close()
    child.open(other)
    others = child.keys(bench.chains(NUM))
    if not bench.traits.is_durable:
        if keys == others:
            not_applicable("nothing outlives a change of identity, and keys are the same: a new store begins empty")
        return passed(f"{words}: the keys differ")
    there = sum(child.has(others))
    got, _ = bench.get_or_raise(child, others)
    num = sum(value is not None for value in got)
    if there or num:
        fail(f"{words}: {max(there, num)} of {NUM} values of the one are hits of the other", "1 chain")
    _both_live(bench, child, others, words)
    child.close()
    child.open(setup)
    got, _ = bench.get_or_raise(child, keys)
    bench.check_values(got, range(NUM), f"{words}, and back")
    return passed(f"{words}: no hit; each finds its own")


def _both_live(bench: Bench, child: Child, keys: list[bytes], words: str) -> None:
    """Store other values under the other identity; they must not be mixed with those there."""
    good = child.put(keys, bench.values(range(NUM), version=1))
    got, _ = bench.get_or_raise(child, keys)
    bench.check_values(got, range(NUM), words, version=1)
    if not any(value is not None for value, is_good in zip(got, good, strict=True) if is_good):
        fail(f"{words}: what is stored under the second identity cannot be read", "1 chain")


def same_keys(bench: Bench) -> Verdict:
    """Derive keys in two processes, each of which Python gives a hash seed of its own.

    The seed is not set: vLLM, for one, takes a PYTHONHASHSEED that is set for a wish to have keys of one's own.
    """
    setup = bench.setup(room=8 * NUM)
    chains, found = bench.chains(NUM, chunks=2), list[list[bytes]]()
    for _ in range(2):
        child = bench.open(setup, environment=("-u", "PYTHONHASHSEED"))
        found.append(child.keys(chains))
        child.close()
    differing = sum(one != other for one, other in zip(*found, strict=True))
    if differing:
        fail(f"{differing} of {NUM} keys differ between two processes", "1 chain")
    return passed(f"{NUM} chains have the same keys in two fresh processes")


def whole_prefix(bench: Bench) -> Verdict:
    """Compare keys of chains that differ only early, or only in where tokens are cut."""
    setup = bench.setup(room=8)
    child = bench.open(setup)
    tokens = bench.traits.chunk_tokens
    base = list(range(100, 100 + 3 * tokens))
    last, before = base[-1], base[-2]
    others = {
        "the first token": [8, *base[1:]],
        "the order of tokens": [*base[:-2], last, before],
        "one more chunk before": base[:tokens] + base,
        "how many chunks there are": base[:tokens],
        "the last token": [*base[:-1], 8],
        "a token above 65,535": [*base[:-1], last + 65536],
    }
    keys = child.keys([base, *others.values()])
    for words, key in zip(others, keys[1:], strict=True):
        if key == keys[0]:
            fail(f"chains that differ in {words} have one key", words)
    if len(set(keys)) < len(keys):
        fail("two different chains have one key", "2 chains")
    return passed(f"{len(keys)} chains that differ in one thing each have {len(keys)} keys")


def _check(name: str) -> Check:
    title, how, report = _TOLD[name]
    return Check(
        f"identity-{name}",
        f"Another {title}",
        f"values stored with another {title} are no hits",
        how,
        report,
        partial(other_fact, name=name),
    )


CHECKS = (
    *(_check(name) for name in _TOLD),
    Check(
        "salt",
        "Another salt",
        "values of one tenant are no hits of another",
        "the same tokens and model, another salt",
        "SGLang#37160, LMCache#4825",
        other_salt,
        ("salt",),
    ),
    Check(
        "same-keys",
        "The same key from two processes",
        "keys do not depend on the process that derives them",
        "keys of the same chains in two processes with hash seeds of their own",
        "LMCache#1139, LMCache#1739, LMCache#2136, LMCache#2511, LMCache#2979",
        same_keys,
    ),
    Check(
        "whole-prefix",
        "Keys of the whole prefix",
        "a key depends on every token before it, on their order and on nothing else",
        "keys of chains that differ in one early token, in order, in number of chunks, in large token ids",
        "",
        whole_prefix,
    ),
)
