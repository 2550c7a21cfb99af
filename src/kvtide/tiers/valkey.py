"""A `RemoteClient` over Valkey or Redis: tcp, TLS or a unix socket, one server or a cluster. Next: mooncake.

Decides pipelines, time-outs and retries. The library (valkey-py) is imported where it is used.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.errors import UnsupportedError
from kvtide.io.ops import address_of
from kvtide.tiers.client import RemoteDown, Values
from kvtide.tiers.contract import FAILED, FULL, MISSING, OK, Statuses

SEND_BYTES_MAX = 1 << 20  # of commands that are copied to be sent together
PIPELINE_BYTES, PIPELINE_OPS = 8 << 20, 1024  # of one pipeline: a server answers others in between
RETRIES, RETRY_AFTER_S = 1, 0.05  # of a broken connection, as after a restart; a time-out is not tried again


@dataclass(frozen=True, slots=True)
class ValkeyOptions:
    """Knobs of a connection. `timeout_s` bounds each wait for the server; `ttl_s` 0 keeps values for ever."""

    timeout_s: float = 2.0
    connect_timeout_s: float = 1.0
    ttl_s: int = 0
    is_cluster: bool = False


class ValkeyClient:
    """A connection to the server, or the cluster, at `url`.

    Raises: UnsupportedError without the package valkey; RemoteDown if there is no answer (a cluster is asked at once).
    """

    def __init__(self, url: str, options: ValkeyOptions) -> None:
        try:
            import valkey
        except ImportError:
            raise UnsupportedError("valkey-py is not here; type pip install 'kvtide[valkey]'") from None
        from valkey.backoff import NoBackoff
        from valkey.retry import Retry

        library: Any = valkey
        self._errors: Any = library.exceptions
        self._ttl_s = options.ttl_s or None
        how: dict[str, Any] = {
            "socket_timeout": options.timeout_s,
            "socket_connect_timeout": options.connect_timeout_s,
            "retry": Retry(NoBackoff(), 0),  # retries are counted here
        }
        if options.is_cluster:
            how |= {"cluster_error_retry_attempts": 1}
            self._server: Any = self._guarded(lambda: library.ValkeyCluster.from_url(url, **how))
        else:
            self._server = library.Valkey.from_url(url, command_packer=_Packer(), **how)
            pool = self._server.connection_pool
            pool.connection_class = _in_few_sends(pool.connection_class)
        self._value = _joined if options.is_cluster else _Parts.of  # a cluster's connections pack by themselves

    # The contract

    def exists(self, names: list[str]) -> npt.NDArray[np.bool_]:
        answers = self._pipelined(np.zeros(len(names), np.int64), lambda pipe, index: pipe.exists(names[index]))
        return np.array([answer == 1 for answer in answers], np.bool_)

    def put(self, names: list[str], values: Values) -> Statuses:
        sizes = values.lengths + values.headers.shape[1]
        answers = self._pipelined(
            sizes, lambda pipe, index: pipe.set(names[index], self._value(values, index), ex=self._ttl_s)
        )
        return np.array([self._put_status(answer) for answer in answers], np.uint8)

    def get(self, names: list[str], values: Values) -> Statuses:
        sizes = values.lengths + values.headers.shape[1]
        statuses = np.full(len(names), MISSING, np.uint8)

        def take(index: int, answer: object) -> None:
            if isinstance(answer, bytes) and len(answer) == sizes[index]:
                _unload(answer, values, index)
                statuses[index] = OK
            elif isinstance(answer, Exception) and not str(answer).startswith("WRONGTYPE"):
                statuses[index] = FAILED

        self._pipelined(sizes, lambda pipe, index: pipe.get(names[index]), after=take)
        return statuses

    def remove(self, names: list[str]) -> None:
        self._pipelined(np.zeros(len(names), np.int64), lambda pipe, index: pipe.unlink(names[index]))

    def close(self) -> None:
        try:
            self._server.close()
        except self._errors.ValkeyError:  # it was gone already
            return

    # Pipelines

    def _pipelined(
        self,
        sizes: npt.NDArray[np.int64],
        command: Callable[[Any, int], object],
        *,
        after: Callable[[int, object], None] | None = None,
    ) -> list[object]:
        """Do a command a size, in pipelines of some MiB; return the answers, or hand each to `after`.

        An answer may be an error of the server, for that command alone.
        """
        answers: list[object] = []
        start, num = 0, len(sizes)
        ends = np.cumsum(sizes)
        while start < num:
            reach = PIPELINE_BYTES + (ends[start - 1] if start else 0)
            end = min(max(start + 1, int(np.searchsorted(ends, reach, side="right"))), start + PIPELINE_OPS, num)
            part = range(start, end)
            got = self._guarded(functools.partial(self._execute, part, command))
            for index, answer in zip(part, got, strict=True):
                self._refuse(answer)
                if after is not None:
                    after(index, answer)
                else:
                    answers.append(answer)
            start = end
        return answers

    def _execute(self, part: range, command: Callable[[Any, int], object]) -> list[object]:
        pipe = self._server.pipeline(transaction=False)
        for index in part:
            command(pipe, index)
        return list(pipe.execute(raise_on_error=False))

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """Return what `call` does, tried again where the connection broke.

        Raises: RemoteDown if it does not answer.
        """
        for left in range(RETRIES, -1, -1):
            try:
                return call()
            except self._errors.TimeoutError as error:
                raise RemoteDown(f"no answer in time ({error})") from None
            except (self._errors.ConnectionError, OSError) as error:
                if not left:
                    raise RemoteDown(f"cannot be reached ({error})") from None
            except (
                self._errors.ValkeyError,
                self._errors.ValkeyClusterException,
            ) as error:  # a cluster without the slot, a server that is no server
                raise RemoteDown(f"refuses ({error})") from None
            time.sleep(RETRY_AFTER_S)
        raise AssertionError("a call was neither done nor given up")

    def _refuse(self, answer: object) -> None:
        """Raise RemoteDown for an answer that every command would get: no rights, still loading."""
        errors = self._errors
        nobody_may = errors.ConnectionError, errors.TimeoutError, errors.NoPermissionError, errors.ClusterError
        if isinstance(answer, nobody_may):
            raise RemoteDown(f"refuses ({answer})")
        if isinstance(answer, errors.ResponseError) and str(answer).startswith("NOAUTH"):
            raise RemoteDown(f"refuses ({answer}); type the URL with user and password")

    def _put_status(self, answer: object) -> int:
        if answer is True:
            return OK
        is_full = isinstance(answer, self._errors.OutOfMemoryError) or str(answer).startswith("OOM")
        return FULL if is_full else FAILED


class _Parts:
    """One value in two places, sent without being put together."""

    def __init__(self, header: memoryview, payload: memoryview) -> None:
        self.header, self.payload = header, payload

    @classmethod
    def of(cls, values: Values, index: int) -> _Parts:
        payload = (ctypes.c_uint8 * int(values.lengths[index])).from_address(int(values.addresses[index]))
        return cls(values.headers[index].data, memoryview(payload).cast("B"))


def _joined(values: Values, index: int) -> bytes:
    parts = _Parts.of(values, index)
    return b"".join((parts.header, parts.payload))


class _Packer:
    """Commands as bytes of the protocol (RESP), payloads as views of the memory they lie in."""

    def pack(self, *args: object) -> list[bytes | memoryview]:
        """Return one command's bytes in order. The first word may hold several, as in `CLIENT SETINFO`."""
        words = [*str(args[0]).split(), *args[1:]]
        output: list[bytes | memoryview] = []
        text = [b"*%d\r\n" % len(words)]
        for word in words:
            if isinstance(word, _Parts):
                text.append(b"$%d\r\n" % (len(word.header) + len(word.payload)))
                output += [b"".join((*text, word.header)), word.payload]
                text = [b"\r\n"]
            else:
                raw = word if isinstance(word, bytes) else str(word).encode()
                text.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
        output.append(b"".join(text))
        return output


