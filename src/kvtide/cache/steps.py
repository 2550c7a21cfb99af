"""Where the steps of a prefill begin and end: for the model, and for whoever predicts what it will do. Pure.

Next: integrations.transformers.store, planner.driver.
"""

from __future__ import annotations

PREFILL_TOKENS = 512  # a step of prefill: enough for full matrix speed on a CPU, few enough for small budgets


def next_prefill_end(start: int, num_tokens: int) -> int:
    """Return where the prefill step that begins at `start` ends: at a multiple of PREFILL_TOKENS, or at the end.

    Fixed places make the same tokens run through the same steps, whatever was kept of them before.
    """
    return min((start // PREFILL_TOKENS + 1) * PREFILL_TOKENS, num_tokens)
