"""Load a kept prefix, or compute it again? Decides from what this cache measured of both. Next: tiered.

*Theory.* A prefix of n tokens, F bytes of which lie in the tier below, costs F / load rate to bring up; computing it
costs n times what a token costs. What lies in DRAM or on the device costs next to nothing, so there are two candidates:
all of the prefix, or what of it is in memory from its first token on. Until both rates are known, KV is loaded: what
was worth keeping is worth reading. Rates are moving averages, so that a slow minute does not decide for ever.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Reuse = Literal["auto", "always", "never"]
REUSES: tuple[Reuse, ...] = ("auto", "always", "never")

WEIGHT = 0.3  # of the newest figure in the average
STEP_TOKENS_MIN = 16  # steps of fewer tokens do not tell what computing a prefix costs
LOAD_BYTES_MIN = 1 << 20  # fills that read less do not tell a rate
TEXT_BYTES_MAX = 4096


@dataclass(slots=True)
class Pace:
    """What was measured: ns to compute one token of a prefill, and ns to load one byte. 0: not known yet."""

    token_ns: float = 0.0
    byte_ns: float = 0.0

    def note_step(self, num_tokens: int, computed_ns: float) -> None:
        """Take in a step that computed `num_tokens` without waiting."""
        if num_tokens >= STEP_TOKENS_MIN and computed_ns > 0:
            self.token_ns = _mixed(self.token_ns, computed_ns / num_tokens)

    def note_load(self, num_bytes: int, took_ns: float) -> None:
        """Take in a fill that read `num_bytes` from the tier below."""
        if num_bytes >= LOAD_BYTES_MIN and took_ns > 0:
            self.byte_ns = _mixed(self.byte_ns, took_ns / num_bytes)

    def text(self) -> str:
        """Return it as a line of JSON, for the next process."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Pace:
        """Return what `text` says; nothing known where it says nothing that can be. Never raises."""
        try:
            found = json.loads(text[:TEXT_BYTES_MAX])
            values = [float(found[name]) for name in ("token_ns", "byte_ns")]
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            return cls()
        return cls(*values) if all(math.isfinite(value) and 0 <= value < 1e12 for value in values) else cls()


def _mixed(old: float, new: float) -> float:
    return new if old == 0 else (1 - WEIGHT) * old + WEIGHT * new


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of a kept prefix: how many of its tokens are reused, and what was expected of each way, in ns."""

    kept_tokens: int
    used_tokens: int
    reason: str = ""
    load_ns: float = 0.0
    compute_ns: float = 0.0

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that are computed though their KV is kept."""
        return self.kept_tokens - self.used_tokens

    def figures(self) -> dict[str, float]:
        """Return what a trace keeps of it; times only where they were expected from measurements."""
        told = {
            "prefix_reused_tokens": float(self.used_tokens),
            "prefix_recomputed_tokens": float(self.recomputed_tokens),
        }
        if self.load_ns:
            told |= {"prefix_load_ns": self.load_ns, "prefix_compute_ns": self.compute_ns}
        return told


def choose(kept: int, file_bytes: int, in_memory_tokens: int, pace: Pace, reuse: Reuse) -> Choice:
    """Return how much of a prefix of `kept` tokens to reuse.

    `file_bytes` of it lie in the tier below; its first `in_memory_tokens` tokens need no load.
    """
    if not kept or reuse == "always":
        return Choice(kept, kept, "asked for" if kept else "nothing is kept")
    if reuse == "never":
        return Choice(kept, 0, "asked for")
    if not file_bytes:
        return Choice(kept, kept, "all of it is in memory")
    if not (pace.token_ns and pace.byte_ns):
        return Choice(kept, kept, "not measured yet")
    load_ns, compute_ns = file_bytes * pace.byte_ns, (kept - in_memory_tokens) * pace.token_ns
    if load_ns <= compute_ns:
        return Choice(kept, kept, "loading is faster", load_ns, compute_ns)
    return Choice(kept, in_memory_tokens, "computing is faster", load_ns, compute_ns)


def tokens_in_memory(resident: Iterable[bool], tokens_per_group: int, num_tokens: int) -> int:
    """Return how many tokens from the first on need no load; `resident` says it of each group in order."""
    num = 0
    for is_resident in resident:
        if not is_resident:
            break
        num += tokens_per_group
    return min(num, num_tokens)
