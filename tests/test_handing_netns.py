"""Prefill and decode in two network namespaces, a server in one of them: KV goes over a network of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("valkey")

from kvtide.integrations.transformers import KvStore
from test_handing import answer
from test_transformers import options
from test_turns import model

HERE, THERE = "10.213.77.1", "10.213.77.2"
PORT, START_S = 6379, 20.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two namespaces joined by a veth pair, with HERE and THERE; gone afterwards, whatever happened."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("namespaces need root and the command ip")
    names = f"kvtide-a{os.getpid()}", f"kvtide-b{os.getpid()}"
    links = f"kva{os.getpid() % 100000}", f"kvb{os.getpid() % 100000}"
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", links[1], "netns", names[1])
            for name, link, address in zip(names, links, (HERE, THERE), strict=True):
                ip("-n", name, "address", "add", f"{address}/30", "dev", link)
                ip("-n", name, "link", "set", link, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as refused:
            pytest.skip(f"this machine makes no namespaces: {refused.stderr.strip()}")
        yield names
    finally:
        for name in names:  # the links go with them
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


@contextlib.contextmanager
def server_in(name: str, folder: Path) -> Iterator[None]:
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        pytest.skip("neither valkey-server nor redis-server is installed: apt-get install redis-server")
    command = ["ip", "netns", "exec", name, program, "--bind", HERE, "--port", str(PORT), "--protected-mode", "no",
               "--unixsocket", str(folder / "s"), "--save", "", "--dir", str(folder)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            with socket.socket(socket.AF_UNIX) as one, contextlib.suppress(OSError):
                one.connect(str(folder / "s"))
                break
            time.sleep(0.01)
        yield
    finally:
        process.kill()
        process.wait()


def roles_in(names: tuple[str, str], url: str) -> list[dict[str, Any]]:
    """Run prefill in the first namespace and decode in the second, at once; what they say."""
    tests, started = Path(__file__).parent, []
    try:
        for name, role in zip(names, ("prefill", "decode"), strict=True):
            command = ["ip", "netns", "exec", name, sys.executable, str(tests / "handing_role.py"), role, url]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            started.append(subprocess.Popen(command, cwd=tests, text=True, **pipes))
        said = [process.communicate(timeout=240) for process in started]
        assert [process.returncode for process in started] == [0, 0], said
        return [json.loads(out.splitlines()[-1]) for out, _ in said]
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_kv_is_handed_over_between_two_namespaces(namespaces: tuple[str, str], tmp_path: Path) -> None:
    loaded = model("llama")
    with KvStore(loaded, options(None)) as store:
        alone = answer(loaded, store)
    with server_in(namespaces[0], tmp_path):
        stored, decoded = roles_in(namespaces, f"valkey://{HERE}:{PORT}/0")
    assert decoded["handed"]["arrived_tokens"] == stored["handed"]["num_tokens"] == alone.prompt_tokens - 1
    assert decoded["answer"] == alone.answer


def test_namespaces_go_after_a_failure() -> None:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("namespaces need root and the command ip")
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"{os.getpid()}" not in listed
