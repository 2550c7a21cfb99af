"""Figures of a trace as rows of words and numbers: one list for the terminal, the page and comparisons. Next: trace.

Decides which figures are shown, in which order and how they are spelled. Pure; knows no terminal and no page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.report.loaded import TraceReport
from kvtide.trace.figures import Indicators, Kv, Latency, Side, Slice
from kvtide.units import format_bytes, format_ns, printable

NONE = "-"
TEXT_MAX = 300  # of a text from a file that is shown in one line
LIST_MAX = 20  # devices, files, notes and bad lines that are shown
TRUST_SHARE_SHOWN = 0.001  # below, nothing is said about lost, unmatched or malformed events
LITTLE_SHOWN = 0.1  # as in thresholds.LITTLE_MAX: figures contradict each other


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure: how it is shown, and its value to compare; None where it cannot be told."""

    name: str
    text: str
    value: float | None = None


def clipped(text: str, limit: int = TEXT_MAX) -> str:
    """Return `text`, which comes from a file, in one line of at most `limit` characters."""
    shown = printable(text[: limit + 1])
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."


def rate(bytes_per_s: float) -> str:
    """`1.25 GiB/s`."""
    return f"{format_bytes(bytes_per_s)}/s"


def share(value: float | None) -> str:
    """`12 %`, or `-` where it cannot be told."""
    return NONE if value is None else f"{100 * value:.3g} %"


def number(value: float | None) -> str:
    """`1.25`, or `-` where it cannot be told."""
    return NONE if value is None else f"{value:.3g}"


def ratio_text(first: float | None, second: float | None) -> str:
    """Return second over first, as in `1.3x`; `-` where there is none."""
    if first is None or second is None or not first or not math.isfinite(second / first):
        return NONE
    return "same" if second == first else f"{second / first:.3g}x"


def _sized(name: str, value: float | None) -> Measure:
    return Measure(name, format_bytes(value), value) if value else Measure(name, NONE)


def _timed(name: str, latency: Latency, value: float) -> Measure:
    return Measure(name, format_ns(value), value) if latency.num else Measure(name, NONE)


def side_measures(side: Side) -> list[Measure]:
    """Return the figures of one direction, in an order that does not depend on what is known."""
    device, queue, sizes = side.device, side.queue, side.sizes
    mode = _sized("commonest size", sizes.mode_bytes)
    if sizes.mode_bytes:
        mode = Measure(mode.name, f"{mode.text} ({share(sizes.mode_share)})", mode.value)
    return [
        Measure("ops", f"{side.num_ops:,}", side.num_ops),
        Measure("bytes", format_bytes(side.num_bytes), side.num_bytes),
        Measure("rate", rate(side.bytes_per_s), side.bytes_per_s),
        Measure("ops/s", f"{side.ops_per_s:,.0f}", side.ops_per_s),
        mode,
        _sized("median size", sizes.median_bytes),
        _sized("median size by bytes", sizes.median_by_bytes),
        Measure("depth", number(side.depth), side.depth),
        _timed("device p50", device, device.p50_ns),
        _timed("device p99", device, device.p99_ns),
        _timed("device p99.9", device, device.p999_ns),
        _timed("queue p50", queue, queue.p50_ns),
        _timed("queue p99", queue, queue.p99_ns),
        Measure("sequential", share(side.sequential_share), side.sequential_share),
        Measure("of the roofline", share(side.roof_share), side.roof_share),
    ]


def slice_rows(parts: Sequence[Slice]) -> list[list[str]]:
    """Return a row for each direction of each slice that has ops, see SLICE_COLUMNS."""
    rows = []
    for part in parts:
        for way, side in (("read", part.read), ("write", part.write)):
            if side.num_ops:
                known = bool(side.device.num)
                rows.append([
                    part.name,
                    way,
                    f"{side.num_ops:,}",
                    format_bytes(side.num_bytes),
                    rate(side.bytes_per_s),
                    format_bytes(side.sizes.median_bytes),
                    number(side.depth),
                    format_ns(side.device.p50_ns) if known else NONE,
                    format_ns(side.device.p99_ns) if known else NONE,
                ])  # fmt: skip
    return rows


SLICE_COLUMNS = ("", "", "ops", "bytes", "rate", "median", "depth", "p50", "p99")


def whole_measures(figures: Indicators) -> list[Measure]:
    """Return the figures that belong to no direction."""
    whole = figures.whole
    day = figures.write_bytes_per_day
    return [
        Measure("window", format_ns(whole.window_ns), whole.window_ns),
        Measure("depth while busy", number(whole.depth_busy), whole.depth_busy),
        Measure("time in flight", share(whole.busy_share), whole.busy_share),
        Measure("submit gap ratio", number(whole.submit_gap_ratio), whole.submit_gap_ratio),
        Measure("flushes", f"{whole.num_flushes:,}", whole.num_flushes),
        Measure("errors", f"{whole.num_errors:,}", whole.num_errors),
        Measure("bytes with a known cause", share(figures.attributed_share), figures.attributed_share),
        Measure("software above the device", share(figures.stack_share), figures.stack_share),
        _page_cache(figures.page_cache_share),
        Measure("CPU of one core", share(figures.host_cpu_share), figures.host_cpu_share),
        Measure("writes a day", NONE if day is None else format_bytes(day), day),
        Measure("drive writes a day", number(figures.drive_writes_per_day), figures.drive_writes_per_day),
    ]


