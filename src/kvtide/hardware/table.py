"""The catalogue as the tables of docs/hardware.md: every figure with a mark that leads to its label and source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from kvtide.hardware.catalogue import Catalogue
from kvtide.hardware.figures import LABELS, Figure, Figures
from kvtide.hardware.models import Gpu, IoPath, Link, Memory, Network, Ssd
from kvtide.units import format_bytes

_HEADS = {"gpus": "GPUs", "links": "Links", "memories": "Memory", "ssds": "SSDs", "networks": "Networks"}
_HEADS |= {"io_paths": "I/O paths"}


class _Marks:
    """Numbers sources in the order they come, with the first letter of their label."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, str], str] = {}
        self._nums = dict.fromkeys(LABELS, 0)

    def of(self, figure: Figure) -> str:
        key = (figure.label, figure.date, figure.source)
        if key not in self.rows:
            self._nums[figure.label] += 1
            self.rows[key] = f"{figure.label[0].upper()}{self._nums[figure.label]}"
        return self.rows[key]


def render(catalogue: Catalogue) -> str:
    """Markdown: for each kind what there is and a row a figure; then the sources, best label first."""
    marks = _Marks()
    parts = []
    for kind, head in _HEADS.items():
        entries = getattr(catalogue, kind).values()
        titles = _rows(("name", "what it is"), ((entry.name, _title(entry)) for entry in entries))
        parts.append(f"### {head}\n\n{titles}\n\n{_figures({e.name: e.figures for e in entries}, marks)}")
    sources = sorted(marks.rows.items(), key=lambda row: (LABELS.index(row[0][0]), int(row[1][1:])))
    rows = _rows(("mark", "label", "date", "source"), ((mark, *key) for key, mark in sources))
    return "\n\n".join([*parts, f"### Sources\n\n{rows}"]) + "\n"


def _title(entry: Gpu | Link | Memory | Ssd | Network | IoPath) -> str:
    link = entry.link if isinstance(entry, Gpu) else None
    return f"{entry.title}; link `{link}`" if link else entry.title


def _figures(by_name: Mapping[str, Figures], marks: _Marks) -> str:
    """A row a figure, a column an entry."""
    keys = dict.fromkeys(key for figures in by_name.values() for key in figures)
    return _rows(
        ("figure", *by_name),
        (
            (f"`{key}`", *(_cell(key, figures[key], marks) if key in figures else "" for figures in by_name.values()))
            for key in keys
        ),
    )


def _cell(key: str, figure: Figure, marks: _Marks) -> str:
    text = format_bytes(figure.value) if key == "transfer_bytes_max" else _number(figure.value)
    return f"{text} {marks.of(figure)}"


def _number(value: float) -> str:
    """`3.35e12`, `80e9`, `57260`: the exponent, from a million on, is a multiple of three."""
    if value < 1e6:
        return f"{value:g}"
    exponent = int(math.log10(value)) // 3 * 3
    return f"{value / 10**exponent:.4g}e{exponent}"


def _rows(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
