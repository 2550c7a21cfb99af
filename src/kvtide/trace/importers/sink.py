"""Where importers put rows, and where every line is accounted for. Next: fields.

Decides what is kept of a log besides its rows: each line is an event, foreign or malformed, and the first malformed
ones are kept as examples. Knows no format.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from kvtide.trace.events import UNKNOWN
from kvtide.trace.file import REJECTS_MAX, About, Device, TraceWriter
from kvtide.trace.importers.source import LINE_BYTES_MAX
from kvtide.units import format_ns

if TYPE_CHECKING:
    import polars as pl

EVENT, FOREIGN, MALFORMED = 0, 1, 2  # what a line is
EXAMPLE_LETTERS = 200  # of a malformed line
DEVICES_MAX = 10_000  # that are named in the trace
MINOR_BITS = 20  # Source: MINORBITS, include/linux/kdev_t.h
NO_MAJOR = 4095  # of made-up device numbers: the largest of 12 bits, which Linux gives to no driver
# A foreign line is text. Bytes that are no text are damage.
NO_TEXT = r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x{fffd}]"


class Sink:
    """Collects the rows of one log, and what is to be known of it. Without `writer`, only counts."""

    def __init__(self, writer: TraceWriter | None, about: About) -> None:
        self.about = about
        self.num_events = 0
        self.first_odd: tuple[int, str] | None = None  # first line that is no event
        self._writer = writer
        self._number_of_name: dict[str, int] = {}
        self._latest_ns = UNKNOWN
        self._num_jumps, self._jump_ns = 0, 0
        self._first_ns, self._last_ns = -1, -1

    def add(self, level: str, frame: pl.DataFrame) -> None:
        """Add rows. Unknown times are null or UNKNOWN."""
        for name in ("time_ns", "complete_ns"):
            if name in frame:
                self._widen(frame[name])
        if self._writer:
            self._writer.add(level, frame)

    def screen(self, lines: pl.DataFrame) -> pl.DataFrame:
        """Judge lines that no format needs to see: blank, too long, or with NUL bytes. Return the others."""
        from kvtide.tables import pl

        text = pl.col("text")
        marked = lines.with_columns(
            (text.str.strip_chars() == "").alias("is_blank"),
            ((text.str.len_bytes() > LINE_BYTES_MAX) | text.str.contains("\0", literal=True)).alias("is_bad"),
        )
        is_out = marked["is_blank"] | marked["is_bad"]
        if is_out.any():
            out = marked.filter(is_out)
            self.judge(out, is_event=pl.lit(value=False), is_foreign=pl.col("is_blank"))
        return lines.filter(~is_out)

    def judge(self, lines: pl.DataFrame, *, is_event: pl.Expr, is_foreign: pl.Expr) -> None:
        """Count each line as one of the three. Neither event nor foreign is malformed; nulls are false."""
        from kvtide.tables import pl

        text, health = pl.col("text"), self.about.health
        event, foreign = is_event.fill_null(value=False), is_foreign.fill_null(value=False)
        kind = (
            pl.when(event)
            .then(EVENT)
            .when(foreign & ~text.str.contains(NO_TEXT))
            .then(FOREIGN)
            .otherwise(MALFORMED)
            .alias("kind")
        )
        judged = lines.select("line", "text", kind)
        kinds = judged["kind"]
        num_malformed, num_foreign = int((kinds == MALFORMED).sum()), int((kinds == FOREIGN).sum())
        self.num_events += len(lines) - num_malformed - num_foreign
        health.num_malformed += num_malformed
        health.num_foreign += num_foreign
        if num_malformed:
            found = judged.filter(pl.col("kind") == MALFORMED).head(REJECTS_MAX)
            examples = found.select("line", text.str.slice(0, EXAMPLE_LETTERS)).iter_rows()
            health.malformed = sorted([*health.malformed, *examples])[:REJECTS_MAX]
        if self.first_odd is None and num_malformed + num_foreign:
            odd = judged.filter((pl.col("kind") != EVENT) & (text.str.strip_chars() != "")).head(1)
            for line, words in odd.select("line", text.str.slice(0, EXAMPLE_LETTERS)).iter_rows():
                self.first_odd = (line, words)

    def malformed_bytes(self, offset: int, words: str) -> None:
        """Count one piece of a binary log that could not be read, by its offset in bytes."""
        health = self.about.health
        health.num_malformed += 1
        if len(health.malformed) < REJECTS_MAX:
            health.malformed.append((offset, words))
        self.first_odd = self.first_odd or (offset, words)

    def lose(self, counts: pl.Series) -> None:
        """Add up how many events the recorder said it had lost. Nulls count nothing."""
        self.about.health.num_lost += int(counts.clip(0, 1 << 40).sum() or 0)

    def note(self, sentence: str) -> None:
        """Tell the reader of the trace something, once."""
        if sentence not in self.about.notes:
            self.about.notes.append(sentence)

    def clock(self, times_ns: pl.Series) -> None:
        """Watch the times of a log, in the order of its lines, for jumps backwards."""
        times = times_ns.drop_nulls().to_numpy()
        if not len(times):
            return
        before = np.maximum.accumulate(np.concatenate([[self._latest_ns], times[:-1]]))
        back = before - times
        self._num_jumps += int(np.count_nonzero(back > 0))
        self._jump_ns = max(self._jump_ns, int(back.max()))
        self._latest_ns = max(self._latest_ns, int(times.max()))

    def device_numbers(self, names: pl.Series) -> pl.Series:
        """Return a number for each device name. Made up, but the same for a name in every log."""
        from kvtide.tables import pl

        for name in names.drop_nulls().unique().to_list():
            if name in self._number_of_name:
                continue
            taken = set(self._number_of_name.values())
            number = zlib.crc32(name.encode()) & ((1 << MINOR_BITS) - 1)
            while NO_MAJOR << MINOR_BITS | number in taken:
                number = (number + 1) & ((1 << MINOR_BITS) - 1)
            self._name_device(NO_MAJOR << MINOR_BITS | number, name)
            self._number_of_name[name] = NO_MAJOR << MINOR_BITS | number
        if not self._number_of_name:
            return pl.Series(names.name, [None] * len(names), pl.Int64)
        return names.replace_strict(self._number_of_name, default=None, return_dtype=pl.Int64)

    def name_devices(self, numbers: pl.Series) -> None:
        """Name devices that a log tells by number, as major:minor."""
        for number in numbers.drop_nulls().unique().to_list():
            if number >= 0:
                self._name_device(number, f"{number >> MINOR_BITS}:{number & ((1 << MINOR_BITS) - 1)}")

    def end(self) -> None:
        """Fill in what only the whole log tells."""
        self.about.start_ns, self.about.end_ns = max(self._first_ns, 0), max(self._last_ns, 0)
        if self._num_jumps:
            self.note(
                f"Times go back {self._num_jumps:,} times from one line to the next, by up to "
                f"{format_ns(self._jump_ns)}; there, events may be out of order or paired wrongly."
            )

    def _name_device(self, number: int, name: str) -> None:
        if len(self.about.devices) < DEVICES_MAX:
            self.about.devices.setdefault(str(number), Device(name=name))

    def _widen(self, times_ns: pl.Series) -> None:
        known = times_ns.filter(times_ns >= 0)
        if not len(known):
            return
        first, last = known.min(), known.max()
        assert isinstance(first, int)
        assert isinstance(last, int)
        self._first_ns = first if self._first_ns < 0 else min(self._first_ns, first)
        self._last_ns = max(self._last_ns, last)
