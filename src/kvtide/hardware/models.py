"""What the catalogue holds: GPU, link, memory, SSD, network, I/O path. Plain values; next: reading, then catalogue.

Every class is made of its figures by `of`, so that a value and its source cannot differ. Rates are decimal, as vendors
count: 1 GB/s is 1e9 bytes a second. Times are in ns. Rates of compute are dense: sparsity is never counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from kvtide.errors import ConfigError
from kvtide.hardware.figures import Figure, Figures, Source, frozen, group
from kvtide.io.drive import DeviceModel
from kvtide.roofline import Roof
from kvtide.spec import PAGE_BYTES, Dtype

PARALLELISM_MAX = 1 << 16  # commands one NVMe queue holds
_WIDER = {
    Dtype.FP8_E4M3: Dtype.FP16,
    Dtype.FP8_E5M2: Dtype.FP16,
    Dtype.INT8: Dtype.FP16,
    Dtype.BF16: Dtype.FP32,
    Dtype.FP16: Dtype.FP32,
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """What computes: a GPU, or the CPU in its place."""

    name: str
    title: str
    memory_bytes: float
    memory_bytes_per_s: float
    flop_per_s: Mapping[Dtype, float]  # peak, for the formats it has units for
    gemm_share: float  # of peak that large matrix products reach; a whole prefill reaches less
    memory_share: float  # of memory_bytes_per_s that the reads of decode reach
    link: str | None  # name of the link to the host; None: computes where the host's memory is
    figures: Figures = field(repr=False)

    @classmethod
    def of(cls, name: str, title: str, figures: Figures, link: str | None) -> Gpu:
        """The GPU these figures describe."""
        flop_per_s = {Dtype(key): value for key, value in group(figures, "flop_per_s").items()}
        return cls(
            name,
            title,
            figures["memory_bytes"].value,
            figures["memory_bytes_per_s"].value,
            MappingProxyType(flop_per_s),
            figures["gemm_share"].value,
            figures["memory_share"].value,
            link,
            frozen(figures),
        )

    def peak_flop_per_s(self, dtype: Dtype) -> float:
        """FLOP a second at most for numbers in `dtype`; formats without units of their own are computed in wider ones.

        Raises: ConfigError if no wider format is known either.
        """
        wider: Dtype | None = dtype
        while wider is not None:
            if wider in self.flop_per_s:
                return self.flop_per_s[wider]
            wider = _WIDER.get(wider)
        known = ", ".join(known.value for known in self.flop_per_s)
        raise ConfigError(f"{self.name} has no rate for {dtype.value} or a wider format, only for {known}; add fp32")

    def gemm_flop_per_s(self, dtype: Dtype) -> float:
        """FLOP a second that large matrix products in `dtype` reach.

        Raises: as `peak_flop_per_s`.
        """
        return self.peak_flop_per_s(dtype) * self.gemm_share

    @property
    def decode_bytes_per_s(self) -> float:
        """Bytes a second that decode reads from the GPU's memory."""
        return self.memory_bytes_per_s * self.memory_share


