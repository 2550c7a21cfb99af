"""A `RemoteClient` over Mooncake Store: values scattered from and gathered to memory by its transfer engine.

Decides what is registered, and how long its calls may take. The library is imported where it is used.

Theory. A call of the library into a master that hangs does not come back, and cannot be ended. So calls run on a thread
of this client's, which is left alone when it is late; until it is back every other call is refused. Such a late call
may still touch the memory it was given: values are put straight from the caller's memory, whose checksum was taken
before, so a change shows; they are got to memory of this client's own, and copied when the call was in time.

Over TCP the library opens a connection a transfer, and each keeps a port for a minute: 28,000 values later there is
none, and calls hang. So it is told to keep its connections, which take no more than 2,048 transfers at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.errors import UnsupportedError
from kvtide.io.ops import address_of, aligned_buffer
from kvtide.tiers.client import RemoteDown, Values
from kvtide.tiers.contract import FAILED, FULL, MISSING, OK, Statuses

LOCAL_BUFFER_BYTES = 64 << 20  # of the library's own
STAGING_BYTES = 48 << 20  # more than the remote tier asks for at once
VALUES_MAX = 512  # of a call: two transfers each
# The library's codes, read from its answers: RPC failures are -900 and -901 .. -909, no room -200, no such key -704,
# a value larger than the place for it -600.
RPC_FAILED = range(-909, -899)
NO_ROOM, NO_KEY, NO_FIT = -200, -704, -600


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """Where the master and the metadata are, and what this process brings: `segment_bytes` of memory for the pool."""

    master: str
    metadata: str
    local: str = "127.0.0.1"
    protocol: str = "tcp"
    device: str = ""
    segment_bytes: int = 0
    timeout_s: float = 5.0


class MooncakeClient:
    """A client of the store whose master is at `options.master`.

    Raises: UnsupportedError without the package; RemoteDown if the master does not answer.
    """

    def __init__(self, options: MooncakeOptions) -> None:
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise UnsupportedError(f"Mooncake is not here ({error}); type pip install 'kvtide[mooncake]'") from None
        _refuse_while_late()
        self._options = options
        os.putenv("MC_TCP_ENABLE_CONNECTION_POOL", "1")  # the library asks for it at set-up
        self._store: Any = MooncakeDistributedStore()
        self._staging = aligned_buffer(STAGING_BYTES)
        self._worker = _Worker(options.timeout_s)
        self._memory: list[npt.NDArray[np.uint8]] = []
        self._is_closed = False
        try:
            self._set_up()
        except BaseException:
            self._worker.stop()  # its thread ends with the call it is in, if it is in one
            raise
        self.register(self._staging)

    def _set_up(self) -> None:
        options = self._options
        place = options.local, options.metadata, options.segment_bytes, LOCAL_BUFFER_BYTES
        try:
            code = self._worker.call(self._store.setup, *place, options.protocol, options.device, options.master)
        finally:
            if self._worker.is_late:
                _late_set_ups.append(self._worker)
        if code != 0:
            raise RemoteDown(f"Mooncake's set-up failed with code {code}: is a master at {options.master}?")

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Tell the transfer engine of memory. TCP works without, RDMA does not."""
        self._memory.append(memory)  # a late call may still use it
        with contextlib.suppress(RemoteDown):  # the next call will find out
            self._worker.call(self._store.register_buffer, address_of(memory), memory.size)

    # The contract

    def exists(self, names: list[str]) -> npt.NDArray[np.bool_]:
        codes = self._codes(self._store.batch_is_exist, names)
        if (codes == -1).any():  # an error of the call as a whole
            raise RemoteDown("the master does not answer")
        return codes == 1

    def put(self, names: list[str], values: Values) -> Statuses:
        there = np.flatnonzero(self.exists(names))
        if len(there):  # put leaves an object as it is
            self.remove([names[index] for index in there.tolist()])
        at, sizes = _scattered(values)
        codes = np.empty(len(names), np.int64)
        for start in range(0, len(names), VALUES_MAX):
            some = slice(start, start + VALUES_MAX)
            codes[some] = self._codes(
                self._store.batch_put_from_multi_buffers, names[some], at[some], sizes[some], owner=values
            )
        return np.where(codes == 0, OK, np.where(codes == NO_ROOM, FULL, FAILED)).astype(np.uint8)

    def get(self, names: list[str], values: Values) -> Statuses:
        sizes = values.lengths + values.headers.shape[1]
        statuses = np.full(len(names), MISSING, np.uint8)
        start = 0
        ends = np.cumsum(sizes)
        while start < len(names):
            reach = STAGING_BYTES + (ends[start - 1] if start else 0)
            end = max(start + 1, int(np.searchsorted(ends[: start + VALUES_MAX], reach, side="right")))
            statuses[start:end] = self._get(names[start:end], values.take(slice(start, end)), sizes[start:end])
            start = end
        return statuses

    def _get(self, names: list[str], values: Values, sizes: npt.NDArray[np.int64]) -> Statuses:
        """Get as many values as staging holds."""
        places = address_of(self._staging) + np.cumsum(sizes) - sizes
        codes = self._codes(self._store.batch_get_into, names, places.tolist(), sizes.tolist())
        good = codes == sizes
        width = values.headers.shape[1]
        for index in np.flatnonzero(good).tolist():
            place = int(places[index])
            ctypes.memmove(address_of(values.headers[index]), place, width)
            ctypes.memmove(int(values.addresses[index]), place + width, int(values.lengths[index]))
        is_missing = (codes == NO_KEY) | (codes == NO_FIT) | (codes >= 0)
        return np.where(good, OK, np.where(is_missing, MISSING, FAILED)).astype(np.uint8)

    def remove(self, names: list[str]) -> None:
        self._codes(self._store.batch_remove, names, True)  # noqa: FBT003  # a lease is no reason to keep it

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(RemoteDown):
            self._worker.call(self._store.close)
        self._worker.stop()

    def _codes(self, method: Callable[..., Any], *args: Any, owner: object = None) -> npt.NDArray[np.int64]:
        """Return the library's code of each value. Raises: RemoteDown if the master did not answer."""
        codes = np.array(self._worker.call(method, *args, owner=owner), np.int64)
        if np.isin(codes, RPC_FAILED).any():
            raise RemoteDown(f"Mooncake's master at {self._options.master} cannot be reached")
        return codes


