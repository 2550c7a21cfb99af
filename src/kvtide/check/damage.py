"""Damage to the files of a store, done from outside as a disk, a crash or an operator would. Next: corruption.

Decides where in the files a value lies: by its bytes. What a store compresses or encrypts is not found.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

PROBE_BYTES = 48  # of random bytes: no two values share them


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part of a value lies: bytes `part_start..part_start + length` of it at `offset` of the file."""

    path: Path
    offset: int
    part_start: int
    length: int


def files_of(directory: Path) -> list[Path]:
    """Return every file under `directory`, in order of name."""
    return sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())


def used_bytes(directory: Path) -> int:
    """Return what the files under `directory` take on their disk."""
    total = 0
    for path in files_of(directory):
        with suppress(FileNotFoundError):  # it left in the meantime
            total += path.stat().st_blocks * 512
    return total


def is_reserved(directory: Path, capacity_bytes: int) -> bool:
    """Return whether most of a store's capacity lies in one file, as of slots: its space is taken before it is used."""
    return any(path.stat().st_size > capacity_bytes // 2 for path in files_of(directory))


def places_of(directory: Path, value: bytes) -> list[Place]:
    """Return where the second half of a value begins on disk, in every file that has it.

    A value in one piece and one that is cut (in layers, in pages) are found alike: what is given is a run of its bytes.
    """
    middle = len(value) // 2
    start = min(middle, len(value) - PROBE_BYTES)
    probe = value[start : start + PROBE_BYTES]
    found = []
    for path in files_of(directory):
        offsets = list(_find(path, probe))
        found += [Place(path, offset, start, _run(path, offset, value[start:])) for offset in offsets]
    return found


def overwrite(place: Place, change: Callable[[bytes], bytes]) -> None:
    """Put `change(bytes there)` in the place of the bytes there, of the same length, and have the disk take it."""
    with place.path.open("r+b") as file:
        file.seek(place.offset)
        old = file.read(place.length)
        file.seek(place.offset)
        file.write(change(old))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def flip(old: bytes) -> bytes:
    """Return bytes with one bit of the first of them turned."""
    return bytes([old[0] ^ 1]) + old[1:]


def zero(old: bytes) -> bytes:
    """Return as many zeros: what a torn write leaves in a new file."""
    return bytes(len(old))


def truncate(places: Sequence[Place]) -> None:
    """Cut files off where the places are."""
    for place in places:
        os.truncate(place.path, place.offset)


def empty(places: Sequence[Place]) -> None:
    """Cut files to nothing."""
    for place in places:
        os.truncate(place.path, 0)


def remove(places: Sequence[Place]) -> None:
    """Delete the files."""
    for place in places:
        place.path.unlink(missing_ok=True)


def swap(first: Place, second: Place) -> None:
    """Exchange what lies at two places of the same length."""
    num = min(first.length, second.length)
    found = []
    for place in (first, second):
        with place.path.open("rb") as file:
            file.seek(place.offset)
            found.append(file.read(num))
    for place, content in ((first, found[1]), (second, found[0])):
        overwrite(Place(place.path, place.offset, place.part_start, num), partial(_replace, content))


def _replace(new: bytes, old: bytes) -> bytes:
    del old
    return new


def _find(path: Path, probe: bytes) -> Iterator[int]:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < len(probe):
            return
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as whole:
            at = whole.find(probe)
            while at >= 0:
                yield at
                at = whole.find(probe, at + 1)


def _run(path: Path, offset: int, rest: bytes) -> int:
    """Return how many bytes at `offset` equal `rest`."""
    with path.open("rb") as file:
        file.seek(offset)
        there = file.read(len(rest))
    num = next((at for at, (one, other) in enumerate(zip(there, rest, strict=False)) if one != other), len(there))
    return max(num, 1)
