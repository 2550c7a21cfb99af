"""What a step attends to, and what chooses it: the contract of all selectors. Pure. Next: choose, then quest.

Theory. Decoding with selection is one pipeline: keys are summarised once; each step scores the units of a layer with
its query, takes the best within a budget, and attends to them exactly. A unit is a run of `unit` tokens of one layer.
Some tokens are attended always: the first ones (*sinks*, which softmax leans on) and the latest (*recent*, with all
that is not a whole unit yet). They count against the budget:

    | sinks | units to choose from ................ | recent, tail |
    0       first * unit                 last * unit               num_tokens

What is chosen (a `Selector`), what is fast already (the tiers) and how the rest is read (the layout) vary apart: a
selector never touches a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError
from kvtide.select.rope import Rope
from kvtide.units import printable

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

SINK_TOKENS = 4  # StreamingLLM (arXiv 2309.17453) keeps four
RECENT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention geometry: every KV head serves `group` query heads (GQA)."""

    num_layers: int
    num_q: int
    num_kv: int
    dim: int
    scaling: float

    def __post_init__(self) -> None:
        if self.num_q % self.num_kv:
            raise ConfigError(
                f"{self.num_q} query heads do not divide among {self.num_kv} KV heads; leave --select out"
            )

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.num_q // self.num_kv

    def by_kv(self, query: Floats) -> Floats:
        """Return `query` [Hq, D] as [Hkv, G, D]."""
        return query.reshape(self.num_kv, self.group, self.dim)

    def flat(self, keys: Floats) -> Floats:
        """Return the keys of all heads of a token side by side. Shapes: [T, Hkv, D] to [T, Hkv * D]."""
        return keys.reshape(-1, self.num_kv * self.dim)

    def all_by_kv(self, queries: Floats) -> Floats:
        """Return every query that a KV head meets. Shapes: queries [n, Hq, D]; returns [Hkv, n * G, D]."""
        by_kv = queries.reshape(-1, self.num_kv, self.group, self.dim).transpose(1, 0, 2, 3)
        return by_kv.reshape(self.num_kv, -1, self.dim)