def _page_cache(part: float | None) -> Measure:
    """Return how much of what calls asked for no device read, or how much more devices read than was asked for."""
    if part is not None and part < 0:
        return Measure("device reads no call asked for", share(-part), part)  # read-ahead, or faults on mapped files
    return Measure("served by the page cache", share(part), part)


def kv_measures(kv: Kv) -> list[Measure]:
    """Return what the cache wanted and what that cost."""
    step_ns, recompute_ns = kv.decode_step_ns, kv.recompute_ns
    return [
        Measure("KV wanted", format_bytes(kv.wanted_bytes), kv.wanted_bytes),
        Measure("already on the device", share(kv.device_hit_share), kv.device_hit_share),
        Measure("from DRAM", f"{format_bytes(kv.dram_bytes)} ({share(kv.dram_hit_share)})", kv.dram_bytes),
        Measure("from the file", format_bytes(kv.file_bytes), kv.file_bytes),
        Measure("device bytes / KV bytes", number(kv.device_bytes_ratio), kv.device_bytes_ratio),
        Measure("steps", f"{kv.num_steps:,}", kv.num_steps),
        Measure("stall a step", format_ns(kv.stall_ns_step), kv.stall_ns_step),
        Measure("stall share", share(kv.stall_share), kv.stall_share),
        Measure("decode step", NONE if step_ns is None else format_ns(step_ns), step_ns),
        Measure("loading prefixes", format_ns(kv.load_ns), kv.load_ns),
        Measure("computing them again (estimate)", NONE if recompute_ns is None else format_ns(recompute_ns),
                recompute_ns),
    ]  # fmt: skip


def groups(report: TraceReport) -> list[tuple[str, list[Measure]]]:
    """Return all figures of a trace by group; the same groups for every trace, so that two can be compared."""
    figures = report.figures
    return [
        ("reads", side_measures(figures.whole.read)),
        ("writes", side_measures(figures.whole.write)),
        ("device", whole_measures(figures)),
        ("KV", kv_measures(figures.kv or Kv())),
    ]


def compared(first: TraceReport, second: TraceReport) -> list[tuple[str, list[tuple[Measure, Measure]]]]:
    """Return the figures of two traces side by side; those that neither has are left out."""
    found = []
    for (name, ours), (_, theirs) in zip(groups(first), groups(second), strict=True):
        pairs = [pair for pair in zip(ours, theirs, strict=True) if pair[0].value or pair[1].value]
        if pairs:
            found.append((name, pairs))
    return found


def about_rows(report: TraceReport) -> list[tuple[str, str]]:
    """Return what was traced, as label and words; texts from the file are made printable."""
    about, figures = report.about, report.figures
    rows = [("file", clipped(str(report.path))), ("source", clipped(about.source or "unknown"))]
    if about.command:
        rows.append(("command", clipped(about.command)))
    if about.pid:
        rows.append(("process", str(about.pid)))
    if about.host:
        rows.append(("host", clipped(about.host)))
    rows.append(("duration", format_ns(figures.whole.window_ns)))
    for key, device in list(about.devices.items())[:LIST_MAX]:
        known = [
            (device.capacity_bytes, "capacity"),
            (device.read_ahead_bytes, "read-ahead"),
            (device.max_sectors_bytes, "largest command"),
        ]
        words = [clipped(device.name, 40) or "device", device_number(key)]
        words += [f"{name} {format_bytes(value)}" for value, name in known if value]
        words += [f"scheduler {clipped(device.scheduler, 40)}"] if device.scheduler else []
        rows.append(("device", ", ".join(words)))
    if len(about.devices) > LIST_MAX:
        rows.append(("device", f"and {len(about.devices) - LIST_MAX} more"))
    counts = [f"{num:,} {level}" for level, num in figures.num_rows.items() if num]
    rows.append(("events", f"{', '.join(counts) or 'none'}; figures are of level {figures.level}"))
    return rows


def device_number(key: str) -> str:
    """`259:0` of a device number as traces have it: major << 20 | minor."""
    if not (key.isascii() and key.isdigit() and len(key) < 20):
        return clipped(key, 40)
    return f"{int(key) >> 20}:{int(key) & 0xFFFFF}"


def warnings_of(report: TraceReport) -> list[str]:
    """Return what a reader should know before believing the figures."""
    health, trust = report.about.health, report.figures.trust
    told = []
    if health.num_lost:
        told.append(f"{health.num_lost:,} events were lost by the recorder ({share(trust.lost_share)}).")
    if not trust.has_completions and trust.num_events:
        told.append("The trace has no completions: latency and depth cannot be told.")
    if trust.unmatched_share > TRUST_SHARE_SHOWN:
        told.append(f"{share(trust.unmatched_share)} of the events have no other half.")
    if trust.little_residual is not None and trust.little_residual > LITTLE_SHOWN:
        told.append(f"Ops in flight and rate x latency differ by {share(trust.little_residual)}: a figure is wrong.")
    if trust.num_impossible:
        told.append(f"{trust.num_impossible:,} samples cannot be, such as a device busy for more than all the time.")
    if health.num_malformed:
        told.append(f"{health.num_malformed:,} lines could not be read ({share(trust.malformed_share)}), such as:")
        told += [f"line {line}: {clipped(text, 120)}" for line, text in health.malformed[:LIST_MAX]]
    return told


def notes_of(report: TraceReport) -> list[str]:
    """Return the sentences the recorder left for the reader."""
    notes = report.about.notes
    more = [f"and {len(notes) - LIST_MAX} more notes"] if len(notes) > LIST_MAX else []
    return [clipped(note) for note in notes[:LIST_MAX]] + more
