"""Hardware by name: the catalogue that ships with kvtide, and a user's file over it. Next: measured, table.

Decides which entry a name means. Capital letters do not matter. An entry of the user's file takes the place of ours
whole, so that no figure of ours hides among theirs.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from kvtide.errors import ConfigError, FormatError
from kvtide.hardware.models import Gpu, IoPath, Link, Memory, Network, Ssd
from kvtide.hardware.reading import Parsed, parse
from kvtide.spec.geometry import shown

FILE_BYTES_MAX = 4 << 20  # ours takes about 30 KB

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Everything known by name. Each method raises ConfigError that lists near names and all names."""

    gpus: Mapping[str, Gpu]
    links: Mapping[str, Link]
    memories: Mapping[str, Memory]
    ssds: Mapping[str, Ssd]
    networks: Mapping[str, Network]
    io_paths: Mapping[str, IoPath]

    def gpu(self, name: str) -> Gpu:
        """The GPU, or CPU in its place, called `name`."""
        return _named("GPU", self.gpus, name)

    def link(self, name: str) -> Link:
        """The link between host and GPU called `name`."""
        return _named("link", self.links, name)

    def memory(self, name: str) -> Memory:
        """The host memory called `name`."""
        return _named("memory", self.memories, name)

    def ssd(self, name: str) -> Ssd:
        """The drive called `name`."""
        return _named("SSD", self.ssds, name)

    def network(self, name: str) -> Network:
        """The network called `name`."""
        return _named("network", self.networks, name)

    def io_path(self, name: str) -> IoPath:
        """The way to reach a drive called `name`."""
        return _named("I/O path", self.io_paths, name)


def load(path: Path | None = None) -> Catalogue:
    """The catalogue that ships with kvtide, with the entries of the file `path` over it.

    Raises: ConfigError if `path` cannot be read; FormatError if it is no catalogue file.
    """
    shipped = resources.files("kvtide.hardware").joinpath("catalogue.toml").read_bytes()
    ours = parse(shipped, "catalogue.toml", {})
    if path is None:
        return _catalogue([ours], "catalogue.toml")
    return _catalogue([ours, parse(_read(path), str(path), ours.sources)], str(path))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; type the path of a catalogue file") from None
    if len(raw) > FILE_BYTES_MAX:
        raise FormatError(f"{path} is no catalogue file: it has more than {FILE_BYTES_MAX} bytes")
    return raw


def _catalogue(files: list[Parsed], origin: str) -> Catalogue:
    """Later files win."""
    merged = {kind: {k: v for file in files for k, v in file.entries[kind].items()} for kind in files[0].entries}
    links = {e.name: Link.of(e.name, e.title, e.figures) for e in merged["link"].values()}
    for entry in merged["gpu"].values():
        if entry.link is not None and entry.link not in links:
            raise FormatError(
                f"{origin}: [gpu.{entry.name}]: no link is called {shown(entry.link)}; known: {', '.join(links)}"
            )
    return Catalogue(
        MappingProxyType({e.name: Gpu.of(e.name, e.title, e.figures, e.link) for e in merged["gpu"].values()}),
        MappingProxyType(links),
        MappingProxyType({e.name: Memory.of(e.name, e.title, e.figures) for e in merged["memory"].values()}),
        MappingProxyType({e.name: Ssd.of(e.name, e.title, e.figures) for e in merged["ssd"].values()}),
        MappingProxyType({e.name: Network.of(e.name, e.title, e.figures) for e in merged["network"].values()}),
        MappingProxyType({e.name: IoPath.of(e.name, e.title, e.figures) for e in merged["io_path"].values()}),
    )


def _named(what: str, known: Mapping[str, _T], name: str) -> _T:
    key = name.strip().lower() if isinstance(name, str) else ""
    if key not in known:
        near = difflib.get_close_matches(key[:64], known, n=3, cutoff=0.4)
        meant = f"near it: {', '.join(near)}; all" if near else "known"
        raise ConfigError(f"no {what} is called {shown(name)}; {meant}: {', '.join(known)}")
    return known[key]