@dataclass(frozen=True, slots=True)
class Reach:
    """How many tokens there are, and how many a step may attend to."""

    num_tokens: int
    budget: int
    sinks: int = SINK_TOKENS
    recent: int = RECENT_TOKENS

    @property
    def is_everything(self) -> bool:
        """Whether the budget covers all tokens."""
        return self.budget >= self.num_tokens

    def bounds(self, unit: int, num_units: int | None = None) -> tuple[int, int, int]:
        """Return the first unit to choose from, the one after the last, and how many the budget leaves room for.

        `num_units` are summarised (None: all): what comes behind them is attended, so it takes room from the others.
        """
        first = -(-self.sinks // unit)
        last = (self.num_tokens - self.recent) // unit
        last = max(first, last if num_units is None else min(last, num_units))
        always = min(self.num_tokens, first * unit) + max(0, self.num_tokens - last * unit)
        return first, last, min(max(0, (self.budget - always) // unit), last - first)

    def check(self, unit: int, num_fresh: int = 0) -> None:
        """Raise ConfigError if the budget leaves no room for a single chosen unit beside what is always kept.

        Up to `num_fresh` of the latest tokens may not be summarised yet.
        """
        always = -(-self.sinks // unit) * unit + max(self.recent, num_fresh) + unit - 1
        if self.budget < always + unit:
            raise ConfigError(
                f"a budget of {self.budget} tokens is too small: {always} are kept always (sinks, recent ones and the "
                f"tail of a unit of {unit}); type --budget {always + unit} or more"
            )


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens a step attends to in each layer: a number, or a share of all there are."""

    tokens: int = 0
    share: float = 0.0
    sinks: int = SINK_TOKENS
    recent: int = RECENT_TOKENS

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Return the budget that "256", "0.1" or "10%" means.

        Raises: ConfigError for anything else.
        """
        try:
            number = float(text.removesuffix("%"))
        except ValueError:
            number = -1.0
        if text.endswith("%"):
            number /= 100
        elif number >= 1 and number.is_integer():
            return cls(tokens=int(number))
        if not 0 < number <= 1:
            raise ConfigError(
                f"--budget is {printable(text)[:40]!r}; type a number of tokens as 256, or a share as 0.1 or 10%"
            )
        return cls(share=number)

    def reach(self, num_tokens: int) -> Reach:
        """Return what a query that sees `num_tokens` may attend to."""
        return Reach(num_tokens, self.tokens or int(self.share * num_tokens), self.sinks, self.recent)


@dataclass(frozen=True, slots=True)
class Selection:
    """Tokens one layer attends to in one step.

    Shapes: ids [h, k] units, each row sorted and without repeats; h is 1 where all heads share, or the KV heads.
    Tokens below `first * unit` and from `last * unit` on belong to it too. `need` says which part must be read.
    """

    unit: int
    ids: Ids
    first: int
    last: int
    num_tokens: int
    need: Literal["kv", "v"] = "kv"

    @classmethod
    def everything(cls, num_tokens: int) -> Selection:
        """Return the selection of all tokens."""
        return cls(1, np.zeros((1, 0), np.int64), 0, 0, num_tokens)

    @property
    def is_everything(self) -> bool:
        """Whether it leaves nothing out."""
        return self.first >= self.last or self.ids.shape[1] >= self.last - self.first

    @property
    def num_selected(self) -> int:
        """Tokens each head attends to."""
        if self.is_everything:
            return self.num_tokens
        return (
            min(self.first * self.unit, self.num_tokens)
            + self.ids.shape[1] * self.unit
            + max(0, self.num_tokens - self.last * self.unit)
        )

    def mask(self) -> npt.NDArray[np.bool_]:
        """Say which tokens are attended. Shapes: [h, num_tokens]."""
        first, last = min(self.first * self.unit, self.num_tokens), min(self.last * self.unit, self.num_tokens)
        mask = np.zeros((len(self.ids), self.num_tokens), np.bool_)
        mask[:, :first] = True
        mask[:, last:] = True
        tokens = (self.ids[:, :, None] * self.unit + np.arange(self.unit)).reshape(len(self.ids), -1)
        np.put_along_axis(mask, tokens, values=True, axis=1)
        return mask

    def groups(self, tokens_per_group: int) -> Ids:
        """Return the stored groups that hold any attended token of any head, in order."""
        if self.unit == tokens_per_group and len(self.ids) == 1:
            num = -(-self.num_tokens // tokens_per_group)
            return np.concatenate([np.arange(min(self.first, num)), self.ids[0], np.arange(self.last, num)])
        touched = np.flatnonzero(self.mask().any(axis=0)) // tokens_per_group
        return np.unique(touched)


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of consecutive tokens of one layer, as attention uses them (after RoPE).

    Shapes: post [T, Hkv, D]; `start` is the position of the first.
    """

    post: Floats
    start: int = 0
    rope: Rope | None = None

    def before_rope(self) -> Floats:
        """Return the keys before their positions were turned into them.

        Raises: ConfigError for a model without RoPE.
        """
        if self.rope is None:
            raise ConfigError("keys before RoPE are needed, and this model has no RoPE; choose another --select")
        return self.rope.undo(self.post, self.start)


class Selector(Protocol):
    """Chooses what a layer attends to. It keeps a summary of the keys in fast memory.

    `unit` tokens are chosen together. `is_ahead`: it is meant to be asked one layer early, with the query that the
    input of the layer before predicts. Threads: one at a time.
    """

    unit: int
    is_ahead: bool

    def on_prefill(self, layer: int, keys: Keys, queries: Floats) -> None:
        """Summarise all keys so far, anew. Shapes: queries [n, Hq, D], the latest ones, oldest first."""

    def on_append(self, layer: int, keys: Keys) -> None:
        """Take in the keys of the tokens that follow. What was not taken in yet counts as tail: it is attended."""

    def select(self, layer: int, query: Floats, reach: Reach) -> Selection:
        """Choose for one query. Shapes: query [Hq, D], after RoPE."""

    def fast_bytes(self) -> int:
        """Return the bytes of fast memory its summaries take now."""


@runtime_checkable
class RebuildsKeys(Protocol):
    """A selector whose summary can stand in for the keys, so that values alone are read."""

    def keys(self, layer: int, tokens: Ids) -> Floats:
        """Return rebuilt keys, after RoPE. Shapes: tokens [n]; returns [n, Hkv, D]."""
