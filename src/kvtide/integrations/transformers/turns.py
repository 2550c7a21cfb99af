"""Conversations over a long document, measured turn by turn. Next: kvtide.report.turns.

Decides what a turn's prompt is and what is measured of it; knows no table and no command line. A turn's prompt begins
with every token of the turns before it, so that all of their KV can be reused.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvtide.cache.steps import next_prefill_end
from kvtide.integrations.transformers.models import LoadedModel
from kvtide.integrations.transformers.store import KvStore, Session
from kvtide.trace.record import Recorder


@dataclass(slots=True)
class Phase:
    """What one phase of a turn cost: prefill up to the first token, or decode after it."""

    total_ns: int = 0
    wait_ns: int = 0  # the part of it the model stood still for KV
    num_ops: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    op_bytes_mean: float = 0.0
    depth_mean: float = 0.0


@dataclass(slots=True)
class Turn:
    """Measures of one turn. Times in nanoseconds, sizes in bytes."""

    conversation: int
    question: str
    answer: str = ""
    prompt_tokens: int = 0
    matched_tokens: int = 0
    matched_bytes: dict[str, int] = field(default_factory=dict)
    recomputed_tokens: int = 0  # kept, but expected to be computed faster than loaded
    reuse_reason: str = ""
    expected_load_ns: float = 0.0  # of what was in the file; 0: nothing was measured yet
    expected_compute_ns: float = 0.0
    new_tokens: int = 0
    ttft_ns: int = 0
    itl_ns_p50: int = 0
    itl_ns_p99: int = 0
    prefill: Phase = field(default_factory=Phase)
    decode: Phase = field(default_factory=Phase)
    num_lost: int = 0
    tokens_equal: bool | None = None
    logits_diff_max: float | None = None


class Clockwork:
    """A `generate` streamer that notes when each token came and hands its text on."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None], on_first: Callable[[], None]) -> None:
        self.times_ns: list[int] = []
        self._tokenizer, self._on_text, self._on_first = tokenizer, on_text, on_first
        self._tokens: list[int] = []
        self._num_shown = 0

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then one token at a time. Shapes: [1, T] for a prompt, [1] for a token.

        Another prompt means that KV was lost and generation began again: its tokens were shown and timed already.
        """
        if value.dim() > 1:
            self._tokens.clear()
            return
        self._tokens.extend(value.tolist())
        if len(self._tokens) > len(self.times_ns):
            self.times_ns.append(time.perf_counter_ns())
            if len(self.times_ns) == 1:
                self._on_first()
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        if len(text) > self._num_shown and not text.endswith("\ufffd"):
            self._on_text(text[self._num_shown :])
            self._num_shown = len(text)

    def end(self) -> None:
        """Nothing is left over: incomplete characters are dropped."""


class Conversation:
    """Messages about one document, as text and as tokens."""

    def __init__(self, loaded: LoadedModel, document: str) -> None:
        self.tokens: list[int] = []
        self.reference = Reference()
        self._loaded, self._document = loaded, document
        self._messages: list[dict[str, str]] = []
        self._text = ""

    def ask(self, question: str) -> None:
        """Add a question; `tokens` is then the next prompt."""
        content = f"{self._document}\n\n{question}" if self._document and not self._messages else question
        self._messages.append({"role": "user", "content": content})
        text = self._render()
        tokenizer = self._loaded.tokenizer
        if self._text and text.startswith(self._text):
            self.tokens += tokenizer(text[len(self._text) :], add_special_tokens=False).input_ids
        else:
            self.tokens = tokenizer(text, add_special_tokens=tokenizer.chat_template is None).input_ids
        self._text = text

    def answered(self, tokens: list[int]) -> str:
        """Add the model's answer, and return its text."""
        tokenizer = self._loaded.tokenizer
        kept = tokens[:-1] if tokens and tokens[-1] in tokenizer.all_special_ids else tokens
        answer = str(tokenizer.decode(kept, skip_special_tokens=True))
        self.tokens = self.tokens + kept
        self._messages.append({"role": "assistant", "content": answer})
        self._text += answer
        return answer

    def _render(self) -> str:
        tokenizer = self._loaded.tokenizer
        if tokenizer.chat_template is not None:
            return str(tokenizer.apply_chat_template(self._messages, tokenize=False, add_generation_prompt=True))
        lines = [f"{'Q' if m['role'] == 'user' else 'A'}: {m['content']}" for m in self._messages]
        return "\n".join([*lines, "A:"])