@dataclass(frozen=True, slots=True)
class Link:
    """Path between host memory and GPU, one direction at a time."""

    name: str
    title: str
    nominal_bytes_per_s: float  # one direction, as the standard counts
    latency_ns: float  # of a copy without its bytes
    table: tuple[tuple[float, float], ...]  # (bytes a descriptor, bytes/s of a long queue of them), sizes increasing
    figures: Figures = field(repr=False)

    @classmethod
    def of(cls, name: str, title: str, figures: Figures) -> Link:
        """The link these figures describe."""
        table = tuple((float(size), rate) for size, rate in group(figures, "bytes_per_s").items())
        nominal, latency = figures["nominal_bytes_per_s"].value, figures["latency_ns"].value
        return cls(name, title, nominal, latency, table, frozen(figures))

    def bytes_per_s(self, size_bytes: float) -> float:
        """Bytes a second of a long queue of copies of `size_bytes` each.

        Between the sizes of the table both axes are logarithmic. Below the smallest a copy takes as long as the
        smallest does; above the largest the rate stays.

        Raises: ConfigError if size_bytes is not positive.
        """
        if not size_bytes > 0:
            raise ConfigError(f"a copy of {size_bytes} bytes has no rate; ask for 1 byte or more")
        smallest, rate = self.table[0]
        if size_bytes <= smallest:
            return rate * size_bytes / smallest
        for (size, rate), (next_size, next_rate) in itertools.pairwise(self.table):
            if size_bytes < next_size:
                share = math.log(size_bytes / size) / math.log(next_size / size)
                return float(rate * (next_rate / rate) ** share)
        return self.table[-1][1]


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the host: DRAM of one socket, or an expander."""

    name: str
    title: str
    bytes_per_s: float  # reads and writes together
    latency_ns: float  # of one read that no cache holds
    figures: Figures = field(repr=False)

    @classmethod
    def of(cls, name: str, title: str, figures: Figures) -> Memory:
        """The memory these figures describe."""
        return cls(name, title, figures["bytes_per_s"].value, figures["latency_ns"].value, frozen(figures))

    @property
    def copy_bytes_per_s(self) -> float:
        """Bytes a second copied inside this memory: each is read and written."""
        return self.bytes_per_s / 2


@dataclass(frozen=True, slots=True)
class Ssd:
    """A drive, or several in RAID 0. The roofs leave the host out: `IoPath.over` adds it."""

    name: str
    title: str
    read: Roof
    write: Roof
    sync_latency_ns: float  # of a flush
    capacity_bytes: float | None  # None, here and below: not known
    drive_writes_per_day: float | None  # endurance, over the warranty
    transfer_bytes_max: float | None  # largest command (MDTS)
    figures: Figures = field(repr=False)

    @classmethod
    def of(cls, name: str, title: str, figures: Figures) -> Ssd:
        """The drive these figures describe."""
        known = {key: figure.value for key, figure in figures.items()}
        return cls(
            name,
            title,
            Roof(**group(figures, "read")),
            Roof(**group(figures, "write")),
            known["sync_latency_ns"],
            known.get("capacity_bytes"),
            known.get("drive_writes_per_day"),
            known.get("transfer_bytes_max"),
            frozen(figures),
        )

    def device_model(self) -> DeviceModel:
        """The drive for `kvtide.io.drive`: it follows both roofs, alone and in deep queues, at every size.

        Parallelism is Little's law: as many channels as keep the IOPS roofs busy with ops of 4 KiB.
        """
        channels = [
            roof.iops_max * (roof.latency_ns / 1e9 + PAGE_BYTES / roof.channel_bytes_per_s)
            for roof in (self.read, self.write)
        ]
        return DeviceModel(
            read_latency_ns=round(self.read.latency_ns),
            write_latency_ns=round(self.write.latency_ns),
            sync_latency_ns=round(self.sync_latency_ns),
            iops_max=round(self.read.iops_max),
            read_bytes_per_s=round(self.read.bytes_per_s_max),
            write_bytes_per_s=round(self.write.bytes_per_s_max),
            parallelism=min(PARALLELISM_MAX, math.ceil(max(channels))),
            read_channel_bytes_per_s=round(self.read.channel_bytes_per_s),
            write_channel_bytes_per_s=round(self.write.channel_bytes_per_s),
            write_iops_max=round(self.write.iops_max),
        )


def raid0(ssd: Ssd, num: int) -> Ssd:
    """`num` drives striped: IOPS, bandwidth and capacity add up, latency and the rate of one op stay.

    Holds for ops that lie on one drive each, or for stripes much smaller than the queue; the host's cost is not in it.

    Raises: ConfigError if num < 1.
    """
    if num < 1:
        raise ConfigError(f"RAID 0 needs at least one drive, got {num}")
    adds = ("iops_max", "bytes_per_s_max", "capacity_bytes")
    figures = {
        key: replace(
            figure,
            value=figure.value * num,
            label="estimate",
            source=f"RAID 0: {num} times the {figure.label}, {figure.source}",
        )
        if num > 1 and key.rpartition(".")[2] in adds
        else figure
        for key, figure in ssd.figures.items()
    }
    return ssd if num == 1 else Ssd.of(f"{num}x-{ssd.name}", f"{num} x {ssd.title}, RAID 0", figures)


@dataclass(frozen=True, slots=True)
class Network:
    """Path to another machine's memory."""

    name: str
    title: str
    bytes_per_s: float  # one direction, line rate
    latency_ns: float  # of a request and its answer without their bytes
    host_ns: float  # CPU time of one op
    figures: Figures = field(repr=False)

    @classmethod
    def of(cls, name: str, title: str, figures: Figures) -> Network:
        """The network these figures describe."""
        rate, latency, host = (figures[key].value for key in ("bytes_per_s", "latency_ns", "host_ns"))
        return cls(name, title, rate, latency, host, frozen(figures))


@dataclass(frozen=True, slots=True)
class IoPath:
    """How a program reaches its drive, and what CPU time one op costs."""

    name: str
    title: str
    host_ns: float
    figures: Figures = field(repr=False)

    @classmethod
    def of(cls, name: str, title: str, figures: Figures) -> IoPath:
        """The path these figures describe."""
        return cls(name, title, figures["host_ns"].value, frozen(figures))

    def over(self, roof: Roof) -> Roof:
        """`roof` with this path's CPU time of one op."""
        return replace(roof, host_ns=self.host_ns)


def figures_of(values: Mapping[str, tuple[float, str]], source: Source) -> dict[str, Figure]:
    """Figures that all come from one source, of (value, unit) by name."""
    return {key: Figure.of(value, unit, source) for key, (value, unit) in values.items()}
