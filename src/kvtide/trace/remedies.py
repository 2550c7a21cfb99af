"""What would help, and by how much: by the roofline where there is one, else estimated. Next: rules.

Decides what is advised. A factor is never more than a model's promise, and its text says whose.
"""

from __future__ import annotations

from kvtide.trace.findings import Case, Evidence, Remedy
from kvtide.trace.thresholds import BUSY_HIGH, DEPTH_AIM, SIZE_AIM
from kvtide.units import format_bytes


def deeper(case: Case) -> Remedy:
    """Return what more ops in flight would bring."""
    aim = max(DEPTH_AIM.value, case.depth)
    what = f"keep {aim:g} ops in flight instead of {case.depth:.3g}: submit a batch before waiting for it"
    if case.roof is None:
        factor = aim / max(case.depth, 1.0)
        return Remedy(what, f"up to x {factor:.3g} (estimated: the drive is taken to answer as fast as now)", factor)
    factor = case.gain(size=case.size, depth=aim)
    return Remedy(what, f"x {factor:.3g} (by the roofline)", factor)


def larger(case: Case) -> Remedy:
    """Return what larger ops would bring at the same depth."""
    aim = SIZE_AIM.value
    what = (
        f"read {format_bytes(aim)} at a time instead of {format_bytes(round(case.size))}: store what is used together "
        "side by side (larger groups), and merge neighbours"
    )
    if case.way == "write":
        what = f"write {format_bytes(aim)} at a time instead of {format_bytes(round(case.size))}: gather before writing"
    if case.roof is None:
        factor = aim / case.size
        return Remedy(what, f"up to x {factor:.3g} (estimated: an op is taken to cost the same at any size)", factor)
    factor = case.gain(size=aim, depth=max(case.depth, 1.0))
    return Remedy(what, f"x {factor:.3g} (by the roofline)", factor)


def larger_readahead(case: Case) -> Remedy:
    """Return the remedy for reads that the kernel makes."""
    aim = 4.0 * case.side.sizes.median_bytes
    factor = case.gain(size=aim, depth=max(case.depth, 1.0)) if case.roof is not None else None
    gain = f"x {factor:.3g} (by the roofline)" if factor is not None else ""
    return Remedy(f"raise read_ahead_kb to {aim / 1024:.0f}, or read with O_DIRECT in larger pieces", gain, factor)


def fewer_bytes(case: Case) -> list[Remedy]:
    """Return what helps where bytes are the limit: to move fewer of them."""
    found = [Remedy("move fewer bytes: a larger DRAM tier, KV of fewer bits, or selecting the blocks a step needs", "")]
    kv = case.figures.kv
    if kv is not None and kv.wanted_bytes and kv.file_bytes:
        share = kv.file_bytes / kv.wanted_bytes
        what = f"{share:.0%} of the KV wanted came from the file; half of that from DRAM would halve the reads"
        found.append(Remedy(what, "x 2 (estimated)", 2.0))
    return found


def after_host(case: Case) -> Remedy:
    """Return what taking the software out of the way would bring, with the device as it is."""
    what = "submit in batches from one thread (io_uring), with fewer calls, copies and locks on the way"
    figures = case.figures
    if figures.stack_share is not None and figures.stack_share < 1:
        factor = 1 / (1 - figures.stack_share)
        return Remedy(what, f"up to x {factor:.3g} (estimated: calls would take only the device's time)", factor)
    if 0 < case.busy < 1:
        factor = 1 / case.busy_active
        return Remedy(what, f"up to x {factor:.3g} (estimated: the device would never wait)", factor)
    return Remedy(what, "")


def limits_of_gain(case: Case) -> list[Evidence]:
    """Return how much of the time is at stake at all, where the device is idle for some of it."""
    if not 0 < case.busy < BUSY_HIGH.value:
        return []
    most = 1 / (1 - case.busy)
    value = f"{case.busy:.0%} of the trace: faster I/O makes the whole at most x {most:.3g} as fast"
    return [Evidence("time in flight", value)]
