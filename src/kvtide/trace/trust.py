"""The rules about trust: what makes figures worthless, and what can still be said. Next: elsewhere, rules, verdict.

A verdict on doubtful figures is worse than none, so these rules come before the others.
"""

from __future__ import annotations

from kvtide.trace.findings import Case, Evidence, Verdict, shown
from kvtide.trace.thresholds import EVENTS_MIN, LITTLE_MAX, LOST_MAX, MALFORMED_MAX, UNMATCHED_MAX, Threshold
from kvtide.units import format_bytes


def distrust_figures(case: Case) -> Verdict | None:
    """Nothing was recorded, or so much is missing that no figure holds."""
    trust, figures = case.figures.trust, case.figures
    if not sum(figures.num_rows.values()) and not trust.num_events:
        return _cannot(case, "the trace holds no events", [])
    if trust.lost_share > LOST_MAX.value:
        reason = f"the recorder lost {trust.lost_share:.2%} of the events; trace again with larger buffers"
        return _cannot(case, reason, [_share("lost events", trust.lost_share, LOST_MAX)])
    if trust.malformed_share > MALFORMED_MAX.value:
        reason = f"{trust.malformed_share:.1%} of the lines could not be read; check the format given"
        return _cannot(case, reason, [_share("malformed lines", trust.malformed_share, MALFORMED_MAX)])
    if figures.level != "sample":
        return None
    residual = trust.little_residual
    if residual is not None and residual > LITTLE_MAX.value:
        reason = (
            "the samples are inconsistent by Little's law: ops in flight are not rate times latency, "
            f"off by {residual:.0%}; columns may be shifted"
        )
        return _cannot(case, reason, [_share("residual of Little's law", residual, LITTLE_MAX), *_impossible(case)])
    if trust.num_impossible > UNMATCHED_MAX.value * max(1, trust.num_events):
        return _cannot(case, "some samples cannot be: a device busy for more than all of the time", _impossible(case))
    return None


def distrust_pairs(case: Case) -> Verdict | None:
    """There are figures, but not of what happens between issue and completion."""
    trust, figures = case.figures.trust, case.figures
    if figures.level == "sample" and not trust.num_events:
        return _cannot(case, "the trace holds only samples, and none with a disk's rates, latencies and depth", [])
    if not trust.has_completions:
        return _cannot(case, "the trace has no completions, so neither latency nor depth can be told", [])
    if figures.level == "sample":
        return None
    if trust.num_events < EVENTS_MIN.value:
        seen = Evidence("events", f"{trust.num_events}", shown(EVENTS_MIN, above=False), EVENTS_MIN.source)
        return _cannot(case, f"there are only {trust.num_events} events of the {figures.level} level", [seen])
    if trust.unmatched_share > UNMATCHED_MAX.value:
        reason = f"{trust.unmatched_share:.1%} of the events lack their issue or their completion"
        return _cannot(case, reason, [_share("unmatched events", trust.unmatched_share, UNMATCHED_MAX)])
    residual = trust.little_residual
    if residual is not None and residual > LITTLE_MAX.value:
        reason = f"the events are inconsistent by Little's law, off by {residual:.0%}"
        return _cannot(case, reason, [_share("residual of Little's law", residual, LITTLE_MAX)])
    return None


def _cannot(case: Case, reason: str, evidence: list[Evidence]) -> Verdict:
    """Return that nothing can be said, with the figures that hold all the same."""
    side, still = case.side, []
    if side.num_ops and case.figures.level != "sample":
        total = f"{side.num_ops:,} {case.way}s, {format_bytes(side.num_bytes)}, {format_bytes(side.bytes_per_s)}/s"
        still.append(Evidence("what can be said: traffic", total))
        if case.size:
            mode = f"{format_bytes(side.sizes.mode_bytes)} ({side.sizes.mode_share:.0%} of the ops)"
            still.append(Evidence("what can be said: most frequent size", mode))
        if case.cap:
            still.append(Evidence("cap", case.cap))
    return Verdict("cannot-say", f"Nothing is certain: {reason}.", [*evidence, *still], is_certain=False, reason=reason)


def _share(name: str, share: float, limit: Threshold) -> Evidence:
    return Evidence(name, f"{share:.2%}", shown(limit), limit.source)


def _impossible(case: Case) -> list[Evidence]:
    num = case.figures.trust.num_impossible
    return [Evidence("samples that cannot be", f"{num}, with a device busy for more than 100 %")] if num else []
