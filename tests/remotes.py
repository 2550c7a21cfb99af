"""Real servers for tests of the remote tier: Redis and Mooncake on this machine, each with its own port or socket."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvhelp import small_identity
from kvtide.spec import SlotLayout
from kvtide.tiers.dial import dial
from kvtide.tiers.remote import RemoteOptions, RemoteTier

START_S = 20.0


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Redis:
    """One server on a unix socket, which may be killed, hung and started again."""

    def __init__(self, folder: Path, *more: str, port: int = 0) -> None:
        program = shutil.which("valkey-server") or shutil.which("redis-server")
        if program is None:
            pytest.skip("neither valkey-server nor redis-server is installed: apt-get install redis-server")
        self.socket = folder / "s"
        self.port = port
        self.url = f"valkey://127.0.0.1:{port}/0" if port else f"unix://{self.socket}"
        self._command = [program, "--port", str(port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket),
                         "--save", "", "--appendonly", "no", "--dir", str(folder), *more]  # fmt: skip
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            with socket.socket(socket.AF_UNIX) as one:
                try:
                    one.connect(str(self.socket))
                except OSError:
                    time.sleep(0.01)
                    continue
                one.sendall(b"PING\r\n")
                if one.recv(16).startswith((b"+PONG", b"-NOAUTH")):
                    return
        self.kill()
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def hang(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def plain(self) -> object:
        """A connection that knows nothing of kvtide."""
        valkey = pytest.importorskip("valkey")
        return valkey.Valkey(unix_socket_path=str(self.socket))

    def close(self) -> None:
        self.wake()
        self.kill()


@contextmanager
def redis(folder: Path, *more: str, port: int = 0) -> Iterator[Redis]:
    pytest.importorskip("valkey")
    server = Redis(folder, *more, port=port)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def mooncake(memory: str = "64MiB") -> Iterator[str]:
    """A master with some memory, as `kvtide remote up` starts it; its URL."""
    pytest.importorskip("mooncake.store")
    command = [sys.executable, "-m", "kvtide.cli", "remote", "up", "mooncake", "--json", "--memory", memory]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        import json

        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def remote_tier(url: str, layout: SlotLayout, *, num_groups: int = 64, rest_ns: int = 20_000_000) -> RemoteTier:
    dialled = dial(url)
    options = RemoteOptions(num_groups=num_groups, zstd_level=dialled.zstd_level, rest_ns=rest_ns)
    return RemoteTier(dialled.connect, layout, small_identity(layout).digest(), options, name=dialled.name)
