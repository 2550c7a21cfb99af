"""Logs that are known, but hold sums in place of events: they are recognised only to say so. Next: formats.

Decides what is told to who brings one, and which tool has the events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

    from kvtide.trace.importers.sink import Sink


class Refused:
    """Counts the lines of a log by a pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def feed(self, lines: pl.DataFrame, sink: Sink) -> None:
        """Take a piece."""
        from kvtide.tables import pl

        sink.judge(lines, is_event=pl.col("text").str.contains(self._pattern), is_foreign=pl.lit(value=True))

    def close(self, sink: Sink) -> None:
        """Nothing is left to be done."""


# `a -> b : n |***|` of bcc, `[a, b)  n |@@@|` of bpftrace
HISTOGRAM = r"^\s*(?:\d+ -> \d+\s*: \d+\s*\||[\[(]\d*[KMGT]?,? ?\d*[KMGT.]*[)\]]\s+\d+ \|)"
BIOPATTERN = r"^\s*\d{2}:\d{2}:\d{2}\s+\S+\s+\d+\s+\d+\s+\d+\s+\d+\s*$|^\s*TIME\s+DISK\s+%RND\s+%SEQ"
BTT = r"^\s*(?:[QGIMDSX]2[QGIADMC](?:dm)?|Q2Adm|Q2Qdm)\s+\d+\.\d+|^=+ .* =+\s*$|^\s*\(\s*\d+,\s*\d+\)\s*\|"
