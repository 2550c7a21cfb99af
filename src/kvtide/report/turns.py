"""Tables and sentences of a measured run. Values in, rich renderables out; measures nothing itself."""

from __future__ import annotations

from rich.table import Table

from kvtide.integrations.transformers.turns import Phase, Turn
from kvtide.tiers.contract import TierStats
from kvtide.units import format_bytes, format_ns

SMALL_BYTES = 64 << 10  # below this, the drive of benchmarks/group_size was limited by operations rather than bytes
BOUND_SHARE = 0.5


MEASURES = (
    *("talk", "prompt", "matched", "from device", "from dram", "from file", "TTFT", "ITL p50", "ITL p99"),
    *("ops", "mean size", "mean depth", "read", "written", "read/write"),
)
WIDE_COLUMNS = 170  # what all measures take side by side
FROM_REMOTE = "from remote"  # shown where there is a remote
NARROW_TURNS_MAX = 4  # turns that fit side by side in 80 columns


def turn_table(turns: list[Turn], bytes_per_token: int, *, width: int = WIDE_COLUMNS) -> Table:
    """Return the measures of each turn: a row a turn, or a column a turn where `width` is too narrow for that.

    Of more turns than fit a narrow terminal, the last ones are shown.
    """
    table = Table(title="Turns (measured)", title_justify="left")
    has_remote = any(turn.matched_bytes.get("remote") for turn in turns)
    at = MEASURES.index("from file") + 1
    names = (*MEASURES[:at], *([FROM_REMOTE] if has_remote else ()), *MEASURES[at:])
    if width < WIDE_COLUMNS:
        turns = turns[-NARROW_TURNS_MAX:]
        columns = [_measures(turn, bytes_per_token, has_remote=has_remote) for turn in turns]
        table.add_column("")
        for _ in turns:
            table.add_column("", justify="right", no_wrap=True)
        for row in zip(names, *columns, strict=True):
            table.add_row(*row)
        table.show_header = False
        return table
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for turn in turns:
        table.add_row(*_measures(turn, bytes_per_token, has_remote=has_remote))
    return table


def _measures(turn: Turn, bytes_per_token: int, *, has_remote: bool) -> list[str]:
    """Return one turn's measures, in the order of MEASURES, with FROM_REMOTE behind "from file" if asked for."""
    tiers = ("device", "dram", "file", *(("remote",) if has_remote else ()))
    read = turn.prefill.read_bytes + turn.decode.read_bytes
    written = turn.prefill.written_bytes + turn.decode.written_bytes
    num_ops = turn.prefill.num_ops + turn.decode.num_ops
    weight = max(1, num_ops)
    depth = (turn.prefill.depth_mean * turn.prefill.num_ops + turn.decode.depth_mean * turn.decode.num_ops) / weight
    return [
        f"{turn.conversation + 1}",
        str(turn.prompt_tokens),
        str(turn.matched_tokens),
        *(str(round(turn.matched_bytes.get(name, 0) / bytes_per_token)) for name in tiers),
        format_ns(turn.ttft_ns),
        format_ns(turn.itl_ns_p50),
        format_ns(turn.itl_ns_p99),
        str(num_ops),
        format_bytes((read + written) // weight) if num_ops else "-",
        f"{depth:.1f}",
        f"{read / 2**20:.1f} MiB",
        f"{written / 2**20:.1f} MiB",
        f"{read / written:.1f}" if written else "-",
    ]


def tier_table(usage: dict[str, TierStats], places: dict[str, str]) -> Table:
    """Return one row a tier; `places` says where those below memory are."""
    table = Table(title="Tiers now", title_justify="left")
    for name in ("tier", "capacity", "used", "read", "written", "corrupt", "failed", "where"):
        table.add_column(name, justify="left" if name in {"tier", "where"} else "right")
    for name, stats in usage.items():
        moved = [format_bytes(stats.read_bytes), format_bytes(stats.written_bytes)] if name in places else ["-", "-"]
        table.add_row(
            name,
            format_bytes(stats.capacity_bytes) if name != "remote" else "-",  # its own affair
            format_bytes(stats.used_bytes),
            *moved,
            str(stats.num_corrupt),
            str(stats.num_failed),
            places.get(name, "memory"),
        )
    return table


def verdict(turns: list[Turn]) -> list[str]:
    """Return one sentence a phase: what the time went into; and what was kept, but not worth loading."""
    return [
        _sentence("Prefill", [turn.prefill for turn in turns]),
        _sentence("Decode", [turn.decode for turn in turns]),
        *(_recomputed(index, turn) for index, turn in enumerate(turns, start=1) if turn.recomputed_tokens),
    ]


def _recomputed(index: int, turn: Turn) -> str:
    times = f"{format_ns(turn.expected_load_ns)} to load, {format_ns(turn.expected_compute_ns)} to compute"
    expected = f": expected were {times}" if turn.expected_load_ns else ""
    return f"Turn {index}: {turn.recomputed_tokens} kept tokens were computed again, {turn.reuse_reason}{expected}."


def _sentence(name: str, phases: list[Phase]) -> str:
    total = max(1, sum(phase.total_ns for phase in phases))
    share = sum(phase.wait_ns for phase in phases) / total
    read = sum(phase.read_bytes for phase in phases)
    num_ops = max(1, sum(phase.num_ops for phase in phases))
    size = sum(phase.op_bytes_mean * phase.num_ops for phase in phases) / num_ops
    depth = sum(phase.depth_mean * phase.num_ops for phase in phases) / num_ops
    if share < BOUND_SHARE:
        return f"{name} was bound by computing: the model stood still for KV {share:.0%} of the time."
    if not read:
        return (
            f"{name} was bound by moving KV ({share:.0%} of the time) between DRAM and device, or by making room: "
            f"nothing was read from the file."
        )
    kind = "small operations" if size < SMALL_BYTES else "bytes"
    return (
        f"{name} was bound by moving KV ({share:.0%} of the time), limited by {kind}: "
        f"{format_bytes(read)} read, {format_bytes(int(size))} an operation at a mean depth of {depth:.1f}."
    )
