"""Pieces of groups moved between memory and a remote, framed, packed and checked. Next: remote.

Decides what a piece that arrived is worth, given the manifest that names it. Knows neither when the remote is left
alone nor which manifests there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KeyArray
from kvtide.tiers.client import RemoteClient, Values
from kvtide.tiers.contract import CORRUPT, FAILED, FULL, MISSING, OK, Statuses, TierStats
from kvtide.tiers.encryptedpieces import EncryptedPieces
from kvtide.tiers.envelope import HEADER_BYTES, PLAIN, ZSTD, Envelope, checksums_at
from kvtide.tiers.packing import Packer

CALL_BYTES_MAX = 32 << 20  # of values in one call of the client: bounds memory, and what a time-out covers

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of pieces that were put. Shapes: all [n, pieces of each]."""

    statuses: Statuses
    checksums: npt.NDArray[np.uint64]
    stored_bytes: Rows
    codec: int  # ZSTD if any of them was packed


class Pieces:
    """Moves pieces, and counts them in `stats`.

    Threads: one at a time.
    """

    def __init__(
        self, envelope: Envelope, packer: Packer, stats: TierStats, encrypted: EncryptedPieces | None = None
    ) -> None:
        self._envelope, self._packer, self._stats, self._encrypted = envelope, packer, stats, encrypted

    def read(
        self,
        client: RemoteClient,
        keys: KeyArray,
        requests: npt.NDArray[np.void],
        known: npt.NDArray[np.bool_],
        manifests: npt.NDArray[np.void],
    ) -> Statuses:
        """Read fragments of groups whose manifests are known; of one's pieces the worst status counts."""
        envelope = self._envelope
        statuses = np.where(known[requests["row"]], OK, MISSING).astype(np.uint8)
        wanted = np.flatnonzero(statuses == OK)
        fragments = requests["fragment"][wanted].astype(np.int64)
        counts = envelope.first[fragments + 1] - envelope.first[fragments]
        of_request = np.repeat(wanted, counts)
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        pieces = np.repeat(envelope.first[fragments], counts) + np.arange(len(of_request)) - starts
        rows = requests["row"][of_request].astype(np.int64)
        addresses = requests["address"][of_request] + envelope.offsets[pieces].astype(np.uint64)
        ends = np.cumsum(envelope.lengths[pieces])
        cuts = np.searchsorted(ends, np.arange(CALL_BYTES_MAX, ends[-1] if len(ends) else 0, CALL_BYTES_MAX))
        for part in np.split(np.arange(len(pieces)), cuts):
            got = self._read_pieces(client, keys, rows[part], pieces[part], addresses[part], manifests)
            bad = part[got != OK]
            np.maximum.at(statuses, of_request[bad], got[got != OK])
        return statuses

    def _read_pieces(
        self,
        client: RemoteClient,
        keys: KeyArray,
        rows: Rows,
        pieces: Rows,
        addresses: npt.NDArray[np.uint64],
        manifests: npt.NDArray[np.void],
    ) -> Statuses:
        """Read and check pieces of the groups `keys[rows]`. Shapes: all but keys and manifests [n]; returns [n]."""
        if not len(rows):
            return np.zeros(0, np.uint8)
        envelope = self._envelope
        lengths, stored = envelope.lengths[pieces], manifests["stored_bytes"][rows, pieces].astype(np.int64)
        places, packed = self._packer.places(addresses, lengths, stored)
        values = Values(np.zeros((len(rows), HEADER_BYTES), np.uint8), places, stored)
        got = client.get(envelope.piece_names(keys, rows, pieces), values)
        found = np.flatnonzero(got == OK)
        self.count_read(len(found), int(stored[found].sum()))
        statuses = got.copy()
        statuses[found], said, _ = envelope.check(
            values.headers[found],
            keys[rows[found]],
            envelope.fragments[pieces[found]],
            envelope.offsets[pieces[found]],
            lengths[found],
            stored[found],
        )
        good = found[statuses[found] == OK]
        said = said[statuses[found] == OK]
        unpacked = self._packer.unpack(packed, good, addresses, lengths)
        real = checksums_at(addresses[good].tolist(), lengths[good].tolist(), len(good))
        is_stale = said != manifests["checksums"][rows[good], pieces[good]]
        statuses[good] = np.where(~unpacked | (real != said), CORRUPT, np.where(is_stale, MISSING, OK))
        if self._encrypted is not None:
            whole = np.flatnonzero(statuses == OK)
            is_ours = self._encrypted.decrypt(
                keys, rows[whole], manifests, pieces[whole], addresses[whole], lengths[whole]
            )
            statuses[whole[~is_ours]] = CORRUPT
        return statuses

    def places(self, addresses: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Return where all pieces of groups lie whose fragments are at `addresses`. Shapes: [n, F]; returns [n, P]."""
        return addresses[:, self._envelope.fragments] + self._envelope.offsets.astype(np.uint64)

    def put(
        self,
        client: RemoteClient,
        keys: KeyArray,
        addresses: npt.NDArray[np.uint64],
        pieces: npt.NDArray[np.integer],
        *,
        at: npt.NDArray[np.uint64] | None = None,
        owner: object = None,
    ) -> Sent:
        """Store some pieces of every group; those of a group that did not arrive are no harm without a manifest.

        Shapes: keys [n]; addresses [n, F] of all fragments; pieces [p], the same of each group; at [n * p], where
        the pieces lie that are not in their fragments, in memory of `owner`.
        """
        assert self._encrypted is None or at is not None, "pieces that were to be encrypted first"
        envelope, num = self._envelope, len(keys)
        shape = num, len(pieces)
        each, rows = np.tile(pieces, num), np.repeat(np.arange(num), len(pieces))
        lengths, fragments, offsets = envelope.lengths[each], envelope.fragments[each], envelope.offsets[each]
        at = addresses[rows, fragments] + offsets.astype(np.uint64) if at is None else at
        checksums = checksums_at(at.tolist(), lengths.tolist(), len(at))
        places, stored, held = self._packer.pack(at, lengths)
        codecs = np.where(stored < lengths, ZSTD, PLAIN)
        headers = envelope.headers(keys[rows], fragments, offsets, lengths, stored, checksums, codecs)
        got = client.put(envelope.piece_names(keys, rows, each), Values(headers, places, stored, (held, owner)))
        self.count_written(got, stored)
        codec = int(codecs.max(initial=PLAIN))
        return Sent(got.reshape(shape), checksums.reshape(shape), stored.reshape(shape), codec)

    def count_read(self, num: int, num_bytes: int) -> None:
        """Count values that were read, of `num_bytes` beside their headers."""
        self._stats.num_reads += num
        self._stats.read_bytes += num_bytes + num * HEADER_BYTES

    def count_written(self, statuses: Statuses, lengths: Rows) -> None:
        """Count those of the values that were written."""
        good = statuses == OK
        self._stats.num_writes += int(good.sum())
        self._stats.written_bytes += int(lengths[good].sum()) + int(good.sum()) * HEADER_BYTES


def worst(statuses: npt.NDArray[np.uint8]) -> Statuses:
    """Return of each row: FAILED if anything failed, else FULL if something found no room, else OK."""
    failed, full = (statuses == FAILED).any(axis=1), (statuses == FULL).any(axis=1)
    return np.where(failed, FAILED, np.where(full, FULL, OK)).astype(np.uint8)
