"""Encryption at rest, off by default: fragments as AES-256-GCM, under a key of each group written. Next: file, remote.

Decides keys, nonces and what is authenticated. Knows no file, and not where bytes lie.

*Theory.* Whoever owns the KV has a master key of 32 bytes, in a file. All others come from it by HKDF-SHA-256
(RFC 5869):

    name of the key     expand("name")                                       told in identity.json; tells nothing else
    root of the chain   expand("root" | identity)                            stands for the identity in keys of blocks
    key of a group      expand("group" | identity | key | opened | number)   encrypts that group, as written that once

`opened` are 16 random bytes of each opening of a store, `number` counts what was written since: no two writes ever
share a key, whatever was lost in a crash or put back from a backup. So the nonce within a key is the number of the
fragment, and cannot come twice. The key of a block is chained from the tenant's salt, so no two tenants share a key.
Authenticated beside each fragment is all that the header says of the group and the place it lies in; the fragment's
number is its nonce. A slot moved, a header altered, a fragment of another group or of an older write do not decrypt.
"""

from __future__ import annotations

import ctypes
import hmac
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KEY
from kvtide.errors import ConfigError, UnsupportedError
from kvtide.io.process import Opener
from kvtide.spec.layout import PROOF_BYTES
from kvtide.tiers.contract import GroupRecords
from kvtide.tiers.guard import read_secret

LOG = logging.getLogger("kvtide.store")
KEY_BYTES = 32
_HINT = "type (umask 077; head -c 32 /dev/urandom > FILE) to make one"
_LABEL = b"kvtide encryption 1"

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


class MasterKey:
    """The secret all keys come from.

    Raises: UnsupportedError without the package cryptography.
    """

    def __init__(self, secret: bytes) -> None:
        assert len(secret) == KEY_BYTES, "a master key has 32 bytes"
        _library()
        self._extracted = hmac.digest(_LABEL, secret, "sha256")
        self.name = f"aes-256-gcm key {self.expand(b'name')[:8].hex()}"  # as identities tell it

    @classmethod
    def read(cls, path: Path) -> MasterKey:
        """Return the key in the file `path`: 32 bytes, or 64 hexadecimal digits.

        Raises: ConfigError if it is no such file, or others may read it; UnsupportedError without cryptography.
        """
        raw = read_secret(path, 4 * KEY_BYTES, _HINT)
        if len(raw) != KEY_BYTES:
            try:
                raw = bytes.fromhex(raw.decode("ascii").strip())
            except ValueError:
                raw = b""
        if len(raw) != KEY_BYTES:
            raise ConfigError(f"{path} holds no key: 32 bytes or 64 hexadecimal digits are needed; {_HINT}")
        return cls(raw)

    def expand(self, *info: bytes) -> bytes:
        """Return 32 bytes that only `info` and the secret give (HKDF's second step, one block of it)."""
        return hmac.digest(self._extracted, b"".join((*info, b"\1")), "sha256")

    def root(self, identity_digest: bytes) -> bytes:
        """Return what stands for the identity in the keys of blocks: without the secret no prompt can be guessed."""
        return self.expand(b"root", identity_digest)