def first_prompt(described: LoadedModel, text: str) -> list[int]:
    """Return the tokens of a conversation that begins with the message `text`."""
    conversation = Conversation(described, "")
    conversation.ask(text)
    return conversation.tokens


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """How a turn is run. More than one sample, or a temperature, draws with fixed seeds."""

    max_new_tokens: int = 48
    num_samples: int = 1
    salt: str = ""
    is_verified: bool = False


class TurnRunner:
    """Runs turns on a store and measures them."""

    def __init__(
        self,
        store: KvStore,
        recorder: Recorder,
        options: TurnOptions,
        *,
        on_text: Callable[[str], None],
        on_prefill: Callable[[int, int], None],
    ) -> None:
        self._store, self._recorder, self._options = store, recorder, options
        self._on_text, self._on_prefill = on_text, on_prefill

    def run(self, conversation: Conversation, question: str, *, index: int) -> Turn:
        """Ask `question`; return what was answered and what it cost.

        Raises: ConfigError if the prompt is longer than the model's positions.
        """
        conversation.ask(question)
        turn = Turn(index, question, prompt_tokens=len(conversation.tokens))
        started, mark = time.perf_counter_ns(), self._mark()
        session = self._store.session(conversation.tokens, salt=self._options.salt)
        # The model never runs on the last token of an answer, so that one needs no position.
        most = self._store.loaded.max_positions - len(conversation.tokens) + 1
        options = replace(self._options, max_new_tokens=min(self._options.max_new_tokens, most))
        try:
            matched = session.matched
            turn.matched_tokens = matched.num_tokens
            turn.matched_bytes = {
                "device": matched.device_bytes,
                "dram": matched.dram_bytes,
                "file": matched.file_bytes,
                "remote": matched.remote_bytes,
            }
            choice = session.choice
            turn.recomputed_tokens, turn.reuse_reason = choice.recomputed_tokens, choice.reason
            turn.expected_load_ns, turn.expected_compute_ns = choice.load_ns, choice.compute_ns
            session.prefill(self._on_prefill, reserve_tokens=options.max_new_tokens)
            outputs, clock, middle = self._generate(session, options)
            turn.num_lost = session.num_lost
            ended = time.perf_counter_ns()
        finally:
            session.release()
        self._store.cache.drain()
        first = clock.times_ns[0] if clock.times_ns else ended
        turn.ttft_ns, turn.new_tokens = first - started, len(clock.times_ns)
        gaps = np.diff(clock.times_ns) if len(clock.times_ns) > 1 else np.zeros(1)
        turn.itl_ns_p50, turn.itl_ns_p99 = int(np.percentile(gaps, 50)), int(np.percentile(gaps, 99))
        turn.prefill = self._phase(mark, middle, first - started)
        turn.decode = self._phase(middle, self._mark(), ended - first)
        prompt = list(conversation.tokens)
        turn.answer = conversation.answered(outputs[0].sequences[0, len(prompt) :].tolist())
        if self._options.is_verified:
            expected = conversation.reference.generate(
                self._store.loaded.model, prompt, options, matched_tokens=turn.matched_tokens
            )
            turn.tokens_equal, turn.logits_diff_max = _compare(outputs, expected, len(prompt))
        return turn

    def _generate(self, session: Session, options: TurnOptions) -> tuple[list[Any], Clockwork, tuple[int, int]]:
        """Generate each sample from a fork of the prompt; the first one is shown and timed."""
        marks: list[tuple[int, int]] = []
        clock = Clockwork(self._store.loaded.tokenizer, self._on_text, lambda: marks.append(self._mark()))
        outputs = []
        for sample in range(options.num_samples):
            one = session.fork() if sample + 1 < options.num_samples else session
            try:
                torch.manual_seed(sample)
                outputs.append(one.generate(streamer=clock if sample == 0 else None, **_how(options)))
            finally:
                one.release()
            if one is not session:
                session.num_lost += one.num_lost
        return outputs, clock, marks[0] if marks else self._mark()

    def _mark(self) -> tuple[int, int]:
        return self._recorder.counts()[1], self._store.cache.wait_ns

    def _phase(self, start: tuple[int, int], end: tuple[int, int], total_ns: int) -> Phase:
        ops = self._recorder.ops_between(start[0], end[0])
        writes, length = ops["is_write"], ops["length"].astype(np.int64)
        return Phase(
            total_ns=total_ns,
            wait_ns=end[1] - start[1],
            num_ops=len(ops),
            read_bytes=int(length[~writes].sum()),
            written_bytes=int(length[writes].sum()),
            op_bytes_mean=float(length.mean()) if len(ops) else 0.0,
            depth_mean=float(ops["depth"].mean()) if len(ops) else 0.0,
        )


