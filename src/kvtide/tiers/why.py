"""Why a prompt, or one block, is not there: compares keys with what namespaces hold and what left them. Pure.

Decides which explanation counts. Of a block that is not there, first what the journal of its own namespace says, then
whether another salt or another identity has it; what nobody has was never stored, or left so long ago that the
journal has forgotten. Next: cli_why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvtide.blocks import chain_keys, chain_root, partial_keys
from kvtide.spec import Identity
from kvtide.tiers.cipher import MasterKey
from kvtide.tiers.departures import Departure
from kvtide.tiers.glance import Glance

THERE, NEVER, OTHER_SALT, OTHER_IDENTITY = "there", "never stored", "other salt", "other identity"

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of which the same is true: `first` to `end`, exclusive; the times are of their departures.

    `why` is a reason of `tiers.contract`, or one of THERE, NEVER, OTHER_SALT, OTHER_IDENTITY; `who` the salt, the
    namespace or the pid it is about.
    """

    first: int
    end: int
    why: str
    who: str = ""
    from_ns: int = 0
    to_ns: int = 0


@dataclass(frozen=True, slots=True)
class Other:
    """Another namespace that holds the first `num_tokens` of the prompt, and the fields that differ: (ours, theirs)."""

    digest: str
    num_tokens: int
    fields: dict[str, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Why:
    """Of a prompt of `num_tokens`, block by block, in namespace `digest`; `exists` tells whether there is such a one.

    `reused_tokens` would not be computed again. `owner` is the pid of a process that has the namespace open, 0: none.
    """

    digest: str
    exists: bool
    num_tokens: int
    block_tokens: int
    reused_tokens: int
    runs: tuple[Run, ...]
    others: tuple[Other, ...] = ()
    owner: int = 0
    is_full: bool = False
    problem: str = ""


@dataclass(slots=True)
class _Block:
    why: str = NEVER
    who: str = ""
    departure: Departure | None = None


def why_prompt(
    tokens: Ids,
    glances: Sequence[Glance],
    wanted: Identity,
    salts: Sequence[str] = ("",),
    master: MasterKey | None = None,
) -> Why:
    """Explain a prompt to a cache of identity `wanted`, asked for with `salts[0]`; the other salts are tried.

    Keys of encrypted KV are found with its `master` only.

    Shapes: tokens [T], each 0 to 2**32 - 1.
    """
    name = wanted.digest().hex()
    own = next((one for one in glances if name.startswith(one.digest)), None)
    size, root = wanted.block_tokens, _root(wanted, salts[0], master)
    keys = chain_keys(tokens, block_tokens=size, parent=root).tolist()
    blocks = [_Block() for _ in keys]
    others = _others(tokens, glances, wanted, salts[0], own, master)
    for other in others:  # the longest comes last and counts
        for block in blocks[: other.num_tokens // size]:
            block.why, block.who = OTHER_IDENTITY, other.digest
    if own is not None:
        _fill_in(blocks, keys, own, tokens, wanted, salts[1:], master)
    reused = 0
    if own is not None:
        reused = _prefix(tokens[:-1], own, root, size)
    return Why(
        digest=own.digest if own is not None else name[:32],
        exists=own is not None,
        num_tokens=len(tokens),
        block_tokens=size,
        reused_tokens=reused,
        runs=_runs(blocks),
        others=tuple(reversed(others)),
        owner=own.owner if own is not None else 0,
        is_full=own is not None and own.is_full,
        problem=own.problem if own is not None else "",
    )


def _fill_in(
    blocks: list[_Block],
    keys: list[bytes],
    own: Glance,
    tokens: Ids,
    wanted: Identity,
    salts: Sequence[str],
    master: MasterKey | None,
) -> None:
    """Note of each block what its own namespace knows."""
    for salt in salts:
        root = _root(wanted, salt, master)
        for block, key in zip(blocks, chain_keys(tokens, block_tokens=wanted.block_tokens, parent=root), strict=True):
            if key.tobytes() in own.held:
                block.why, block.who = OTHER_SALT, salt
    for block, key in zip(blocks, keys, strict=True):
        departure = own.departures.get(key)
        if key in own.held:
            block.why, block.who = THERE, ""
        elif departure is not None:
            block.why, block.who, block.departure = departure.reason, str(departure.pid), departure


def _prefix(tokens: Ids, seen: Glance, root: bytes, size: int) -> int:
    """Return how many of `tokens`, from the first one on, a cache would find in `seen`."""
    num, parent = 0, root
    for key in chain_keys(tokens, block_tokens=size, parent=root).tolist():
        if key not in seen.held:
            break
        num, parent = num + size, key
    rest = partial_keys(tokens[num : num + size - 1], parent=parent).tolist()
    return num + max((place for place, key in enumerate(rest, 1) if key in seen.held), default=0)


def _root(identity: Identity, salt: str, master: MasterKey | None) -> bytes:
    """Return what keys of blocks are chained from."""
    digest = identity.digest()
    return chain_root(digest if master is None or identity.encryption != master.name else master.root(digest), salt)


def _others(
    tokens: Ids,
    glances: Sequence[Glance],
    wanted: Identity,
    salt: str,
    own: Glance | None,
    master: MasterKey | None,
) -> list[Other]:
    """Return the namespaces of other identities that hold the prompt's beginning, the longest last."""
    found = []
    for seen in glances:
        if seen is own or seen.identity is None or not seen.held:
            continue
        theirs = seen.identity
        num = _prefix(tokens, seen, _root(theirs, salt, master), theirs.block_tokens)
        if num:
            found.append(Other(seen.digest, num, differing(wanted, theirs)))
    return sorted(found, key=lambda other: other.num_tokens)


def differing(ours: Identity, theirs: Identity) -> dict[str, tuple[str, str]]:
    """Return the fields in which two identities differ, each as (ours, theirs) in words; `facts` one by one."""
    told = []
    for identity in (ours, theirs):
        fields = identity.describe()
        facts = fields.pop("facts", {})
        named = {f"facts.{name}": fact for name, fact in facts.items()} if isinstance(facts, dict) else {}
        told.append({"split": "none", "encryption": "none"} | fields | named)
    names = [name for name in dict.fromkeys([*told[0], *told[1]]) if told[0].get(name) != told[1].get(name)]
    return {name: (str(told[0].get(name, "none")), str(told[1].get(name, "none"))) for name in names}


def _runs(blocks: Sequence[_Block]) -> tuple[Run, ...]:
    """Join consecutive blocks of which the same is true."""
    runs = []
    for (why, who), group in groupby(enumerate(blocks), key=lambda item: (item[1].why, item[1].who)):
        members = list(group)
        times = [block.departure.time_ns for _, block in members if block.departure is not None] or [0]
        runs.append(Run(members[0][0], members[-1][0] + 1, why, who, min(times), max(times)))
    return tuple(runs)


@dataclass(frozen=True, slots=True)
class KeyWhy:
    """Of one block, by its key, in one namespace."""

    digest: str
    why: str
    departure: Departure | None = None
    owner: int = 0
    is_full: bool = False
    problem: str = ""


def why_key(key: bytes, glances: Sequence[Glance]) -> list[KeyWhy]:
    """Explain one block to each namespace. Identity and salt are in its key, so it can only belong to one of them."""
    found = []
    for seen in glances:
        departure = seen.departures.get(key)
        why = THERE if key in seen.held else departure.reason if departure is not None else NEVER
        told = departure if why not in {THERE, NEVER} else None
        found.append(KeyWhy(seen.digest, why, told, seen.owner, seen.is_full, seen.problem))
    return found
