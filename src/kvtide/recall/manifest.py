"""What a memory's segments are, noted whole or not at all. Next: segments.

    manifest-00000003.json       the segments, oldest first, and the last log whose rows are in them
    segment-00000003/            a segment: `rows.lance`, `deleted.ids`, and `segment.json`, its own entry

The newest manifest is the truth; the one before is kept. A newest one that cannot be read is set aside, and its change
is made again from the entry that every segment carries: what a merge replaced may be gone already.
"""

from __future__ import annotations

import logging
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kvtide.errors import FormatError
from kvtide.recall.place import read_json, sync_folder, write_json

FORMAT = "kvtide-memory-segments"
VERSION = 1
MANIFEST_NAME = re.compile(r"manifest-([0-9]{8})\.json")
SEGMENT_NAME = re.compile(r"segment-([0-9]{8})")
_log = logging.getLogger("kvtide.recall")


@dataclass(frozen=True, slots=True)
class Entry:
    """A segment, and what it took the place of."""

    number: int
    num_rows: int
    num_deleted: int  # ids deleted here that something older may hold
    rows_check: str  # of ids, row checks and deleted ids
    replaces: tuple[int, ...]  # segments
    logs_to: int  # the last log whose rows are in this or an older segment
    is_indexed: bool


@dataclass(frozen=True, slots=True)
class Manifest:
    """The segments of a memory, oldest first. Logs up to `logs_to` are in them."""

    number: int = 0
    entries: tuple[Entry, ...] = ()
    logs_to: int = 0

    def after(self, entry: Entry) -> Manifest:
        """Return the manifest in which `entry` has taken its place."""
        kept = [one for one in self.entries if one.number not in entry.replaces]
        at = [one.number for one in self.entries].index(entry.replaces[0]) if entry.replaces else len(kept)
        kept.insert(at, entry)
        return Manifest(self.number + 1, tuple(kept), max(self.logs_to, entry.logs_to))


def segment_path(path: Path, number: int) -> Path:
    """Return the folder of a segment."""
    return path / f"segment-{number:08}"


def manifest_path(path: Path, number: int) -> Path:
    """Return the file of a manifest."""
    return path / f"manifest-{number:08}.json"


def numbers(path: Path, name: re.Pattern[str]) -> list[int]:
    """Return the numbers in the names that fit, in order."""
    return sorted(int(match[1]) for one in path.iterdir() if (match := name.fullmatch(one.name)))


def read_manifest(path: Path) -> Manifest:
    """Return the newest manifest of a memory, an empty one if it never merged.

    Raises: FormatError if none of those there are can be read.
    """
    there = numbers(path, MANIFEST_NAME)
    unreadable: list[str] = []
    found: Manifest | None = None
    for number in reversed(there):
        try:
            found = _manifest(path, number)
            break
        except FormatError as error:
            unreadable.append(str(error))
    if found is None:
        found = Manifest()
    if not unreadable:
        return found
    mended = _mended(path, replace(found, number=there[-1]))
    for number in there[len(there) - len(unreadable) :]:
        old = manifest_path(path, number)
        old.rename(old.with_name(old.name + ".unreadable"))
    write_manifest(path, mended)
    _log.warning("%s: set aside as .unreadable; %d segments are used", unreadable[0], len(mended.entries))
    return mended


def _mended(path: Path, manifest: Manifest) -> Manifest:
    """Return the manifest with the segments that were made after it, each as its own entry says."""
    known = {one.number for one in manifest.entries}
    first = max(known, default=0) + 1
    for number in numbers(path, SEGMENT_NAME):
        if number < first:
            continue
        try:
            entry = read_entry(path, number)
        except FormatError:
            continue  # not finished: what it would have replaced is there
        if entry is not None and set(entry.replaces) <= {one.number for one in manifest.entries}:
            manifest = manifest.after(entry)
    return manifest


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Note the segments, durable when it returns; keep the manifest before.

    Raises: IoError.
    """
    entries = [asdict(one) | {"replaces": list(one.replaces)} for one in manifest.entries]
    what: dict[str, object] = {"format": FORMAT, "version": VERSION, "logs_to": manifest.logs_to, "segments": entries}
    write_json(manifest_path(path, manifest.number), what)
    for number in numbers(path, MANIFEST_NAME):
        if number < manifest.number - 1:
            manifest_path(path, number).unlink()


def write_entry(path: Path, entry: Entry) -> None:
    """Let a segment say what it is, durable when it returns: from then on it is whole.

    Raises: IoError.
    """
    folder = segment_path(path, entry.number)
    what: dict[str, object] = asdict(entry) | {"replaces": list(entry.replaces)}
    write_json(folder / "segment.json", {"format": FORMAT, "version": VERSION, **what})
    sync_folder(path)


def read_entry(path: Path, number: int) -> Entry | None:
    """Return what a segment says it is; None if it was not finished.

    Raises: FormatError.
    """
    file = segment_path(path, number) / "segment.json"
    found = read_json(file)
    if found is None:
        return None
    _checked_version(file, found)
    entry = _entry(file, found)
    if entry.number != number:
        raise FormatError(f"{file}: expected the entry of segment {number}, found that of {entry.number}")
    return entry


def _manifest(path: Path, number: int) -> Manifest:
    file = manifest_path(path, number)
    found = read_json(file)
    if found is None:
        raise FormatError(f"{file}: expected a manifest, found no file")
    _checked_version(file, found)
    entries, logs_to = found.get("segments"), found.get("logs_to")
    if not isinstance(entries, list) or not isinstance(logs_to, int) or logs_to < 0:
        raise FormatError(f"{file}: expected segments and logs_to, found {entries!r:.40} and {logs_to!r:.40}")
    return Manifest(number, tuple(_entry(file, one) for one in entries), logs_to)


def _checked_version(file: Path, found: dict[str, object]) -> None:
    if (found.get("format"), found.get("version")) != (FORMAT, VERSION):
        got = f"{found.get('format')!r} version {found.get('version')!r}"
        raise FormatError(f"{file}: expected {FORMAT} version {VERSION}, found {got}")


def _entry(file: Path, found: object) -> Entry:
    if isinstance(found, dict):
        counts = [found.get(name) for name in ("number", "num_rows", "num_deleted", "logs_to")]
        check, replaces, is_indexed = found.get("rows_check"), found.get("replaces"), found.get("is_indexed")
        if (
            all(isinstance(one, int) and 0 <= one < 1 << 40 for one in counts)
            and isinstance(check, str)
            and isinstance(replaces, list)
            and all(isinstance(one, int) for one in replaces)
            and isinstance(is_indexed, bool)
        ):
            number, num_rows, num_deleted, logs_to = (int(one) for one in counts if isinstance(one, int))
            return Entry(number, num_rows, num_deleted, check, tuple(replaces), logs_to, is_indexed=is_indexed)
    raise FormatError(f"{file}: expected a segment with its counts and check, found {found!r:.80}")
