"""The rules about the device: too shallow, too many, too small, too much, or just right. Next: verdict.

Each looks at a case and returns a verdict, or None if it does not apply. Decides no order; verdict does.
"""

from __future__ import annotations

from kvtide.trace.findings import NO_PROBE, Case, Evidence, Remedy, Verdict, shown
from kvtide.trace.remedies import deeper, fewer_bytes, larger, larger_readahead, limits_of_gain
from kvtide.trace.thresholds import (
    AT_ROOF,
    BUSY_LOW,
    BUSY_MIN,
    DEPTH_AIM,
    DEPTH_HIGH,
    DEPTH_MODERATE,
    DEPTH_STARVED,
    GAIN_MIN,
    LARGE_BYTES,
    QUEUED_MIN,
    ROOF_LOW,
    SIZE_AIM,
    SMALL_BYTES,
    SMALL_BYTES_ALONE,
    STALL_HIGH,
    STALL_LOW,
    TAIL_MIN,
    WAITING_MIN,
    Threshold,
)
from kvtide.units import format_bytes, format_ns


def healthy(case: Case) -> Verdict | None:
    """Nobody waits for the storage."""
    kv, busy = case.figures.kv, case.figures.whole.busy_share
    if kv is not None and kv.num_steps and kv.stall_share <= STALL_LOW.value:
        evidence = [Evidence("stall", f"{kv.stall_share:.1%} of the time", *_of(STALL_LOW, above=False))]
        return Verdict("healthy", f"The model waits for KV {kv.stall_share:.1%} of the time.", evidence)
    is_waiting = kv is not None and kv.stall_share >= STALL_HIGH.value
    if busy is not None and busy <= BUSY_LOW.value and not is_waiting:
        evidence = [Evidence("time in flight", f"{busy:.1%}", *_of(BUSY_LOW, above=False))]
        return Verdict("healthy", f"The device has something in flight only {busy:.1%} of the time.", evidence)
    return None


def depth_starved(case: Case) -> Verdict | None:
    """Too few ops are in flight for the drive to show what it can."""
    if case.depth_asked >= DEPTH_HIGH.value or not case.depth:
        return None
    is_lone = case.depth_asked < DEPTH_STARVED.value
    if case.roof is None:
        is_starved = is_lone and case.size <= SIZE_AIM.value
    else:
        is_small = _is_small(case)
        in_depth = case.gain(size=case.size, depth=DEPTH_AIM.value)
        in_size = case.gain(size=SIZE_AIM.value, depth=case.depth)
        is_first = is_lone or not is_small or (case.depth < DEPTH_MODERATE.value and in_depth >= in_size)
        is_starved = in_depth >= GAIN_MIN.value and is_first and not _is_at_roof(case)
        is_starved &= is_lone or not case.is_queued  # what looks like a queue at depth 1 is a slower day
    if not is_starved:
        return None
    needed = _of(DEPTH_STARVED, above=False)
    if case.roof is not None:
        needed = (f"{case.roof.depth_for(AT_ROOF.value, case.size):.3g} for {AT_ROOF.text} of the roof", "the roofline")
    evidence = [
        Evidence("depth while in flight", f"{case.depth:.3g}", *needed),
        *device_evidence(case),
        *limits_of_gain(case),
    ]
    remedies = [deeper(case)]
    if case.cap and case.way == "read":
        remedies.append(larger_readahead(case))
    elif _is_small(case):
        remedies.append(larger(case))
    how = "go nearly one after the other" if case.depth < DEPTH_STARVED.value else "are too few at a time"
    sentence = f"{_ops(case)} {how}: {case.depth:.3g} in flight, so the drive's latency sets the pace."
    return _told(case, "depth-starved", sentence, evidence, remedies)


