"""Drafts of the next tokens from suffixes seen before, and what those tokens attended to. Pure. Next: names.

Decoding reads for one token at a time, so few reads are in flight. But text repeats itself: the longest suffix of the
text that occurred before says what came after it then. Those tokens are a *draft*; the model verifies all of them in
one step, whose reads are in flight together, and keeps those it would have produced itself. So greedy output does not
change, and depth rises with the tokens a step verifies.

Huawei's UCM calls its own design PMR-Tree (partial matched retrieval); no algorithm of it is published. This one is a
trie of suffixes with counts, as in SuffixDecoding (arXiv 2411.04975), with two additions: it knows where a continuation
occurred last, and which groups the tokens there attended to, which is a guess of what the next ones will.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.select.contract import Ids

DRAFT_TOKENS = 8  # of a step: reads of so many tokens are in flight together
DEPTH = 12  # tokens of the longest suffix that is matched
MATCH_MIN = 2  # shorter matches predict little (SuffixDecoding begins at 1, with a draft as long as the match)
TOKEN_SHARE_MIN = 0.1  # a draft ends where its probability by counts falls below (SuffixDecoding's min_token_prob)
IDS_MAX = 4_000_000  # of attended groups that are remembered, in all


@dataclass(frozen=True, slots=True)
class Draft:
    """Predicted tokens, and the position at which each occurred last."""

    tokens: list[int]
    positions: list[int]


class SuffixTrie:
    """All substrings of at most `depth` tokens of the texts seen, with counts.

    Nodes are numbers; node 0 is the empty string. Memory is bounded by `nodes_max`: a full trie learns no new strings.
    """

    def __init__(self, *, depth: int = DEPTH, nodes_max: int = 500_000) -> None:
        self._depth, self._nodes_max = depth, nodes_max
        self._children: list[dict[int, int] | None] = [None]
        self._counts, self._last = [0], [-1]
        self._active = [0]  # nodes of the suffixes of the text so far, the shortest first
        self._text: list[int] = []
        self.num_tokens = 0  # of all texts: the position of the next one

    def observe(self, text: Sequence[int]) -> None:
        """Take in `text`; where it continues the one before, only what is new of it."""
        known = len(self._text)
        if list(text[:known]) != self._text:
            self._text, self._active, known = [], [0], 0
        for token in text[known:]:
            self._append(token)

    def position(self, index: int) -> int:
        """Return the position of token `index` of the current text among all tokens seen."""
        return self.num_tokens - len(self._text) + index

    def draft(self, num_max: int) -> Draft:
        """Return what followed the longest matching suffix most often, up to `num_max` tokens, while it is likely."""
        tokens: list[int] = []
        positions: list[int] = []
        context, share = self._text[-self._depth :], 1.0
        while len(tokens) < num_max:
            node = self._match(context)
            if node is None:
                break
            children = self._children[node]
            assert children is not None, "a match is a string that was continued"
            token, child = max(children.items(), key=lambda item: (self._counts[item[1]], self._last[item[1]]))
            share *= self._counts[child] / sum(self._counts[one] for one in children.values())
            if share < TOKEN_SHARE_MIN:
                break
            tokens.append(token)
            positions.append(self._last[child])
            context = [*context, token][-self._depth :]
        return Draft(tokens, positions)

    def _match(self, context: list[int]) -> int | None:
        """Return the node of the longest suffix of `context` that was continued before; None if it is too short."""
        for start in range(max(0, len(context) - self._depth + 1), len(context) - MATCH_MIN + 1):
            node = 0
            for token in context[start:]:
                found = (self._children[node] or {}).get(token)
                if found is None:
                    break
                node = found
            else:
                if self._children[node]:
                    return node
        return None

    def _append(self, token: int) -> None:
        reached = [0]
        for node in self._active:
            child = self._child(node, token)
            if child is None:
                break
            self._counts[child] += 1
            self._last[child] = self.num_tokens
            reached.append(child)
        self._active = reached[: self._depth]
        self._text.append(token)
        self.num_tokens += 1

    def _child(self, node: int, token: int) -> int | None:
        children = self._children[node]
        if children is None:
            children = self._children[node] = {}
        child = children.get(token)
        if child is None and len(self._counts) < self._nodes_max:
            child = children[token] = len(self._counts)
            self._children.append(None)
            self._counts.append(0)
            self._last.append(-1)
        return child


class AttendedGroups:
    """Which groups each layer attended to at positions of the trie's texts; the latest `ids_max` are remembered."""

    def __init__(self, ids_max: int = IDS_MAX) -> None:
        self._ids_max, self._num_ids = ids_max, 0
        self._groups: dict[int, list[Ids]] = {}

    def note(self, position: int, layers: list[Ids]) -> None:
        """Remember what the token at `position` attended to, one array a layer."""
        self._num_ids -= _num_ids(self._groups.pop(position, []))
        self._groups[position] = layers
        self._num_ids += _num_ids(layers)
        while self._num_ids > self._ids_max:
            self._num_ids -= _num_ids(self._groups.pop(next(iter(self._groups))))

    def of(self, positions: list[int]) -> list[list[Ids]]:
        """Return what the tokens at `positions` attended to, for those that are remembered."""
        return [self._groups[position] for position in positions if position in self._groups]


def _num_ids(layers: list[Ids]) -> int:
    return sum(len(groups) for groups in layers)
