"""One number of the catalogue with what it is worth: its unit, who says so, and when. Next: models.

Decides the labels: `datasheet` is what the vendor promises, `measured` what somebody measured and published or a probe
found here, `paper` what a scientific paper states, `estimate` what is derived or assumed, and then the source says from
what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

LABELS = ("datasheet", "measured", "paper", "estimate")


@dataclass(frozen=True, slots=True)
class Source:
    """Who says so."""

    label: str  # one of LABELS
    text: str
    date: str  # year-month: published, or looked up where the source bears no date


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and where it comes from."""

    value: float
    unit: str
    label: str
    source: str
    date: str

    @classmethod
    def of(cls, value: float, unit: str, source: Source) -> Figure:
        """The figure of `value` that `source` gives."""
        return cls(value, unit, source.label, source.text, source.date)


Figures = Mapping[str, Figure]  # by name; parts of a group are joined by a dot: `read.latency_ns`


def frozen(figures: Figures) -> Figures:
    """A copy of `figures` that nobody can change."""
    return MappingProxyType(dict(figures))


def group(figures: Figures, name: str) -> dict[str, float]:
    """The values of the figures called `name.part`, by part, in their order."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): figure.value for key, figure in figures.items() if key.startswith(prefix)}