def iops_bound(case: Case) -> Verdict | None:
    """The drive does as many ops a second as it can, and they are small."""
    if case.roof is None:
        is_bound = (
            0 < case.size <= SMALL_BYTES_ALONE.value
            and case.depth_asked >= DEPTH_HIGH.value
            and case.busy_active >= BUSY_MIN.value
        )
    else:
        is_under_knee = case.size < case.roof.knee_bytes
        of_roof = case.ops_per_s / case.roof.iops_max
        is_limit = of_roof >= AT_ROOF.value or (case.is_queued and of_roof >= ROOF_LOW.value)
        # A noisy probe misses the roof by much; a deep queue of small ops is at it by the model alone.
        is_limit |= case.depth_asked >= DEPTH_HIGH.value and case.roof.bound(case.size, case.depth) == "iops"
        is_bound = case.size > 0 and is_under_knee and is_limit and not _is_at_bandwidth(case)
        is_bound &= case.depth_asked >= DEPTH_STARVED.value
    if not is_bound:
        return None
    evidence = [Evidence("depth while in flight", f"{case.depth:.3g}", *_of(DEPTH_HIGH)), *device_evidence(case)]
    if case.roof is not None:
        of_roof = case.ops_per_s / case.roof.iops_max
        value = f"{case.ops_per_s:,.0f}, {of_roof:.0%} of the roof of {case.roof.iops_max:,.0f}"
        evidence.append(Evidence("ops/s while in flight", value, *_of(AT_ROOF)))
        evidence.append(Evidence("knee", format_bytes(case.roof.knee_bytes), "larger ops would be bandwidth-bound"))
    sentence = (
        f"The drive does {case.ops_per_s:,.0f} {_ops(case)} a second with {case.depth:.3g} in flight: "
        "it is their number that limits, not their bytes."
    )
    return _told(case, "iops-bound", sentence, [*evidence, *limits_of_gain(case)], [larger(case)])


def size_bound(case: Case) -> Verdict | None:
    """Ops are too small: at this depth, larger ones would move far more bytes."""
    if case.cap or not case.size or _is_at_bandwidth(case):
        return None
    is_bound = _is_small(case) and case.depth_asked >= DEPTH_STARVED.value
    if case.roof is None:
        is_bound &= case.busy_active >= BUSY_MIN.value
    if not is_bound:
        return None
    evidence = [
        Evidence("size", _size(case), *_of(SMALL_BYTES, above=False)),
        Evidence("depth while in flight", f"{case.depth:.3g}", *_of(DEPTH_STARVED)),
        *device_evidence(case)[1:],
        *limits_of_gain(case),
    ]
    sentence = f"{_ops(case)} are too small: each costs about as much as a larger one, with {case.depth:.3g} in flight."
    remedies = [larger(case)]
    if case.depth < DEPTH_AIM.value:
        remedies.append(deeper(case))
    return _told(case, "size-bound", sentence, evidence, remedies)


def bandwidth_bound(case: Case) -> Verdict | None:
    """The drive moves as many bytes a second as it can."""
    if case.roof is None:
        is_bound = (
            case.size >= LARGE_BYTES.value
            and case.depth_asked >= DEPTH_MODERATE.value
            and case.busy_active >= BUSY_MIN.value
        )
    else:
        is_over_knee = case.size >= case.roof.knee_bytes
        is_near = case.bytes_per_s >= ROOF_LOW.value * case.roof.bytes_per_s_max
        # A noisy probe misses the roof by much; a queue of large ops is at it by the model alone.
        is_limit = case.is_queued or case.roof.bound(case.size, case.depth_asked) == "bandwidth"
        is_bound = _is_at_bandwidth(case) or (is_over_knee and is_limit and is_near)
    if not is_bound:
        return None
    evidence = device_evidence(case)
    if case.roof is not None:
        of_roof = case.bytes_per_s / case.roof.bytes_per_s_max
        value = f"{format_bytes(case.bytes_per_s)}/s, {of_roof:.0%} of the roof"
        evidence.append(Evidence("rate while in flight", value, *_of(AT_ROOF)))
    sentence = (
        f"The drive moves {format_bytes(case.bytes_per_s)}/s of {case.way}s while busy: it is the bytes that limit."
    )
    return _told(case, "bandwidth-bound", sentence, [*evidence, *limits_of_gain(case)], fewer_bytes(case))


