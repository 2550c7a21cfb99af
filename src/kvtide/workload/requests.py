"""Requests in order of arrival, their prompts as ids of blocks: what a cache can be judged on before it is built.

Decides what a workload is, and what can be told of it without a cache. Refuses to know files and generators.
Next: prefixes.

Theory. The prompts of a workload form a tree: a block is a node, and its id says what it holds and what comes before
it, so equal ids mean equal KV. Ids are numbered by first appearance, which makes the ids of the first requests dense
too. An answer enters the ids only where a later prompt repeats it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError
from kvtide.spec.geometry import whole_number
from kvtide.spec.layout import BLOCK_TOKENS_MAX

Ids = npt.NDArray[np.int64]
TOKENS_MAX = 1 << 24  # of one prompt or answer: beyond the longest context there is, 10 million (Llama 4 Scout)
BLOCKS_MAX = 1 << 27  # of all prompts: 1 GiB an array
TIME_NS_MAX = 1 << 62


@dataclass(frozen=True, slots=True)
class Malformed:
    """Lines that could not be read: how many, and the first of them with line number and reason."""

    num: int = 0
    first: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests in order of arrival, their prompts as ids of blocks. Made by `make_workload`; arrays are read-only.

    Shapes: R requests, N blocks of all prompts.
    """

    name: str
    source: str  # a format, as in "mooncake", or "synthetic multi-turn"
    block_tokens: int  # tokens one block id stands for
    arrival_ns: Ids  # [R] from the first request, ascending
    input_tokens: Ids  # [R]
    output_tokens: Ids  # [R]
    block_start: Ids  # [R + 1]; request r has block_ids[block_start[r]:block_start[r + 1]]
    block_ids: Ids  # [N] 0 to num_unique - 1 by first appearance; the last of a request may be filled in part
    session: Ids  # [R]; -1 where unknown
    notes: tuple[str, ...] = ()  # what was assumed or left out
    malformed: Malformed = Malformed()

    @property
    def num_requests(self) -> int:
        """Requests."""
        return len(self.arrival_ns)

    @property
    def num_blocks(self) -> int:
        """Blocks of all prompts; one that several prompts have counts each time."""
        return len(self.block_ids)

    @property
    def num_unique(self) -> int:
        """Different blocks: what a cache that forgets nothing ends up with."""
        return int(self.block_ids.max()) + 1

    def blocks_of(self, request: int) -> Ids:
        """Return the block ids of a prompt, in order. Shapes: [blocks of the prompt]."""
        assert 0 <= request < self.num_requests, "there is such a request"
        return self.block_ids[self.block_start[request] : self.block_start[request + 1]]

    def take(self, num: int) -> Workload:
        """Return the first `num` requests, or all if there are no more. Raises: ConfigError if num < 1."""
        whole_number("number of requests", num, least=1, most=1 << 62)
        if num >= self.num_requests:
            return self
        end = int(self.block_start[num])
        return replace(
            self,
            arrival_ns=self.arrival_ns[:num],
            input_tokens=self.input_tokens[:num],
            output_tokens=self.output_tokens[:num],
            block_start=self.block_start[: num + 1],
            block_ids=self.block_ids[:end],
            session=self.session[:num],
            notes=(*self.notes, f"The first {num:,} of {self.num_requests:,} requests."),
        )

    def next_use(self) -> Ids:
        """Return for each block where in `block_ids` a later request has it again; N where none does.

        No prompt has a block twice, so the next place of an id is always in a later request.

        Shapes: [N].
        """
        order = np.argsort(self.block_ids, kind="stable")
        again = np.flatnonzero(self.block_ids[order[1:]] == self.block_ids[order[:-1]])
        found = np.full(self.num_blocks, self.num_blocks, np.int64)
        found[order[again]] = order[again + 1]
        return found

    def ideal_hits(self) -> tuple[Ids, Ids]:
        """Return blocks and tokens of each prompt that a cache that forgets nothing would have: the ceiling of any.

        A block counts if an earlier request has it. All blocks before it count then too, so hits are always a prefix.
        Engines compute the last token of a prompt even if it is cached; here it counts like the others.

        Shapes: two arrays [R].
        """
        is_new = np.diff(np.maximum.accumulate(self.block_ids), prepend=-1) > 0  # ids are numbered by appearance
        hits_before = np.concatenate([[0], np.cumsum(~is_new)])
        blocks = hits_before[self.block_start[1:]] - hits_before[self.block_start[:-1]]
        return blocks, np.minimum(blocks * self.block_tokens, self.input_tokens)


