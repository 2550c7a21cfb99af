"""A prompt's KV handed over layer by layer, while later layers are still computed. Next: stacked.

Theory. The groups that one step completes are put as usual, pieces of layer 0 first, then those of layer 1, and so on.
Behind each layer goes a *note*, a value of its own that names the layer's pieces by their checksums, as a manifest does
for all layers. Manifests follow the last note: from then on the groups are like any others.

    name   kvtide:<identity>:{<key of the prompt's last group>}:l<layer>, or :x where the prefill gave up
    value  header, fragment 0xFFFFFFFE, offset <layer> | a row a group of the prompt: streamed u8, pieces x (u64, u32)

Who decodes asks for the note of a layer when its attention wants that layer, and believes the pieces it names.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtide.blocks import KeyArray
from kvtide.io.ops import address_of
from kvtide.tiers.client import RemoteClient, Values
from kvtide.tiers.contract import MISSING, OK, GroupRecords, Statuses
from kvtide.tiers.envelope import HEADER_BYTES, PLAIN, checksums_at
from kvtide.tiers.remote import RemoteTier

NOTE = 0xFFFFFFFE  # stands in a header where a piece has the number of its fragment
POLL_S, POLL_S_MAX = 0.002, 0.05  # between two looks for the note of a layer
STALL_S = 10.0  # with no further layer: whoever computes them is gone
LOG = logging.getLogger("kvtide.remote")


class Notes:
    """The notes of one prompt whose groups have `keys`: what they are called, and their rows."""

    def __init__(self, far: RemoteTier, keys: KeyArray) -> None:
        self._far, self._envelope, self.keys = far, far.envelope, keys
        self._stem = f"{far.envelope.prefix}{{{keys[-1].tobytes().hex()}}}:"
        self.num_layers = far.layout.num_layers

    def pieces(self, layer: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the pieces of a layer."""
        parts, first = self._far.layout.layer_fragments(layer), self._envelope.first
        return np.arange(first[parts.start], first[parts.stop])

    def rows(self, layer: int) -> npt.NDArray[np.void]:
        """Return an empty note. Shapes: [groups]."""
        num = len(self.pieces(layer))
        fields = [("is_streamed", "<u4"), ("stored_bytes", "<u4", (num,)), ("checksums", "<u8", (num,))]
        return np.zeros(len(self.keys), np.dtype(fields))

    def name(self, layer: int) -> str:
        """Return the name of a layer's note."""
        return f"{self._stem}l{layer}"

    def names(self) -> list[str]:
        """Return all names."""
        return [*map(self.name, range(self.num_layers)), f"{self._stem}x"]

    def put(self, client: RemoteClient, layer: int, rows: npt.NDArray[np.void], name: str) -> Statuses:
        """Store a note."""
        one, size = np.ones(1, np.int64), rows.nbytes
        address = np.array([address_of(rows.view(np.uint8))], np.uint64)
        checksum = checksums_at(address.tolist(), [size], 1)
        args = (one * NOTE, one * layer, one * size, one * size, checksum, one * PLAIN)
        headers = self._envelope.headers(self.keys[-1:], *args)
        return client.put([name], Values(headers, address, one * size, rows))

    def get(self, client: RemoteClient, layer: int) -> npt.NDArray[np.void] | None:
        """Return a layer's note, None while there is none that can be believed."""
        rows, one = self.rows(layer), np.ones(1, np.int64)
        address, size = np.array([address_of(rows.view(np.uint8))], np.uint64), rows.nbytes
        values = Values(np.zeros((1, HEADER_BYTES), np.uint8), address, one * size)
        if client.get([self.name(layer)], values)[0] != OK:
            return None
        args = (one * NOTE, one * layer, one * size, one * size)
        checked, said, _ = self._envelope.check(values.headers, self.keys[-1:], *args)
        is_good = checked[0] == OK and said[0] == checksums_at(address.tolist(), [size], 1)[0]
        return rows if is_good else None


class Publisher:
    """Sends the groups that the last step of a prefill completes, layer by layer, on a thread of its own.

    The memory of the groups stays as it is until `finish` has returned.
    """

    def __init__(self, far: RemoteTier, records: GroupRecords, first: int) -> None:
        self._far, self._records, self._first = far, records, first
        self._notes = Notes(far, records.keys)
        num_pieces = far.envelope.num_pieces
        self._checksums = np.zeros((len(records) - first, num_pieces), np.uint64)
        self._stored, self._codec, self.num_published = np.zeros(self._checksums.shape, np.int64), PLAIN, 0
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvtide-publisher", daemon=True)
        self._thread.start()
        self._jobs.put(self._forget)

    def layer(self, layer: int, addresses: npt.NDArray[np.uint64]) -> None:
        """Send a layer that is computed. Never waits. Shapes: addresses [streamed groups, F]."""
        self._jobs.put(lambda: self._publish(layer, addresses))

    def finish(self, *, is_whole: bool) -> None:
        """Wait until all is sent; where it is not the whole step, say so to whoever waits for the rest. Idempotent."""
        if self._thread.is_alive():
            self._jobs.put(self._manifest if is_whole else self._fail)
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _forget(self) -> None:
        with self._far.reached() as client:
            if client is not None:
                client.remove(self._notes.names())

    def _publish(self, layer: int, addresses: npt.NDArray[np.uint64]) -> None:
        if self.num_published != layer:
            return  # an earlier one did not arrive
        pieces, rows = self._notes.pieces(layer), self._notes.rows(layer)
        with self._far.reached() as client:
            if client is None:
                return
            sent = self._far.pieces.put(client, self._records.keys[self._first :], addresses, pieces)
            if not (sent.statuses == OK).all():
                return
            self._checksums[:, pieces], self._stored[:, pieces] = sent.checksums, sent.stored_bytes
            self._codec = max(self._codec, sent.codec)
            rows["is_streamed"][self._first :] = 1
            rows["checksums"][self._first :], rows["stored_bytes"][self._first :] = sent.checksums, sent.stored_bytes
            if self._notes.put(client, layer, rows, self._notes.name(layer))[0] == OK:
                self.num_published += 1

    def _manifest(self) -> None:
        if self.num_published < self._notes.num_layers:
            self._fail()
            return
        records = self._records.take(slice(self._first, None))
        self._far.publish(records, self._checksums, self._stored, self._codec)

    def _fail(self) -> None:
        with self._far.reached() as client:
            if client is not None:
                self._notes.put(client, 0, self._notes.rows(0), self._notes.names()[-1])


