"""A roofline on the terminal: rate against size, both logarithmic; dots for the roofs, letters for what was measured.

Decides only how it looks. Values in, lines of text out. Braille characters give two by four dots a character; where
the terminal has no such characters, full stops do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtide.roofline import Roof
from kvtide.units import format_bytes

LABEL_WIDTH = 11  # left of the axis: a rate such as `1.25 GiB/s`
BRAILLE = 0x2800  # U+2800, a cell without dots
# Bit of each dot of a braille cell, by row from the top and column from the left (Unicode, Braille Patterns).
BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


@dataclass(frozen=True, slots=True)
class Mark:
    """One measured point, drawn as a letter."""

    size_bytes: float
    bytes_per_s: float
    letter: str


@dataclass(frozen=True, slots=True)
class _Axes:
    """The part of the plane that is drawn, in powers of two, and the canvas in dots."""

    left: float
    right: float
    bottom: float
    top: float
    num_across: int
    num_down: int

    def across(self, size: float) -> int:
        """Return the column of a size."""
        share = (math.log2(size) - self.left) / (self.right - self.left)
        return min(self.num_across - 1, max(0, round(share * (self.num_across - 1))))

    def down(self, rate: float) -> int:
        """Return the row of a rate; 0 is the top."""
        share = (math.log2(rate) - self.bottom) / (self.top - self.bottom)
        return min(self.num_down - 1, max(0, round((1 - share) * (self.num_down - 1))))


def draw_roofline(
    roof: Roof, marks: Sequence[Mark], *, depths: Sequence[int], width: int = 72, height: int = 14, plain: bool = False
) -> list[str]:
    """Return the lines of a drawing `width` characters wide, axes included: a line of dots a depth, then the marks."""
    across = max(20, width - LABEL_WIDTH - 1)
    sizes = [mark.size_bytes for mark in marks] or [4096.0, float(4 << 20)]
    rates = [mark.bytes_per_s for mark in marks]
    rates += [float(roof.bytes_per_s(size, depth)) for size in (min(sizes), max(sizes)) for depth in depths]
    per_across, per_down = (1, 1) if plain else (2, 4)
    left, right = math.log2(min(sizes)), math.log2(max(sizes))
    axes = _Axes(
        left,
        max(right, left + 1),
        math.floor(math.log2(min(rates))),
        math.floor(math.log2(max(rates))) + 1,
        across * per_across,
        height * per_down,
    )
    dots = np.zeros((axes.num_down, axes.num_across), bool)
    for depth in depths:
        _draw_line(dots, axes, roof, depth)
    rows = _plain(dots) if plain else _braille(dots)
    for mark in marks:
        rows[axes.down(mark.bytes_per_s) // per_down][axes.across(mark.size_bytes) // per_across] = mark.letter
    return [*_with_rates(rows, axes), *_size_axis(axes, across, per_across)]


def _draw_line(dots: np.ndarray, axes: _Axes, roof: Roof, depth: int) -> None:
    """Set the dots of one depth's roof, without gaps where it is steep."""
    sizes = 2 ** np.linspace(axes.left, axes.right, axes.num_across)
    rows = [axes.down(rate) for rate in roof.bytes_per_s(sizes, depth).tolist()]
    for column, row in enumerate(rows):
        before = rows[max(0, column - 1)]
        dots[min(row, before + 1) : max(row, before - 1) + 1, column] = True


def _plain(dots: np.ndarray) -> list[list[str]]:
    return [["." if dot else " " for dot in row] for row in dots.tolist()]


def _braille(dots: np.ndarray) -> list[list[str]]:
    num_rows, num_columns = dots.shape[0] // 4, dots.shape[1] // 2
    cells = dots.reshape(num_rows, 4, num_columns, 2).transpose(0, 2, 1, 3)
    codes = (cells * np.array(BITS)).sum(axis=(2, 3))
    return [[chr(BRAILLE + code) if code else " " for code in row] for row in codes.tolist()]


def _with_rates(rows: list[list[str]], axes: _Axes) -> list[str]:
    """Put the axis of rates before the rows: a label at the powers of four, as far as each has a row of its own."""
    labels = [""] * len(rows)
    step = max(2, 2 * math.ceil((axes.top - axes.bottom) / len(rows)))
    for power in range(int(axes.top), int(axes.bottom) - 1, -step):
        row = axes.down(2.0**power) * len(rows) // axes.num_down
        labels[row] = labels[row] or f"{format_bytes(2.0**power)}/s"
    return [f"{label:>{LABEL_WIDTH}}|{''.join(row)}".rstrip() for label, row in zip(labels, rows, strict=True)]


def _size_axis(axes: _Axes, across: int, per_across: int) -> list[str]:
    """Return the axis of sizes: a tick at every fourth power of two that has room for its label."""
    line, labels = ["-"] * across, [" "] * across
    free = 0
    for power in range(math.ceil(axes.left), math.floor(axes.right) + 1, 2):
        column, text = axes.across(2.0**power) // per_across, format_bytes(2.0**power)
        start = min(max(0, column - len(text) // 2), across - len(text))
        if start >= free:
            line[column] = "+"
            labels[start : start + len(text)] = text
            free = start + len(text) + 2
    pad = " " * LABEL_WIDTH
    return [f"{pad}+{''.join(line)}", f"{pad} {''.join(labels)}".rstrip()]
