"""A log on disk, as frames of whole lines or as bytes. Next: sink.

Decides how large files become small pieces: gzip is undone on the way, a line longer than LINE_BYTES_MAX is cut off,
and memory stays at a few pieces of PIECE_BYTES. Knows no format.
"""

from __future__ import annotations

import errno
import gzip
import importlib
import io
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from kvtide.errors import ConfigError, FormatError, IoError, UnsupportedError

if TYPE_CHECKING:
    import polars as pl

PIECE_BYTES = 16 << 20  # of text at once: some 200,000 lines
HEAD_BYTES = 64 << 10  # what a format is guessed from
LINE_BYTES_MAX = 64 << 10  # longer lines are no event of any format
GZIP, ZSTD, PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"  # RFC 1952, RFC 8878, parquet-format

OnProgress = Callable[[int, int], None]  # bytes of the file read, and its size or 0


class Source:
    """Reads a file once, from its beginning.

    Raises: ConfigError if it cannot be opened; FormatError if it is empty or no log at all; UnsupportedError for zstd
    where Python cannot read it; IoError if reading fails.
    """

    def __init__(self, path: Path, *, on_progress: OnProgress | None = None) -> None:
        self.path = path
        self.notes: list[str] = []
        self._on_progress = on_progress or _silent
        self._raw, self._size_bytes = _open(path)
        try:
            self._stream = self._unpacked()
            self._first = self._read(PIECE_BYTES)
            if not self._first:
                raise FormatError(f"{path} is empty: expected a log; try --help for the formats")  # noqa: TRY301
        except BaseException:
            self.close()
            raise

    @property
    def head(self) -> bytes:
        """The first whole lines, at most HEAD_BYTES; all of it if there is no line break."""
        head = self._first[:HEAD_BYTES]
        if len(self._first) <= HEAD_BYTES:
            return head
        return head[: head.rfind(b"\n") + 1] or head

    def pieces(self) -> Iterator[bytes]:
        """Yield all bytes, once."""
        piece, self._first = self._first, b""
        while piece:
            yield piece
            piece = self._read(PIECE_BYTES)

    def lines(self) -> Iterator[pl.DataFrame]:
        """Yield all lines, once. Columns as `line_frame`."""
        number, paragraph = 1, 0
        for text in whole_lines(self.pieces()):
            frame = line_frame(text, number=number, paragraph=paragraph)
            number += len(frame)
            paragraph = int(frame["paragraph"][-1])
            yield frame

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._raw.close()

    def _unpacked(self) -> IO[bytes]:
        magic = self._raw.peek(4)[:4]
        if magic.startswith(GZIP):
            return cast("IO[bytes]", gzip.GzipFile(fileobj=self._raw))
        if magic == ZSTD:
            return _zstd(self.path, self._raw)
        if magic == PARQUET:
            raise FormatError(f"{self.path} is Parquet, such as a kvtide trace, and no log: use it as it is")
        return self._raw

    def _read(self, num_bytes: int) -> bytes:
        parts, missing = [], num_bytes
        try:
            while missing:
                part = self._stream.read(min(missing, 1 << 20))
                if not part:
                    break
                parts.append(part)
                missing -= len(part)
        except EOFError:
            self.notes.append("The compressed file ends early; what it holds was imported.")
        except (gzip.BadGzipFile, zlib.error) as error:
            raise FormatError(f"{self.path} is damaged gzip: {error}; expected a whole .gz file") from None
        except OSError as error:
            raise IoError(error.errno or errno.EIO, f"cannot read {self.path}: {error}") from None
        self._on_progress(self._raw.tell() if self._size_bytes else 0, self._size_bytes)
        return b"".join(parts)


def _silent(_done: int, _total: int) -> None:
    pass


def _open(path: Path) -> tuple[io.BufferedReader, int]:
    try:
        about = path.stat()
        if stat.S_ISDIR(about.st_mode):
            raise ConfigError(f"{path} is a directory; type the path of a log")
        return path.open("rb"), about.st_size if stat.S_ISREG(about.st_mode) else 0
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: {reason}; type the path of a log") from None


def _zstd(path: Path, raw: io.BufferedReader) -> IO[bytes]:
    try:
        zstd: Any = importlib.import_module("compression.zstd")
    except ModuleNotFoundError:
        raise UnsupportedError(
            f"{path} is compressed with zstd, which Python reads from 3.14 on; type zstd -d {path} first"
        ) from None
    return zstd.ZstdFile(raw)


def whole_lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the bytes of `pieces`, cut at line breaks. A line over LINE_BYTES_MAX keeps that many and one more."""
    rest, is_skipping = b"", False
    for piece in pieces:
        data = piece
        if is_skipping:
            end = data.find(b"\n")
            if end < 0:
                continue
            data, is_skipping = data[end:], False
        data = rest + data
        cut = data.rfind(b"\n") + 1
        rest = data[cut:]
        if len(rest) > LINE_BYTES_MAX:
            rest, is_skipping = rest[: LINE_BYTES_MAX + 1], True
        if cut:
            yield data[:cut]
    if rest:
        yield rest


def line_frame(data: bytes, *, number: int = 1, paragraph: int = 0) -> pl.DataFrame:
    """Return the lines of `data`, without their line breaks.

    Columns: line, its number from `number` on; text; paragraph, the number of blank lines up to it.
    """
    from kvtide.tables import pl

    text = data.decode("utf-8", errors="replace")
    text = text.removeprefix("\ufeff") if number == 1 else text
    lines = pl.Series("text", [text.removesuffix("\n")]).str.split("\n").explode().str.strip_suffix("\r")
    frame = lines.to_frame().with_row_index("line", offset=0)
    is_blank = pl.col("text").str.strip_chars() == ""
    return frame.select(
        (pl.col("line").cast(pl.Int64) + number).alias("line"),
        "text",
        (is_blank.cast(pl.Int64).cum_sum() + paragraph).alias("paragraph"),
    )
