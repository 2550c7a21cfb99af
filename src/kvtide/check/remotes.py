"""kvtide's remote tier as targets, over a Redis or Valkey server and over Mooncake, each started for the check.

A server outlives the process of the target, as in use. Its pid lies in a `*.pid` file of the setup's directory: the
suite ends it.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar

import kvtide
from kvtide.check.contract import Setup, Traits
from kvtide.check.own import TIER_TRAITS, TierTarget
from kvtide.errors import IoError, UnsupportedError
from kvtide.tiers.contract import Tier
from kvtide.tiers.dial import open_remote
from kvtide.tiers.remote import RemoteTier

START_S = 30.0
SEGMENT = "256MiB"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # what is missing is said where it is used
        return "not installed"


REMOTE_TRAITS = replace(TIER_TRAITS, is_durable=True, is_checksummed=True, can_be_shared=True)


class RemoteTarget(TierTarget):
    """`kvtide.tiers.RemoteTier`; subclasses say where the server is."""

    def __init__(self, setup: Setup) -> None:
        self._url = self._serve(setup)
        super().__init__(setup)

    def _serve(self, setup: Setup) -> str:
        raise NotImplementedError

    def _open(self) -> Tier:
        self._remote: RemoteTier = open_remote(self._url, self._layout, self._identity.digest())
        return self._remote

    def _num_slots(self) -> int:
        return 1 << 40  # the server makes room

    def close(self) -> None:
        self._remote.close()


class ValkeyTarget(RemoteTarget):
    """Over a Valkey or Redis server on a unix socket."""

    traits: ClassVar[Traits] = replace(
        REMOTE_TRAITS,
        name="valkey",
        package="valkey",
        version=_version("valkey"),
        note=f"kvtide {kvtide.__version__} over a server that keeps nothing on disk",
    )

    def _serve(self, setup: Setup) -> str:
        path = setup.directory / "s"
        program = shutil.which("valkey-server") or shutil.which("redis-server")
        if program is None:
            raise UnsupportedError("neither valkey-server nor redis-server is here: apt-get install redis-server")
        setup.directory.mkdir(exist_ok=True)
        words = [program, "--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no"]
        if not _answers(path):
            path.unlink(missing_ok=True)
            start_server(
                [*words, "--dir", str(setup.directory)], setup.directory / "server.pid", lambda: _answers(path)
            )
        return f"unix://{path}?timeout_s=10"


class MooncakeTarget(RemoteTarget):
    """Over a Mooncake master and the memory of one process, as `kvtide remote up mooncake` starts them."""

    traits: ClassVar[Traits] = replace(
        REMOTE_TRAITS,
        name="mooncake",
        package="mooncake-transfer-engine-non-cuda",
        version=_version("mooncake-transfer-engine-non-cuda"),
        note=f"kvtide {kvtide.__version__} over a master and {SEGMENT} of memory on this machine",
    )

    def _serve(self, setup: Setup) -> str:
        told = setup.directory / "up.json"
        setup.directory.mkdir(exist_ok=True)
        if not told.exists():
            code = "import sys; from kvtide.cli import main; main()"  # the directory in its command line names it ours
            words = [sys.executable, "-c", code, "remote", "up", "mooncake", "--json", "--memory", SEGMENT]
            start_server(words, setup.directory / "server.pid", lambda: bool(told.read_text().strip()), output=told)
        return str(json.loads(told.read_text().splitlines()[0])["url"])


def start_server(words: list[str], pid_file: Path, is_up: Callable[[], bool], *, output: Path | None = None) -> None:
    """Start a server that goes on without this process, and wait until it is up.

    Raises: IoError if it does not come up.
    """
    named = ["env", f"KVTIDE_CHECK={pid_file.parent}", *words]
    with (output or pid_file.with_suffix(".log")).open("wb") as file:
        process = subprocess.Popen(
            named, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.DEVNULL, start_new_session=True
        )
    pid_file.write_text(str(process.pid))
    until = time.monotonic() + START_S
    while not is_up():
        if process.poll() is not None or time.monotonic() > until:
            raise IoError(0, f"{Path(words[0]).name} did not come up; its output is in {pid_file.with_suffix('.log')}")
        time.sleep(0.02)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as one:
        try:
            one.connect(str(path))
            one.sendall(b"PING\r\n")
            return one.recv(16).startswith(b"+PONG")
        except OSError:
            return False
