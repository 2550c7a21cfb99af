"""The rules about what is not the drive: page cache, recomputing, copies, metadata, bursts, the host. Next: rules.

Each looks at a case and returns a verdict, or None if it does not apply. Decides no order; verdict does.
"""

from __future__ import annotations

from kvtide.trace.findings import Case, Evidence, Remedy, Verdict, shown
from kvtide.trace.remedies import after_host, limits_of_gain
from kvtide.trace.thresholds import (
    AT_ROOF,
    BURST_CV_MIN,
    BURSTS_MIN,
    BUSY_LOW,
    BUSY_MIN,
    CACHED_BYTES_PER_S,
    CACHED_LATENCY_NS,
    COPY_BUSY_MAX,
    COPY_SHARE_MIN,
    CPU_MIN,
    DEPTH_MODERATE,
    DEPTH_STARVED,
    FLUSHES_MIN,
    GAP_RATIO_MIN,
    IDLE_MIN,
    LOAD_SHARE_MIN,
    META_SHARE_MIN,
    META_TIME_MIN,
    PAGE_CACHE_MIN,
    RECOMPUTE_RATIO,
    STACK_MIN,
    STALL_HIGH,
    STALL_LOW,
    WRITE_SHARE_MIN,
    Threshold,
)
from kvtide.units import format_bytes, format_ns

KERNEL_SOURCE = "kernel"  # `about.source` of traces in which block commands are seen wherever there are any


def page_cache(case: Case) -> Verdict | None:
    """The program read and wrote, and the storage did next to nothing."""
    figures = case.figures
    if not figures.call_bytes:
        return None
    share = 1 - figures.block_bytes / figures.call_bytes
    if share < PAGE_CACHE_MIN.value:
        return None
    is_traced = bool(figures.num_rows.get("block")) or (case.about is not None and case.about.source == KERNEL_SOURCE)
    evidence = [
        Evidence("bytes the program asked for", format_bytes(figures.call_bytes)),
        Evidence("bytes the device moved", format_bytes(figures.block_bytes)),
        Evidence("served by the page cache", f"{share:.1%}", *_over(PAGE_CACHE_MIN)),
    ]
    reason = ""
    if not is_traced:
        call = figures.call
        if call is None or not call.device.num:
            return None
        fast_ns = CACHED_LATENCY_NS.value + call.sizes.mean_bytes / CACHED_BYTES_PER_S.value * 1e9
        if call.device.p50_ns > fast_ns:
            return None
        reason = "block commands were not traced; calls are faster than a drive answers"
        evidence[1:] = [
            Evidence(
                "median time of a call",
                format_ns(call.device.p50_ns),
                f"below {format_ns(fast_ns)}",
                CACHED_LATENCY_NS.source,
            )
        ]
    sentence = "The page cache served the program: storage was not exercised, so nothing here says how fast it is."
    remedies = [
        Remedy("to measure storage: read with O_DIRECT, or drop the page cache and use more data than fits memory", ""),
    ]
    return Verdict("page-cache", sentence, evidence, remedies, is_certain=is_traced, reason=reason)


def recompute_is_cheaper(case: Case) -> Verdict | None:
    """Bringing KV back took longer than computing it again would have."""
    kv, window_ns = case.figures.kv, case.figures.whole.window_ns
    if kv is None or not kv.recompute_ns or not window_ns:
        return None
    load_share, ratio = kv.load_ns / window_ns, kv.load_ns / kv.recompute_ns
    if ratio < RECOMPUTE_RATIO.value or load_share < LOAD_SHARE_MIN.value:
        return None
    evidence = [
        Evidence("waited for restored KV", format_ns(kv.load_ns)),
        Evidence("computing it again", f"{format_ns(kv.recompute_ns)} (estimated from this trace's prefill)"),
        Evidence("load over recompute", f"{ratio:.2g}", *_over(RECOMPUTE_RATIO)),
    ]
    remedies = [
        Remedy("compute these prefixes again instead of loading them", f"x {ratio:.3g} for them (estimated)", ratio),
    ]
    sentence = f"Loading prefixes took {ratio:.2g} times as long as computing them again would have (estimated)."
    reason = "recomputing is estimated from the prefill steps of the same trace"
    return Verdict("recompute-is-cheaper", sentence, evidence, remedies, is_certain=False, reason=reason)


