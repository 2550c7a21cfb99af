"""Figures of a time series: their means, and whether those of iostat fit each other. Next: slices.

Decides what can be told from rates and mean latencies alone. Knows `sample` rows and no event.

Theory. iostat measures ops in flight (aqu-sz) and, apart from it, rates and mean times in flight. By Little's law the
first is the product of the other two, so a table whose columns were mixed up gives itself away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtide.trace.figures import Latency, Side, Sizes, Slice

if TYPE_CHECKING:
    import polars as pl

NUM_SERIES_MAX = 10_000  # different figures of which a mean is kept
KIB, MS_PER_S, NS_PER_MS = 1024, 1000, 1_000_000
UTIL_MAX = 101.0  # percent; iostat rounds, and its clock is not exact
# Columns of iostat -x, as its manual page names them and as tables derived from it do. Awaits are in ms.
NAMES = {
    "r_s": ("r/s", "r_s"),
    "w_s": ("w/s", "w_s"),
    "d_s": ("d/s", "d_s"),
    "f_s": ("f/s", "f_s"),
    "r_await": ("r_await", "r_await_ms"),
    "w_await": ("w_await", "w_await_ms"),
    "d_await": ("d_await", "d_await_ms"),
    "f_await": ("f_await", "f_await_ms"),
    "aqu_sz": ("aqu-sz", "aqu_sz", "avgqu-sz"),
    "util": ("%util", "util"),
}
RATES = {  # bytes a second of each unit in which iostat writes them
    "rkB/s": ("read", KIB),
    "wkB/s": ("write", KIB),
    "rMB/s": ("read", KIB * KIB),
    "wMB/s": ("write", KIB * KIB),
    "rMB_s": ("read", KIB * KIB),
    "wMB_s": ("write", KIB * KIB),
}
_SUMS = ("num", "n", "xr", "off", "r_s", "w_s", "r_ns", "w_ns", "read", "write", "impossible")


class SampleMeter:
    """Adds up samples."""

    def __init__(self) -> None:
        self._means: pl.DataFrame | None = None
        self._disks: pl.DataFrame | None = None  # one row a subject, columns _SUMS

    def add(self, frame: pl.DataFrame) -> None:
        """Add sample rows. Rows of one moment should come together."""
        from kvtide.tables import pl

        frame = frame.filter(pl.col("value").is_not_nan())
        sums = frame.group_by("source", "subject", "name").agg(pl.col("value").sum(), pl.len().alias("num"))
        joined = sums if self._means is None else pl.concat([self._means, sums])
        joined = joined.group_by("source", "subject", "name").agg(pl.col("value").sum(), pl.col("num").sum())
        self._means = joined.sort("source", "subject", "name").head(NUM_SERIES_MAX)
        disks = _disks(frame)
        if disks is not None:
            joined = disks if self._disks is None else pl.concat([self._disks, disks])
            self._disks = joined.group_by("subject").agg(pl.col(name).sum() for name in _SUMS)

    @property
    def means(self) -> dict[str, float]:
        """The mean of each figure, by source/subject/name."""
        if self._means is None:
            return {}
        rows = self._means.iter_rows()
        return {f"{source}/{subject}/{name}": value / num for source, subject, name, value, num in rows}

    @property
    def num_impossible(self) -> int:
        """Samples that cannot be, such as a device busy for more than all of the time."""
        return 0 if self._disks is None else int(self._disks["impossible"].sum())

    @property
    def num_disk_samples(self) -> int:
        """Moments at which a disk's rates, times and depth are all known."""
        return 0 if self._disks is None else int(self._disks["num"].sum())

    @property
    def little_residual(self) -> float | None:
        """Sum of |N - X R| over the sum of the larger of both, from 0 to 1. None if nothing was in flight."""
        if self._disks is None or not self._disks["off"].len():
            return None
        most = float(self._disks["n"].sum())
        return float(self._disks["off"].sum()) / most if most else None

    def busiest(self, window_ns: int) -> Slice | None:
        """Return means of the disk that moves most bytes, as a slice: sizes and times are means, not percentiles."""
        from kvtide.tables import pl

        if self._disks is None:
            return None
        row = self._disks.sort(pl.col("read") + pl.col("write")).row(-1, named=True)
        made = Slice(window_ns=window_ns, depth=row["xr"] / row["num"])
        for letter, name, side in (("r", "read", made.read), ("w", "write", made.write)):
            _fill(side, ops=row[f"{letter}_s"], took_ns=row[f"{letter}_ns"], num_bytes=row[name], num=row["num"])
            side.num_ops = round(side.ops_per_s * window_ns / 1e9)
            side.num_bytes = round(side.bytes_per_s * window_ns / 1e9)
        return made


def _fill(side: Side, *, ops: float, took_ns: float, num_bytes: float, num: int) -> None:
    """Set the means of one direction from sums over `num` samples."""
    side.ops_per_s, side.bytes_per_s = ops / num, num_bytes / num
    if not ops:
        return
    took, size = took_ns / ops, round(num_bytes / ops)
    side.device = Latency(num=num, mean_ns=took, p50_ns=took, p90_ns=took, p99_ns=took, p999_ns=took, max_ns=took)
    side.depth = took_ns / num / 1e9
    side.sizes = Sizes(mode_bytes=size, median_bytes=size, median_by_bytes=size, mean_bytes=num_bytes / ops)


def _disks(frame: pl.DataFrame) -> pl.DataFrame | None:
    """Return sums over the moments at which rates, times and depth are all known, a row for each subject."""
    from kvtide.tables import pl

    known = {alias: name for name, aliases in NAMES.items() for alias in aliases}
    frame = frame.filter(pl.col("name").is_in([*known, *RATES]))
    if not len(frame):
        return None
    value, name = pl.col("value"), pl.col("name")
    figures = [value.filter(name.is_in(aliases)).first().alias(key) for key, aliases in NAMES.items()]
    for side in ("read", "write"):
        scaled = [value.filter(name == alias).first() * scale for alias, (way, scale) in RATES.items() if way == side]
        figures.append(pl.coalesce(scaled).fill_null(0.0).alias(side))
    table = frame.group_by("subject", "time_ns").agg(figures)
    table = table.filter(pl.col("r_s").is_not_null() & pl.col("r_await").is_not_null() & pl.col("aqu_sz").is_not_null())
    table = table.with_columns(pl.exclude("subject", "time_ns", "util").fill_null(0.0))
    xr = sum((pl.col(f"{way}_s") * pl.col(f"{way}_await") for way in "rwdf"), pl.lit(0.0)) / MS_PER_S
    return (
        table.with_columns(
            xr.alias("xr"),
            (pl.col("r_s") * pl.col("r_await") * NS_PER_MS).alias("r_ns"),
            (pl.col("w_s") * pl.col("w_await") * NS_PER_MS).alias("w_ns"),
            (pl.col("util") > UTIL_MAX).fill_null(value=False).cast(pl.Int64).alias("impossible"),
        )
        .with_columns(
            pl.max_horizontal("aqu_sz", "xr").alias("n"),
            (pl.col("aqu_sz") - pl.col("xr")).abs().alias("off"),
            pl.lit(1, pl.Int64).alias("num"),
        )
        .group_by("subject")
        .agg(pl.col(name).sum() for name in _SUMS)
    )