def _compare(outputs: list[Any], expected: list[Any], num_prompt: int) -> tuple[bool, float]:
    """Say whether all tokens are equal, and how far logits differ until they are not."""
    is_equal, diff_max = True, 0.0
    for ours, theirs in zip(outputs, expected, strict=True):
        a, b = (output.sequences[0, num_prompt:].tolist() for output in (ours, theirs))
        is_equal &= a == b
        for ours_logits, theirs_logits, ours_id, theirs_id in zip(ours.logits, theirs.logits, a, b, strict=False):
            diff = (ours_logits.float() - theirs_logits.float()).abs().nan_to_num(nan=math.inf)
            diff_max = max(diff_max, float(diff.max()))
            if ours_id != theirs_id:  # from here on the two run on different tokens
                break
    return is_equal, diff_max


class Reference:
    """The same conversation on transformers' own cache, kept from turn to turn as people keep it."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._cache = DynamicCache()

    def generate(self, model: Any, prompt: list[int], options: TurnOptions, *, matched_tokens: int) -> list[Any]:
        """Return one output a sample, from steps of the same places as a session's that found `matched_tokens`."""
        common = next((i for i, (a, b) in enumerate(zip(self._tokens, prompt, strict=False)) if a != b), None)
        start = min(len(self._tokens) if common is None else common, matched_tokens)
        excess = self._cache.get_seq_length() - start
        if start and excess:
            self._cache.crop(-excess)
        elif not start:
            self._cache = DynamicCache()
        ids = torch.tensor([prompt], device=model.device)
        with torch.inference_mode():
            while (end := next_prefill_end(start, len(prompt))) < len(prompt):
                model(input_ids=ids[:, start:end], cache=self._cache, use_cache=True, logits_to_keep=1)
                start = end
        outputs: list[Any] = []
        for sample in reversed(range(options.num_samples)):  # the first one last: its cache is kept
            cache = copy.deepcopy(self._cache) if sample else self._cache
            torch.manual_seed(sample)
            mask = torch.ones_like(ids)
            outputs.insert(0, model.generate(ids, attention_mask=mask, cache=cache, pad_token_id=0, **_how(options)))
        self._tokens = outputs[0].sequences[0, :-1].tolist()
        return outputs


def _how(options: TurnOptions) -> dict[str, Any]:
    return {
        "max_new_tokens": options.max_new_tokens,
        "do_sample": options.num_samples > 1,
        "return_dict_in_generate": True,
        "output_logits": options.is_verified,
    }
