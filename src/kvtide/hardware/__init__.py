"""Figures of hardware, each with its source: GPUs, links, memory, drives, networks, and ways to reach a drive."""

from kvtide.hardware.catalogue import Catalogue, load
from kvtide.hardware.figures import LABELS, Figure, Source
from kvtide.hardware.measured import Measured, from_probe
from kvtide.hardware.models import Gpu, IoPath, Link, Memory, Network, Ssd, raid0

__all__ = [
    "LABELS",
    "Catalogue",
    "Figure",
    "Gpu",
    "IoPath",
    "Link",
    "Measured",
    "Memory",
    "Network",
    "Source",
    "Ssd",
    "from_probe",
    "load",
    "raid0",
]
