"""The L2 adapter that LMCache's controllers store objects to, look them up in, and load them from.

Two controllers call it and poll its event descriptors, so nothing waits: a look-up asks memory, and bytes move on the
stores' workers straight from and to LMCache's memory. What takes longer, opening the store of a form met for the first
time, is done on a thread of its own. Next: kvtide.integrations.
"""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvtide.blocks import KeyArray
from kvtide.chunks import LOAD, STORE, ChunkOptions, ChunkStore, SeveralStores, Transfer
from kvtide.chunks.several import Kind
from kvtide.chunks.transfer import Kind as Direction
from kvtide.errors import ConfigError
from kvtide.integrations.lmcache.forms import form_of, keys_of
from kvtide.integrations.lmcache.names import Names
from kvtide.integrations.lmcache.tasks import Rows, Task
from kvtide.integrations.lmcache.versions import check_version
from kvtide.integrations.options import PlugInOptions
from kvtide.metrics import StoresMetrics
from kvtide.tiers.contract import OK
from kvtide.units import parse_bytes

DIRECTORY = "~/.cache/kvtide/lmcache"
FORMS_MAX = 16  # a model has one for each group of layers; more come from serdes whose output varies in size
_log = logging.getLogger("kvtide.lmcache")


class KvtideL2Adapter(L2AdapterInterface):
    """LMCache's objects in bounded files, one for each form of object.

    `params` has the keys of `PlugInOptions`. LMCache names a model, but not its weights: `salt` can.

    Raises: ConfigError, FormatError, IoError of the stores: LMCache then does not start, and shows the message.
    """

    def __init__(self, params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        del l1_memory_desc  # nothing is registered: any host memory will do
        options = PlugInOptions.of(params, where="adapter_params", directory=DIRECTORY)
        capacity = parse_bytes(str(options.capacity))
        super().__init__(max_capacity_bytes=capacity)
        facts = {"engine": f"lmcache {check_version()}", "salt": options.salt[:256]}
        shared = ChunkOptions(
            Path(options.directory).expanduser(), capacity, 1, "lmcache", facts, master=options.master()
        )
        self._metrics = StoresMetrics(options.metrics_port, integration="lmcache")
        self._stores = SeveralStores(shared, self._left, recorder_of=self._metrics.recorder, on_open=self._metrics.add)
        self._lock = threading.Lock()  # of all below; held for no I/O and no listener
        self._names: dict[str, Names] = {}
        self._locked: dict[bytes, list[ChunkStore]] = collections.defaultdict(list)
        self._refused: set[str] = set()
        self._stored: dict[int, L2StoreResult] = {}
        self._found: dict[int, Bitmap] = {}
        self._loaded: dict[int, Bitmap] = {}
        self._ids = itertools.count()
        self._is_restored_told = self._is_closed = False
        try:
            self._stores.adopt()
            for form in self._stores.stores:
                self._name(form)
        except BaseException:
            self._metrics.close()
            self._stores.close()
            raise
        self._events = {name: create_event_notifier() for name in ("store", "lookup", "load")}
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="kvtide-lmcache")

    def get_store_event_fd(self) -> int:
        return self._events["store"].fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._events["lookup"].fileno()

    def get_load_event_fd(self) -> int:
        return self._events["load"].fileno()

    # Tasks

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        return self._begin(STORE, keys, objects)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            done, self._stored = self._stored, {}
        return done

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        return self._begin(LOAD, keys, objects)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._loaded.pop(task_id, None)

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], group_layout_descs: Any) -> int:
        folded, found = keys_of(keys), np.zeros(len(keys), np.bool_)
        for store in self._stores.stores.values():
            rows = np.flatnonzero(~found)
            kept = rows[store.pin(folded[rows])]
            store.touch(folded[kept])
            found[kept] = True
            with self._lock:
                for row in kept.tolist():
                    self._locked[folded[row].tobytes()].append(store)
        task_id = next(self._ids)
        with self._lock:
            self._found[task_id] = _bitmap(found)
        self._events["lookup"].notify()
        return task_id

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._found.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        folded = keys_of(keys)
        rows_of: dict[int, list[int]] = collections.defaultdict(list)
        stores = {}
        with self._lock:
            for row, key in enumerate(folded.tolist()):
                if held := self._locked.get(key):
                    store = held.pop()
                    stores[id(store)] = store
                    rows_of[id(store)].append(row)
                    if not held:
                        del self._locked[key]
        for which, rows in rows_of.items():
            stores[which].unpin(folded[rows])

    def _begin(self, direction: Direction, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> int:
        """Begin a task, in one part for each form of its objects."""
        self._tell_restored()
        rows_of: dict[Kind, list[int]] = collections.defaultdict(list)
        for row, memory in enumerate(objects):
            rows_of[form_of(memory)].append(row)
        task = Task(next(self._ids), direction, keys, max(1, len(rows_of)))
        folded = keys_of(keys)
        at = np.array([memory.data_ptr for memory in objects], np.uint64)
        if not rows_of:
            self._end_part(task, np.zeros(0, np.intp), np.zeros(0, np.bool_), 0)
        for form, listed in rows_of.items():
            rows = np.array(listed)
            on_done = functools.partial(self._moved, task, rows, form.name)
            self._send(task, form, rows, Transfer(direction, folded[rows], at[rows], on_done))
        return task.id

    def _send(self, task: Task, form: Kind, rows: Rows, transfer: Transfer) -> None:
        """Give a part of a task to the store of its form; open it aside where there is none yet."""
        store = self._stores.stores[form.name] if form.name in self._names else None
        if store is None and task.kind == STORE and form.name not in self._refused and not self._is_closed:
            self._later(lambda: self._open(form), lambda: self._send(task, form, rows, transfer))
            return
        try:
            if store is None:
                self._moved(task, rows, form.name, transfer)  # nothing of this form is kept
            else:
                store.submit(transfer)
        except Exception as error:  # such as a store that is closed
            _log.warning("kvtide: cannot %s %d objects: %s", task.kind, len(rows), error)
            self._end_part(task, rows, np.zeros(len(rows), np.bool_), 0)

    def _later(self, action: Callable[[], object], then: Callable[[], object]) -> None:
        def run() -> None:
            try:
                action()
            except Exception as error:  # LMCache goes on without
                _log.warning("kvtide: %s", error)
            then()

        try:
            self._aside.submit(run)
        except RuntimeError:  # closed
            then()

    def _open(self, form: Kind) -> None:
        """Open the store of a form met for the first time; where that cannot be, note that its objects are not kept."""
        if form.name in self._names or form.name in self._refused:
            return
        try:
            self._open_store(form)
        except Exception:
            self._refused.add(form.name)
            raise

    def _open_store(self, form: Kind) -> None:
        if len(self._stores.stores) >= FORMS_MAX:
            raise ConfigError(
                f"objects of {FORMS_MAX} forms are kept, and {form.name!r} is one more; serdes whose output varies "
                "in size do not go with kvtide, and `kvtide store drop` removes forms that are used no more"
            )
        self._stores.open([form])
        self._name(form.name)

    def _name(self, form: str) -> None:
        store = self._stores.stores[form]
        names = Names(store.path, store.keys())
        with self._lock:
            self._names[form] = names

    # On the stores' workers

    def _moved(self, task: Task, rows: Rows, form: str, transfer: Transfer) -> None:
        """End a part that is done."""
        good, num_bytes = transfer.statuses == OK, 0
        if task.kind == STORE and transfer.num_good:
            good &= self._stores.stores[form].has(transfer.keys)  # some may have given way to the last of them
        try:
            num_bytes = self._note(task, rows[good], form, transfer, good)
        except Exception:  # of a listener: the task must end all the same
            _log.exception("kvtide: what became of %d objects is not told to all", len(rows))
        self._end_part(task, rows, good, num_bytes)

    def _note(self, task: Task, rows: Rows, form: str, transfer: Transfer, good: Any) -> int:
        """Take note of what arrived, at `rows` of the task, and tell of it; return the bytes that moved."""
        keys = [task.keys[row] for row in rows.tolist()]
        store = self._stores.stores.get(form)
        size = store.chunk_bytes if store is not None else 0
        num_bytes = size * len(keys)
        if task.kind == LOAD:
            self._mislaid(form, transfer.keys[~good])
            if keys:
                self._notify_keys_accessed(keys)
        elif keys:
            names = self._names[form]
            with self._lock:
                arrived = list(zip(transfer.keys[good].tolist(), keys, strict=True))
                new = [(key, name) for key, name in arrived if key not in names.of]
                sizes = [0 if key in names.of else size for key, _ in arrived]
                names.add(new)
            names.write()
            num_bytes = sum(sizes)
            self._notify_keys_stored(keys, sizes)  # of size 0: stored again
        return num_bytes

    def _end_part(self, task: Task, rows: Rows, good: Any, num_bytes: int) -> None:
        if not task.end_part(rows, good, num_bytes):
            return
        with self._lock:
            if task.kind == STORE:
                self._stored[task.id] = L2StoreResult(bool(task.good.all()), task.num_bytes)
            else:
                self._loaded[task.id] = _bitmap(task.good)
        if not self._is_closed:  # else nobody polls
            self._events[task.kind].notify()

    def _mislaid(self, form: str, keys: KeyArray) -> None:
        """Forget objects that were wanted in this form and lie here in another: no load could ever end well."""
        for other, store in self._stores.stores.items():
            stale = keys[store.has(keys)] if other != form else keys[:0]
            if len(stale):
                _log.warning("kvtide: %d objects of another form are forgotten: %s, not %s", len(stale), other, form)
                self._later(functools.partial(self._drop, other, stale), lambda: None)

    def _left(self, form: str, keys: KeyArray) -> None:
        """Tell that objects are gone."""
        with self._lock:
            names = self._names.get(form)
            gone = names.take(keys.tolist()) if names is not None else []
        if gone:
            self._notify_keys_deleted(gone, [self._stores.stores[form].chunk_bytes] * len(gone))

    # What is kept

    def delete(self, keys: list[ObjectKey]) -> None:
        folded = keys_of(keys)
        for form, store in self._stores.stores.items():
            self._drop(form, folded[store.has(folded)])

    def _drop(self, form: str, keys: KeyArray) -> None:
        if len(keys):
            try:
                self._stores.stores[form].drop(keys)
            except Exception as error:  # closed
                _log.warning("kvtide: %d objects are not deleted: %s", len(keys), error)
                return
            self._left(form, keys)

    def register_listener(self, listener: Any) -> None:
        self._tell_restored()
        super().register_listener(listener)
        for keys, sizes in self._all_named():
            listener.on_l2_keys_stored(keys, sizes)

    def set_backend_identity(self, name: str, shared: bool = False) -> None:
        super().set_backend_identity(name, shared)
        self._tell_restored()

    def get_usage(self) -> AdapterUsage:
        self._tell_restored()
        return super().get_usage()

    def _tell_restored(self) -> None:
        """Tell once what earlier runs left: LMCache counts what it was told of."""
        with self._lock:
            told, self._is_restored_told = self._is_restored_told, True
        if not told:
            for keys, sizes in self._all_named():
                self._notify_keys_stored(keys, sizes)

    def _all_named(self) -> list[tuple[list[ObjectKey], list[int]]]:
        with self._lock:
            named = [(form, list(names.of.values())) for form, names in self._names.items() if names.of]
        return [(keys, [self._stores.stores[form].chunk_bytes] * len(keys)) for form, keys in named]

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        if page_size < 1:
            raise ValueError(f"page_size must be 1 or more, got {page_size}")
        after = bytes.fromhex(cursor) if cursor is not None else b""
        with self._lock:
            listed = [(key, name, form) for form, names in self._names.items() for key, name in names.of.items()]
        left = [one for one in listed if one[0] > after and model_name in {None, one[1].model_name}]
        left.sort(key=lambda one: one[0])
        page = left[:page_size]
        entries = tuple(
            KeyEntry(name.to_encoded_object_key(), self._stores.stores[form].chunk_bytes) for _, name, form in page
        )
        return KeyListPage(entries, page[-1][0].hex() if len(left) > len(page) else None)

    def report_status(self) -> dict[str, Any]:
        stores = self._stores.stores
        return {
            "is_healthy": not self._is_closed,
            "type": "KvtideL2Adapter",
            "max_capacity_bytes": self._max_capacity_bytes,
            "file_bytes_used": sum(store.used_bytes for store in stores.values()),
            "stored_object_count": sum(store.num_chunks for store in stores.values()),
            "locked_key_count": sum(store.num_pinned for store in stores.values()),
            "forms": {form: str(store.path) for form, store in stores.items()},
            "evicted": sum(store.counts.evicted for store in stores.values()),
            "missed": sum(store.counts.missed for store in stores.values()),
            "failed": sum(store.counts.failed for store in stores.values()),
        }

    def close(self) -> None:
        """Finish what was begun, then give up files, locks and descriptors. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._metrics.close()
        self._aside.shutdown(wait=True)
        self._stores.close()
        with self._lock:
            for names in self._names.values():
                names.close()
        for event in self._events.values():
            event.close()


def _bitmap(bits: Any) -> Bitmap:
    made = Bitmap(len(bits))
    made.batched_set(np.flatnonzero(bits).tolist())
    return made
