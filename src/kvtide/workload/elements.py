"""The elements of a JSON list, one after the other, however long the list is. Next: texts.

Decides how reading goes on behind a damaged element: at the next that begins as a conversation does.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator

from kvtide.workload.lines import LINE_BYTES_MAX, Lines, json_fault

PIECE_BYTES = 1 << 20
DROP_LETTERS = 16 << 10  # what is read is dropped in steps of this: an error of json counts all lines before it
CUT_LETTERS = 16  # an element that is cut off fails closer to the end: in \uXXXX or in -Infinity, at most
# Possessive, so that a long run of spaces costs no more than itself.
_BETWEEN = re.compile(r"[\s,\[\]\ufeff]*+")
_BEGIN = re.compile(r'\{\s*+"(?:id|conversations)"')


class _Text:
    """A window on the text of a file: `letters` from `at` on are yet to be read."""

    def __init__(self, lines: Lines) -> None:
        self.letters, self.at, self.is_end = "", 0, False
        self._lines = lines
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._number, self._counted = 1, 0

    @property
    def num_left(self) -> int:
        """Letters that are here and yet to be read."""
        return len(self.letters) - self.at

    def line(self) -> int:
        """Return the number of the line at `at`, which must not go back."""
        self._number += self.letters.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._number

    def more(self) -> None:
        """Read on: as much again as is left, so that elements of any size are tried a few times only."""
        self.drop()
        piece = self._lines.letters(max(PIECE_BYTES, self.num_left))
        self.is_end = not piece
        self.letters += self._decoder.decode(piece, final=self.is_end)

    def drop(self) -> None:
        """Forget what is read."""
        self.line()
        self.letters = self.letters[self.at :]
        self.at = self._counted = 0


def json_elements(lines: Lines) -> Iterator[tuple[int, object]]:
    """Yield each element of a JSON list, or each of JSON lines, and the line it begins on.

    What lies between two readable elements is counted as one malformed line.
    """
    text, decoder = _Text(lines), json.JSONDecoder()
    while True:
        between = _BETWEEN.match(text.letters, text.at)
        text.at = between.end() if between else text.at
        if text.at >= DROP_LETTERS:
            text.drop()
        if not text.num_left:
            if text.is_end:
                return
            text.more()
            continue
        try:
            value, end = decoder.raw_decode(text.letters, text.at)
        except (ValueError, RecursionError) as error:
            if not text.is_end and text.num_left < LINE_BYTES_MAX and _is_cut_off(error, text):
                text.more()
            else:
                lines.reject(text.line(), json_fault(error))
                _skip(text)
            continue
        number, text.at = text.line(), end
        yield number, value


def _is_cut_off(error: Exception, text: _Text) -> bool:
    """Return whether there may be more to an element."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated") or error.pos >= len(text.letters) - CUT_LETTERS


def _skip(text: _Text) -> None:
    """Go on to where the next element begins, or to the end."""
    text.at += 1
    while True:
        found = _BEGIN.search(text.letters, text.at)
        if found or text.is_end:
            text.at = found.start() if found else len(text.letters)
            return
        begun = text.letters.rfind("{", text.at)
        text.at = begun if begun >= 0 and len(text.letters) - begun < PIECE_BYTES else len(text.letters)
        text.more()
