"""The bytes of a slot's header: encode, and decode without trusting them. Next: file.

Theory. A slot is `[header][fragment 0][fragment 1]...`, each starting on a page. The header is the
only truth about a slot: whose KV it is, how much of it is valid, and the checksum of every fragment. It carries a
checksum of itself, so a torn header reads as an empty slot.

    magic 8 | version u32 | fragments u32 | identity 32 | key 32 | parent 32 | tokens u32 | blocks u32 | sequence u64
    block keys G x 32 | fragment checksums F x u64 | header checksum u64 | zeros to the end of the header

Of encrypted slots the version is 2, and before the header checksum lies their proof: 16 random bytes, then a tag of 16
a fragment (`cipher`). The checksums are of what is in the file, so a flipped bit is told without the key.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvtide.blocks import KEY
from kvtide.spec import SlotLayout
from kvtide.tiers.contract import GroupRecords

MAGIC = b"KVTSLOT\0"
FORMAT_VERSION, ENCRYPTED_VERSION = 1, 2
SEQUENCE_MAX = 1 << 62  # no process writes as many groups; what is above could not be counted on from


@dataclass(frozen=True, slots=True)
class Decoded:
    """Headers as arrays; rows where `valid` is False hold garbage and mean an empty slot."""

    valid: npt.NDArray[np.bool_]
    records: GroupRecords
    sequences: npt.NDArray[np.uint64]
    checksums: npt.NDArray[np.uint64]
    proofs: npt.NDArray[np.uint8]


class HeaderCodec:
    """Headers of one namespace: fixed geometry and identity."""

    def __init__(self, layout: SlotLayout, identity_digest: bytes) -> None:
        self._layout = layout
        self._identity = np.frombuffer(identity_digest, KEY)[0]
        num_fragments = self._num_fragments = layout.num_fragments
        self._version = ENCRYPTED_VERSION if layout.is_encrypted else FORMAT_VERSION
        self._dtype = np.dtype(
            [
                ("magic", "V8"),
                ("version", "<u4"),
                ("num_fragments", "<u4"),
                ("identity", KEY),
                ("key", KEY),
                ("parent", KEY),
                ("num_tokens", "<u4"),
                ("num_blocks", "<u4"),
                ("sequence", "<u8"),
                ("block_keys", KEY, (layout.group_blocks,)),
                ("checksums", "<u8", (num_fragments,)),
                ("proof", "u1", (layout.proof_bytes,)),
                ("header_checksum", "<u8"),
            ]
        )
        self._checked_bytes = self._dtype.itemsize - 8
        assert self._dtype.itemsize <= layout.header_bytes, "SlotLayout reserves too small a header"

    def encode(
        self,
        records: GroupRecords,
        sequences: npt.NDArray[np.uint64],
        checksums: npt.NDArray[np.uint64],
        pages: npt.NDArray[np.uint8],
        proofs: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """Write headers into `pages`. Shapes: checksums [n, F]; proofs [n, proof_bytes]; pages [n, header_bytes]."""
        rows = np.zeros(len(records), self._dtype)
        rows["magic"] = np.frombuffer(MAGIC, "V8")[0]
        rows["version"], rows["num_fragments"], rows["identity"] = self._version, self._num_fragments, self._identity
        rows["key"], rows["parent"] = records.keys, records.parents
        rows["num_tokens"], rows["num_blocks"] = records.num_tokens, records.num_blocks
        rows["sequence"], rows["block_keys"], rows["checksums"] = sequences, records.block_keys, checksums
        if proofs is not None:
            rows["proof"] = proofs
        raw = rows.view(np.uint8).reshape(len(rows), self._dtype.itemsize)
        rows["header_checksum"] = list(map(xxhash.xxh3_64_intdigest, raw[:, : self._checked_bytes].copy()))
        pages[:] = 0
        pages[:, : self._dtype.itemsize] = raw

    def decode(self, pages: npt.NDArray[np.uint8]) -> Decoded:
        """Read headers; a row is valid only if every field agrees with its checksum and this namespace."""
        raw = np.ascontiguousarray(pages[:, : self._dtype.itemsize])
        rows = raw.view(self._dtype).reshape(len(pages))
        layout = self._layout
        num_tokens, num_blocks = rows["num_tokens"].astype(np.int64), rows["num_blocks"].astype(np.int64)
        valid = (rows["magic"] == np.frombuffer(MAGIC, "V8")[0]) & (rows["version"] == self._version)
        valid &= (rows["num_fragments"] == self._num_fragments) & (rows["identity"] == self._identity)
        valid &= (num_tokens >= 1) & (num_tokens <= layout.tokens_per_group)
        valid &= num_blocks == -(-num_tokens // layout.block_tokens)
        valid &= rows["sequence"] < SEQUENCE_MAX
        for index in np.flatnonzero(valid).tolist():
            valid[index] = (
                xxhash.xxh3_64_intdigest(raw[index, : self._checked_bytes].data) == rows["header_checksum"][index]
            )
        records = GroupRecords(rows["key"], rows["parent"], num_tokens, num_blocks, rows["block_keys"])
        return Decoded(valid, records, rows["sequence"], rows["checksums"], rows["proof"])
