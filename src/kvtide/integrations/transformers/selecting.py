"""Decoding that attends to a selection, its KV read from the tiers as it is wanted. Next: store.

The order of a step: when a layer's input is known, a selector that looks ahead chooses for the layer after it, and what
that lacks is read meanwhile; when the layer's own attention comes, its selection is gathered from DRAM frames and
attended exactly. The step before the first of these is an ordinary one: it has every key at hand to summarise.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from threadpoolctl import ThreadpoolController

from kvtide.cache.picking import Pick
from kvtide.cache.sequence import Sequence
from kvtide.cache.tiered import TieredCache
from kvtide.errors import IoError
from kvtide.integrations.transformers.gather import FrameView
from kvtide.integrations.transformers.sparse import Part, attend, merge
from kvtide.integrations.transformers.wiring import Wiring, as_floats
from kvtide.select.contract import Budget, Floats, Ids, Keys, Reach, RebuildsKeys, Selection, Selector
from kvtide.select.pmr import DRAFT_TOKENS
from kvtide.tiers.contract import Cause

HINT_FRAGMENTS = 64  # read by one job: enough to keep a drive busy, few enough that demand need not wait long
PICKS_MAX = 4  # a selection takes this part of DRAM at most: the next one, and what is written, need room too


@dataclass(slots=True)
class SelectCounts:
    """What selecting did since it began. Sizes in groups of one layer; times in nanoseconds."""

    num_steps: int = 0
    num_queries: int = 0  # of all layers
    num_attended: int = 0  # tokens, of all layers and queries, the mean over heads
    num_wanted: int = 0
    num_read: int = 0
    num_read_ahead: int = 0  # of those read: begun a layer or more before they were wanted
    num_wasted: int = 0  # read ahead and not wanted
    num_failed: int = 0  # selections that failed, and attended to everything instead
    select_ns: int = 0
    wait_ns: int = 0


@dataclass(slots=True)
class _Layer:
    """Keys of one layer that are not summarised yet. Shapes: fresh [n, Hkv, D]; they begin at token `start`."""

    fresh: Floats
    start: int = 0


@dataclass(frozen=True, slots=True)
class _Picked:
    """Groups of one layer that are on their way. Shapes: groups [n]; wanted [n, parts of a layer]."""

    groups: Ids
    wanted: npt.NDArray[np.bool_]
    pick: Pick
    is_ahead: bool


class Selecting:
    """Selected attention of one sequence at a time.

    Threads: the thread that runs the model.
    """

    def __init__(
        self, cache: TieredCache, wiring: Wiring, selector: Selector, budget: Budget, dtype: torch.dtype
    ) -> None:
        # What may not be summarised yet counts as recent always, so that a token selects the same in any step.
        recent = max(budget.recent, cache.layout.tokens_per_group + DRAFT_TOKENS)
        self.selector, self.budget, self.counts = selector, replace(budget, recent=recent), SelectCounts()
        self.is_sparse = False
        self._cache, self._wiring, self._picker = cache, wiring, cache.picker
        self._heads, self._rope = wiring.heads, wiring.rope()
        self._group = cache.layout.tokens_per_group
        self._device = wiring.modules[0].q_proj.weight.device
        self._frames = FrameView(cache, self._heads, dtype, self._device)
        self._groups_max = max(1, cache.ledger.frame_pool.num_frames // (PICKS_MAX * cache.layout.parts_per_layer))
        # Threads of numpy's BLAS spin on after each product, and torch's then wait for their processors: a step over
        # 5,000 tokens took 187 ms with them and 145 ms without, on two.
        self._pools = ThreadpoolController()
        self._sequence: Sequence | None = None
        self._is_summarised = True
        self._layers: list[_Layer] = []
        self._chosen: dict[int, list[Selection]] = {}
        self._picks: dict[int, _Picked] = {}
        self._hinted: list[Ids] = []
        self._hints: list[tuple[Ids, Pick]] = []
        self.attended: list[list[Ids]] = []  # groups each query of the step attended to, one list a layer
        self._old_tokens = self._num_tokens = 0

    # Around a step

    def start(self, sequence: Sequence) -> None:
        """Follow `sequence` from here on: its next step attends to everything and summarises, those after it select."""
        self.stop()
        self._sequence, self._is_summarised = sequence, True
        self._layers = [
            _Layer(np.zeros((0, self._heads.num_kv, self._heads.dim), np.float32)) for _ in self._wiring.modules
        ]

    def stop(self) -> None:
        """Follow no sequence; let go of all that is held. Idempotent."""
        self.end()
        self._sequence, self.is_sparse = None, False

    def swap(self, selector: Selector, budget: Budget) -> None:
        """Go on with `selector`, which has summarised all tokens that are there now, and no others; count anew."""
        assert self._sequence is not None, "nothing was summarised"
        self.selector, self.budget, self.counts = selector, budget, SelectCounts()
        for layer in self._layers:
            layer.fresh, layer.start = layer.fresh[:0], self._sequence.num_tokens

    def follows(self, sequences: list[Sequence]) -> bool:
        """Say whether the one sequence that is followed is the one that steps."""
        return self._sequence is not None and sequences == [self._sequence]

    def hint(self, layers: list[Ids]) -> None:
        """Say what groups the next step may want. Shapes: one array of groups a layer."""
        self._hinted = layers

    def read_hinted(self) -> None:
        """Begin to read what was hinted at, all layers at once; what the step does not want is wasted.

        No more is read than a part of DRAM holds. A step that was begun has its room already.
        """
        layers, self._hinted = self._hinted, []
        if not layers or self._sequence is None or not self._cache.is_prefetching:
            return
        parts = self._cache.layout.parts_per_layer
        layer = np.repeat(np.arange(len(layers)), [len(groups) for groups in layers])
        groups = np.concatenate(layers)
        near = np.argsort(groups, kind="stable")[: self._groups_max // 2]  # fragments of one group lie together
        place, layer = np.repeat(groups[near], parts), np.repeat(layer[near], parts)
        fragments = layer * parts + np.tile(np.arange(parts), len(near))
        for start in range(0, len(place), HINT_FRAGMENTS):
            part = slice(start, start + HINT_FRAGMENTS)
            pick = self._picker.begin(self._sequence, -1, place[part], fragments[part], cause="prefetch")
            self._hints.append((place[part], pick))

    def begin(self, num_new: int) -> None:
        """Begin a step of `num_new` tokens."""
        assert self._sequence is not None, "a step of no sequence"
        self._let_go()  # of a step that was given up
        self.attended = [[] for _ in self._layers]
        self._old_tokens = self._sequence.num_tokens
        self._num_tokens = self._old_tokens + num_new
        self.counts.num_steps += self.is_sparse

    def end(self) -> None:
        """End a step: let go of what was read for it in vain, and count that."""
        parts = self._cache.layout.parts_per_layer
        for places, pick in self._hints:
            if pick.job is not None and not pick.job.done():  # too late to be of use
                self._picker.release(pick)
                continue
            was_read = self._picker.settle(pick)
            layers = pick.fragments // parts
            wanted = [
                any(place in groups for groups in self.attended[layer])
                for place, layer in zip(places.tolist(), layers.tolist(), strict=True)
            ]
            self.counts.num_read += int(was_read.sum())
            self.counts.num_read_ahead += int(was_read.sum())
            self.counts.num_wasted += int((was_read & ~np.array(wanted, np.bool_)).sum())
        self._hints = []
        self._let_go()

    # In a layer

    def before(self, layer: int, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Choose for the layer after `layer`, from its own input, and begin to read. Shapes: hidden [1, m, width]."""
        if not self.selector.is_ahead or layer + 1 >= len(self._layers):
            return
        selections = self._choose(layer + 1, self._wiring.ahead(layer, hidden, rotation))
        self._chosen[layer + 1] = selections
        groups = self._groups(layer + 1, selections)
        if self._cache.is_prefetching and len(groups) <= self._groups_max:
            self._picks[layer + 1] = self._pick(layer + 1, selections, groups, "prefetch")

    def summarise(self, layer: int, query: torch.Tensor, keys: torch.Tensor) -> None:
        """Take in all keys of a layer, from a step that attends to everything.

        Shapes: query [1, Hq, m, D]; keys [1, Hkv, T, D], views.
        """
        rows = Keys(as_floats(keys[0].transpose(0, 1)), 0, self._rope)
        try:
            self.selector.on_prefill(layer, rows, as_floats(query[0].transpose(0, 1)))
        except Exception:  # whatever a method runs into; without its summary, attention stays to everything
            self.counts.num_failed += 1
            self._is_summarised = False
        self._layers[layer].fresh, self._layers[layer].start = self._layers[layer].fresh[:0], keys.shape[2]
        self.is_sparse = self._is_summarised and layer == len(self._layers) - 1

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Attend to the selection of `layer`. Shapes: query [1, Hq, m, D], key [1, Hkv, m, D]; returns [1, m, Hq, D].

        Raises: LostKv if some of it cannot be read; IoError if DRAM has no room for it.
        """
        self._take_in(layer, key)
        selections = self._chosen.pop(layer, None) or self._choose(layer, as_floats(query[0].transpose(0, 1)))
        heads, num = self._heads, query.shape[2]
        by_kv = query.reshape(heads.num_kv, heads.group, num, heads.dim)
        rounds = self._picked(layer, selections)
        parts = [part for picked in rounds for part in self._attend_round(layer, by_kv, selections, picked)]
        if layer == len(self._layers) - 1:
            self.end()
        return merge(parts).permute(2, 0, 1, 3).reshape(1, num, heads.num_q, -1)

    def _attend_round(
        self, layer: int, query: torch.Tensor, selections: list[Selection], picked: _Picked
    ) -> list[Part]:
        """Attend to what was picked; in two halves, one after the other, where DRAM has no room for all of it."""
        try:
            return [self._attend(layer, query, selections, picked)]
        except IoError as error:
            if error.errno != errno.ENOSPC or len(picked.groups) == 1:
                raise
        finally:
            self._picker.release(picked.pick)
        parts = []
        for half in np.array_split(picked.groups, 2):
            again = self._pick(layer, selections, half, "decode-read")
            parts += self._attend_round(layer, query, selections, again)
        return parts

    def _attend(self, layer: int, query: torch.Tensor, selections: list[Selection], picked: _Picked) -> Part:
        found = self._picker.finish(picked.pick)
        self.counts.wait_ns += picked.pick.wait_ns
        self.counts.num_read += len(picked.pick.read)
        self.counts.num_read_ahead += len(picked.pick.read) if picked.is_ahead else 0
        frames = np.zeros(picked.wanted.shape, np.int64)  # what is not wanted is masked, or rebuilt: any frame does
        frames[picked.wanted] = found
        keys, values = self._frames.keys(frames), self._frames.values(frames)
        is_rebuilt = ~picked.wanted[:, 0] if self._reads_values(selections) else None
        if is_rebuilt is not None and is_rebuilt.any():
            tokens = (picked.groups[is_rebuilt, None] * self._group + np.arange(self._group)).ravel()
            assert isinstance(self.selector, RebuildsKeys), "only a selector that rebuilds keys asks for values alone"
            rebuilt = torch.from_numpy(self.selector.keys(layer, tokens)).to(keys)
            keys[:, torch.from_numpy(np.repeat(is_rebuilt, self._group)).to(keys.device)] = rebuilt.transpose(0, 1)
        mask = self._mask(selections, picked.groups)
        return attend(query, keys, values, scaling=self._heads.scaling, mask=mask)

    # What to attend to

    def _choose(self, layer: int, queries: Floats) -> list[Selection]:
        """Return a selection for each query; where the selector fails, everything. Shapes: queries [m, Hq, D]."""
        started = time.perf_counter_ns()
        first = self._num_tokens - len(queries) + 1
        with self._pools.limit(limits=1, user_api="blas"):
            chosen = [self._select(layer, query, self.budget.reach(first + at)) for at, query in enumerate(queries)]
        self.counts.num_attended += sum(selection.num_selected for selection in chosen)
        self.counts.num_queries += len(queries)
        self.counts.select_ns += time.perf_counter_ns() - started
        return chosen

    def _select(self, layer: int, query: Floats, reach: Reach) -> Selection:
        try:
            return self.selector.select(layer, query, reach)
        except Exception:  # whatever a method runs into: attention to everything is never wrong
            self.counts.num_failed += 1
            return Selection.everything(reach.num_tokens)

    def _groups(self, layer: int, selections: list[Selection]) -> Ids:
        self.attended[layer] = [selection.groups(self._group) for selection in selections]
        if len(selections) == 1:
            return self.attended[layer][0]
        return np.unique(np.concatenate(self.attended[layer]))

    def _mask(self, selections: list[Selection], groups: Ids) -> torch.Tensor | None:
        """Say which gathered tokens each query attends to. Shapes: [Hkv or 1, m, tokens of the groups]."""
        tokens = (groups[:, None] * self._group + np.arange(self._group)).ravel()
        only = selections[0]
        if len(selections) == 1 and (only.is_everything or (only.unit == self._group and len(only.ids) == 1)):
            is_there = np.asarray(tokens < only.num_tokens)
            return None if is_there[-1] else torch.from_numpy(is_there[None, None]).to(self._device)
        rows = []
        for selection in selections:
            seen: npt.NDArray[np.bool_] = np.asarray(tokens < selection.num_tokens)[None]
            if not selection.is_everything:
                seen = seen & selection.mask()[:, np.minimum(tokens, selection.num_tokens - 1)]
            rows.append(np.broadcast_to(seen, (self._heads.num_kv, len(tokens))))
        return torch.from_numpy(np.stack(rows, axis=1)).to(self._device)

    # What to read

    def _picked(self, layer: int, selections: list[Selection]) -> Iterator[_Picked]:
        """Yield what the selections need, in rounds of what DRAM has room for."""
        ahead = self._picks.pop(layer, None)
        if ahead is not None:
            yield ahead
            return
        groups = self._groups(layer, selections)
        for start in range(0, len(groups), self._groups_max):
            yield self._pick(layer, selections, groups[start : start + self._groups_max], "decode-read")

    def _pick(self, layer: int, selections: list[Selection], groups: Ids, cause: Cause) -> _Picked:
        assert self._sequence is not None, "a step of no sequence"
        wanted = self._wanted(selections, groups)
        place, part = np.nonzero(wanted)
        fragments = layer * wanted.shape[1] + part
        self.counts.num_wanted += len(part)
        pick = self._picker.begin(self._sequence, layer, groups[place], fragments, cause=cause)
        return _Picked(groups, wanted, pick, is_ahead=cause == "prefetch")

    def _wanted(self, selections: list[Selection], groups: Ids) -> npt.NDArray[np.bool_]:
        """Say which parts of a layer's groups are needed. Shapes: [groups, parts of a layer]."""
        layout = self._cache.layout
        wanted = np.ones((len(groups), layout.parts_per_layer), np.bool_)
        only = selections[0]
        if len(selections) > 1 or only.is_everything:
            return wanted
        if self._reads_values(selections):  # what is kept always has its keys read: it may not be summarised
            start = groups * self._group
            wanted[:, 0] = (start < only.first * only.unit) | (start + self._group > only.last * only.unit)
        elif layout.split == "head" and len(only.ids) > 1:
            padded = np.zeros((len(only.ids), (groups[-1] + 1) * self._group), np.bool_)
            mask = only.mask()
            padded[:, : mask.shape[1]] = mask[:, : padded.shape[1]]
            by_group = np.logical_or.reduce(padded.reshape(len(padded), -1, self._group), axis=2)
            return by_group[:, groups].T
        return wanted

    def _reads_values(self, selections: list[Selection]) -> bool:
        return len(selections) == 1 and selections[0].need == "v" and self._cache.layout.split == "kv"

    # What is new

    def _take_in(self, layer: int, key: torch.Tensor) -> None:
        """Give the selector the keys of groups that earlier steps filled, and keep this step's. Shapes: [1, Hkv, m, D].

        A step's own tokens may still be taken back.
        """
        state = self._layers[layer]
        fresh = state.fresh[: self._old_tokens - state.start]
        num = (state.start + len(fresh)) // self._group * self._group - state.start
        if num > 0:
            try:
                self.selector.on_append(layer, Keys(fresh[:num], state.start, self._rope))
                state.start, fresh = state.start + num, fresh[num:]
            except Exception:  # what is not summarised is attended; it is tried again
                self.counts.num_failed += 1
        state.fresh = np.concatenate([fresh, as_floats(key[0].transpose(0, 1))])

    def _let_go(self) -> None:
        for picked in self._picks.values():
            self._picker.release(picked.pick)
        self._picks, self._chosen = {}, {}
