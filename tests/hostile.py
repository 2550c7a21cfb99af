"""A small store as bytes, ways to damage it, and what must hold of whoever opens it: used by tests and by `make fuzz`.

Damage is done as an accident does it, checksums left as they are, or as somebody who means it: checksums made right
again. Of the first, and of both where the store is encrypted, every byte read is right or a miss. What a person who may
write to a plain store forges well cannot be told from the truth; there it is that nothing crashes, hangs or grows.
"""

from __future__ import annotations

import resource
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash

from kvhelp import small_identity
from kvtide.errors import KvtideError
from kvtide.io.ops import PAGE_BYTES
from kvtide.spec import Dtype, KVShape, LayerShape, SlotLayout
from kvtide.tiers.cipher import MasterKey
from kvtide.tiers.contract import CORRUPT, FAILED, MISSING, OK
from kvtide.tiers.departures import RECORD, _checksums
from kvtide.tiers.glance import glance
from kvtide.tiers.header import HeaderCodec
from kvtide.tiers.inspect import list_namespaces
from kvtide.tiers.namespace import open_namespace
from kvtide.tiers.verify import verify_namespace
from kvtide.tiers.why import why_key
from simkv import Groups, group_key

_LAYER = LayerShape(k_bytes=256, v_bytes=256, num_heads=2)
_SHAPE = KVShape(dtype=Dtype.BF16, layers=(_LAYER,), layer_index=(0,))
MASTER = MasterKey(bytes(range(32)))
NUM_SLOTS, NUM_GROUPS, MEMORY_BYTES_MAX = 4, 3, 64 << 20
KEYS = [group_key(name) for name in range(NUM_GROUPS)]
FILES = ("data.kvt", "checkpoint.kvt", "departures.kvt", "identity.json", "pace.json", "owner.lock")


class HostileStore:
    """A cleanly closed namespace of three groups and a departure, put on disk anew for every damage."""

    def __init__(self, *, is_encrypted: bool, is_clean: bool = True) -> None:
        self.is_encrypted, self.master = is_encrypted, MASTER if is_encrypted else None
        self.layout = SlotLayout(_SHAPE, 4, 2, is_encrypted=is_encrypted)
        self.groups = Groups(self.layout)
        plain = replace(small_identity(self.layout), layers=((0, 256, 256, 2, 0),))
        self.identity = replace(plain, encryption=MASTER.name) if is_encrypted else plain
        self.codec = HeaderCodec(self.layout, self.identity.digest())
        with tempfile.TemporaryDirectory(prefix="kvtide-hostile-") as folder:
            opened = self.open(Path(folder) / "s")
            self.groups.write(opened.tier, KEYS, [0] * NUM_GROUPS)
            self.groups.write(opened.tier, [group_key(99)], [0])
            opened.tier.drop(np.frombuffer(group_key(99), "V32"))
            opened.write_pace("{}")
            opened.close()
            self.name = opened.path.name
            self.files = {name: (opened.path / name).read_bytes() for name in FILES}
        if not is_clean:
            del self.files["checkpoint.kvt"]

    def open(self, root):
        capacity = PAGE_BYTES + NUM_SLOTS * self.layout.slot_bytes
        return open_namespace(
            root, self.identity, self.layout, capacity_bytes=capacity, engine="threads", master=self.master
        )

    def forged(self, files: dict[str, bytes]) -> dict[str, bytes]:
        """Make the checksums of what was damaged right again, as far as they can be found."""
        made, header = {name: bytearray(content) for name, content in files.items()}, self.codec._dtype.itemsize

        def forge_header(raw: bytearray, at: int) -> None:
            if len(raw) >= at + header:
                raw[at + header - 8 : at + header] = xxhash.xxh3_64_intdigest(raw[at : at + header - 8]).to_bytes(
                    8, "little"
                )

        data = made.get("data.kvt", bytearray())
        if len(data) >= PAGE_BYTES:
            data[PAGE_BYTES - 8 : PAGE_BYTES] = xxhash.xxh3_64_digest(bytes(data[: PAGE_BYTES - 8]))
        for slot in range(NUM_SLOTS):
            forge_header(data, PAGE_BYTES + slot * self.layout.slot_bytes)
        body = made.get("checkpoint.kvt", bytearray())
        for group in range(NUM_GROUPS):
            forge_header(body, 24 + 8 + 8 * NUM_GROUPS + group * self.layout.header_bytes)
        if len(body) > 8:
            body[-8:] = xxhash.xxh3_64_digest(bytes(body[:-8]))
        left = made.get("departures.kvt", bytearray())
        rows = np.frombuffer(bytes(left[: len(left) // RECORD.itemsize * RECORD.itemsize]), RECORD).copy()
        if len(rows):
            rows["checksum"] = _checksums(rows.view(np.uint8).reshape(len(rows), -1))
            left[: rows.nbytes] = rows.tobytes()
        return {name: bytes(content) for name, content in made.items()}

    def check(self, files: dict[str, bytes], *, is_forged: bool) -> None:
        """Put the damaged files on disk, look at them in every way there is, and use them."""
        with tempfile.TemporaryDirectory(prefix="kvtide-hostile-") as folder:
            root = Path(folder) / "s"
            self._put(root, self.forged(files) if is_forged else files)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self._look(root)
            shutil.rmtree(root)
            self._put(root, self.forged(files) if is_forged else files)
            self._use(root, must_be_right=self.is_encrypted or not is_forged)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
            assert grown < MEMORY_BYTES_MAX, f"{grown} bytes were held for a store of {sum(map(len, files.values()))}"

    def _put(self, root: Path, files: dict[str, bytes]) -> None:
        path = root / self.name
        path.mkdir(parents=True, mode=0o700)
        (root / "kvtide-store").write_text('{"format": "kvtide store", "version": 1}\n')
        for name, content in files.items():
            (path / name).write_bytes(content)

    def _look(self, root: Path) -> None:
        try:
            infos, glances = list_namespaces(root), glance(root)
        except KvtideError:
            return
        assert all(isinstance(info.problem, str) for info in infos)
        for key in KEYS:
            why_key(key, glances)
        verify_namespace(root / self.name)

    def _use(self, root: Path, *, must_be_right: bool) -> None:
        try:
            opened = self.open(root)
        except KvtideError:
            return
        try:
            for key in KEYS:
                statuses, parts = self.groups.read_group(opened.tier, key)
                assert set(statuses) <= {OK, MISSING, CORRUPT, FAILED}
                if must_be_right and statuses == [OK] * len(statuses):
                    assert self.groups.version_of(key, parts, [0]) == 0, "wrong bytes"
            for fresh in (group_key(50), group_key(51)):
                status = self.groups.write(opened.tier, [fresh], [7])
                if status == [OK]:
                    statuses, parts = self.groups.read_group(opened.tier, fresh)
                    assert statuses == [OK] * len(statuses)
                    assert self.groups.version_of(fresh, parts, [7]) == 7
        finally:
            opened.close()
