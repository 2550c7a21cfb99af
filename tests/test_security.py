"""Who may touch a store's files, what is followed, what is told to whom: modes, owners, links, names, reports."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inprocess import kvtide
from kvhelp import Walker, open_small, small_cache, small_identity, small_layout
from kvtide import ConfigError
from kvtide.errors import IoError, KvtideError
from kvtide.metrics.endpoint import parse_address
from kvtide.metrics.names import METRICS
from kvtide.report.select import SelectReport
from kvtide.report.select_html import select_page
from kvtide.tiers import guard
from kvtide.tiers.breaker import Breaker
from kvtide.tiers.glance import glance
from kvtide.tiers.inspect import drop_namespace, find_namespaces, list_namespaces
from kvtide.tiers.namespace import MARKER, open_namespace, prepare_root
from kvtide.tiers.why import NEVER, why_prompt

LAYOUT = small_layout()
DIGEST = small_identity(LAYOUT).digest().hex()[:32]
FILES = ("identity.json", "owner.lock", "data.kvt", "checkpoint.kvt", "pace.json")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def made(root: Path) -> Path:
    opened = open_small(root, LAYOUT)
    opened.write_pace("{}")
    opened.close()
    return opened.path


# Modes and owners


@pytest.mark.usefixtures("umask")
def test_modes_whatever_the_umask(tmp_path):
    path = made(tmp_path / "a" / "store")
    assert mode_of(path) == mode_of(path.parent) == 0o700
    assert mode_of(path.parent / MARKER) == 0o600
    assert {name: mode_of(path / name) for name in FILES} == dict.fromkeys(FILES, 0o600)


def test_a_file_that_others_could_read_is_closed_to_them(tmp_path):
    path = made(tmp_path / "s")
    (path / "data.kvt").chmod(0o666)
    made(tmp_path / "s")
    assert mode_of(path / "data.kvt") == 0o600


@pytest.mark.parametrize("which", ["root", "namespace"])
def test_a_directory_that_everybody_may_write_to_is_refused(tmp_path, which):
    path = made(tmp_path / "s")
    (path if which == "namespace" else path.parent).chmod(0o777)
    with pytest.raises(ConfigError, match="chmod go-w"):
        open_small(tmp_path / "s", LAYOUT)
    if which == "root":
        for look in (list_namespaces, glance, drop_namespace):
            with pytest.raises(ConfigError, match="chmod go-w"):
                look(tmp_path / "s")


def test_a_group_that_may_write_is_warned_of(tmp_path, caplog):
    path = made(tmp_path / "s")
    path.parent.chmod(0o770)
    with caplog.at_level(logging.WARNING):
        made(tmp_path / "s")
    assert "a group may write" in caplog.text


@pytest.mark.parametrize(("us", "is_refused"), [(1000, True), (0, False)])
def test_a_directory_of_somebody_else(tmp_path, monkeypatch, caplog, us, is_refused):
    """Refused, but to root, who is told."""
    path = tmp_path / "s"
    made(path)
    status = os.stat_result([*path.stat()[:4], 4711, *path.stat()[5:10]])
    monkeypatch.setattr(Path, "stat", lambda *_, **__: status)
    monkeypatch.setattr(os, "geteuid", lambda: us)
    if is_refused:
        with pytest.raises(ConfigError, match="belongs to user 4711"):
            guard.check_directory(path, may_be_link=True)
    else:
        with caplog.at_level(logging.WARNING):
            guard.check_directory(path, may_be_link=True)
        assert "belongs to user 4711" in caplog.text


# Links and names


@pytest.mark.parametrize("name", [*FILES, "departures.kvt"])
def test_no_link_in_a_namespace_is_followed(tmp_path, name):
    """Neither read through, nor written through, nor truncated: what it points to stays as it was."""
    path, victim = made(tmp_path / "s"), tmp_path / "victim"
    victim.write_bytes(b"precious")
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(victim)
    try:
        opened = open_small(tmp_path / "s", LAYOUT)
    except KvtideError as error:
        told = str(error)
    else:
        told = name
        opened.write_pace("{}")
        opened.tier.drop(np.zeros(1, "V32"))
        opened.close()
    assert name in told
    assert victim.read_bytes() == b"precious"
    assert "not a regular file" in list_namespaces(tmp_path / "s")[0].problem or not (path / name).is_symlink()


@pytest.mark.parametrize("name", ["identity.json", "checkpoint.kvt", "pace.json"])
def test_a_link_planted_under_the_name_of_a_half_written_file(tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path = tmp_path / "s" / DIGEST
    path.mkdir(parents=True, mode=0o700)
    (tmp_path / "s" / MARKER).write_text('{"format": "kvtide store", "version": 1}\n')
    (path / f"{name}.partial").symlink_to(victim)
    made(tmp_path / "s")
    assert victim.read_bytes() == b"precious"
    assert not (path / name).is_symlink()


def test_a_namespace_that_is_a_link_is_not_entered(tmp_path):
    made(tmp_path / "s")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "s" / DIGEST).rename(tmp_path / "away")
    (tmp_path / "s" / DIGEST).symlink_to(elsewhere)
    with pytest.raises(IoError, match="directory"):
        open_small(tmp_path / "s", LAYOUT)
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("name", ["../victim", "..", "/etc", "a/../../victim", "0" * 31 + "/", "\0" * 32, "*", ""])
def test_names_of_namespaces_are_digits_and_nothing_else(tmp_path, name):
    made(tmp_path / "s")
    (tmp_path / "victim").mkdir()
    with pytest.raises(ConfigError):
        find_namespaces(tmp_path / "s", name)
    with pytest.raises(ConfigError):
        drop_namespace(tmp_path / "s", name)
    assert (tmp_path / "victim").is_dir()


def test_what_an_identity_says_is_never_a_path(tmp_path):
    layout = small_layout()
    hostile = replace(small_identity(layout), model="../../../tmp/x", revision="/etc/passwd", adapter="..")
    path = tmp_path / "s" / hostile.digest().hex()[:32]
    opened = guard_open(tmp_path / "s", hostile, layout)
    opened.close()
    assert opened.path == path
    assert sorted(child.name for child in tmp_path.iterdir()) == ["s"]


def guard_open(root, identity, layout):
    return open_namespace(root, identity, layout, capacity_bytes=4096 + 4 * layout.slot_bytes)


@pytest.mark.parametrize("make", ["pipe", "directory", "link"])
def test_pipes_and_directories_in_the_place_of_files(tmp_path, make):
    """No open waits for a writer that never comes."""
    for name in FILES:
        root = tmp_path / name
        path = made(root)
        (path / name).unlink(missing_ok=True)
        if make == "pipe":
            os.mkfifo(path / name)
        elif make == "directory":
            (path / name).mkdir()
        else:
            (path / name).symlink_to(path / name)  # to itself
        assert isinstance(list_namespaces(root)[0].problem, str)
        assert isinstance(glance(root)[0].problem, str)
        with contextlib.suppress(KvtideError):
            open_small(root, LAYOUT).close()


def test_a_file_longer_than_it_can_be_is_not_read(tmp_path):
    path = made(tmp_path / "s")
    with (path / "identity.json").open("r+b") as file:
        file.truncate(1 << 40)
    with (path / "checkpoint.kvt").open("r+b") as file:
        file.truncate(1 << 40)
    assert "longer" in list_namespaces(tmp_path / "s")[0].problem
    (tmp_path / "s" / MARKER).write_bytes(b"x")
    with (tmp_path / "s" / MARKER).open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="longer"):
        prepare_root(tmp_path / "s")


# Tenants


def test_one_salt_learns_nothing_of_another(tmp_path):
    """The same prompt is a miss for another tenant; nothing told of its store names a salt or a key of the other."""
    opened = open_small(tmp_path / "s", LAYOUT)
    cache = small_cache(LAYOUT, opened.tier)
    tokens = list(range(32))
    sequence = cache.open(tokens, salt="tenant-secret-a")
    Walker(cache).step([sequence], [tokens])
    cache.release(sequence)
    cache.flush()
    assert cache.match([*tokens, 1], salt="tenant-secret-a").num_tokens == 32
    for salt in ("", "tenant-secret-b", "tenant-secret-a "):
        assert cache.match([*tokens, 1], salt=salt).num_tokens == 0
    keys = [key.hex() for key in opened.tier.inventory().keys.tolist()]
    cache.close()
    opened.close()
    told = why_prompt(np.array(tokens), glance(tmp_path / "s"), small_identity(LAYOUT), ("tenant-secret-b",))
    assert [run.why for run in told.runs] == [NEVER]
    assert told.reused_tokens == 0
    info = repr(list_namespaces(tmp_path / "s")) + repr(told)
    assert "tenant-secret-a" not in info
    assert not any(key in info for key in keys)
    stored = b"".join(path.read_bytes() for path in opened.path.iterdir())
    assert b"tenant-secret" not in stored


def test_what_a_server_says_cannot_steer_a_terminal(caplog):
    breaker = Breaker("valkey://h", lambda: 0)
    with caplog.at_level(logging.WARNING):
        breaker.fail("\x1b]0;owned\x07 refuses\r\nFAKE: all is well")
    assert "\x1b" not in caplog.text
    assert "\x07" not in caplog.text
    assert len(caplog.text.splitlines()) == 1


def test_metrics_have_no_label_of_a_tenant_or_a_key():
    labels = {label for metric in METRICS for label in metric.labels}
    assert not labels & {"salt", "tenant", "key", "prompt", "session"}
    assert parse_address("9464")[0] == "127.0.0.1"


# Pages


SCRIPT = "<img src=x onerror=alert(2)>\x1b[2J\x07"  # a file may be called that


def check_told(text: str) -> None:
    assert "<img src=x" not in text
    assert "\x1b" not in text
    assert "\x07" not in text


def hostile_model(tmp_path: Path) -> Path:
    folder = tmp_path / SCRIPT
    folder.mkdir()
    fields = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    fields |= {
        "intermediate_size": 128,
        "vocab_size": 1000,
        "max_position_embeddings": 65536,
        "torch_dtype": "bfloat16",
    }
    fields |= {"auto_map": {"AutoModelForCausalLM": "evil.Model"}, "_name_or_path": SCRIPT}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "evil.py").write_text("raise SystemExit('code of a model folder was run')")
    return folder


@pytest.mark.parametrize("more", [(), ("--sweep", "batch=1,2")])
def test_a_hostile_name_of_a_model_in_a_plan(tmp_path, more):
    page = tmp_path / "plan.html"
    done = kvtide("plan", str(hostile_model(tmp_path)), "--html", str(page), *more)
    assert done.returncode == 0, done.stderr
    check_told(page.read_text())
    assert "\x1b[2J" not in done.stdout + done.stderr


def test_a_hostile_name_of_a_model_in_a_comparison():
    check_told(select_page(SelectReport(model=SCRIPT, dtype="bf16")))


def test_a_hostile_identity_in_the_list_of_a_store(tmp_path):
    opened = guard_open(
        tmp_path / "s", replace(small_identity(LAYOUT), model=SCRIPT, facts=(("x\x1b", SCRIPT),)), LAYOUT
    )
    opened.close()
    for words in (("store", "ls"), ("store", "verify"), ("why", "1,2,3", "--dir")):
        done = kvtide(*words, str(tmp_path / "s"))
        assert "\x1b[2J" not in done.stdout + done.stderr
        assert "\x07" not in done.stdout + done.stderr


def test_weights_that_hold_code_are_not_loaded(tmp_path):
    """A pickle runs what it likes when it is loaded; only safetensors are read."""
    models = pytest.importorskip("kvtide.integrations.transformers.models")
    folder, ran = hostile_model(tmp_path), tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return (os.system, (f"touch {ran}",))

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ConfigError, match="cannot load a model") as raised:
        models.load(str(folder), dtype="fp32", cache_dir=tmp_path)
    assert "code of a model folder" not in str(raised.value)
    assert not ran.exists()