def as_promised(case: Case) -> Verdict | None:
    """The drive gives what the roofline promises, and no change of size or depth would gain much."""
    if case.roof is None or not case.size or not case.depth:
        return None
    promised = float(case.roof.bytes_per_s(case.size, case.depth))
    share = case.bytes_per_s / promised
    if share < ROOF_LOW.value:
        reason = (
            f"the device gives {share:.0%} of what the roofline promises at this size and depth: it was probed in "
            "another state, or somebody else uses it; probe again while the machine is quiet"
        )
        return Verdict(
            "cannot-say", f"Nothing is certain: {reason}.", device_evidence(case), [], is_certain=False, reason=reason
        )
    if case.gain(size=max(case.size, SIZE_AIM.value), depth=max(case.depth, DEPTH_AIM.value)) >= GAIN_MIN.value:
        return None
    sentence = f"The drive gives {share:.0%} of what its roofline promises; no other size or depth would gain much."
    return Verdict(
        "healthy", sentence, [*device_evidence(case), Evidence("of the roofline", f"{share:.0%}", *_of(ROOF_LOW))]
    )


def _told(case: Case, name: str, sentence: str, evidence: list[Evidence], remedies: list[Remedy]) -> Verdict:
    """Return the verdict with what is always said: the cap, the tail, and whether a roofline stands behind it."""
    tail = case.side.device
    if tail.p50_ns and tail.num > 1 and tail.p99_ns / tail.p50_ns >= TAIL_MIN.value:
        value = f"{format_ns(tail.p99_ns)} over {format_ns(tail.p50_ns)}"
        evidence = [*evidence, Evidence("latency p99 over p50", value, *_of(TAIL_MIN))]
    if case.roof is not None and case.figures.level != "call":
        return Verdict(name, sentence, evidence, remedies)
    if case.roof is not None:
        reason = "only calls were traced: their time is not the device's alone"
        return Verdict(name, sentence, evidence, remedies, is_certain=False, reason=reason)
    evidence = [*evidence, Evidence("roofline", NO_PROBE)]
    reason = f"there is {NO_PROBE}"
    return Verdict(name, f"{sentence} Estimated, {NO_PROBE}.", evidence, remedies, is_certain=False, reason=reason)


def device_evidence(case: Case) -> list[Evidence]:
    """Return what every verdict about a device shows: size, cap, latency, queueing."""
    found = [Evidence("size", _size(case))]
    if case.cap:
        found.append(Evidence("cap", case.cap))
    device = case.side.device
    if device.num:
        found.append(Evidence("device latency", f"{format_ns(device.p50_ns)} median, {format_ns(device.p99_ns)} p99"))
    if case.waiting >= WAITING_MIN.value:
        value = f"{case.depth_asked:.3g}, those that wait in the block layer included"
        found.append(Evidence("depth asked for", value, *_of(WAITING_MIN)))
    if case.queued is not None:
        value = f"{case.queued:.3g} x that of one op alone"
        found.append(Evidence("mean latency", value, *(_of(QUEUED_MIN) if case.queued >= QUEUED_MIN.value else ())))
    return found


def _size(case: Case) -> str:
    """Return the mean size, and the median where it is another."""
    mean, median = format_bytes(round(case.size)), format_bytes(case.side.sizes.median_bytes)
    return mean if mean == median else f"{mean} mean, {median} median"


def _is_small(case: Case) -> bool:
    """Whether ops are small for this drive: larger ones would gain, and the size is the program's own."""
    if case.cap or not case.size:
        return False
    if case.roof is None:
        return case.size <= SMALL_BYTES_ALONE.value
    is_gain = case.gain(size=SIZE_AIM.value, depth=max(case.depth, 1.0)) >= GAIN_MIN.value
    return case.size <= SMALL_BYTES.value and is_gain


def _is_at_bandwidth(case: Case) -> bool:
    return case.roof is not None and case.bytes_per_s >= AT_ROOF.value * case.roof.bytes_per_s_max


def _is_at_roof(case: Case) -> bool:
    is_at_iops = case.roof is not None and case.ops_per_s >= AT_ROOF.value * case.roof.iops_max
    return is_at_iops or _is_at_bandwidth(case)


def _of(threshold: Threshold, *, above: bool = True) -> tuple[str, str]:
    return shown(threshold, above=above), threshold.source


def _ops(case: Case) -> str:
    return f"{format_bytes(round(case.size))} {case.way}s" if case.size else f"{case.way}s"
