"""The remote tier: groups as checked values on another machine, which others write to as well. Next: stacked.

Decides names, framing, what may be believed, and when the remote is left alone. Knows no client library: it moves bytes
through a `RemoteClient`. What arrives short, foreign, stale or corrupt is a miss, never wrong bytes; a remote that is
dead or hangs costs one time-out, then nothing until the breaker lets a probe through.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KeyArray
from kvtide.io.ops import address_of
from kvtide.spec import SlotLayout
from kvtide.tiers.breaker import REST_NS, Breaker
from kvtide.tiers.cipher import Cipher
from kvtide.tiers.client import RegistersMemory, RemoteClient, RemoteDown, Values
from kvtide.tiers.contract import CORRUPT, FAILED, FULL, MISSING, OK, Cause, GroupRecords, Reason, Statuses, TierStats
from kvtide.tiers.encryptedpieces import pieces_for
from kvtide.tiers.envelope import HEADER_BYTES, MANIFEST, PLAIN, ZSTD, Envelope, checksums_at
from kvtide.tiers.gate import Gate
from kvtide.tiers.packing import Packer
from kvtide.tiers.pieces import Pieces, Rows, worst

WRITE_BYTES_MAX = 8 << 20  # of groups written before somebody who reads may come in between
KNOWN_GROUPS = 16384  # groups whose manifests are remembered


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Knobs of a remote tier. None changes results.

    `num_groups` is how many groups on the remote are kept account of at once. `zstd_level` 0 is no compression.
    """

    num_groups: int = KNOWN_GROUPS
    zstd_level: int = 0
    rest_ns: int = REST_NS


