"""Bytes and nanoseconds as people write them, both ways. Knows no model and no device. Next: spec.

Sizes are binary everywhere: `64KiB`, `64KB` and `64k` all mean 65,536, as memory and block devices count.
"""

from __future__ import annotations

import re

from kvtide.errors import ConfigError

_SCALE_OF_UNIT = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_SIZE = re.compile(r"(?P<count>[0-9]+(?:\.[0-9]+)?)\s*(?:(?P<unit>[KMGTP])(?:I?B)?|B)?", re.ASCII | re.IGNORECASE)
_BYTES_MAX = 1 << 63  # sizes travel in signed 64-bit fields of files and system calls
_DIGITS_MAX = 40  # longer texts are no size, and Python refuses to convert very long ones


def parse_bytes(text: str | int) -> int:
    """Bytes meant by `64MiB`, `1.5 GiB`, `4096` or a plain integer.

    Units are powers of 1024, whichever way they are spelled. A fraction must come to whole bytes.

    Raises: ConfigError if it is no size, is negative, or does not fit 63 bits.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise _no_size(text)
    if isinstance(text, int):
        if not 0 <= text < _BYTES_MAX:
            raise _no_size(text)
        return text
    match = _SIZE.fullmatch(text.strip())
    if match is None or len(text) > _DIGITS_MAX:
        raise _no_size(text)
    scale = _SCALE_OF_UNIT[(match["unit"] or "").upper()]
    whole, _, fraction = match["count"].partition(".")
    numerator = int(whole + fraction) * scale
    denominator: int = 10 ** len(fraction)
    if numerator % denominator or numerator // denominator >= _BYTES_MAX:
        raise _no_size(text)
    return numerator // denominator


def parse_option_bytes(name: str, text: str) -> int:
    """Bytes meant by the `text` of option `name`.

    Raises: ConfigError that names the option.
    """
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _no_size(got: object) -> ConfigError:
    shown = repr(got)
    shown = shown if len(shown) <= _DIGITS_MAX + 20 else f"{shown[: _DIGITS_MAX + 20]}..."
    return ConfigError(
        f"not a size in bytes: {shown}; write whole bytes below 8 EiB, as in 4096, 64KiB, 512MiB or 1.5GiB"
    )


def format_bytes(count: float) -> str:
    """`64 KiB`, `1.25 GiB`: the largest unit that leaves at least 1, with at most two decimals."""
    value, sign = abs(count), "-" if count < 0 else ""
    if value < 1024:
        return f"{sign}{_short(value)} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1023.995:
            return f"{sign}{_short(value)} {unit}"
    return f"{sign}{_short(value / 1024)} PiB"


def format_ns(ns: float) -> str:
    """`850 ns`, `12.5 us`, `3.2 ms`, `1.75 s`: a duration in the largest unit below it."""
    value, sign = abs(ns), "-" if ns < 0 else ""
    for unit in ("ns", "us", "ms"):
        if value < 999.995:
            return f"{sign}{_short(value)} {unit}"
        value /= 1000
    return f"{sign}{_short(value)} s"


def _short(value: float) -> str:
    text = f"{value:.2f}"
    return text.rstrip("0").rstrip(".")


def printable(text: str, *, keep: str = "") -> str:
    """`text` without line breaks, escape codes and bytes that are no text, but for those in `keep`.

    Names come from files and answers from models; neither may steer a terminal.
    """
    return "".join(letter if letter.isprintable() or letter in keep else "?" for letter in text)
