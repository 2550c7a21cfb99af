"""What a clean close leaves so that the next open need not scan: all headers, in one file. Next: namespace.

Decides what of such a file is believed: all of it or nothing. Its form is in docs/formats.md.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from kvtide.spec import SlotLayout
from kvtide.tiers.file import FileTier
from kvtide.tiers.guard import partial_of, read_file, sync_directory, write_whole
from kvtide.tiers.header import FORMAT_VERSION, HeaderCodec

CHECKPOINT = "checkpoint.kvt"
_MAGIC = b"KVTCHKP2"
_HEAD = np.dtype(
    [("magic", "S8"), ("version", "<u4"), ("header_bytes", "<u4"), ("num_slots", "<u8"), ("sequence", "<u8")]
)


def write_checkpoint(path: Path, tier: FileTier) -> None:
    """Leave what the next owner would otherwise have to scan for; where that fails, it scans."""
    slots, pages = tier.headers()
    head = np.array([(_MAGIC, FORMAT_VERSION, pages.shape[1], tier.num_slots, tier.sequence)], _HEAD)
    body = b"".join(
        [
            head.tobytes(),
            np.uint64(len(slots)).tobytes(),
            slots.astype("<u8").tobytes(),
            pages.tobytes(),
            np.packbits(tier.table.has_header).tobytes(),  # free slots that must be wiped before use, too
        ]
    )
    try:
        write_whole(path / CHECKPOINT, body + xxhash.xxh3_64_digest(body))
    except OSError:
        with suppress(OSError):
            partial_of(path / CHECKPOINT).unlink(missing_ok=True)  # the next open scans instead


def take_checkpoint(path: Path, tier: FileTier, layout: SlotLayout, identity_digest: bytes, num_before: int) -> bool:
    """Adopt what a clean close left; say whether there was such a thing. It is used once.

    `num_before` are the slots that the file had then: it may be smaller by now.
    """
    file = path / CHECKPOINT
    if not os.path.lexists(file):
        return False
    body = read_checkpoint(file, tier, num_before)
    file.unlink()
    sync_directory(path)  # or a power cut could bring it back, older than the slots
    return adopt_checkpoint(body, tier, layout, identity_digest)


def read_checkpoint(file: Path, tier: FileTier, num_before: int = 0) -> bytes:
    """Return what a checkpoint file holds; nothing where it is longer than one of this tier, or no file of ours."""
    layout = tier.layout
    num_slots = max(tier.num_slots, num_before, os.fstat(tier.fd).st_size // layout.slot_bytes) + 1
    try:
        return read_file(file, _HEAD.itemsize + 16 + num_slots * (9 + layout.header_bytes))
    except OSError:
        return b""


def adopt_checkpoint(body: bytes, tier: FileTier, layout: SlotLayout, identity_digest: bytes) -> bool:
    """Fill the tier's table from the bytes of a checkpoint; say whether they are one of this namespace."""
    start = _HEAD.itemsize
    if len(body) < start + 16 or xxhash.xxh3_64_digest(body[:-8]) != body[-8:]:
        return False
    head = np.frombuffer(body, _HEAD, 1)[0]
    num = int(np.frombuffer(body, "<u8", 1, start)[0])
    stated = (head["magic"], int(head["version"]), int(head["header_bytes"]))
    if stated != (_MAGIC, FORMAT_VERSION, layout.header_bytes):
        return False
    flags_start = start + 8 + num * (8 + layout.header_bytes)
    if len(body) != flags_start + -(-int(head["num_slots"]) // 8) + 8:
        return False
    slots = np.frombuffer(body, "<u8", num, start + 8).astype(np.int64)
    pages = np.frombuffer(body, np.uint8, num * layout.header_bytes, start + 8 + 8 * num)
    decoded = HeaderCodec(layout, identity_digest).decode(pages.reshape(num, layout.header_bytes))
    kept = decoded.valid & (slots < tier.num_slots) & (slots >= 0)
    if not decoded.valid.all() or len(np.unique(slots)) != num:
        return False
    flags = np.unpackbits(np.frombuffer(body[flags_start:-8], np.uint8), count=int(head["num_slots"]))
    num_slots = min(tier.num_slots, len(flags))
    tier.table.has_header[:num_slots] = flags[:num_slots]
    tier.adopt(slots, decoded, kept)
    tier.write_after(int(head["sequence"]))
    return True
