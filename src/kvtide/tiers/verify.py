"""Reading all of a namespace, to say whether every byte is right. Next: kvtide.cache.

Decides what counts as ok, corrupt or unreadable, and in which portions to read; how bytes move is the file tier's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError, FormatError
from kvtide.io.ops import address_of, aligned_buffer
from kvtide.spec import Identity
from kvtide.tiers.checkpoint import write_checkpoint
from kvtide.tiers.contract import CORRUPT, FAILED, READ_REQUEST
from kvtide.tiers.departures import DEPARTURES, Departures
from kvtide.tiers.file import FileTier
from kvtide.tiers.inspect import Seen, check_entries, looking_at, problem_of
from kvtide.tiers.namespace import read_identity

VERIFY_BYTES = 32 << 20  # memory of a verification, and bytes in flight: many times what keeps a drive busy


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What reading everything in one namespace found; groups are either ok, corrupt or unreadable.

    `num_slots_unreadable` counts slots whose header could not be read: nobody knows whether they held a group.
    """

    digest: str
    identity: Identity | None = None
    problem: str = ""
    num_groups: int = 0
    num_ok: int = 0
    num_corrupt: int = 0
    num_unreadable: int = 0
    num_slots_unreadable: int = 0
    read_bytes: int = 0

    @property
    def is_fine(self) -> bool:
        """Whether all of it could be read and was right."""
        return not (self.problem or self.num_corrupt or self.num_unreadable or self.num_slots_unreadable)


def verify_namespace(
    path: Path,
    *,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    memory_bytes: int = VERIFY_BYTES,
) -> VerifyReport:
    """Read every fragment of every group and compare it with its checksum; corrupt groups are forgotten.

    Their slots are free for the next owner. `on_progress` gets the bytes that are done and all there are. At most
    `memory_bytes` are held at a time, or one fragment.

    Raises: IoError(EBUSY) while another process owns the namespace. Any other trouble is told in the report.
    """
    identity = None
    try:
        check_entries(path)
        identity = read_identity(path)
        return _verify(path, identity, on_progress, memory_bytes)
    except (FormatError, ConfigError, OSError) as error:
        return VerifyReport(path.name, identity, problem_of(path, error))


def _verify(path: Path, identity: Identity, on_progress: Callable[[int, int], None], memory_bytes: int) -> VerifyReport:
    # The buffer is made before the engine is opened and dies after it was closed: reads may be in flight until then.
    largest = max(identity.slot().fragment_padded_bytes)
    if largest > (found := (path / "data.kvt").lstat().st_size):
        raise FormatError(
            f"{path / 'identity.json'} tells of fragments of {largest} bytes, but all of data.kvt has {found}; "
            f"type `kvtide store drop` to remove it"
        )
    buffer = aligned_buffer(max(memory_bytes, largest))
    with looking_at(path, identity) as seen:
        tier = seen.tier
        slots = np.flatnonzero(tier.table.used)
        is_all_known = not tier.stats().num_failed  # else the next owner must look again: headers may come back
        try:
            bad_headers, num_slots_unreadable = _bad_headers(seen, slots)
            statuses = _read_all(tier, slots, buffer, on_progress)
            corrupt = (statuses == CORRUPT) | (bad_headers & (statuses != FAILED))
            _drop_corrupt(path, tier, slots[corrupt])
        finally:
            is_changed = tier.stats().num_groups < len(slots) or not seen.was_clean
            if is_changed and is_all_known:
                write_checkpoint(path, tier)
        num_unreadable = int((statuses == FAILED).sum())
        return VerifyReport(
            digest=path.name,
            identity=identity,
            problem=seen.problem,
            num_groups=len(slots),
            num_ok=len(slots) - int(corrupt.sum()) - num_unreadable,
            num_corrupt=int(corrupt.sum()),
            num_unreadable=num_unreadable,
            num_slots_unreadable=num_slots_unreadable,
            read_bytes=tier.stats().read_bytes,
        )


def _drop_corrupt(path: Path, tier: FileTier, slots: npt.NDArray[np.int64]) -> None:
    """Forget the groups in `slots`, and note why, for `kvtide why`."""
    gone, sequences = tier.table.records(slots), tier.table.sequences[slots]
    tier.drop(gone.keys, reason="corrupt")
    if len(gone):
        departures = Departures(path / DEPARTURES)
        departures.note(gone, "corrupt", sequences)
        departures.close()


def _bad_headers(seen: Seen, slots: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.bool_], int]:
    """Say which of the used `slots` have another header in the file than in the table, and count unreadable ones.

    Without a checkpoint the table was filled from the file just now.
    """
    if not seen.was_clean:
        return np.zeros(len(slots), np.bool_), seen.tier.stats().num_failed
    twin = FileTier(seen.engine, seen.fd, seen.tier.layout, seen.digest, seen.tier.num_slots)
    twin.scan()
    found, known = twin.table, seen.tier.table
    good = found.has_header[slots] & (found.keys[slots] == known.keys[slots])
    good &= found.sequences[slots] == known.sequences[slots]
    good &= (found.checksums[slots] == known.checksums[slots]).all(axis=1)
    return ~good, twin.stats().num_failed


def _read_all(
    tier: FileTier, slots: npt.NDArray[np.int64], buffer: npt.NDArray[np.uint8], on_progress: Callable[[int, int], None]
) -> npt.NDArray[np.uint8]:
    """Read all fragments of `slots` in the order of the file; return the worst status of each: OK, FAILED, CORRUPT."""
    lengths = np.array(tier.layout.fragment_padded_bytes, np.int64)
    keys, worst = tier.table.keys[slots], np.zeros(len(slots), np.uint8)
    num_done, num_bytes = 0, int(lengths.sum()) * len(slots)
    on_progress(0, num_bytes)
    for groups, fragments in _batches(len(slots), lengths, buffer.size):
        requests = np.zeros((len(groups), len(fragments)), READ_REQUEST)
        requests["row"], requests["fragment"] = np.arange(len(groups))[:, None], fragments
        sizes = np.broadcast_to(lengths[fragments], requests.shape).ravel()
        requests["address"] = (address_of(buffer) + np.cumsum(sizes) - sizes).reshape(requests.shape)
        statuses = tier.read(keys[groups], requests.ravel(), cause="metadata").reshape(requests.shape)
        worst[groups] = np.where((statuses == FAILED).any(axis=1) & (worst[groups] != CORRUPT), FAILED, worst[groups])
        worst[groups] = np.where((statuses == CORRUPT).any(axis=1), CORRUPT, worst[groups])
        num_done += int(sizes.sum())
        on_progress(num_done, num_bytes)
    return worst


def _batches(num_groups: int, lengths: npt.NDArray[np.int64], memory_bytes: int) -> Iterator[tuple[range, range]]:
    """Cut groups x fragments into runs of at most `memory_bytes`: whole groups, or parts of one that is larger."""
    at_once = memory_bytes // int(lengths.sum())
    if at_once:
        for first in range(0, num_groups, at_once):
            yield range(first, min(first + at_once, num_groups)), range(len(lengths))
        return
    spans, first, total = [], 0, 0
    for fragment, length in enumerate(lengths.tolist()):
        if total + length > memory_bytes:
            spans.append(range(first, fragment))
            first, total = fragment, 0
        total += length
    spans.append(range(first, len(lengths)))
    for group in range(num_groups):
        for span in spans:
            yield range(group, group + 1), span