class Cipher:
    """Encrypts what one opening of a store writes, and decrypts what any did. `identity_digest` is of its KV.

    Threads: one at a time.
    """

    def __init__(self, master: MasterKey, identity_digest: bytes) -> None:
        self._master, self._identity = master, identity_digest
        self._opened = os.urandom(PROOF_BYTES)
        self._ciphers, self._invalid = _library()
        self._has_warned, self._opener = False, Opener()

    def encrypt(
        self,
        records: GroupRecords,
        sequences: U64,
        places: I64,
        parts: I64,
        sources: U64,
        targets: U64,
        lengths: I64,
    ) -> U8:
        """Encrypt parts of groups from `sources` to `targets`; return the proofs that headers keep.

        Behind each target 16 bytes are used: targets ascend, so what lies there is written later, or is spare.

        Shapes: records, sequences, places [n]; parts [P], their numbers; sources, targets, lengths [n, P];
        returns [n, 16 * (1 + P)].
        Raises: IoError in a forked child, whose numbers would be those of its parent.
        """
        self._opener.check("what encrypts KV")
        proofs = np.zeros((len(records), PROOF_BYTES * (1 + len(parts))), np.uint8)
        proofs[:, :PROOF_BYTES] = np.frombuffer(self._opened, np.uint8)
        about = self._about(records, sequences, places)
        opened = [self._opened] * len(records)
        keys = self._keys(records, sequences, opened)
        for row, key in enumerate(keys):
            columns = (array[row].tolist() for array in (sources, targets, lengths))
            working = self._ciphers.aesgcm(key)
            tags = [
                _encrypt_one(working, about[row], part, *where)
                for part, *where in zip(parts.tolist(), *columns, strict=True)
            ]
            proofs[row, PROOF_BYTES:] = np.frombuffer(b"".join(tags), np.uint8)
        return proofs

    def decrypt(
        self,
        records: GroupRecords,
        sequences: U64,
        places: I64,
        proofs: U8,
        rows: I64,
        parts: I64,
        addresses: U64,
        lengths: I64,
    ) -> npt.NDArray[np.bool_]:
        """Decrypt parts of groups where they lie; say of each whether it is what was written. What is not is garbage.

        Shapes: records, sequences, places, proofs [n, ..]; rows (of those), parts, addresses, lengths, returns [r].
        """
        tags = proofs.reshape(len(proofs), proofs.shape[1] // PROOF_BYTES, PROOF_BYTES)
        about = self._about(records, sequences, places)
        keys = self._keys(records, sequences, [row[0].tobytes() for row in tags])
        good = np.zeros(len(rows), np.bool_)
        asked = zip(rows.tolist(), parts.tolist(), addresses.tolist(), lengths.tolist(), strict=True)
        for index, (row, part, address, length) in enumerate(asked):
            good[index] = self._decrypt_one(keys[row], about[row], part, address, length, tags[row, 1 + part].tobytes())
        if not good.all() and not self._has_warned:
            self._has_warned = True
            LOG.warning("KV that does not decrypt under this key (%s) is taken for missing", self._master.name)
        return good

    def _keys(self, records: GroupRecords, sequences: U64, opened: list[bytes]) -> list[bytes]:
        """Return the key of each group."""
        made = zip(records.keys.tolist(), sequences.tolist(), opened, strict=True)
        return [
            self._master.expand(b"group", self._identity, key, once, number.to_bytes(8, "little"))
            for key, number, once in made
        ]

    def _about(self, records: GroupRecords, sequences: U64, places: I64) -> list[bytes]:
        """Return what is authenticated beside the bytes of each group."""
        numbers = "num_tokens", "num_blocks", "sequence", "place"
        names = "identity", "key", "parent"
        fields: list[Any] = [(name, KEY) for name in names] + [(name, "<i8") for name in numbers]
        told = np.zeros(len(records), np.dtype([*fields, ("block_keys", KEY, (records.block_keys.shape[1],))]))
        told["identity"] = np.frombuffer(self._identity, KEY)[0]
        told["key"], told["parent"], told["sequence"], told["place"] = records.keys, records.parents, sequences, places
        told["num_tokens"], told["num_blocks"] = records.num_tokens, records.num_blocks
        is_valid = np.arange(records.block_keys.shape[1]) < records.num_blocks[:, None]
        told["block_keys"][is_valid] = records.block_keys[is_valid]
        return [row.tobytes() for row in told]

    def _decrypt_one(self, key: bytes, about: bytes, part: int, address: int, length: int, tag: bytes) -> bool:
        """Decrypt in place, and say whether it was what was encrypted."""
        working = self._ciphers.cipher(self._ciphers.aes(key), self._ciphers.gcm(_nonce(part))).decryptor()
        working.authenticate_additional_data(about)
        working.update_into(_view(address, length), _view(address, length))
        try:
            working.finalize_with_tag(tag)
        except self._invalid:
            return False
        return True


def _encrypt_one(working: Any, about: bytes, part: int, source: int, target: int, length: int) -> bytes:
    """Return the tag of `length` bytes encrypted from `source` to `target`, behind which it is put, too."""
    working.encrypt_into(_nonce(part), _view(source, length), about, _view(target, length + PROOF_BYTES))
    return ctypes.string_at(target + length, PROOF_BYTES)


def _nonce(part: int) -> bytes:
    return part.to_bytes(12, "little")


def _view(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * length).from_address(address)).cast("B")


@dataclass(frozen=True, slots=True)
class _Ciphers:
    cipher: Any
    aes: Any
    gcm: Any
    aesgcm: Any


def _library() -> tuple[_Ciphers, type[Exception]]:
    """Return what encrypts, and what it raises for bytes that are not what was encrypted."""
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import GCM
    except ImportError:
        raise UnsupportedError(
            "a key file asks for encryption, and cryptography is not here; type pip install 'kvtide[encrypt]'"
        ) from None
    return _Ciphers(Cipher, AES, GCM, AESGCM), InvalidTag
