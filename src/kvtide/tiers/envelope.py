"""The bytes of a remote object: names, headers, manifests; made, and read without trusting them. Next: remote.

Theory. A group is stored as pieces and one manifest, each a value of its own:

    name      kvtide:<identity, hex>:{<key, hex>}:<piece number, or m>     the braces keep a group on one cluster node
    value     header 128 | payload
    header    magic 8 | version u32 | fragment u32 | identity 32 | key 32 | offset u64 | codec u32 | 0 u32
              raw bytes u64 | stored bytes u64 | xxh3-64 of the raw payload u64 | xxh3-64 of the header before it u64
    manifest  parent 32 | tokens u32 | blocks u32 | codec u32 | pieces u32 | block keys G x 32
              xxh3-64 of every piece P x u64 | stored bytes of every piece P x u32

Of encrypted KV the pieces are encrypted, each by itself, and the manifest ends with `sequence u64 | proof 16 + P x 16`
(`cipher`); every checksum is then of encrypted bytes.

A piece is a fragment, or 1 MiB of a larger one. The manifest is written last: without it the group is not there. It
names every piece by its checksum, so pieces that another writer left there are never taken for those it was made of.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash

from kvtide.blocks import KEY, KeyArray
from kvtide.spec import SlotLayout
from kvtide.spec.layout import PROOF_BYTES
from kvtide.tiers.contract import CORRUPT, MISSING, OK, GroupRecords, Statuses

MAGIC = b"KVTREM\0\0"
FORMAT_VERSION = 1
PIECE_BYTES = 1 << 20  # small enough for any server's limit of a value, large enough for a network's full rate
MANIFEST = 0xFFFFFFFF  # stands in a header where a piece has the number of its fragment
PLAIN, ZSTD = 0, 1  # codecs

HEADER = np.dtype(
    [
        ("magic", "V8"),
        ("version", "<u4"),
        ("fragment", "<u4"),
        ("identity", KEY),
        ("key", KEY),
        ("offset", "<u8"),
        ("codec", "<u4"),
        ("zero", "<u4"),
        ("raw_bytes", "<u8"),
        ("stored_bytes", "<u8"),
        ("checksum", "<u8"),
        ("header_checksum", "<u8"),
    ]
)
HEADER_BYTES = HEADER.itemsize
_CHECKED_BYTES = HEADER_BYTES - 8


class Envelope:
    """How groups of one layout and identity are cut, named and checked.

    Shapes: fragments, offsets, lengths [P], one entry a piece; `first[f]` is the first piece of fragment f.
    """

    def __init__(self, layout: SlotLayout, identity_digest: bytes) -> None:
        self._layout, self._identity = layout, np.frombuffer(identity_digest, KEY)[0]
        self.prefix = f"kvtide:{identity_digest.hex()}:"
        sizes = layout.fragment_padded_bytes
        counts = [-(-size // PIECE_BYTES) for size in sizes]
        self.num_pieces = sum(counts)
        self.first = np.append(0, np.cumsum(counts)).astype(np.int64)
        self.fragments = np.repeat(np.arange(len(sizes)), counts)
        self.offsets = (np.arange(self.num_pieces) - self.first[self.fragments]) * PIECE_BYTES
        self.lengths = np.minimum(np.array(sizes)[self.fragments] - self.offsets, PIECE_BYTES).astype(np.int64)
        self.manifest = np.dtype(
            [
                ("parent", KEY),
                ("num_tokens", "<u4"),
                ("num_blocks", "<u4"),
                ("codec", "<u4"),
                ("num_pieces", "<u4"),
                ("block_keys", KEY, (layout.group_blocks,)),
                ("checksums", "<u8", (self.num_pieces,)),
                ("stored_bytes", "<u4", (self.num_pieces,)),
                *(
                    [("sequence", "<u8"), ("proof", "u1", (PROOF_BYTES * (1 + self.num_pieces),))]
                    if layout.is_encrypted
                    else []
                ),
            ]
        )

    # Names

    def piece_names(self, keys: KeyArray, rows: npt.NDArray[np.integer], pieces: npt.NDArray[np.integer]) -> list[str]:
        """Return the names of pieces of the groups `keys[rows]`. Shapes: rows, pieces [n]."""
        stems = [f"{self.prefix}{{{key.hex()}}}:" for key in keys.tolist()]
        return [f"{stems[row]}{piece}" for row, piece in zip(rows.tolist(), pieces.tolist(), strict=True)]

    def manifest_names(self, keys: KeyArray) -> list[str]:
        """Return the names of the manifests of groups."""
        return [f"{self.prefix}{{{key.hex()}}}:m" for key in keys.tolist()]

    def names(self, keys: KeyArray) -> list[str]:
        """Return every name that groups may have, manifests first: they must go first."""
        rows = np.repeat(np.arange(len(keys)), self.num_pieces)
        pieces = self.piece_names(keys, rows, np.tile(np.arange(self.num_pieces), len(keys)))
        return self.manifest_names(keys) + pieces

    def probe_name(self) -> str:
        """Return a name that nothing has."""
        return f"{self.prefix}probe"

    # Headers

    def headers(
        self,
        keys: KeyArray,
        fragments: npt.NDArray[np.integer],
        offsets: npt.NDArray[np.integer],
        raw_bytes: npt.NDArray[np.integer],
        stored_bytes: npt.NDArray[np.integer],
        checksums: npt.NDArray[np.uint64],
        codecs: npt.NDArray[np.integer],
    ) -> npt.NDArray[np.uint8]:
        """Return headers as bytes. Shapes: every argument [n]; returns [n, 128]."""
        rows = np.zeros(len(keys), HEADER)
        rows["magic"], rows["version"] = np.frombuffer(MAGIC, "V8")[0], FORMAT_VERSION
        rows["identity"], rows["key"], rows["fragment"], rows["offset"] = self._identity, keys, fragments, offsets
        rows["codec"], rows["raw_bytes"], rows["stored_bytes"] = codecs, raw_bytes, stored_bytes
        rows["checksum"] = checksums
        raw = rows.view(np.uint8).reshape(len(rows), HEADER_BYTES)
        rows["header_checksum"] = list(map(xxhash.xxh3_64_intdigest, raw[:, :_CHECKED_BYTES].copy()))
        return raw

    def check(
        self,
        headers: npt.NDArray[np.uint8],
        keys: KeyArray,
        fragments: npt.NDArray[np.integer],
        offsets: npt.NDArray[np.integer],
        raw_bytes: npt.NDArray[np.integer],
        stored_bytes: npt.NDArray[np.integer],
    ) -> tuple[Statuses, npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
        """Return of each header: OK, CORRUPT (its own checksum differs) or MISSING (of something else); and what it
        says of the payload: checksum and codec.

        Shapes: headers [n, 128], all else [n].
        """
        rows = np.ascontiguousarray(headers).view(HEADER).reshape(len(headers))
        ours = (rows["magic"] == np.frombuffer(MAGIC, "V8")[0]) & (rows["version"] == FORMAT_VERSION)
        found = np.fromiter(
            map(xxhash.xxh3_64_intdigest, np.ascontiguousarray(headers[:, :_CHECKED_BYTES])), np.uint64, len(rows)
        )
        intact = found == rows["header_checksum"]
        expected = (rows["identity"] == self._identity) & (rows["key"] == keys) & (rows["fragment"] == fragments)
        expected &= (rows["offset"] == offsets) & (rows["raw_bytes"] == raw_bytes)
        expected &= (rows["stored_bytes"] == stored_bytes) & (rows["codec"] <= ZSTD)
        statuses = np.where(ours & intact & expected, OK, np.where(ours & ~intact, CORRUPT, MISSING)).astype(np.uint8)
        return statuses, rows["checksum"], rows["codec"]

    # Manifests

    def manifests(
        self,
        records: GroupRecords,
        checksums: npt.NDArray[np.uint64],
        stored_bytes: npt.NDArray[np.integer],
        codec: int,
    ) -> npt.NDArray[np.void]:
        """Return manifests. Shapes: checksums, stored_bytes [n, P]; returns [n]."""
        rows = np.zeros(len(records), self.manifest)
        rows["parent"], rows["num_tokens"], rows["num_blocks"] = records.parents, records.num_tokens, records.num_blocks
        is_valid = np.arange(self._layout.group_blocks) < records.num_blocks[:, None]
        rows["block_keys"][is_valid] = records.block_keys[is_valid]
        rows["codec"], rows["num_pieces"] = codec, self.num_pieces
        rows["checksums"], rows["stored_bytes"] = checksums, stored_bytes
        return rows

    def plausible(self, rows: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """Say which manifests describe a group of this layout. Shapes: rows [n]."""
        layout, num_blocks = self._layout, rows["num_blocks"].astype(np.int64)
        good: npt.NDArray[np.bool_] = (rows["num_pieces"] == self.num_pieces) & (rows["codec"] <= ZSTD)
        good &= (rows["num_tokens"] >= 1) & (rows["num_tokens"] <= layout.tokens_per_group)
        good &= num_blocks == -(-rows["num_tokens"].astype(np.int64) // layout.block_tokens)
        good &= ((rows["stored_bytes"] >= 1) & (rows["stored_bytes"] <= self.lengths)).all(axis=1)
        is_plain = (rows["stored_bytes"] == self.lengths).all(axis=1)
        if self._layout.is_encrypted:  # what is encrypted is not compressed
            return good & is_plain & (rows["codec"] == PLAIN)
        return good & (is_plain | (rows["codec"] == ZSTD))

    @staticmethod
    def records(keys: KeyArray, rows: npt.NDArray[np.void]) -> GroupRecords:
        """Return manifests as records. Shapes: keys, rows [n]."""
        num_tokens, num_blocks = rows["num_tokens"].astype(np.int64), rows["num_blocks"].astype(np.int64)
        return GroupRecords(keys, rows["parent"].copy(), num_tokens, num_blocks, rows["block_keys"].copy())


def checksums_at(addresses: Iterable[int], lengths: Iterable[int], num: int) -> npt.NDArray[np.uint64]:
    """Return the xxh3-64 of `num` runs of this process's memory."""
    views = (
        (ctypes.c_uint8 * length).from_address(address) for address, length in zip(addresses, lengths, strict=True)
    )
    return np.fromiter(map(xxhash.xxh3_64_intdigest, views), np.uint64, num)
