"""A probe as hardware: what was measured of this machine takes the place of the catalogue's figures. Next: table.

Decides what stands in for what a probe does not measure, and labels it an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtide.hardware.figures import Figure, Source
from kvtide.hardware.models import IoPath, Link, Memory, Ssd, figures_of
from kvtide.probe.file import Probe
from kvtide.units import printable

DRAM_LATENCY_NS = 100.0  # local DRAM of servers, idle: about 0.1 us
HOST_NS_MIN = 1.0  # an op whose CPU time did not show


@dataclass(frozen=True, slots=True)
class Measured:
    """What a probe measured. None: it did not."""

    drive: Ssd
    io_path: IoPath  # of reads, through the engine of the probe
    memory: Memory | None
    link: Link | None


def from_probe(probe: Probe, name: str = "probed") -> Measured:
    """The probed drive, the CPU time its ops cost, and memory and link where they were measured; all called `name`."""
    source = Source("measured", _origin(probe), probe.date[:7] or "unknown")
    assumed = Source("estimate", f"not measured by {source.text}", source.date)
    title = printable(probe.caps.model or probe.caps.name) or "probed drive"
    host = Figure.of(max(HOST_NS_MIN, probe.read.roof.host_ns), "ns", source)
    return Measured(
        Ssd.of(name, title, _drive(probe, source, assumed)),
        IoPath.of(name, f"{printable(probe.engine)}, as probed", {"host_ns": host}),
        _memory(probe, name, source, assumed),
        _link(probe, name, source, assumed),
    )


def _origin(probe: Probe) -> str:
    return f"kvtide probe of {printable(probe.caps.name or probe.caps.file_system) or 'an unknown device'}"


def _drive(probe: Probe, source: Source, assumed: Source) -> dict[str, Figure]:
    """The host is left out of the roofs: it has its own entry. A flush is taken to cost what a small write does."""
    measured = {
        f"{way}.{key}": (getattr(roof, key), unit)
        for way, roof in (("read", probe.roofline.read), ("write", probe.roofline.write))
        for key, unit in (
            ("latency_ns", "ns"),
            ("channel_bytes_per_s", "bytes/s"),
            ("iops_max", "ops/s"),
            ("bytes_per_s_max", "bytes/s"),
        )
    }
    if probe.caps.capacity_bytes:
        measured["capacity_bytes"] = (float(probe.caps.capacity_bytes), "bytes")
    if probe.caps.max_hw_sectors_bytes:
        measured["transfer_bytes_max"] = (float(probe.caps.max_hw_sectors_bytes), "bytes")
    flush = {"sync_latency_ns": (probe.roofline.write.latency_ns, "ns")}
    return figures_of(measured, source) | figures_of(flush, assumed)


def _memory(probe: Probe, name: str, source: Source, assumed: Source) -> Memory | None:
    """The probe counts a copied byte once, memory moves it twice."""
    if probe.dram is None:
        return None
    figures = figures_of({"bytes_per_s": (2 * probe.dram.bytes_per_s_all, "bytes/s")}, source)
    figures |= figures_of({"latency_ns": (DRAM_LATENCY_NS, "ns")}, assumed)
    return Memory.of(name, f"DRAM, {probe.dram.num_threads} threads copying", figures)


def _link(probe: Probe, name: str, source: Source, assumed: Source) -> Link | None:
    """To the device. Its latency is the time of the smallest copy, which hardly has bytes."""
    gpu = probe.gpu
    if not gpu.sizes_bytes:
        return None
    points = sorted(zip(gpu.sizes_bytes, gpu.to_device_bytes_per_s, strict=True))
    table = {f"bytes_per_s.{size}": (rate, "bytes/s") for size, rate in points}
    latency_ns = 1e9 * points[0][0] / points[0][1]
    figures = figures_of({"nominal_bytes_per_s": (max(rate for _, rate in points), "bytes/s"), **table}, source)
    return Link.of(name, f"to {printable(gpu.name)}", figures | figures_of({"latency_ns": (latency_ns, "ns")}, assumed))
