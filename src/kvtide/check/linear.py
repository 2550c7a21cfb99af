"""Whether a history of reads and writes can be put in one order. Pure. Next: order.

*Theory.* A key is a register that may lose its value at any time, so a miss says nothing. Every write has a value of
its own, so reads are known by their write. Source: Gibbons and Korach, Testing shared memories, 1997. The operations on
one value are a cluster, and span from `first`, the earliest end among them, to `last`, the latest begin. Where
first < last the value must have been in place between them: a forward zone. Else the cluster can be done at one moment
between last and first: a backward zone. A history is right if no read ended before its write began, no two forward
zones overlap, and no backward zone lies inside a forward one.

A write whose value nobody read is a zone too: it says that older values were replaced by then. Of stores that leave a
value that is there as it is, such writes say nothing, and are left out. A drop counts as a write that nobody read.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from kvtide.check.race import MISS, RAISED, WRONG, Row


@dataclass(frozen=True, slots=True)
class Zone:
    """All operations on one value of a key."""

    version: int
    first: int
    last: int
    what: str


def what_breaks(rows: Iterable[Row], *, can_overwrite: bool) -> tuple[str, int]:
    """Return what is wrong with a history, and the key it is wrong for; empty and -1 if nothing is."""
    by_key: dict[int, list[Row]] = collections.defaultdict(list)
    for row in rows:
        by_key[row[1]].append(row)
    for key, own in sorted(by_key.items()):
        drops = [row for row in own if row[0] == "drop"]
        if found := _what_breaks([row for row in own if row[0] != "drop"], drops, can_overwrite=can_overwrite):
            return found, key
    return "", -1


def _what_breaks(rows: list[Row], drops: list[Row], *, can_overwrite: bool) -> str:
    if wrong := sum(row[2] == WRONG for row in rows):
        return f"{wrong} reads gave wrong bytes"
    writes = {row[2]: row for row in rows if row[0] == "put"}
    reads: dict[int, list[Row]] = collections.defaultdict(list)
    for row in rows:
        if row[0] == "get" and row[2] not in {MISS, RAISED}:
            reads[row[2]].append(row)
    zones = []
    for version, write in writes.items():
        own = reads.pop(version, [])
        if any(row[4] < write[3] for row in own):
            return f"version {version} was read before it was written"
        if own or can_overwrite:
            zones.append(_zone(version, [write, *own], f"version {version}"))
    if reads:
        return f"version {next(iter(reads))} was read and never written"
    zones += [_zone(row[2], [row], "a drop") for row in drops]
    return _overlap(zones)


def _zone(version: int, rows: list[Row], what: str) -> Zone:
    return Zone(version, min(row[4] for row in rows), max(row[3] for row in rows), what)


def _overlap(zones: list[Zone]) -> str:
    forward = sorted((zone for zone in zones if zone.first < zone.last), key=lambda zone: zone.first)
    for one, other in itertools.pairwise(forward):
        if other.first < one.last:
            return f"{other.what} was written, and {one.what} was read after that and {other.what} as well"
    backward = sorted((zone for zone in zones if zone.first >= zone.last), key=lambda zone: zone.last)
    place = 0
    for zone in forward:
        while place < len(backward) and backward[place].last <= zone.first:
            place += 1
        for inner in backward[place:]:
            if inner.last >= zone.last:
                break
            if inner.first < zone.last:
                return f"{zone.what} was read after {inner.what} had taken its place"
    return ""
