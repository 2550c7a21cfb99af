"""Greedy decoding that verifies several drafted tokens in one step. Next: turns.

A step runs on the last token and a draft; the model's choices say how much of the draft is right, and the KV of the
rest is taken back. So tokens are those of plain greedy decoding; what changes is that the reads of several tokens are
in flight together. Where the two best tokens are closer than rounding may move them between a step of several tokens
and one of a single token, a single one decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvtide.integrations.transformers.kvcache import TieredKv
from kvtide.select.contract import Ids
from kvtide.select.pmr import DRAFT_TOKENS, AttendedGroups, Draft, SuffixTrie

NEAR_TIES = {
    torch.float32: 1e-3,
    torch.float16: 0.06,
    torch.bfloat16: 0.5,
}  # of logits; about 8 units of rounding at 16


HANDLED = {"attention_mask", "do_sample", "num_beams", "num_return_sequences", "output_logits", "pad_token_id"}
HANDLED |= {"return_dict_in_generate", "streamer"}
# What a model's own generation config may have that changes the likeliest token, and what leaves it.
PLAIN: dict[str, tuple[object, ...]] = {
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "sequence_bias": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1.0),
    "watermarking_config": (None,),
}


@dataclass(frozen=True, slots=True)
class Drafted:
    """What was generated. Shapes: sequences [1, T] with the prompt; logits one [1, vocabulary] a new token."""

    sequences: torch.Tensor
    logits: tuple[torch.Tensor, ...] | None


@dataclass(slots=True)
class DraftCounts:
    """How drafts fared."""

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_near_ties: int = 0


class Drafter:
    """What is known of texts, kept over all conversations of a store.

    Threads: the thread that runs the model.
    """

    def __init__(self, model: Any, *, num_max: int = DRAFT_TOKENS) -> None:
        self.counts = DraftCounts()
        self._model, self._num_max = model, num_max
        self._trie, self._attended = SuffixTrie(), AttendedGroups()

    def generate(
        self,
        kv: TieredKv,
        tokens: list[int],
        *,
        max_new_tokens: int,
        on_token: Callable[[int], None],
        keep_logits: bool,
    ) -> Drafted:
        """Continue `tokens`, of which `kv` holds all but the last step; `on_token` gets each new token.

        Raises: LostKv as a step does.
        """
        ends = _ends(self._model)
        text, logits = list(tokens), []
        with torch.inference_mode():
            start = kv.num_tokens
            while len(text) - len(tokens) < max_new_tokens:
                self._trie.observe(text)
                room = max_new_tokens - (len(text) - len(tokens)) - 1
                draft = self._trie.draft(min(self._num_max, room)) if kv.is_sparse else Draft([], [])
                found = self._step(kv, text[start:], draft)
                for row in found:
                    token = int(row.argmax())
                    text.append(token)
                    logits += [row[None]] if keep_logits else []
                    on_token(token)
                    if token in ends:
                        break
                start = kv.num_tokens
                if text[-1] in ends:
                    break
        ids = torch.tensor([text])
        return Drafted(ids, tuple(logits) if keep_logits else None)

    def _step(self, kv: TieredKv, new: list[int], draft: Draft) -> list[torch.Tensor]:
        """Run on `new` and the draft; return the logits of each token that is decided, one at least."""
        if draft.tokens:
            self._hint(kv, draft)
        first = kv.num_tokens + len(new) - 1  # position of the last token before the draft
        rows = self._run(kv, [*new, *draft.tokens], len(draft.tokens) + 1)
        if not draft.tokens:
            self._note(kv, first, 1)
            return [rows[0]]
        num = self._num_right(rows, draft)
        self.counts.num_steps += 1
        self.counts.num_drafted += len(draft.tokens)
        self.counts.num_accepted += max(0, num - 1)
        self._note(kv, first, num)
        kv.truncate(first + num)
        return list(rows[:num]) if num else [self._run(kv, new[-1:], 1)[0]]

    def _num_right(self, rows: torch.Tensor, draft: Draft) -> int:
        """Return how many rows decide a token: up to the first one that differs from the draft, or is a near tie."""
        best = torch.topk(rows.float(), 2, dim=-1)
        is_near = (best.values[:, 0] - best.values[:, 1] < NEAR_TIES.get(rows.dtype, 0.5)).tolist()
        for index, token in enumerate(best.indices[:, 0].tolist()):
            if is_near[index]:
                self.counts.num_near_ties += 1
                return index
            if index == len(draft.tokens) or token != draft.tokens[index]:
                return index + 1
        raise AssertionError("the last row has no draft behind it")

    def _run(self, kv: TieredKv, tokens: list[int], num_logits: int) -> torch.Tensor:
        ids = torch.tensor([tokens], device=self._model.device)
        found = self._model(input_ids=ids, cache=kv, use_cache=True, logits_to_keep=num_logits)
        logits: torch.Tensor = found.logits[0]
        return logits

    def _hint(self, kv: TieredKv, draft: Draft) -> None:
        """Let what the drafted tokens attended to when they last came be read."""
        remembered = self._attended.of(draft.positions)
        if kv.selecting is None or not remembered:
            return
        num_groups = -(-kv.num_tokens // kv.cache.layout.tokens_per_group)
        layers: list[Ids] = []
        for groups in zip(*remembered, strict=True):
            wanted = np.unique(np.concatenate(groups))
            layers.append(wanted[wanted < num_groups])
        kv.selecting.hint(layers)

    def _note(self, kv: TieredKv, first: int, num: int) -> None:
        """Remember what the tokens from position `first` on attended to."""
        if kv.selecting is None or not kv.is_sparse:
            return
        for index in range(num):
            layers = [groups[index] for groups in kv.selecting.attended if index < len(groups)]
            if len(layers) == len(kv.selecting.attended):
                self._attended.note(self._trie.position(first + index), layers)


def is_plain_greedy(config: Any, options: dict[str, Any]) -> bool:
    """Say whether `generate` with these options takes the likeliest token of one row each time, and nothing else.

    Drafts know no other way; whoever asks for one gets `generate` itself.
    """
    if not set(options) <= HANDLED:
        return False
    if options.get("do_sample", config.do_sample) or options.get("num_beams", config.num_beams or 1) != 1:
        return False
    changed = any(getattr(config, name, None) not in plain for name, plain in PLAIN.items())
    return options.get("num_return_sequences", 1) == 1 and not changed


def _ends(model: Any) -> set[int]:
    found = model.generation_config.eos_token_id
    if found is None:
        return set()
    return {int(token) for token in (found if isinstance(found, list) else [found])}