def master_program() -> str:
    """Return the path of the master that comes with the package.

    Raises: UnsupportedError without it.
    """
    found = importlib.util.find_spec("mooncake")
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder) / "mooncake_master"
        if path.is_file():
            path.chmod(path.stat().st_mode | 0o100)  # wheels unpack it without
            return str(path)
    raise UnsupportedError("mooncake_master is not here; type pip install 'kvtide[mooncake]'")


def _scattered(values: Values) -> tuple[list[list[int]], list[list[int]]]:
    """Return the addresses and the lengths of each value's header and payload."""
    width = values.headers.shape[1]
    heads = address_of(values.headers) + np.arange(len(values)) * values.headers.strides[0]
    at = np.column_stack([heads, values.addresses.astype(np.int64)])
    sizes = np.column_stack([np.full(len(values), width), values.lengths])
    return at.tolist(), sizes.tolist()


def _refuse_while_late() -> None:
    """Raise RemoteDown while a set-up of this process has not come back: each holds a thread and a store."""
    _late_set_ups[:] = [worker for worker in _late_set_ups if worker.is_late]
    if _late_set_ups:
        raise RemoteDown("Mooncake's set-up from before has not come back")


class _Worker:
    """One daemon thread that does calls; a call that is late is left to it, and refuses those after it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any], object] | None] = queue.SimpleQueue()
        self._late: Future[Any] | None = None
        threading.Thread(target=self._run, name="kvtide-mooncake", daemon=True).start()

    def call(self, method: Callable[..., Any], *args: Any, owner: object = None) -> Any:
        """Return what the call returns; `owner` lives until it has come back.

        Raises: RemoteDown if it is late, or the one before still is.
        """
        if self.is_late:
            raise RemoteDown("a call from before has not come back")
        future: Future[Any] = Future()
        self._calls.put((future, functools.partial(method, *args), owner))
        try:
            return future.result(self._timeout_s)
        except TimeoutError:
            self._late = future
            raise RemoteDown(f"no answer in {self._timeout_s:g} s") from None
        except RuntimeError as error:  # what the library throws
            raise RemoteDown(f"Mooncake failed ({error})") from None

    @property
    def is_late(self) -> bool:
        """Whether a call has not come back in time, nor since."""
        return self._late is not None and not self._late.done()

    def stop(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call, _owner = item
            try:
                future.set_result(call())
            except BaseException as error:  # whoever waits gets it, whatever it is
                future.set_exception(error)


_late_set_ups: list[_Worker] = []
