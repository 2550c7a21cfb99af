"""Encrypted pieces of a remote's groups: each of at most 1 MiB is encrypted by itself. Next: remote.

Decides where encrypted bytes lie on their way and what of a manifest proves them; how they are encrypted is `cipher`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KeyArray
from kvtide.errors import ConfigError
from kvtide.io.ops import address_of, aligned_buffer
from kvtide.spec import SlotLayout
from kvtide.spec.layout import PROOF_BYTES
from kvtide.tiers.cipher import Cipher
from kvtide.tiers.contract import GroupRecords
from kvtide.tiers.envelope import Envelope

_NOWHERE = -1  # a remote has no places: a value is where its name is


@dataclass(frozen=True, slots=True)
class Encrypted:
    """What manifests say of encrypted groups, and the memory they lie in until they were sent."""

    sequences: npt.NDArray[np.uint64]
    proofs: npt.NDArray[np.uint8]
    memory: npt.NDArray[np.uint8]


class EncryptedPieces:
    """Encrypts what goes to a remote, and decrypts what comes from it."""

    def __init__(self, cipher: Cipher, envelope: Envelope) -> None:
        self._cipher, self._envelope, self._sequence = cipher, envelope, 0

    def encrypt(
        self, records: GroupRecords, addresses: npt.NDArray[np.uint64]
    ) -> tuple[npt.NDArray[np.uint64], Encrypted]:
        """Return where the encrypted pieces lie, and what their manifests say. Shapes: addresses, returns [n * P]."""
        num, lengths = len(records), self._envelope.lengths
        addresses = addresses.reshape(num, len(lengths))
        sizes = np.broadcast_to(lengths, addresses.shape)
        memory = aligned_buffer(num * int(lengths.sum()) + PROOF_BYTES)
        targets = (address_of(memory) + np.cumsum(sizes).reshape(sizes.shape) - sizes).astype(np.uint64)
        sequences = np.arange(self._sequence + 1, self._sequence + 1 + num, dtype=np.uint64)
        self._sequence += num
        parts, places = np.arange(len(lengths)), np.full(num, _NOWHERE, np.int64)
        proofs = self._cipher.encrypt(records, sequences, places, parts, addresses, targets, sizes)
        return targets.ravel(), Encrypted(sequences, proofs, memory)

    def decrypt(
        self,
        keys: KeyArray,
        rows: npt.NDArray[np.int64],
        manifests: npt.NDArray[np.void],
        pieces: npt.NDArray[np.int64],
        addresses: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.bool_]:
        """Decrypt pieces of the groups `keys[rows]` where they lie; say which are what was encrypted.

        Shapes: keys, manifests [n]; all else [r]; returns [r].
        """
        groups, at = np.unique(rows, return_inverse=True)
        told = manifests[groups]
        records = self._envelope.records(keys[groups], told)
        places = np.full(len(groups), _NOWHERE, np.int64)
        return self._cipher.decrypt(records, told["sequence"], places, told["proof"], at, pieces, addresses, lengths)


def pieces_for(
    cipher: Cipher | None, envelope: Envelope, layout: SlotLayout, zstd_level: int
) -> EncryptedPieces | None:
    """Return what encrypts with `cipher`; None where nothing does.

    Raises: ConfigError where values shall be compressed as well.
    """
    assert (cipher is not None) == layout.is_encrypted, "a key and room for what proves encrypted pieces go together"
    if cipher is None:
        return None
    if zstd_level:
        raise ConfigError("encrypted KV does not become smaller: leave out zstd of --remote, or --key-file")
    return EncryptedPieces(cipher, envelope)
