"""A recorded trace of attention, replayed to any selector: how much of it a selection holds, and what it reads. Pure.
Next: compared.

The trace has keys, values and queries of a model that attended to everything. So every selector meets the same queries,
and what one step leaves out does not change the next: what is measured is the choice alone.

    | keys that are summarised ........ | n tokens, one a step: each is a query, then a key |
    0                             num_prefill                                         num_tokens
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtide.select.choose import top
from kvtide.select.contract import Budget, Floats, Heads, Ids, Keys, Reach, RebuildsKeys, Selection, Selector
from kvtide.select.rope import Rope

GROUP_TOKENS = 16  # of the groups that are counted: those that a store reads


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """One layer of a trace, after RoPE.

    Shapes: keys [T, Hkv, D]; values [T, Hkv, Dv]; queries [n, Hq, D] of the last n tokens; ahead [n, Hq, D] what the
    input of the layer before predicts of them, None in the first layer; earlier [c, Hq, D] queries before these.
    """

    keys: Floats
    values: Floats
    queries: Floats
    ahead: Floats | None
    earlier: Floats


@dataclass(frozen=True, slots=True)
class Trace:
    """Attention of one model to one text. `element_bytes` is the size of a stored number of KV."""

    heads: Heads
    layers: list[LayerTrace]
    rope: Rope | None = None
    element_bytes: int = 4

    @property
    def num_tokens(self) -> int:
        """All tokens."""
        return len(self.layers[0].keys)

    @property
    def num_queries(self) -> int:
        """Tokens that are replayed."""
        return len(self.layers[0].queries)

    @property
    def num_prefill(self) -> int:
        """Tokens that are summarised at once."""
        return self.num_tokens - self.num_queries


@dataclass(slots=True)
class Replayed:
    """What a selector did on a trace. Means over layers, queries and heads, unless a name says otherwise.

    `by_layer` has the same figures of each layer. None: there was nothing to measure.
    """

    mass: float  # share of the attention mass that is attended
    mass_p5: float
    middle: float | None  # the same of the mass outside sinks and recent window
    middle_p5: float | None
    index_recall: float | None  # units in both this choice and the oracle's, of those in either
    error: float  # of the output, relative to its length
    attended: float  # tokens
    groups: float  # of 16 tokens that hold any of them, in one layer
    reuse: float | None  # share of these that the step before touched, too
    new_groups: float | None
    touched_bytes: float  # of all layers, a token
    new_bytes: float | None
    select_ns: float  # a query of one layer, median
    fast_bytes: int
    by_layer: dict[str, list[float | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Exact:
    """Attention to everything in one layer.

    Shapes: weights [n, Hq, T]; lse [n, Hq]; out [n, Hq, Dv]; values [Hkv, T, Dv].
    """

    weights: Floats
    lse: Floats
    out: Floats
    values: Floats


class Replay:
    """Replays one trace; attention to everything is computed once."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._exact = [_exact(trace, layer) for layer in trace.layers]

    def summarise(self, selector: Selector) -> None:
        """Give `selector` the keys before the first query."""
        trace = self.trace
        for index, layer in enumerate(trace.layers):
            selector.on_prefill(index, Keys(layer.keys[: trace.num_prefill], 0, trace.rope), layer.earlier)

    def run(self, summarised: Selector, budget: Budget) -> Replayed:
        """Replay all queries to a copy of `summarised`, a token at a time, each through all layers."""
        trace, selector = self.trace, copy.deepcopy(summarised)
        notes = _Notes(trace)
        start = trace.num_prefill
        for step in range(trace.num_queries):
            num_tokens = trace.num_prefill + step + 1
            full = (num_tokens - 1) // GROUP_TOKENS * GROUP_TOKENS
            reach = budget.reach(num_tokens)
            for index, layer in enumerate(trace.layers):
                if full > start:
                    selector.on_append(index, Keys(layer.keys[start:full], start, trace.rope))
                query = layer.ahead[step] if selector.is_ahead and layer.ahead is not None else layer.queries[step]
                began = time.perf_counter_ns()
                selection = selector.select(index, query, reach)
                notes.select_ns[index, step] = time.perf_counter_ns() - began
                self._note(notes, index, step, selector, selection, reach)
            start = max(start, full)
        return notes.figures(selector.fast_bytes())

    def _note(
        self, notes: _Notes, index: int, step: int, selector: Selector, selection: Selection, reach: Reach
    ) -> None:
        """Measure one selection."""
        trace, exact, num = self.trace, self._exact[index], reach.num_tokens
        heads, weights = trace.heads, exact.weights[step, :, :num]
        mask = np.broadcast_to(selection.mask(), (heads.num_kv, num))
        kept = weights * np.repeat(mask, heads.group, axis=0)
        notes.mass[index, step] = kept.sum(axis=1)
        middle = slice(reach.sinks, max(reach.sinks, num - reach.recent))
        there = weights[:, middle].sum(axis=1)
        np.divide(kept[:, middle].sum(axis=1), there, out=notes.middle[index, step], where=there > 0)
        if not selection.is_everything and selection.ids.shape[1]:
            notes.index_recall[index, step] = _index_recall(heads, weights, selection, reach)
        if selection.need == "v" and isinstance(selector, RebuildsKeys):
            kept = self._rebuilt(kept, index, step, selector, selection)
        by_kv = (kept / kept.sum(axis=1, keepdims=True)).reshape(heads.num_kv, heads.group, num)
        out = np.matmul(by_kv, exact.values[:, :num]).reshape(heads.num_q, -1)
        full = exact.out[step]
        notes.error[index, step] = float(np.linalg.norm(out - full) / max(float(np.linalg.norm(full)), 1e-30))
        notes.attended[index, step] = selection.num_selected
        notes.note_groups(index, step, selection.groups(GROUP_TOKENS), is_values=selection.need == "v")

    def _rebuilt(self, kept: Floats, index: int, step: int, selector: RebuildsKeys, selection: Selection) -> Floats:
        """Return the weights `kept` with those of chosen tokens as rebuilt keys have them. Shapes: [Hq, tokens]."""
        chosen = Selection(selection.unit, selection.ids, 0, len(kept[0]) // selection.unit + 1, selection.num_tokens)
        tokens: Ids = np.flatnonzero(chosen.mask().any(axis=0))
        keys = selector.keys(index, tokens).transpose(1, 2, 0)
        heads = self.trace.heads
        logits = np.matmul(heads.by_kv(self.trace.layers[index].queries[step]), keys) * heads.scaling
        weights = np.exp(logits.reshape(heads.num_q, -1) - self._exact[index].lse[step][:, None])
        out = kept.copy()
        out[:, tokens] = np.where(kept[:, tokens] > 0, weights, 0)
        return out


class _Notes:
    """Figures of every layer and step, as they come. Shapes: [layers, n, heads] and [layers, n]; NaN: not measured."""

    def __init__(self, trace: Trace) -> None:
        shape = len(trace.layers), trace.num_queries
        self.mass = np.zeros((*shape, trace.heads.num_q))
        self.middle = np.full((*shape, trace.heads.num_q), np.nan)
        self.index_recall = np.full(shape, np.nan)
        self.error, self.attended, self.select_ns = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.groups, self.touched_bytes = np.zeros(shape), np.zeros(shape)
        self.reuse, self.new_groups = np.full(shape, np.nan), np.full(shape, np.nan)
        self.new_bytes = np.full(shape, np.nan)
        layer = trace.layers[0]
        self._v_bytes = GROUP_TOKENS * trace.heads.num_kv * layer.values.shape[2] * trace.element_bytes
        self._kv_bytes = self._v_bytes + GROUP_TOKENS * trace.heads.num_kv * trace.heads.dim * trace.element_bytes
        self._last: dict[int, Ids] = {}

    def note_groups(self, index: int, step: int, groups: Ids, *, is_values: bool) -> None:
        """Note which groups a step touches. Of a step that reads values alone, values count alone."""
        group_bytes = self._v_bytes if is_values else self._kv_bytes
        self.groups[index, step] = len(groups)
        self.touched_bytes[index, step] = len(groups) * group_bytes
        last = self._last.get(index)
        if last is not None:
            num_new = len(np.setdiff1d(groups, last, assume_unique=True))
            self.new_groups[index, step], self.new_bytes[index, step] = num_new, num_new * group_bytes
            self.reuse[index, step] = 1 - num_new / len(groups)
        self._last[index] = groups

    def figures(self, fast_bytes: int) -> Replayed:
        """Return the means."""
        num_layers = len(self.mass)
        new_bytes = _mean(self.new_bytes)
        names = ("mass", "middle", "index_recall", "error", "attended", "groups", "reuse", "new_groups")
        by_layer = {name: [_mean(rows) for rows in getattr(self, name)] for name in names}
        return Replayed(
            mass=float(self.mass.mean()),
            mass_p5=float(np.percentile(self.mass, 5)),
            middle=_mean(self.middle),
            middle_p5=None if np.isnan(self.middle).all() else float(np.nanpercentile(self.middle, 5)),
            index_recall=_mean(self.index_recall),
            error=float(self.error.mean()),
            attended=float(self.attended.mean()),
            groups=float(self.groups.mean()),
            reuse=_mean(self.reuse),
            new_groups=_mean(self.new_groups),
            touched_bytes=float(self.touched_bytes.mean()) * num_layers,
            new_bytes=None if new_bytes is None else new_bytes * num_layers,
            select_ns=float(np.median(self.select_ns)),
            fast_bytes=fast_bytes,
            by_layer=by_layer,
        )


def _mean(rows: npt.NDArray[np.float64]) -> float | None:
    """Return the mean of what was measured, None where nothing was."""
    return None if np.isnan(rows).all() else float(np.nanmean(rows))


def _exact(trace: Trace, layer: LayerTrace) -> _Exact:
    """Attend to everything."""
    heads, num = trace.heads, trace.num_tokens
    keys = np.ascontiguousarray(layer.keys.transpose(1, 2, 0))
    values = np.ascontiguousarray(layer.values.transpose(1, 0, 2))
    weights = np.zeros((trace.num_queries, heads.num_q, num), np.float32)
    lse, out = [], []
    for step, query in enumerate(layer.queries):
        seen = trace.num_prefill + step + 1
        logits = np.matmul(heads.by_kv(query), keys[:, :, :seen]) * heads.scaling
        highest = logits.max(axis=2, keepdims=True)
        exps = np.exp(logits - highest)
        sums = exps.sum(axis=2, keepdims=True)
        weights[step, :, :seen] = (exps / sums).reshape(heads.num_q, seen)
        lse.append((highest + np.log(sums)).reshape(heads.num_q))
        out.append(np.matmul(exps / sums, values[:, :seen]).reshape(heads.num_q, -1))
    return _Exact(weights, np.stack(lse), np.stack(out), values)


def _index_recall(heads: Heads, weights: Floats, selection: Selection, reach: Reach) -> float:
    """Return units in common with the oracle of the same unit and sharing, of those in either. Shapes: [Hq, tokens]."""
    unit = selection.unit
    first, last, num = reach.bounds(unit)
    by_head = weights[:, first * unit : last * unit].reshape(heads.num_kv, heads.group, last - first, unit)
    mass = by_head.sum(axis=(1, 3))
    if len(selection.ids) == 1:
        mass = mass.sum(axis=0, keepdims=True)
    best = top(mass, num) + first
    shares = [
        len(np.intersect1d(ours, theirs)) / len(np.union1d(ours, theirs))
        for ours, theirs in zip(selection.ids, best, strict=True)
    ]
    return float(np.mean(shares))