def _in_few_sends(connection: type[Any]) -> type[Any]:
    """Return a kind of connection that sends small commands together: at each send others may take the interpreter.

    The library sends 6 kB at a time: 3,600 keys were 54 sends.
    """

    class FewSends(connection):  # type: ignore[misc]
        def pack_commands(self, commands: Any) -> list[bytes | memoryview]:
            return _together(super().pack_commands(commands))

    return FewSends


def _together(pieces: list[bytes | memoryview]) -> list[bytes | memoryview]:
    """Join neighbours that are bytes, up to 1 MiB; views stay as they are."""
    found: list[bytes | memoryview] = []
    run: list[bytes] = []
    size = 0
    for piece in [*pieces, memoryview(b"")]:
        if run and (isinstance(piece, memoryview) or size + len(piece) > SEND_BYTES_MAX):
            found.append(b"".join(run))
            run, size = [], 0
        if not isinstance(piece, memoryview):
            run.append(piece)
            size += len(piece)
        elif len(piece):
            found.append(piece)
    return found


def _unload(answer: bytes, values: Values, index: int) -> None:
    header, raw = values.headers[index], np.frombuffer(answer, np.uint8)
    header[:] = raw[: len(header)]
    ctypes.memmove(int(values.addresses[index]), address_of(raw) + len(header), int(values.lengths[index]))