def copy_bound(case: Case) -> Verdict | None:
    """The model waits for KV, and nearly all of it comes from DRAM while the drive has little to do."""
    kv, busy = case.figures.kv, case.figures.whole.busy_share or 0.0
    if kv is None or kv.stall_share < STALL_HIGH.value:
        return None
    share = kv.dram_bytes / max(1, kv.dram_bytes + kv.file_bytes)
    if share < COPY_SHARE_MIN.value or busy > COPY_BUSY_MAX.value * kv.stall_share:
        return None
    evidence = [
        Evidence("stall", f"{kv.stall_share:.0%} of the time", *_over(STALL_HIGH)),
        Evidence("KV moved from DRAM", f"{share:.0%}", *_over(COPY_SHARE_MIN)),
        Evidence("drive in flight", f"{busy:.0%} of the time", *_under(COPY_BUSY_MAX)),
    ]
    factor = 1 / (1 - kv.stall_share) if kv.stall_share < 1 else None
    gain = f"up to x {factor:.3g} (estimated: without any waiting)" if factor is not None else ""
    remedies = [
        Remedy(
            "copy larger pieces from DRAM to the device (larger groups), and begin before the layer is needed",
            gain,
            factor,
        ),
        Remedy("keep more KV on the device", ""),
    ]
    sentence = f"The model waits {kv.stall_share:.0%} of the time for KV that is copied from DRAM; the drive is not it."
    return Verdict("copy-bound", sentence, evidence, remedies)


def metadata_bound(case: Case) -> Verdict | None:
    """Names, attributes and flushes take what data should."""
    figures, whole = case.figures, case.figures.whole
    num_ops = whole.read.num_ops + whole.write.num_ops
    num_meta = whole.read.meta_share * whole.read.num_ops + whole.write.meta_share * whole.write.num_ops
    share = num_meta / num_ops if num_ops else 0.0
    flushes = whole.num_flushes / max(1, whole.write.num_ops)
    evidence = []
    if share >= META_SHARE_MIN.value:
        evidence.append(Evidence("block commands for metadata", f"{share:.0%}", *_over(META_SHARE_MIN)))
    if (figures.meta_call_share or 0.0) >= META_SHARE_MIN.value and (
        figures.meta_time_share or 0.0
    ) >= META_TIME_MIN.value:
        evidence.append(Evidence("calls for metadata", f"{figures.meta_call_share:.0%}", *_over(META_SHARE_MIN)))
        evidence.append(Evidence("time in them", f"{figures.meta_time_share:.0%}", *_over(META_TIME_MIN)))
    if flushes >= FLUSHES_MIN.value and _write_share(case) >= WRITE_SHARE_MIN.value:
        evidence.append(Evidence("flushes a write", f"{flushes:.2f}", *_over(FLUSHES_MIN)))
    if not evidence:
        return None
    remedies = [
        Remedy("keep KV in few large files, preallocated and left open, instead of a file for each object", ""),
        Remedy("sync once a batch instead of once a write; KV that is lost is computed again", ""),
    ]
    sentence = "Much of the work is metadata: creating, opening, describing and flushing files rather than moving KV."
    return Verdict("metadata-bound", sentence, evidence, remedies)


def write_burst(case: Case) -> Verdict | None:
    """Writes come all at once, again and again, with nothing between."""
    write = case.figures.whole.write
    if write.burstiness is None or _write_share(case) < WRITE_SHARE_MIN.value:
        return None
    if write.burstiness < BURST_CV_MIN.value or write.num_bursts < BURSTS_MIN.value:
        return None
    active = write.active_share or 1.0
    evidence = [
        Evidence("variation of bytes written over time", f"{write.burstiness:.2g}", *_over(BURST_CV_MIN)),
        Evidence("bursts", f"{write.num_bursts}", *_over(BURSTS_MIN)),
        Evidence("bins with any writes", f"{active:.0%}"),
        Evidence("share of writes", f"{_write_share(case):.0%}", *_over(WRITE_SHARE_MIN)),
    ]
    if write.device.num:
        evidence.append(
            Evidence("write latency", f"{format_ns(write.device.p50_ns)} median, {format_ns(write.device.p99_ns)} p99")
        )
    gain = f"x {1 / active:.3g} lower peak rate (estimated)"
    remedies = [
        Remedy(
            "write as KV becomes ready, with a bound on what is outstanding, instead of all at once", gain, 1 / active
        )
    ]
    sentence = (
        f"Writes come in {write.num_bursts} bursts, {active:.0%} of the time: "
        f"{format_bytes(write.bytes_per_s / active)}/s in a burst, {format_bytes(write.bytes_per_s)}/s on average."
    )
    return Verdict("write-burst", sentence, evidence, remedies)


def host_bound(case: Case) -> Verdict | None:
    """The device waits for software: calls, copies, locks, or one thread that submits one op at a time."""
    if _is_saturated(case) or (case.figures.kv is not None and case.figures.kv.stall_share <= STALL_LOW.value):
        return None
    for found in (_by_stack(case), _by_cpu(case), _by_roof(case), _by_gaps(case)):
        if found is not None:
            return found
    return None


