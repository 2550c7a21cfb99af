"""Numbers and times from columns of text, exact and checked. Next: pairs.

Decides which texts are numbers: what does not fit becomes null, and its line malformed. Knows no format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

TIME_NS_MAX = 1 << 62  # year 2116 since 1970; two of them still add up in 64 bits
BYTES_MAX = 1 << 62
SECTOR_BYTES = 512  # of the block layer, whatever the drive's. Source: include/linux/blk_types.h
NO_SECTOR = (1 << 64) - 1  # of a command without a place, such as a flush
SECONDS, MILLISECONDS, MICROSECONDS, NANOSECONDS = 9, 6, 3, 0  # decimal places from a unit to ns


def integer(text: pl.Expr, *, most: int = BYTES_MAX) -> pl.Expr:
    """Return whole numbers from -`most` to `most`; null for any other text."""
    from kvtide.tables import pl

    number = text.str.strip_chars().cast(pl.Int64, strict=False)
    return pl.when(number.is_between(-most, most)).then(number)


def small(text: pl.Expr) -> pl.Expr:
    """Return whole numbers of 32 bits; null for any other text."""
    from kvtide.tables import pl

    return text.str.strip_chars().cast(pl.Int32, strict=False)


def number(text: pl.Expr) -> pl.Expr:
    """Return finite numbers; null for any other text. A comma may stand for the decimal point."""
    from kvtide.tables import pl

    value = text.str.strip_chars().str.replace(",", ".", literal=True).cast(pl.Float64, strict=False)
    return pl.when(value.is_finite()).then(value)


def time_ns(text: pl.Expr, unit: int) -> pl.Expr:
    """Return ns from decimal texts such as `12.000345`, digit by digit. `unit`: SECONDS, MILLISECONDS, ...

    Null if negative, no number or above TIME_NS_MAX. Digits below 1 ns are cut off.
    """
    from kvtide.tables import pl

    parts = text.str.strip_chars().str.splitn(".", 2)
    whole = parts.struct.field("field_0").cast(pl.Int64, strict=False)
    digits = parts.struct.field("field_1").fill_null("")
    ns = whole * 10**unit
    if unit:
        ns += (digits.str.slice(0, unit).str.pad_end(unit, "0")).cast(pl.UInt32, strict=False).cast(pl.Int64)
    return pl.when(whole.is_between(0, TIME_NS_MAX // 10**unit - 1) & digits.str.contains(r"^[0-9]*$")).then(ns)


def sector(text: pl.Expr) -> pl.Expr:
    """Return sectors as UInt64; null if their byte does not fit 63 bits. NO_SECTOR, also written -1, stays."""
    from kvtide.tables import pl

    found = text.str.replace(r"^-1$", str(NO_SECTOR)).cast(pl.UInt64, strict=False)
    return pl.when((found < BYTES_MAX // SECTOR_BYTES) | (found == NO_SECTOR)).then(found)


def sector_offset(sectors: pl.Expr) -> pl.Expr:
    """Return the byte a sector begins at; null for NO_SECTOR."""
    from kvtide.tables import pl

    return pl.when(sectors != NO_SECTOR).then(sectors.cast(pl.Int64, strict=False) * SECTOR_BYTES)


def sectors_bytes(text: pl.Expr) -> pl.Expr:
    """Return bytes of a number of sectors; null if there are none or too many."""
    return integer(text, most=BYTES_MAX // SECTOR_BYTES) * SECTOR_BYTES


def device(major: pl.Expr, minor: pl.Expr) -> pl.Expr:
    """Return `major << 20 | minor` from two texts; null where Linux has no such number."""
    from kvtide.tables import pl

    high, low = integer(major), integer(minor)
    return pl.when(high.is_between(0, 4095) & low.is_between(0, (1 << 20) - 1)).then(high * (1 << 20) + low)
