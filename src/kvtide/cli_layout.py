"""`--layout` of a command that opens a store: which layout, what group, and over which gaps it reads. Next: cli_run.

Decides what a selection method reads of a store, and whose figures stand in for a drive that was never probed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtide.errors import ConfigError
from kvtide.hardware import load as load_catalogue
from kvtide.planner.layouts import AUTO, LAYOUT_OF_NAME, Case, Pattern, Picked, ReadTime, layout_for, read_time
from kvtide.probe.file import DEPTH, Gap, find_gap, find_probe
from kvtide.select.names import DEFAULT
from kvtide.select.quest import PAGE_TOKENS
from kvtide.select.shadowkv import CHUNK_TOKENS
from kvtide.spec import KVShape, SlotLayout, auto_group_blocks
from kvtide.units import format_bytes, printable

if TYPE_CHECKING:
    from kvtide.integrations.transformers import StoreOptions
    from kvtide.integrations.transformers.store import SelectOptions

DRIVE = "nvme-gen4"  # of the catalogue, where the device was never probed
OF_HEADS = {  # methods by which each KV head chooses alone: tokens of a unit, and whether values alone are read
    "quest": (PAGE_TOKENS, False),
    "shadowkv": (CHUNK_TOKENS, True),
    "infinigen": (1, False),
    "retrieval": (1, False),
}  # the others choose whole groups, the same for all heads


@dataclass(frozen=True, slots=True)
class Laid:
    """How a store is opened: the layout with its reasons, and the gap it reads over."""

    picked: Picked
    gap: Gap

    def lines(self) -> list[str]:
        """Return what is told of it before anything runs."""
        reasons = " ".join(self.picked.reasons[:3])  # what is wanted, what that takes, and the next best
        told = [f"layout {self.picked.name}: {reasons}"]
        if self.gap.num_bytes:
            told.append(f"reads go on over gaps of up to {format_bytes(self.gap.num_bytes)} ({self.gap.source})")
        return told

    def report(self) -> dict[str, Any]:
        """Return the same for `--json`, with every reason."""
        return {
            "layout": {"name": self.picked.name, "reasons": list(self.picked.reasons)},
            "gap": asdict(self.gap),
        }


def is_block_first(layout: str, group_blocks: str) -> bool:
    """Say whether `layout` is groups of one block.

    Raises: ConfigError for a layout that does not exist, or does not go with `group_blocks`.
    """
    if layout not in {AUTO, *LAYOUT_OF_NAME}:
        raise ConfigError(f"--layout is {printable(layout)[:40]!r}; type {AUTO}, {', '.join(LAYOUT_OF_NAME)}")
    if layout != "block-first":
        return False
    if group_blocks not in {"auto", "1"}:
        raise ConfigError(
            f"--layout block-first has groups of one block, but --group-blocks is {group_blocks}; leave one of them out"
        )
    return True


def lay_out(
    options: StoreOptions, name: str, shape: KVShape, num_tokens: int, *, cache_dir: Path
) -> tuple[StoreOptions, Laid]:
    """Return `options` with the layout called `name`, and with the gap that the probe of its drive tells.

    What was typed as group is kept. What DRAM will hold is not counted: a store outlives the run that made it.
    """
    case = None
    if options.select is not None and name == AUTO:
        directory = options.directory or Path()
        read_ns, drive = _drive(cache_dir, directory)
        pattern, group_blocks = pattern_of(options.select, num_tokens, options.block_tokens)
        group_blocks = options.group_blocks or group_blocks
        case = Case(shape, options.block_tokens, num_tokens, pattern, read_ns, drive, group_blocks=group_blocks)
    picked = layout_for(name, case)
    group = options.group_blocks or picked.group_blocks
    options = replace(options, split=picked.layout.split, group_blocks=group)
    slot = SlotLayout(
        shape,
        options.block_tokens,
        group or auto_group_blocks(shape, options.block_tokens, options.knee_bytes),
        options.split,
    )
    gap = Gap(0, "no file tier")
    if options.directory is not None and options.disk_bytes:
        gap = find_gap(cache_dir, options.directory, max(slot.fragment_padded_bytes))
    return replace(options, gap_bytes_max=gap.num_bytes), Laid(picked, gap)


def pattern_of(select: SelectOptions, num_tokens: int, block_tokens: int) -> tuple[Pattern, int | None]:
    """Return what a method reads of a step, and the groups it needs: those that choose whole ones need small ones."""
    method = select.name.split("+")[-1]
    method = DEFAULT if method in {"clo", "pmr"} else method
    budget = max(1, select.budget.reach(num_tokens).budget)
    if method not in OF_HEADS:
        return Pattern(budget, block_tokens), 1
    unit, is_values_only = OF_HEADS[method]
    return Pattern(budget, unit, is_per_head=True, is_values_only=is_values_only), None


def _drive(cache_dir: Path, directory: Path) -> tuple[ReadTime, str]:
    """Return the read time of the drive under `directory`, and whose it is."""
    probe, source = find_probe(cache_dir, directory)
    if probe is not None:
        return read_time(probe.read.roof, DEPTH), "this drive, as probed"
    catalogue = load_catalogue(None)
    roof = catalogue.io_path("io_uring").over(catalogue.ssd(DRIVE).read)
    return read_time(roof, DEPTH), f"{DRIVE} of the catalogue ({source.removeprefix('default: ')})"
