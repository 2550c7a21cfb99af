"""Which layout of the store fits what a step reads: every candidate predicted, the fastest taken. Pure. Next: closed.

Theory. The file tier reads whole fragments, because each has one checksum; so a step moves, of each layer, the
fragments of every group that holds anything it wants. A *candidate* is a split (none, kv, head) with groups of 1 to 64
blocks; groups of one block without a split are called block-first. For each it is counted, a layer:

    groups touched    all where everything is read; else by the chance that a group holds one of the chosen units
    reads             one a touched group: its wanted fragments are neighbours. Heads that choose alone are not:
                      with a part p of the groups of each of H heads wanted, a group has p + (H-1) p (1-p) runs of heads
    bytes             whole pages, of whole groups, also of the last one that is partly filled
    time              the drive's, for that many reads of the mean size, as many of them in flight as there are, up to
                      its depth; layers one after the other, for what is wanted of the next is not known before

Chance. n units, m of them chosen, c units a group. *Independent*: a group is missed with probability
C(n-c, m) / C(n, m). *Clustered*: chosen units come in runs of r units on average, and chosen and left ones follow each
other as in a Markov chain; a group is missed with probability (1-f) * (1-a)^(c-1), where f = m / n, and
a = f / (r (1-f)) is the chance that a run begins. Both are expectations; which one holds is a matter of the model and
the text, so the run is a parameter.

Fast memory. What it holds need not be read. Of a scan of everything that is its share of all KV. Of a selection it is
what the step before wanted too (`reuse`), as far as it fits, and of the rest the share that the room left over holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvtide.errors import ConfigError
from kvtide.roofline import Roof
from kvtide.spec import Access, KVShape, Layout, SlotLayout, fragments, why_not_split
from kvtide.spec.geometry import POSITIONS_MAX, whole_number
from kvtide.spec.layout import BLOCK_TOKENS_MAX, GROUP_BLOCKS_MAX
from kvtide.units import format_bytes, format_ns

TIE = 0.01  # times closer than this are equal: no prediction here is better
LAYOUT_OF_NAME = {
    "block-first": Layout.BLOCK_FIRST,
    "groups": Layout.LAYER_MAJOR,
    "kv-apart": Layout.KV_APART,
    "head-major": Layout.HEAD_MAJOR,
}
AUTO = "auto"

ReadTime = Callable[[float, float], float]
"""Time in ns of so many reads, known at once, of so many bytes each."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a step reads of each layer: everything (`budget_tokens` None), or a selection.

    A selection is `budget_tokens` tokens in units of `unit_tokens`; `is_per_head`: each KV head has units of its own.
    `reuse` is the part of them that the step before had chosen too; `run_units` the mean length of a run of chosen
    units, None: chosen independently.
    Raises: ConfigError for numbers that cannot be.
    """

    budget_tokens: int | None = None
    unit_tokens: int = 16
    is_per_head: bool = False
    is_values_only: bool = False
    reuse: float = 0.0
    run_units: float | None = None

    def __post_init__(self) -> None:
        whole_number("unit_tokens", self.unit_tokens, least=1, most=BLOCK_TOKENS_MAX)
        if self.budget_tokens is not None:
            whole_number("budget_tokens", self.budget_tokens, least=1, most=POSITIONS_MAX)
        if not 0.0 <= self.reuse <= 1.0:
            raise ConfigError(f"reuse is {self.reuse}; it is a part, from 0 to 1")
        if self.run_units is not None and not self.run_units >= 1.0:
            raise ConfigError(f"run_units is {self.run_units}; a run has at least 1 unit")

    def num_chosen(self, num_tokens: int) -> int:
        """Units chosen among `num_tokens` tokens."""
        return -(-min(self.budget_tokens or num_tokens, num_tokens) // self.unit_tokens)

    def touched(self, num_tokens: int, group_tokens: int) -> float:
        """Return how many groups of `group_tokens` tokens are expected to hold anything that is wanted."""
        num_groups = -(-num_tokens // group_tokens)
        num_units, chosen = -(-num_tokens // self.unit_tokens), self.num_chosen(num_tokens)
        if chosen >= num_units:
            return float(num_groups)
        if self.unit_tokens >= group_tokens:
            return min(float(num_groups), chosen * -(-self.unit_tokens // group_tokens))
        return num_groups * (1 - self._missed(num_units, chosen, -(-group_tokens // self.unit_tokens)))

    def _missed(self, num_units: int, chosen: int, in_group: int) -> float:
        """Return the chance that none of a group's units is chosen."""
        in_group = min(in_group, num_units)
        if self.run_units is None:
            return math.prod(max(0, num_units - chosen - i) / (num_units - i) for i in range(in_group))
        part = chosen / num_units
        begins = min(1.0, part / (self.run_units * (1 - part)))
        return (1 - part) * (1 - begins) ** (in_group - 1)


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked: a sequence's KV, what a step reads of it, and what from. `drive` names what `read_ns` is of.

    `fast_bytes` is memory above the drive that keeps KV, for all of `num_sequences` together; `group_blocks` leaves
    only candidates with such groups.
    """

    shape: KVShape
    block_tokens: int
    num_tokens: int
    pattern: Pattern
    read_ns: ReadTime
    drive: str = "the drive"
    fast_bytes: int = 0
    num_sequences: int = 1
    group_blocks: int | None = None

    def __post_init__(self) -> None:
        whole_number("block_tokens", self.block_tokens, least=1, most=BLOCK_TOKENS_MAX)
        whole_number("num_tokens", self.num_tokens, least=1, most=POSITIONS_MAX)
        whole_number("num_sequences", self.num_sequences, least=1, most=1 << 20)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout and what a step is expected to cost with it: reads, bytes and time for one token of each sequence.

    `slack_bytes` is room a sequence takes beyond its KV: headers, padding and the group that is not full.
    """

    layout: Layout
    group_blocks: int
    num_ops: float
    num_bytes: float
    time_ns: float
    slack_bytes: int

    @property
    def name(self) -> str:
        """The layout as people type it."""
        return next(name for name, layout in LAYOUT_OF_NAME.items() if layout is self.layout)

    @property
    def title(self) -> str:
        """The layout and its groups."""
        if self.layout is Layout.BLOCK_FIRST:
            return self.name
        of = f"of {self.group_blocks} block{'s' if self.group_blocks > 1 else ''}"
        return f"groups {of}" if self.layout is Layout.LAYER_MAJOR else f"{self.name}, groups {of}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The best candidate, all of them in order of layout and group, and why, in sentences."""

    best: Candidate
    candidates: tuple[Candidate, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Picked:
    """What a store is to be opened with. `group_blocks` None: by the drive's knee."""

    name: str
    layout: Layout
    group_blocks: int | None
    reasons: tuple[str, ...]


def layout_for(name: str, case: Case | None = None) -> Picked:
    """Return the layout called `name`; for `auto` the best one of `case`, or groups where nothing is selected.

    Raises: ConfigError for an unknown name, or no candidate.
    """
    if name in LAYOUT_OF_NAME:
        return Picked(name, LAYOUT_OF_NAME[name], 1 if name == "block-first" else None, ("it was asked for",))
    if name != AUTO:
        raise ConfigError(f"--layout is {name[:40]!r}; type {AUTO}, {', '.join(LAYOUT_OF_NAME)}")
    if case is None or case.pattern.budget_tokens is None:
        return Picked("groups", Layout.LAYER_MAJOR, None, ("nothing is selected, so whole layers are read",))
    choice = choose(case)
    return Picked(choice.best.name, choice.best.layout, choice.best.group_blocks, choice.reasons)


def read_time(roof: Roof, depth: int, *, num_threads: int = 1) -> ReadTime:
    """Return the time a drive with these roofs needs, with at most `depth` reads in flight."""

    def took_ns(num_ops: float, op_bytes: float) -> float:
        in_flight = max(1.0, min(float(depth), num_ops))
        return num_ops * op_bytes / float(roof.bytes_per_s(op_bytes, in_flight, num_threads=num_threads)) * 1e9

    return took_ns


def choose(case: Case) -> Choice:
    """Predict every candidate and take the fastest; of those within TIE of it the one with the fewest reads.

    Where fast memory holds everything, the candidates are compared by what reading a whole prefix costs.
    Raises: ConfigError if no candidate is left.
    """
    candidates = predict(case)
    reasons = [_wanted(case)]
    if not any(candidate.time_ns for candidate in candidates):
        reasons = ["Fast memory holds all KV, so layouts are compared by what reading a whole prefix takes."]
        case = replace(case, pattern=Pattern(), fast_bytes=0)
        candidates = predict(case)
    least = min(candidate.time_ns for candidate in candidates)
    tied = [candidate for candidate in candidates if candidate.time_ns <= least * (1 + TIE)]
    best = min(tied, key=lambda one: (one.num_ops, one.time_ns, one.slack_bytes))
    return Choice(best, tuple(candidates), (*reasons, *_why(best, candidates, case)))


def predict(case: Case) -> list[Candidate]:
    """Return every candidate with what it costs, layouts as in LAYOUT_OF_NAME, groups from small to large.

    Raises: ConfigError if there is none.
    """
    found = [
        _cost(case, layout, group_blocks)
        for layout in LAYOUT_OF_NAME.values()
        if not why_not_split(case.shape, layout.split)
        for group_blocks in _group_sizes(case, layout)
    ]
    if not found:
        raise ConfigError(f"no layout has groups of {case.group_blocks} blocks of {case.block_tokens} tokens")
    return found


def _group_sizes(case: Case, layout: Layout) -> list[int]:
    """Powers of two: block-first has one, groups have none of one block, for that is block-first."""
    if layout is Layout.BLOCK_FIRST:
        sizes = [1]
    else:
        least = 2 if layout is Layout.LAYER_MAJOR else 1
        sizes = [1 << power for power in range(GROUP_BLOCKS_MAX.bit_length()) if 1 << power >= least]
        if case.group_blocks is not None and case.group_blocks >= least:
            sizes = [case.group_blocks]
    wanted = [size for size in sizes if case.group_blocks in {None, size}]
    return [size for size in wanted if size * case.block_tokens <= BLOCK_TOKENS_MAX]


def _cost(case: Case, layout: Layout, group_blocks: int) -> Candidate:
    shape, num = case.shape, case.num_sequences
    slot = SlotLayout(shape, case.block_tokens, group_blocks, layout.split)
    num_slots = -(-case.num_tokens // slot.tokens_per_group)
    per_layer: dict[object, tuple[float, float]] = {}  # most layers are alike
    reads = []
    for index, layer in enumerate(shape.layers):
        if layer not in per_layer:
            per_layer[layer] = _layer_reads(case, layout, group_blocks, index)
        reads.append(per_layer[layer])
    miss = _missing(case, num * sum(moved for _, moved in reads), num * num_slots * sum(slot.fragment_padded_bytes))
    times = {(ops, moved): case.read_ns(num * ops * miss, moved / ops) for ops, moved in set(reads)} if miss else {}
    return Candidate(
        layout=layout,
        group_blocks=group_blocks,
        num_ops=num * miss * sum(ops for ops, _ in reads),
        num_bytes=num * miss * sum(moved for _, moved in reads),
        time_ns=sum(times[one] for one in reads) if miss else 0.0,
        slack_bytes=num_slots * slot.slot_bytes - case.num_tokens * shape.bytes_per_token,
    )


def _layer_reads(case: Case, layout: Layout, group_blocks: int, layer: int) -> tuple[float, float]:
    """Return reads and bytes of what a step wants of one layer, before fast memory takes its part."""
    pattern, group_tokens = case.pattern, case.block_tokens * group_blocks
    num_groups = -(-case.num_tokens // group_tokens)
    part = pattern.touched(case.num_tokens, group_tokens) / num_groups
    heads = case.shape.layers[layer].num_heads if pattern.is_per_head and pattern.budget_tokens is not None else 1
    is_head_read = heads > 1 and layout is Layout.HEAD_MAJOR
    access = Access.READ_BLOCKS
    if is_head_read:
        access = Access.READ_HEAD_BLOCKS
    elif pattern.is_values_only and layout is Layout.KV_APART:
        access = Access.READ_VALUES
    one = fragments(  # a whole group is taken as one block: it is read as one piece
        case.shape,
        Layout.BLOCK_FIRST if layout is Layout.LAYER_MAJOR else layout,
        access,
        num_tokens=case.num_tokens,
        block_tokens=group_tokens,
        layer=layer,
    )
    if is_head_read:
        runs = part + (heads - 1) * part * (1 - part)
        return num_groups * runs, num_groups * heads * part * one.padded_bytes
    touched = num_groups * (1 - (1 - part) ** heads)  # by any head
    return touched * one.num_fragments, touched * one.padded_bytes


def _missing(case: Case, wanted_bytes: float, all_bytes: float) -> float:
    """Return the part of a step's reads that fast memory does not answer."""
    pattern, fast = case.pattern, case.fast_bytes
    if fast >= all_bytes:
        return 0.0
    if pattern.num_chosen(case.num_tokens) >= -(-case.num_tokens // pattern.unit_tokens):
        return 1 - fast / all_bytes
    again = pattern.reuse * min(1.0, fast / wanted_bytes)
    others = max(0.0, fast - wanted_bytes) / all_bytes
    return (1 - again) * (1 - others)


def _wanted(case: Case) -> str:
    pattern, num = case.pattern, case.num_tokens
    if pattern.budget_tokens is None:
        return f"A step reads all {num:,} tokens of every layer."
    chance = f"in runs of {pattern.run_units:g}" if pattern.run_units is not None else "independent of each other"
    whose = "each KV head's own" if pattern.is_per_head else "the same for all heads"
    what = "values only" if pattern.is_values_only else "keys and values"
    return (
        f"A step reads {what} of {min(pattern.budget_tokens, num):,} of {num:,} tokens a layer: "
        f"{pattern.num_chosen(num):,} units of {pattern.unit_tokens}, {whose}, {chance}, {pattern.reuse:.0%} of them "
        f"as the step before."
    )


def _why(best: Candidate, candidates: list[Candidate], case: Case) -> list[str]:
    told = [f"{_capital(best.title)}: a step takes {_costs(best)} on {case.drive}."]
    rivals = {one.layout: one for one in sorted(candidates, key=lambda one: -one.time_ns) if one is not best}
    for rival in sorted(rivals.values(), key=lambda one: one.time_ns):
        if not best.time_ns:
            than = "not all of it fits fast memory"
        elif rival.time_ns > best.time_ns * (1 + TIE):
            than = f"{rival.time_ns / best.time_ns:.2f} x as long"
        else:
            than = "as long, with no fewer reads"
        told.append(f"{_capital(rival.title)}: {than}, {_costs(rival)}.")
    told.append(f"Headers, padding and the group that is not full take {format_bytes(best.slack_bytes)} a sequence.")
    return told


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _costs(one: Candidate) -> str:
    mean = one.num_bytes / one.num_ops if one.num_ops else 0.0
    moved = f"{one.num_ops:,.0f} reads of {format_bytes(mean)}, {format_bytes(one.num_bytes)}"
    return f"{format_ns(one.time_ns)} for {moved}"
