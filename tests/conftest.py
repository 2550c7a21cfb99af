"""Being here, this file puts `tests` on the import path, where the shared helpers lie."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from hypothesis import HealthCheck, settings

import inprocess

# Before torch is imported, here or in a program that a test starts. Prompts of tests are too short for a second thread
# to help; and where others use the machine, each of a model's many small steps would wait for it to be scheduled.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes, to make or to run, is the machine's affair.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.fixture(autouse=True)
def _ctrl_c() -> None:
    """Let Ctrl-C do what it does, for programs that a test starts, too.

    A shell that starts the tests in the background has their programs ignore it, and so has a test before that ended
    the command line by Ctrl-C.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `kvtide run` in this process use models that were loaded before: to load one takes seconds."""
    from kvtide.integrations import transformers

    monkeypatch.setattr(transformers, "load", inprocess.load_once)


@pytest.fixture
def short_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it use those without most of their layers: where what the model says does not matter."""
    from kvtide.integrations import transformers

    monkeypatch.setattr(transformers, "load", inprocess.load_short)