class Arrival:
    """What arrives of one prompt: reads of its groups wait for the note of their layer.

    `stall_s` (None: 10) is the longest wait without a further layer. Threads: one reads; any may `stop`.
    """

    def __init__(self, far: RemoteTier, records: GroupRecords, stall_s: float | None = None) -> None:
        self.records, self._far, self._stall_s = records, far, STALL_S if stall_s is None else stall_s
        self.notes = Notes(far, records.keys)
        self._row_of = {key: row for row, key in enumerate(records.keys.tolist())}
        self._manifests = np.zeros(len(records), far.envelope.manifest)
        self._seen: dict[int, npt.NDArray[np.bool_]] = {}
        self._stopped = threading.Event()
        self.is_over = False
        self.wait_ns = self.num_bytes = self.overlapped_bytes = 0

    def has_begun(self) -> bool:
        """Say whether the first layer is there."""
        return self._look(0)

    def holds(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """Say which groups come by this stream. Shapes: returns [n]."""
        streamed = self._seen.get(0, np.zeros(len(self.records), np.bool_))
        rows = [self._row_of.get(key, -1) for key in keys.tolist()]
        return np.array([row >= 0 and not self.is_over and bool(streamed[row]) for row in rows], np.bool_)

    @property
    def overlapped_share(self) -> float:
        """Share of the bytes that moved before the last layer was there."""
        return self.overlapped_bytes / self.num_bytes if self.num_bytes else 0.0

    def stop(self) -> None:
        """End the waits there are: what has not arrived does not."""
        self.is_over = True
        self._stopped.set()

    def read(self, keys: KeyArray, requests: npt.NDArray[np.void]) -> Statuses:
        """Read fragments once their layers are there. Shapes: requests [r], of groups that `holds`; returns [r]."""
        statuses = np.full(len(requests), MISSING, np.uint8)
        layers = requests["fragment"] // self._far.layout.parts_per_layer
        rows = np.array([self._row_of.get(key, 0) for key in keys.tolist()], np.int64)
        last = self.notes.num_layers - 1
        for layer in np.unique(layers).tolist():
            if self.is_over or not self._wait(layer):
                break
            some = np.flatnonzero(layers == layer)
            with self._far.reached() as client:
                if client is not None:
                    is_early = last not in self._seen and not client.exists([self.notes.name(last)])[0]
                    known = np.ones(len(keys), np.bool_)
                    manifests = self._manifests[rows]
                    statuses[some] = self._far.pieces.read(client, keys, requests[some], known, manifests)
                    sizes = np.array(self._far.layout.fragment_padded_bytes)[requests["fragment"][some]]
                    self.num_bytes += int(sizes.sum())
                    self.overlapped_bytes += int(sizes.sum()) * is_early
        if not self.is_over and not (statuses == OK).all():
            self._give_up("what it names is not there, or is corrupt")
        return statuses

    def _look(self, layer: int) -> bool:
        if layer not in self._seen:
            rows, has_failed = None, False
            with self._far.reached() as client:
                if client is not None:
                    rows = self.notes.get(client, layer)
                    has_failed = rows is None and bool(client.exists(self.notes.names()[-1:])[0])
            if has_failed:
                self._give_up("the prefill failed")
            if rows is None or not self._is_plausible(layer, rows):
                return False
            pieces = self.notes.pieces(layer)
            self._manifests["checksums"][:, pieces] = rows["checksums"]
            self._manifests["stored_bytes"][:, pieces] = rows["stored_bytes"]
            self._seen[layer] = rows["is_streamed"] == 1
        return True

    def _is_plausible(self, layer: int, rows: npt.NDArray[np.void]) -> bool:
        streamed = rows[rows["is_streamed"] == 1]["stored_bytes"]
        lengths = self._far.envelope.lengths[self.notes.pieces(layer)]
        return bool(len(streamed) and ((streamed >= 1) & (streamed <= lengths)).all())

    def _wait(self, layer: int) -> bool:
        started, pause_s = time.perf_counter_ns(), POLL_S
        try:
            while not self._look(layer) and not self.is_over:
                if (time.perf_counter_ns() - started) / 1e9 >= self._stall_s:
                    self._give_up(f"no further layer came for {self._stall_s:g} s")
                self._stopped.wait(pause_s)
                pause_s = min(2 * pause_s, POLL_S_MAX)
        finally:
            self.wait_ns += time.perf_counter_ns() - started
        return not self.is_over

    def _give_up(self, why: str) -> None:
        if not self.is_over:
            self.is_over = True
            with self._far.reached() as client:
                if client is not None:  # or who decodes next would wait for the same layers
                    client.remove(self.notes.names())
            text = "%s: the KV that was handed over ends behind %d of %d layers: %s; the rest is computed"
            LOG.warning(text, self._far.name, len(self._seen), self.notes.num_layers, why)
