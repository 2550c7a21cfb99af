"""Clients of a remote that fail in ways of their own: none harms a run, leaks a thread, or shows a secret."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.tiers.client import RemoteDown
from kvtide.tiers.mooncake import MooncakeClient, MooncakeOptions


class HangingStore:
    """A store whose set-up comes back when it is let go."""

    may_return = threading.Event()

    def setup(self, *_: object) -> int:
        self.may_return.wait()
        return 0


class RefusingStore:
    def setup(self, *_: object) -> int:
        return -1


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvtide-mooncake"]


def connect(monkeypatch: pytest.MonkeyPatch, store: type[Any]) -> None:
    package = SimpleNamespace(MooncakeDistributedStore=store)
    monkeypatch.setitem(sys.modules, "mooncake", SimpleNamespace(store=package))
    monkeypatch.setitem(sys.modules, "mooncake.store", package)
    MooncakeClient(MooncakeOptions("host:1", "http://host/metadata", timeout_s=0.01))


def test_connects_that_fail_leave_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = workers()
    with pytest.raises(RemoteDown, match="code -1"):
        connect(monkeypatch, RefusingStore)
    with pytest.raises(RemoteDown, match="no answer"):
        connect(monkeypatch, HangingStore)
    for _ in range(3):
        with pytest.raises(RemoteDown, match="has not come back"):
            connect(monkeypatch, HangingStore)
    HangingStore.may_return.set()
    for thread in set(workers()) - set(before):
        thread.join(10)
    assert set(workers()) <= set(before)
    with pytest.raises(RemoteDown, match="code -1"):  # asked again
        connect(monkeypatch, RefusingStore)
