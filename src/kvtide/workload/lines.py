"""A log of requests on disk, line by line, and the account of every line. Next: rows.

Decides what is read of a file, and how what cannot be read is counted and shown. Knows no format. Memory stays at one
line of LINE_BYTES_MAX, whatever the file.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

from kvtide.errors import ConfigError, FormatError, IoError
from kvtide.spec.geometry import shown
from kvtide.units import printable
from kvtide.workload.requests import TIME_NS_MAX, TOKENS_MAX, Malformed

LINE_BYTES_MAX = 8 << 20  # a million tokens of text, twice over; such a line of brackets takes some 200 MiB
HEAD_BYTES = 256 << 10  # what a format is guessed from
EXAMPLES_MAX = 5
REASON_LETTERS = 200
GZIP = b"\x1f\x8b"  # RFC 1952
S_NS, MS_NS, US_NS = 1_000_000_000, 1_000_000, 1_000
_DIGITS = re.compile(r"\d{1,19}", re.ASCII)
_DECIMAL = re.compile(r"(\d{1,19})(?:\.(\d*))?", re.ASCII)


class LineError(Exception):
    """One line is not what it should be: the message says why. It is counted, and reading goes on."""


class Lines:
    """Reads a file once, from its beginning; gzip is undone on the way.

    Raises: ConfigError if it cannot be opened; FormatError if it is empty or damaged gzip; IoError if reading fails.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self.num_good = 0
        self._num_bad, self._first_bad = 0, list[tuple[int, str]]()
        self._raw = _open(path)
        self._stream = self._raw
        try:
            if self._guarded(lambda: self._raw.peek(2)[:2]) == GZIP:
                self._stream = io.BufferedReader(gzip.GzipFile(fileobj=self._raw), HEAD_BYTES)
            self.head = self._guarded(lambda: self._stream.peek(HEAD_BYTES)[:HEAD_BYTES]).decode(errors="replace")
            if not self.head:
                raise FormatError(f"{path} is empty: expected a log of requests")  # noqa: TRY301
        except BaseException:
            self.close()
            raise

    @property
    def malformed(self) -> Malformed:
        """The lines that could not be read."""
        return Malformed(self._num_bad, tuple(self._first_bad))

    def reject(self, number: int, reason: str) -> None:
        """Count line `number` as malformed."""
        self._num_bad += 1
        if len(self._first_bad) < EXAMPLES_MAX or number < self._first_bad[-1][0]:
            told = (number, printable(reason)[:REASON_LETTERS])
            self._first_bad = sorted([*self._first_bad, told])[:EXAMPLES_MAX]

    def withdraw(self, number: int, reason: str) -> None:
        """Count a line as malformed that had seemed good."""
        self.num_good -= 1
        self.reject(number, reason)

    def each(self, take: Callable[[int, str], bool]) -> None:
        """Give `take` the number and text of each line that is not blank, until it returns False.

        A LineError from it counts the line as malformed, anything else as good.
        """
        for number, text in self._numbered():
            try:
                goes_on = take(number, text)
            except LineError as error:
                self.reject(number, str(error))
                continue
            self.num_good += 1
            if not goes_on:
                return

    def letters(self, num_bytes: int) -> bytes:
        """Return the next `num_bytes`, or fewer at the end: for files that are no lines."""
        return self._guarded(lambda: self._stream.read(num_bytes))

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._raw.close()

    def _numbered(self) -> Iterator[tuple[int, str]]:
        number = 0
        while raw := self._guarded(lambda: self._stream.readline(LINE_BYTES_MAX + 1)):
            number += 1
            if len(raw) > LINE_BYTES_MAX:
                while raw and not raw.endswith(b"\n"):
                    raw = self._guarded(lambda: self._stream.readline(LINE_BYTES_MAX))
                self.reject(number, f"longer than {LINE_BYTES_MAX >> 20} MiB")
                continue
            text = raw.decode(errors="replace").strip()
            text = text.removeprefix("\ufeff") if number == 1 else text
            if text:
                yield number, text

    def _guarded(self, read: Callable[[], bytes]) -> bytes:
        try:
            return read()
        except EOFError:
            self.notes.append("The compressed file ends early; requests near its end are missing.")
            return b""
        except (gzip.BadGzipFile, zlib.error) as error:
            raise FormatError(f"{self.path} is damaged gzip: {error}; expected a whole .gz file") from None
        except OSError as error:
            raise IoError(error.errno or errno.EIO, f"cannot read {self.path}: {error}") from None


def _open(path: Path) -> io.BufferedReader:
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            raise ConfigError(f"{path} is a directory; type the path of a log of requests")
        return io.BufferedReader(io.FileIO(path), HEAD_BYTES)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: {reason}; type the path of a log of requests") from None


def json_object(text: str) -> dict[str, object]:
    """Return the JSON object that `text` is. Raises: LineError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LineError(json_fault(error)) from None
    if not isinstance(found, dict):
        raise LineError(f"no JSON object, but {shown(found)}")
    return found


def json_fault(error: Exception) -> str:
    """Return what an error of json says, without its count of lines, which begins at the wrong place."""
    return f"no JSON: {error.msg}" if isinstance(error, json.JSONDecodeError) else f"no JSON: {error}"


def whole(record: dict[str, object], name: str, *, least: int = 0, most: int = TOKENS_MAX) -> int:
    """Return a whole number of a JSON object. Raises: LineError if it is none of `least` to `most`."""
    value = record.get(name)
    if type(value) is not int or not least <= value <= most:
        raise LineError(_not_in(name, value, least, most))
    return value


def whole_text(text: str, name: str, *, least: int = 0, most: int = TOKENS_MAX) -> int:
    """Return a whole number that is written as digits. Raises: LineError if it is none of `least` to `most`."""
    if not _DIGITS.fullmatch(text) or not least <= int(text) <= most:
        raise LineError(_not_in(name, text, least, most))
    return int(text)


def _not_in(name: str, value: object, least: int, most: int) -> str:
    if value is None:
        return f"{name} is missing"
    return f"{name} is {shown(value)}, no whole number of {least:,} to {most:,}"


def time_ns(record: dict[str, object], name: str, unit_ns: int) -> int:
    """Return a time of a JSON object in ns, exactly as written, cut to whole ns. Raises: LineError."""
    value = record.get(name)
    limit = TIME_NS_MAX // unit_ns
    if value is None:
        raise LineError(f"{name} is missing")
    if type(value) is int and 0 <= value < limit:
        return value * unit_ns
    if isinstance(value, float) and 0 <= value < limit:  # false for NaN
        return int(Decimal(repr(value)) * unit_ns)
    raise LineError(f"{name} is {shown(value)}, no time")


def time_text_ns(text: str, name: str, unit_ns: int) -> int:
    """Return a time that is written as a decimal in ns, cut to whole ns. Raises: LineError."""
    match = _DECIMAL.fullmatch(text)
    if not match or int(match[1]) >= TIME_NS_MAX // unit_ns:
        raise LineError(f"{name} is {shown(text)}, no time")
    return int(match[1]) * unit_ns + int(f"{match[2] or ''}{'0' * 9}"[:9]) * unit_ns // S_NS