class RemoteTier:
    """A `Tier` on another machine.

    `stats` counts what this process wrote or found there; the remote may hold more, or have dropped some.
    Threads: any; who reads goes before who writes, and waits for one call of a write at most.
    """

    def __init__(
        self,
        connect: Callable[[], RemoteClient],
        layout: SlotLayout,
        identity_digest: bytes,
        options: RemoteOptions = RemoteOptions(),
        *,
        name: str = "remote",
        now_ns: Callable[[], int] = time.monotonic_ns,
        cipher: Cipher | None = None,
    ) -> None:
        """Make a tier; `connect` is called when something is first asked of it, and may raise RemoteDown.

        `cipher` encrypts what is put there, and goes with a layout of encrypted slots.
        Raises: ConfigError for a level zstd does not have, or any with a cipher; UnsupportedError without its package.
        """
        self.layout, self.name = layout, name
        self.breaker = Breaker(name, now_ns, rest_ns=options.rest_ns)
        self._connect = connect
        self._client: RemoteClient | None = None
        self.envelope = Envelope(layout, identity_digest)
        self.prefix = self.envelope.prefix  # of every name
        self._encrypted = pieces_for(cipher, self.envelope, layout, options.zstd_level)
        self._packer = Packer(options.zstd_level)
        self._manifests: OrderedDict[bytes, npt.NDArray[np.void]] = OrderedDict()
        self._num_groups = options.num_groups
        self._memory: list[npt.NDArray[np.uint8]] = []
        self._stats = TierStats(capacity_bytes=options.num_groups * layout.slot_bytes)
        self.pieces = Pieces(self.envelope, self._packer, self._stats, self._encrypted)
        self._gate = Gate()

    @property
    def can_stream(self) -> bool:
        """Whether layers can go there one by one: encrypted groups go whole, each with a proof of all its pieces."""
        return self._encrypted is None

    # The contract

    def lookup(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        found = np.zeros(len(keys), np.bool_)
        with self.reached(len(keys)) as client:
            if client is not None:
                found = client.exists(self.envelope.manifest_names(keys))
        return found

    def find(self, keys: KeyArray, *, is_last: bool = False) -> GroupRecords:
        """Return the records of those of `keys` whose groups are there, in the order asked for.

        One pass of the client, whatever the number of keys. `is_last`: for somebody who only sends.
        """
        found = np.zeros(len(keys), np.bool_)
        rows = np.zeros(len(keys), self.envelope.manifest)
        with self.reached(len(keys), is_last=is_last) as client:
            if client is not None:
                found, rows = self._fetch_manifests(client, keys)
        return self.envelope.records(keys[found], rows[found])

    def read(self, keys: KeyArray, requests: npt.NDArray[np.void], *, cause: Cause) -> Statuses:
        del cause
        statuses, is_done = np.full(len(requests), MISSING, np.uint8), False
        with self.reached(len(requests)) as client:
            if client is not None:
                self._read_known(client, keys, requests, statuses)
                is_done = True
        if not is_done:
            self._stats.num_failed += int((statuses != OK).sum())
        return statuses

    def _read_known(
        self, client: RemoteClient, keys: KeyArray, requests: npt.NDArray[np.void], statuses: Statuses
    ) -> None:
        """Do what `read` does, as far as it comes: `statuses` are filled in."""
        known, manifests = self._manifests_of(client, keys, requests["row"])
        statuses[:] = self.pieces.read(client, keys, requests, known, manifests)
        again = self._fetch_if_changed(client, keys, requests["row"][statuses != OK], known, manifests)
        if len(again):  # written anew since its manifest was read: what was read may be of the one before
            late = np.flatnonzero(np.isin(requests["row"], again))
            statuses[late] = self.pieces.read(client, keys, requests[late], known, manifests)
        is_known = known[requests["row"]]
        self._stats.num_corrupt += int((statuses == CORRUPT).sum())
        self._stats.num_failed += int(((statuses != OK) & (statuses != CORRUPT) & is_known).sum())
        corrupt = np.unique(requests["row"][statuses == CORRUPT])
        gone = np.setdiff1d(requests["row"][(statuses == MISSING) & is_known], corrupt)  # what failed may be there
        self._remove(client, keys[corrupt], "corrupt")
        self._remove(client, keys[gone], "evicted")

    def write(self, records: GroupRecords, addresses: npt.NDArray[np.uint64], *, cause: Cause) -> Statuses:
        del cause
        statuses = np.full(len(records), FAILED, np.uint8)
        step = max(1, WRITE_BYTES_MAX // self.layout.slot_bytes)
        for start in range(0, len(records), step):
            part = slice(start, start + step)
            with self.reached(is_last=True) as client:
                if client is not None:
                    statuses[part] = self._write(client, records.take(part), addresses[part])
        self._stats.num_full += int((statuses == FULL).sum())
        self._stats.num_failed += int((statuses == FAILED).sum())
        return statuses

    def drop(self, keys: KeyArray, *, reason: Reason = "dropped") -> None:
        with self.reached(len(keys)) as client:
            if client is not None:
                self._remove(client, keys, reason)

    def publish(self, records: GroupRecords, checksums: npt.NDArray[np.uint64], stored_bytes: Rows, codec: int) -> None:
        """Make groups whole whose pieces are there. Shapes: checksums, stored_bytes [n, P]."""
        with self.reached() as client:
            if client is not None:
                manifests = self.envelope.manifests(records, checksums, stored_bytes, codec)
                self._write_manifests(client, records.keys, manifests)

    def stats(self) -> TierStats:
        self._stats.num_groups = len(self._manifests)
        self._stats.used_bytes = len(self._manifests) * self.layout.slot_bytes
        return self._stats

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Say that KV is written from this memory: some clients then do so without a copy."""
        with self._gate.last():
            self._memory.append(memory)
            try:
                if isinstance(self._client, RegistersMemory):
                    self._client.register(memory)
            except Exception as error:
                self._give_up(error)

    def close(self) -> None:
        """Give the connection back. Idempotent."""
        if self._client is not None:
            self._client.close()

    # The remote as a whole

    @contextmanager
    def reached(self, num: int = 1, *, is_last: bool = False) -> Iterator[RemoteClient | None]:
        """Have the client to oneself: None where the remote is left alone, or nothing (`num` 0) is asked of it.

        What goes wrong meanwhile ends the block and nothing else: the remote is an extra.
        """
        if not num:  # who asks nothing does not wait for those who do
            yield None
            return
        with self._gate.last() if is_last else self._gate.first():
            client = self._reach()
            try:
                yield client
            except Exception as error:  # of a library too
                self._give_up(error)

    def _reach(self) -> RemoteClient | None:
        """Return the client, None while the remote is left alone; probe it when that has been long enough."""
        if self.breaker.is_resting():
            return None
        try:
            if self._client is None:
                self._client = self._connect()
                if isinstance(self._client, RegistersMemory):
                    for memory in self._memory:
                        self._client.register(memory)
            if self.breaker.is_open:
                self._client.exists([self.envelope.probe_name()])
        except Exception as error:  # of a library too: the remote is an extra
            self._give_up(error)
            return None
        self.breaker.succeed()
        return self._client

    def _give_up(self, error: Exception) -> None:
        self.breaker.fail(error if isinstance(error, RemoteDown) else f"failed ({type(error).__name__}: {error})")

    # Manifests

    def _fetch_manifests(
        self, client: RemoteClient, keys: KeyArray
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.void]]:
        """Read manifests and remember the good ones; return which those are, and all. Shapes: [n], [n]."""
        num, envelope = len(keys), self.envelope
        rows = np.zeros(num, envelope.manifest)
        size = envelope.manifest.itemsize
        addresses = np.uint64(address_of(rows.view(np.uint8))) + np.arange(num, dtype=np.uint64) * np.uint64(size)
        lengths = np.full(num, size, np.int64)
        values = Values(np.zeros((num, HEADER_BYTES), np.uint8), addresses, lengths)
        found = np.flatnonzero(client.get(envelope.manifest_names(keys), values) == OK)
        self.pieces.count_read(len(found), int(lengths[found].sum()))
        zeros = np.zeros(len(found), np.int64)
        checked, checksums, _ = envelope.check(
            values.headers[found], keys[found], zeros + MANIFEST, zeros, lengths[found], lengths[found]
        )
        intact = checksums == checksums_at(addresses[found].tolist(), lengths[found].tolist(), len(found))
        self._stats.num_corrupt += int(((checked == CORRUPT) | ((checked == OK) & ~intact)).sum())
        good = np.zeros(num, np.bool_)
        good[found] = (checked == OK) & intact & envelope.plausible(rows[found])
        is_packed = good & (rows["codec"] == ZSTD)
        if is_packed.any() and not self._packer.can_unpack():  # not there for us, but for others
            self._stats.num_failed += int(is_packed.sum())
            good &= ~is_packed
        for index, key in enumerate(keys.tolist()):
            if good[index]:
                self._remember(key, rows[index])
            else:
                self._manifests.pop(key, None)
        return good, rows

    def _remember(self, key: bytes, manifest: npt.NDArray[np.void]) -> None:
        self._manifests[key] = manifest.copy()
        self._manifests.move_to_end(key)
        if len(self._manifests) > self._num_groups:
            self._manifests.popitem(last=False)

    def _manifests_of(
        self, client: RemoteClient, keys: KeyArray, wanted: npt.NDArray[np.integer]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.void]]:
        """Return for which keys a manifest is known, and all of them; only the `wanted` rows are looked for."""
        rows = np.zeros(len(keys), self.envelope.manifest)
        known = np.zeros(len(keys), np.bool_)
        wanted = np.unique(wanted)
        for index in wanted.tolist():
            manifest = self._manifests.get(keys[index].tobytes())
            if manifest is not None:
                rows[index], known[index] = manifest, True
        absent = wanted[~known[wanted]]
        if len(absent):
            known[absent], rows[absent] = self._fetch_manifests(client, keys[absent])
        return known, rows

    def _fetch_if_changed(
        self,
        client: RemoteClient,
        keys: KeyArray,
        failed: npt.NDArray[np.integer],
        known: npt.NDArray[np.bool_],
        manifests: npt.NDArray[np.void],
    ) -> Rows:
        """Read the manifests of rows that failed again; return the rows that have another one now, noted in place."""
        asked: Rows = np.unique(failed[known[failed]].astype(np.int64))
        if not len(asked):
            return asked
        found, rows = self._fetch_manifests(client, keys[asked])
        is_other = np.array(rows != manifests[asked], np.bool_)
        manifests[asked[found]] = rows[found]
        return asked[found & is_other]

    def _write(self, client: RemoteClient, records: GroupRecords, addresses: npt.NDArray[np.uint64]) -> Statuses:
        """Store groups, pieces first and manifests last; what did not become whole is removed. Returns [n]."""
        at, encrypted = None, None
        if self._encrypted is not None:
            at, encrypted = self._encrypted.encrypt(records, self.pieces.places(addresses))
        sent = self.pieces.put(
            client, records.keys, addresses, np.arange(self.envelope.num_pieces), at=at, owner=encrypted
        )
        statuses = worst(sent.statuses)
        whole = np.flatnonzero(statuses == OK)
        if len(whole):
            manifests = self.envelope.manifests(
                records.take(whole), sent.checksums[whole], sent.stored_bytes[whole], sent.codec
            )
            if encrypted is not None:
                manifests["sequence"], manifests["proof"] = encrypted.sequences[whole], encrypted.proofs[whole]
            statuses[whole] = self._write_manifests(client, records.keys[whole], manifests)
        self._remove(client, records.keys[statuses != OK], "failed")
        return statuses

    def _write_manifests(self, client: RemoteClient, keys: KeyArray, manifests: npt.NDArray[np.void]) -> Statuses:
        size, num = manifests.dtype.itemsize, len(keys)
        addresses = np.uint64(address_of(manifests.view(np.uint8))) + np.arange(num, dtype=np.uint64) * np.uint64(size)
        lengths, zeros = np.full(num, size, np.int64), np.zeros(num, np.int64)
        checksums = checksums_at(addresses.tolist(), lengths.tolist(), num)
        headers = self.envelope.headers(keys, zeros + MANIFEST, zeros, lengths, lengths, checksums, zeros + PLAIN)
        statuses = client.put(self.envelope.manifest_names(keys), Values(headers, addresses, lengths, manifests))
        self.pieces.count_written(statuses, lengths)
        for index in np.flatnonzero(statuses == OK).tolist():
            self._remember(keys[index].tobytes(), manifests[index])
        return statuses

    def _remove(self, client: RemoteClient, keys: KeyArray, reason: Reason) -> None:
        if not len(keys):
            return
        gone = [self._manifests.pop(key, None) for key in keys.tolist()]
        self._stats.note_dropped(len(gone) - gone.count(None), reason)
        client.remove(self.envelope.names(keys))
