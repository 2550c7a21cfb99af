"""The verdict: what limits the I/O of a trace, on which figures that rests, and what would help. Next: report.

Decides the order in which rules are asked; the first that applies has the word. Pure: figures in, sentences out.

Order, from what makes the rest meaningless to what needs the rest to be excluded:

    can the figures be believed?                 cannot-say
    did the storage do anything?                 page-cache
    enough events, each with its other half?     cannot-say
    is loading worth it at all?                  recompute-is-cheaper
    is it the copies, names or bursts?           copy-bound, metadata-bound, write-burst
    does the device wait for the program?        host-bound
    does anybody wait for the device?            healthy
    what of the device limits?                   depth-starved, iops-bound, size-bound, bandwidth-bound, healthy
    none of these                                cannot-say
"""

from __future__ import annotations

from collections.abc import Callable

from kvtide.roofline import Roofline
from kvtide.trace import rules
from kvtide.trace.elsewhere import (
    copy_bound,
    host_bound,
    metadata_bound,
    page_cache,
    recompute_is_cheaper,
    write_burst,
)
from kvtide.trace.figures import Indicators
from kvtide.trace.file import About
from kvtide.trace.findings import NO_PROBE, VERDICTS, Case, Evidence, Remedy, Verdict, case_of
from kvtide.trace.trust import distrust_figures, distrust_pairs

__all__ = ["VERDICTS", "Evidence", "Remedy", "Verdict", "judge"]

RULES: tuple[Callable[[Case], Verdict | None], ...] = (
    distrust_figures,
    page_cache,
    distrust_pairs,
    recompute_is_cheaper,
    copy_bound,
    metadata_bound,
    write_burst,
    host_bound,
    rules.healthy,
    rules.depth_starved,
    rules.iops_bound,
    rules.size_bound,
    rules.bandwidth_bound,
    rules.as_promised,
)


def judge(indicators: Indicators, *, roofline: Roofline | None = None, about: About | None = None) -> Verdict:
    """Return the verdict on a trace. `about` tells which devices' caps are known and where the trace comes from."""
    case = case_of(indicators, roofline=roofline, about=about)
    for rule in RULES:
        verdict = rule(case)
        if verdict is not None:
            return verdict
    reason = "no rule fits: the device is busy, but neither its queue nor its sizes stand out"
    if roofline is None:
        reason += f", and there is {NO_PROBE}"
    evidence = [
        Evidence("depth while in flight", f"{case.depth:.3g}"),
        *rules.device_evidence(case),
        Evidence("time in flight", f"{case.busy:.0%}"),
    ]
    return Verdict("cannot-say", f"Nothing is certain: {reason}.", evidence, is_certain=False, reason=reason)
