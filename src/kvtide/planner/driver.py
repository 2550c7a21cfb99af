"""Runs turns on a cache without a model: the same calls in the same order as integrations.transformers makes them.

On a virtual cache the compute that a model would do passes as virtual time; on real tiers it is left out and made-up
bytes are kept. Decides nothing about what to keep. Next: simulate.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtide.cache import Match, Sequence, TieredCache
from kvtide.cache.steps import next_prefill_end
from kvtide.tiers.contract import Cause

Rows = npt.NDArray[np.uint8]


class Compute(Protocol):
    """Time a model takes, in ns. A step runs `num_new` tokens of each of `rows` sequences that have `num_old`."""

    def layer_ns(self, num_new: int, num_old: int, rows: int) -> tuple[float, float]:
        """Return the time of one layer before it asks for its KV, and after."""

    def step_ns(self, num_new: int, num_old: int, rows: int) -> float:
        """Return the time of what belongs to no layer: look-up, head, sampling."""

    def turn_ns(self) -> float:
        """Return the time of what comes once a turn, before its first step."""


class NoCompute:
    """No model at all."""

    def layer_ns(self, num_new: int, num_old: int, rows: int) -> tuple[float, float]:
        """Return nothing."""
        del num_new, num_old, rows
        return 0.0, 0.0

    def step_ns(self, num_new: int, num_old: int, rows: int) -> float:
        """Return nothing."""
        del num_new, num_old, rows
        return 0.0

    def turn_ns(self) -> float:
        """Return nothing."""
        return 0.0


@dataclass(slots=True)
class TurnTimes:
    """What one turn took. Times in ns of the clock given; `step_ns` has one entry a decoded token after the first."""

    prompt_tokens: int
    matched: Match
    ttft_ns: int = 0
    prefill_wait_ns: int = 0
    decode_wait_ns: int = 0
    step_ns: list[int] = field(default_factory=list)


class Driver:
    """Runs prompts on `cache`.

    Threads: one.
    """

    def __init__(
        self,
        cache: TieredCache,
        compute: Compute,
        *,
        clock: Callable[[], int],
        advance: Callable[[float], None],
        make_rows: Callable[[int, int], Rows],
        call_ns: float = 0.0,
        byte_ns: float = 0.0,
    ) -> None:
        """Drive `cache`; `advance` lets computing time pass, `make_rows(tokens, row bytes)` gives KV to keep.

        Beside computing, `call_ns` passes for each layer of a step and `byte_ns` for each byte of new KV: what the
        calls themselves take.
        """
        self._call_ns, self._byte_ns = call_ns, byte_ns
        self.cache, self._compute, self._clock, self._advance, self._make = cache, compute, clock, advance, make_rows

    def turn(self, prompt: Seq[int], answer: Seq[int], *, salt: str = "") -> TurnTimes:
        """Run one prompt and the tokens that follow it, the last of which is never run."""
        started, waited = self._clock(), self.cache.wait_ns
        sequence = self.cache.open(prompt, salt=salt)
        times = TurnTimes(len(prompt), sequence.matched)
        self._advance(self._compute.turn_ns())
        try:
            self.prefill(sequence, prompt, len(prompt) + len(answer))
            times.ttft_ns = self._clock() - started
            times.prefill_wait_ns = self.cache.wait_ns - waited
            for token in answer[:-1]:
                began = self._clock()
                self.step([sequence], [[token]], len(prompt) + len(answer))
                times.step_ns.append(self._clock() - began)
            times.decode_wait_ns = self.cache.wait_ns - waited - times.prefill_wait_ns
        finally:
            self.cache.release(sequence)
        self.cache.drain()
        return times

    def prefill(self, sequence: Sequence, prompt: Seq[int], capacity: int) -> None:
        """Run what is not kept of `prompt`, in the steps of a real prefill."""
        while (start := sequence.num_tokens) < len(prompt):
            end = next_prefill_end(start, len(prompt))
            self.step([sequence], [prompt[start:end]], capacity)

    def step(self, sequences: list[Sequence], tokens: Seq[Seq[int]], capacity: int) -> None:
        """Run one step: as many new tokens of each sequence; `capacity` tokens will come in all."""
        cache, num_new, num_old, num_rows = self.cache, len(tokens[0]), sequences[0].num_tokens, len(sequences)
        num_layers = cache.layout.num_layers
        cause: Cause = "decode-read" if num_new == 1 else "restore"
        before, after = self._compute.layer_ns(num_new, num_old, num_rows)
        cache.resize(max(num_old + num_new, capacity), num_old + num_new, num_rows)
        for sequence in sequences:
            cache.begin_step(sequence, num_new)
        for layer, shape in enumerate(cache.layout.shape.layers):
            self._advance(before + self._call_ns + self._byte_ns * num_rows * num_new * shape.token_bytes)
            window = cache.layer(sequences, layer, cause=cause)
            k, v = self._make(num_new, shape.k_bytes), self._make(num_new, shape.v_bytes)
            for row, sequence in enumerate(sequences):
                cache.write(sequence, layer, k, v, window=window, row=row)
            is_last = layer == num_layers - 1
            cache.prefetch(sequences, (layer + 1) % num_layers, is_written=is_last)
            if not is_last:
                self._advance(after)
        for sequence, ids in zip(sequences, tokens, strict=True):
            cache.seal(sequence, ids)
        self._advance(after + self._compute.step_ns(num_new, num_old, num_rows))
