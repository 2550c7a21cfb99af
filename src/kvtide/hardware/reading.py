"""A catalogue file, checked: what every kind of hardware must state, and that each number names its source.

Decides the form of the file (docs/hardware.md); knows no hardware. Next: catalogue.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvtide.errors import FormatError
from kvtide.hardware.figures import LABELS, Figure, Source
from kvtide.spec import Dtype
from kvtide.spec.geometry import shown
from kvtide.units import printable

Table = Mapping[str, object]

_RATE, _TIME, _SIZE, _SHARE = "bytes/s", "ns", "bytes", "share"
_ROOF = {"latency_ns": _TIME, "channel_bytes_per_s": _RATE, "iops_max": "ops/s", "bytes_per_s_max": _RATE}
UNITS: Mapping[str, Mapping[str, str]] = {
    "gpu": {"memory_bytes": _SIZE, "memory_bytes_per_s": _RATE, "gemm_share": _SHARE, "memory_share": _SHARE},
    "link": {"nominal_bytes_per_s": _RATE, "latency_ns": _TIME},
    "memory": {"bytes_per_s": _RATE, "latency_ns": _TIME},
    "ssd": {f"{way}.{key}": unit for way in ("read", "write") for key, unit in _ROOF.items()}
    | {
        "sync_latency_ns": _TIME,
        "capacity_bytes": _SIZE,
        "drive_writes_per_day": "drive writes/day",
        "transfer_bytes_max": _SIZE,
    },
    "network": {"bytes_per_s": _RATE, "latency_ns": _TIME, "host_ns": _TIME},
    "io_path": {"host_ns": _TIME},
}
_DTYPES = tuple(dtype.value for dtype in Dtype)
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)
_DATE = re.compile(r"[0-9]{4}-(0[1-9]|1[0-2])", re.ASCII)
TEXT_MAX = 400  # characters of a title or a source
POINTS_MAX = 256  # of one table
VALUE_MIN, VALUE_MAX = 1e-9, 1e30  # between any hardware and numbers that break arithmetic


@dataclass(frozen=True, slots=True)
class Entry:
    """One piece of hardware as the file states it."""

    name: str
    title: str
    figures: dict[str, Figure]
    link: str | None  # of a GPU


@dataclass(frozen=True, slots=True)
class Parsed:
    """What one file states."""

    sources: dict[str, Source]
    entries: dict[str, dict[str, Entry]]  # by kind, by name


def parse(raw: bytes, origin: str, known: Mapping[str, Source]) -> Parsed:
    """The content of a catalogue file; `known` are sources it may name without stating them.

    Raises: FormatError that names origin, entry and key, and says what is needed.
    """
    try:
        tables = tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, a number too long, tables too deep
        raise FormatError(f"{origin} is no TOML file: {error}; see docs/hardware.md for the form") from None
    _only(origin, tables, ("source", *UNITS))
    sources = {
        key: _source(f"{origin}: [source.{printable(key)}]", value)
        for key, value in _table(f"{origin}: [source]", tables.get("source", {})).items()
    }
    entries: dict[str, dict[str, Entry]] = {}
    for kind in UNITS:
        found: dict[str, Entry] = {}
        for written, value in _table(f"{origin}: [{kind}]", tables.get(kind, {})).items():
            where, name = f"{origin}: [{kind}.{printable(written)}]", written.lower()
            if not _NAME.fullmatch(name):
                raise FormatError(f"{where}: a name has up to 64 letters, digits, dots, dashes and underscores")
            if name in found:
                raise FormatError(f"{where}: stated twice; names differ by more than capital letters")
            found[name] = _entry(where, kind, name, _table(where, value), {**known, **sources})
        entries[kind] = found
    return Parsed(sources, entries)


def _source(where: str, value: object) -> Source:
    table = _table(where, value)
    _only(where, table, ("label", "text", "date"))
    label, date = table.get("label"), table.get("date")
    if label not in LABELS:
        raise FormatError(f"{where}: label must be one of {', '.join(LABELS)}, got {shown(label)}")
    if not isinstance(date, str) or not _DATE.fullmatch(date):
        raise FormatError(f'{where}: date must be a year and a month, as in "2026-05", got {shown(date)}')
    return Source(str(label), _text(where, "text", table.get("text")), date)


def _entry(where: str, kind: str, name: str, table: Table, sources: Mapping[str, Source]) -> Entry:
    units = UNITS[kind]
    groups = dict.fromkeys(key.partition(".")[0] for key in units if "." in key)
    singles = [key for key in units if "." not in key]
    more = {"gpu": ("link", "flop_per_s"), "link": ("table",)}.get(kind, ())
    _only(where, table, ("title", *singles, *groups, *more))
    flat = {key: table.get(key) for key in singles}
    for group in groups:
        inner = _table(f"{where} {group}", table.get(group))
        _only(f"{where} {group}", inner, [key.partition(".")[2] for key in units if key.startswith(f"{group}.")])
        flat |= {key: inner.get(key.partition(".")[2]) for key in units if key.startswith(f"{group}.")}
    figures = {key: _figure(where, key, value, units[key], sources) for key, value in flat.items()}
    if kind == "gpu":
        figures |= _flop_per_s(where, _table(f"{where} flop_per_s", table.get("flop_per_s")), sources)
    if kind == "link":
        figures |= _points(f"{where} table", _table(f"{where} table", table.get("table")), sources)
    link = _text(where, "link", table["link"]).lower() if "link" in table else None
    return Entry(name, _text(where, "title", table.get("title")), figures, link)


def _flop_per_s(where: str, table: Table, sources: Mapping[str, Source]) -> dict[str, Figure]:
    _only(f"{where} flop_per_s", table, _DTYPES)
    if not table:
        raise FormatError(f"{where} flop_per_s: state at least one of {', '.join(_DTYPES)}")
    return {
        f"flop_per_s.{key}": _figure(where, f"flop_per_s.{key}", value, "FLOP/s", sources)
        for key, value in table.items()
    }


def _points(where: str, table: Table, sources: Mapping[str, Source]) -> dict[str, Figure]:
    _only(where, table, ("sizes_bytes", "bytes_per_s", "source"))
    sizes, rates = table.get("sizes_bytes"), table.get("bytes_per_s")
    if not isinstance(sizes, list) or not isinstance(rates, list) or not 1 <= len(sizes) == len(rates) <= POINTS_MAX:
        raise FormatError(
            f"{where}: sizes_bytes and bytes_per_s must be two lists of the same length, 1 to {POINTS_MAX} numbers"
        )
    if not all(type(size) is int and 0 < size <= VALUE_MAX for size in sizes) or sizes != sorted(set(sizes)):
        raise FormatError(f"{where}: sizes_bytes must be whole numbers above 0 that increase")
    return {
        f"bytes_per_s.{size}": _figure(where, f"bytes_per_s at {size}", [rate, table.get("source")], _RATE, sources)
        for size, rate in zip(sizes, rates, strict=True)
    }


def _figure(where: str, key: str, value: object, unit: str, sources: Mapping[str, Source]) -> Figure:
    if not isinstance(value, list) or len(value) != 2:
        got = "nothing" if value is None else shown(value)
        raise FormatError(f'{where}: {key} must be [number of {unit}, "key of its source"], got {got}')
    number, source = value
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not VALUE_MIN <= number <= VALUE_MAX:
        raise FormatError(f"{where}: {key} must be a number above 0, in {unit}, got {shown(number)}")
    if unit == _SHARE and number > 1:
        raise FormatError(f"{where}: {key} is a share and must be at most 1, got {shown(number)}")
    if not isinstance(source, str) or source not in sources:
        raise FormatError(f"{where}: {key} names the source {shown(source)}, which is not stated; add [source.KEY]")
    return Figure.of(float(number), unit, sources[source])


def _text(where: str, key: str, value: object) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= TEXT_MAX or printable(value) != value:
        raise FormatError(f"{where}: {key} must be one line of text, up to {TEXT_MAX} characters, got {shown(value)}")
    return value


def _table(where: str, value: object) -> Table:
    if not isinstance(value, dict):
        got = "nothing" if value is None else shown(value)
        raise FormatError(f"{where} must be a table, got {got}")
    return value


def _only(where: str, table: Table, allowed: Iterable[str]) -> None:
    allowed = list(allowed)
    for key in table:
        if key not in allowed:
            raise FormatError(f"{where}: unknown key {shown(key)}; known: {', '.join(allowed)}")