def _by_stack(case: Case) -> Verdict | None:
    stack = case.figures.stack_share
    if stack is None or stack < STACK_MIN.value:
        return None
    evidence = [
        Evidence("software above the device", f"{stack:.0%} of a call's time", *_over(STACK_MIN)),
        *_queue(case),
    ]
    sentence = f"Software above the device takes {stack:.0%} of the time of a call; the drive is not what it waits for."
    return Verdict("host-bound", sentence, [*evidence, *limits_of_gain(case)], [after_host(case)])


def _by_cpu(case: Case) -> Verdict | None:
    cpu = case.figures.host_cpu_share
    if cpu is None or cpu < CPU_MIN.value:
        return None
    evidence = [Evidence("CPU time", f"{cpu:.0%} of a core", *_over(CPU_MIN)), *_queue(case)]
    sentence = f"The program uses {cpu:.0%} of a core and the drive is not at its limit: the CPU sets the pace."
    return Verdict("host-bound", sentence, [*evidence, *limits_of_gain(case)], [after_host(case)])


def _by_roof(case: Case) -> Verdict | None:
    if case.roof is None or not case.size or case.roof.bound(case.size, case.depth) != "host":
        return None
    evidence = [Evidence("CPU time of an op", format_ns(case.roof.host_ns), "the lowest roof", "roofline of the probe")]
    sentence = "At this size and depth the CPU time of an op is the lowest roof of the probe."
    return Verdict("host-bound", sentence, [*evidence, *_queue(case)], [after_host(case)])


def _by_gaps(case: Case) -> Verdict | None:
    """Nothing is in flight most of the time although I/O goes on, and gaps are longer than the device takes."""
    whole = case.figures.whole
    if whole.busy_share is None or whole.submit_gap_ratio is None or whole.busy_share <= BUSY_LOW.value:
        return None
    idle = 1 - case.busy_active
    if whole.submit_gap_ratio < GAP_RATIO_MIN.value or idle < IDLE_MIN.value or case.depth >= DEPTH_STARVED.value:
        return None
    is_stalled = case.figures.kv is not None and case.figures.kv.stall_share >= STALL_HIGH.value
    evidence = [
        Evidence("gap between ops over device latency", f"{whole.submit_gap_ratio:.2g}", *_over(GAP_RATIO_MIN)),
        Evidence("device idle while I/O goes on", f"{idle:.0%}", *_over(IDLE_MIN)),
        *_queue(case),
    ]
    sentence = (
        f"The program sets the pace: it waits {whole.submit_gap_ratio:.2g} device latencies from one op to the next, "
        f"and the drive is idle {idle:.0%} of the time."
    )
    reason = "" if is_stalled else "the trace does not tell whether the program works or waits between its ops"
    return Verdict("host-bound", sentence, evidence, [after_host(case)], is_certain=is_stalled, reason=reason)


def _is_saturated(case: Case) -> bool:
    """Whether the device is at a limit of its own, whatever the software does."""
    if case.roof is None:
        return case.depth_asked >= DEPTH_MODERATE.value and case.busy_active >= BUSY_MIN.value
    is_at_iops = case.ops_per_s >= AT_ROOF.value * case.roof.iops_max
    is_at_bandwidth = case.bytes_per_s >= AT_ROOF.value * case.roof.bytes_per_s_max
    is_full = is_at_iops or is_at_bandwidth or (case.is_queued and case.depth_asked >= DEPTH_STARVED.value)
    return is_full and case.busy_active >= 1 - IDLE_MIN.value


def _write_share(case: Case) -> float:
    """Return the larger of the shares that writes have of the bytes and of the device's time."""
    read, write = case.figures.whole.read, case.figures.whole.write
    of_bytes = write.num_bytes / max(1, read.num_bytes + write.num_bytes)
    depth = (read.depth or 0.0) + (write.depth or 0.0)
    return max(of_bytes, (write.depth or 0.0) / depth if depth else 0.0)


def _queue(case: Case) -> list[Evidence]:
    found = [Evidence("depth while in flight", f"{case.depth:.3g}")]
    device = case.side.device
    if device.num:
        found.append(Evidence("device latency", f"{format_ns(device.p50_ns)} median"))
    if case.cap:
        found.append(Evidence("cap", case.cap))
    return found


def _over(threshold: Threshold) -> tuple[str, str]:
    return shown(threshold), threshold.source


def _under(threshold: Threshold) -> tuple[str, str]:
    return shown(threshold, above=False), threshold.source