def make_workload(
    *,
    name: str,
    source: str,
    block_tokens: int,
    arrival_ns: npt.ArrayLike,
    input_tokens: npt.ArrayLike,
    output_tokens: npt.ArrayLike,
    block_start: npt.ArrayLike,
    block_ids: npt.ArrayLike,
    session: npt.ArrayLike,
    notes: tuple[str, ...] = (),
    malformed: Malformed | None = None,
) -> Workload:
    """Return a workload from its arrays, checked, and its ids numbered by first appearance.

    Shapes: as in `Workload`. `block_ids` must be dense, in any order.
    Raises: ConfigError that says which rule is broken.
    """
    whole_number("block_tokens", block_tokens, least=1, most=BLOCK_TOKENS_MAX)
    arrivals, inputs = _row("arrival_ns", arrival_ns), _row("input_tokens", input_tokens)
    outputs, sessions = _row("output_tokens", output_tokens), _row("session", session)
    start, raw_ids = _row("block_start", block_start), _flat("block_ids", block_ids)
    num = len(arrivals)
    _need(num >= 1, "a workload has at least one request")
    lengths = (len(inputs), len(outputs), len(sessions), len(start) - 1)
    _need(lengths == (num,) * 4, f"{num} arrivals need as many of each, got {lengths}")
    _need(arrivals[0] == 0 and bool((np.diff(arrivals) >= 0).all()), "arrival_ns begins with 0 and never falls")
    _need(int(arrivals[-1]) < TIME_NS_MAX, "arrival_ns is below 2**62")
    _need(inputs.min() >= 1 and inputs.max() <= TOKENS_MAX, f"input_tokens are 1 to {TOKENS_MAX:,}")
    _need(outputs.min() >= 0 and outputs.max() <= TOKENS_MAX, f"output_tokens are 0 to {TOKENS_MAX:,}")
    _need(bool(sessions.min() >= -1), "session is -1 or a number from 0 on")
    counts = -(-inputs // block_tokens)
    expected = np.concatenate([[0], np.cumsum(counts)])
    _need(np.array_equal(start, expected), f"block_start fits prompts cut into blocks of {block_tokens} tokens")
    _need(len(raw_ids) == expected[-1], f"{expected[-1]} block ids are needed, got {len(raw_ids)}")
    _need(len(raw_ids) <= BLOCKS_MAX, f"all prompts together have at most {BLOCKS_MAX:,} blocks")
    ids = _by_appearance(raw_ids)
    _check_tree(ids, start, inputs - (counts - 1) * block_tokens, block_tokens)
    for column in (arrivals, inputs, outputs, start, ids, sessions):
        column.flags.writeable = False
    return Workload(
        name, source, block_tokens, arrivals, inputs, outputs, start, ids, sessions, notes, malformed or Malformed()
    )


def _row(name: str, values: npt.ArrayLike) -> Ids:
    return _flat(name, values).astype(np.int64)  # a copy: it becomes read-only


def _flat(name: str, values: npt.ArrayLike) -> npt.NDArray[np.integer]:
    found = np.asarray(values)
    if found.ndim != 1 or (found.dtype.kind not in "iu" and found.size):
        raise ConfigError(f"{name} must be a flat array of whole numbers, got shape {found.shape} of {found.dtype}")
    return found


def _need(is_met: bool | np.bool_, rule: str) -> None:
    if not is_met:
        raise ConfigError(f"this is no workload: {rule}")


def _by_appearance(ids: npt.NDArray[np.integer]) -> Ids:
    """Return `ids` numbered anew, in the order they appear in. Shapes: [N], N <= BLOCKS_MAX."""
    num_unique = int(ids.max()) + 1
    _need(ids.min() >= 0 and num_unique <= len(ids), "block_ids are dense numbers from 0 on")
    first = np.full(num_unique, -1, np.int32)
    first[ids[::-1]] = np.arange(len(ids) - 1, -1, -1, dtype=np.int32)  # of equal ids the last assignment stays
    _need(bool((first >= 0).all()), "block_ids are dense numbers from 0 on")
    is_first = np.zeros(len(ids), np.bool_)
    is_first[first] = True
    rank = np.empty(num_unique, np.int64)
    rank[ids[is_first]] = np.arange(num_unique)
    return rank[ids]


def _check_tree(ids: Ids, start: Ids, last_fill: Ids, block_tokens: int) -> None:
    """Check that equal ids mean equal prefixes and equal sizes. That rules out an id twice in one prompt, too."""
    num_unique = int(ids.max()) + 1
    parents = np.empty(len(ids), np.int32)
    parents[1:], parents[start[:-1]] = ids[:-1], -1
    parent_of = np.empty(num_unique, np.int32)
    parent_of[ids] = parents
    _need(bool((parent_of[ids] == parents).all()), "equal block_ids have equal ids before them")
    fill_of, last = np.full(num_unique, block_tokens, np.int64), ids[start[1:] - 1]
    fill_of[last] = last_fill
    num_filled_in_part = int(np.count_nonzero(last_fill < block_tokens))
    is_like = np.array_equal(fill_of[last], last_fill)
    is_like &= np.count_nonzero((fill_of < block_tokens)[ids]) == num_filled_in_part
    _need(is_like, "blocks with equal ids are filled alike")
