"""Groups made smaller for the ring, without loss. Next: ring.

Theory. Four rows of 1 KiB fill a page, so with anything else beside them they need another one. But of a float32 the
byte of sign and exponent takes few values: coded by their frequency (Huffman) it shrinks to less than half. Each of the
four bytes of all words is coded apart, and kept as it is where that does not help.

    magic 8 | bytes of the group u32 | bytes of each plane u32 x 4 | zeros 4 | planes | zeros to a multiple of 8

The group has its own checksum, so there is none here: what was changed does not unpack to a group.
"""

from __future__ import annotations

import zlib

import numpy as np

from kvtide.recall.records import ALIGN_BYTES

PACK_MAGIC = b"KVTPACK\0"
PLANES = 4
_HEAD = np.dtype([("magic", "V8"), ("num_bytes", "<u4"), ("planes", "<u4", PLANES), ("zeros", "<u4")])


def packed(raw: bytes) -> bytes:
    """Return a group, whose bytes are a multiple of 8, packed; itself if that is not smaller."""
    words = np.frombuffer(raw, np.uint8).reshape(-1, PLANES)
    planes = [_coded(words[:, one].tobytes()) for one in range(PLANES)]
    head = np.zeros(1, _HEAD)
    head["magic"], head["num_bytes"] = np.frombuffer(PACK_MAGIC, "V8")[0], len(raw)
    head["planes"][0] = [len(one) for one in planes]
    made = b"".join([head.tobytes(), *planes])
    made += bytes(-len(made) % ALIGN_BYTES)
    return made if len(made) < len(raw) else raw


def unpacked(view: memoryview, at: int, *, bytes_max: int) -> bytes:
    """Return the group packed at byte `at`, empty if there is none or more than `bytes_max`."""
    if at + _HEAD.itemsize > len(view):
        return b""
    head = np.frombuffer(view, _HEAD, 1, at)[0]
    num, lengths = int(head["num_bytes"]), head["planes"].astype(np.int64)
    ends = at + _HEAD.itemsize + np.cumsum(lengths)
    if bytes(view[at : at + 8]) != PACK_MAGIC or num > bytes_max or num % ALIGN_BYTES or ends[-1] > len(view):
        return b""
    words = np.zeros((num // PLANES, PLANES), np.uint8)
    for one, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
        plane = _decoded(bytes(view[end - length : end]), num // PLANES)
        if len(plane) != num // PLANES:
            return b""
        words[:, one] = np.frombuffer(plane, np.uint8)
    return words.tobytes()


def _coded(plane: bytes) -> bytes:
    coder = zlib.compressobj(1, zlib.DEFLATED, -9, 8, zlib.Z_HUFFMAN_ONLY)
    coded = coder.compress(plane) + coder.flush()
    return coded if len(coded) < len(plane) else plane


def _decoded(coded: bytes, num_bytes: int) -> bytes:
    if len(coded) == num_bytes:
        return coded
    try:
        return zlib.decompressobj(-9).decompress(coded, num_bytes)
    except zlib.error:
        return b""
