"""Sizes and durations in words."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import ConfigError
from kvtide.units import format_bytes, format_ns, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        (4096, 4096),
        ("4096B", 4096),
        ("64KiB", 65536),
        ("64 kib", 65536),
        ("64KB", 65536),
        ("64k", 65536),
        ("64MiB", 64 << 20),
        ("1.5GiB", 3 << 29),
        ("2TiB", 2 << 40),
        (" 1 GB ", 1 << 30),
        ("0.5K", 512),
        ("1PiB", 1 << 50),
    ],
)
def test_sizes_are_read(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", " ", "-1", -1, "MiB", "1.5", "0.3K", "1e9", "1,000", "1 MiB 2", "inf", "nan", "٣", True, 1.5, None, "8EiB",
     "9" * 5000, 1 << 63, "8192PiB", "1_000", "64MiBs", "0x10", "1iB2", "1iB"],
)  # fmt: skip
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="not a size"):
        parse_bytes(text)


@given(st.text())
def test_any_text_is_a_size_or_a_config_error(text):
    with contextlib.suppress(ConfigError):
        assert 0 <= parse_bytes(text) < 1 << 63


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (65536, "64 KiB"),
        (1342177280, "1.25 GiB"),
        (335544320000, "312.5 GiB"),
        ((1 << 20) - 1, "1 MiB"),
        (1 << 50, "1 PiB"),
        (-65536, "-64 KiB"),
        (1536.5, "1.5 KiB"),
    ],
)
def test_bytes_are_shown(count, expected):
    assert format_bytes(count) == expected


@pytest.mark.parametrize(
    ("ns", "expected"),
    [(0, "0 ns"), (850, "850 ns"), (12_500, "12.5 us"), (3_200_000, "3.2 ms"), (1_750_000_000, "1.75 s"),
     (999_999, "1 ms"), (-5_000, "-5 us"), (75e9, "75 s")],
)  # fmt: skip
def test_durations_are_shown(ns, expected):
    assert format_ns(ns) == expected


@given(st.integers(0, 1 << 40).map(lambda num: num << 10))
def test_whole_kibibytes_below_one_mebibyte_survive_the_round_trip(count):
    if count < 1 << 20:
        assert parse_bytes(format_bytes(count)) == count
