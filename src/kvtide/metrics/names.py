"""Every metric there is: its name, kind, labels and meaning. Values only; next: sources (who fills them in).

Names end in their unit, as Prometheus wants it: seconds and bytes. All metrics also have the label `store`, which
tells the stores of one process apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `section` is the row of the dashboard it is shown in. A counter's name ends in `_total`."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    section: str
    about: str


def _listed() -> tuple[Metric, ...]:
    hits, moves, room, ops = "Hits", "Bytes", "Room", "Operations"
    return (
        Metric("kvtide_store_info", "gauge", ("integration", "model", "version"), room, "1; which store this is."),
        Metric("kvtide_requests_total", "counter", (), hits, "Prefixes asked for."),
        Metric(
            "kvtide_asked_total",
            "counter",
            ("unit",),
            hits,
            "Tokens of prefixes asked for; chunks that were to be loaded, or were computed and brought to be stored.",
        ),
        Metric("kvtide_hit_total", "counter", ("unit",), hits, "Those of them that were kept and used."),
        Metric("kvtide_hit_bytes_total", "counter", ("tier",), hits, "KV reused, by the fastest tier that had it."),
        Metric(
            "kvtide_decisions_total",
            "counter",
            ("choice", "reason"),
            hits,
            "Requests by what was decided of their kept prefix: load or recompute, and why.",
        ),
        Metric("kvtide_kept_tokens_total", "counter", (), hits, "Tokens found, whether loaded or computed again."),
        Metric("kvtide_compute_token_seconds", "gauge", (), hits, "Measured time to compute a token; 0: not yet."),
        Metric("kvtide_load_byte_seconds", "gauge", (), hits, "Measured time to load a byte; 0: not yet."),
        Metric("kvtide_wait_seconds_total", "counter", (), hits, "Time the model stood still for KV."),
        Metric(
            "kvtide_moved_bytes_total",
            "counter",
            ("tier", "direction", "cause"),
            moves,
            "Bytes by tier and by why they moved, from recorded events; of the device, those that were there already.",
        ),
        Metric("kvtide_tier_bytes_total", "counter", ("tier", "direction"), moves, "Bytes read and written, exact."),
        Metric("kvtide_gap_bytes_total", "counter", ("tier",), moves, "Bytes read only to join two reads."),
        Metric("kvtide_capacity_bytes", "gauge", ("tier",), room, "Room."),
        Metric("kvtide_used_bytes", "gauge", ("tier",), room, "Room in use."),
        Metric("kvtide_groups", "gauge", ("tier",), room, "Groups, windows on the device, or chunks."),
        Metric("kvtide_dropped_total", "counter", ("tier", "reason"), room, "Groups, or chunks, given up, and why."),
        Metric("kvtide_evicted_fragments_total", "counter", ("tier",), room, "Fragments that gave way to others."),
        Metric("kvtide_corrupt_total", "counter", ("tier",), room, "Fragments whose checksum differed."),
        Metric("kvtide_failed_total", "counter", ("tier",), room, "Reads and writes that failed."),
        Metric(
            "kvtide_full_total", "counter", ("tier",), room, "Groups refused for want of room, at first or at last."
        ),
        Metric("kvtide_refused_total", "counter", ("tier",), room, "Groups, or chunks, that were not stored at last."),
        Metric("kvtide_tier_operations_total", "counter", ("tier", "direction"), ops, "Reads and writes."),
        Metric("kvtide_operation_seconds", "histogram", ("direction", "cause"), ops, "From submission to completion."),
        Metric("kvtide_operation_bytes", "histogram", ("direction", "cause"), ops, "Size."),
        Metric("kvtide_operation_depth", "histogram", ("direction",), ops, "Operations in flight, itself included."),
        Metric("kvtide_operation_errors_total", "counter", ("direction",), ops, "Operations the drive refused."),
        Metric("kvtide_pending", "gauge", (), ops, "Transfers that are not done."),
        Metric(
            "kvtide_lost_events_total",
            "counter",
            ("level",),
            ops,
            "Events that were overwritten before a scrape: what is counted from events lacks them.",
        ),
    )


METRICS = _listed()
