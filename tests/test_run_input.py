"""What `kvtide run` refuses before it loads anything, and how it leaves when its output or its files fail it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from inprocess import kvtide

pytest.importorskip("torch")
pytest.importorskip("transformers")


def shell(command: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    line = f"{sys.executable} -m kvtide.cli {command}"
    return subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--dram 0", "--dram is 0"),
        ("--device-memory 0", "--device-memory is 0"),
        ("--disk -1", "--disk: not a size"),
        ("--dram ''", "--dram: not a size"),
        ("--block-tokens 0", "--block-tokens"),
        ("--block-tokens 100000", "--block-tokens"),
        ("--group-blocks 0", "from 1 to 64"),
        ("--group-blocks 65", "from 1 to 64"),
        ("--group-blocks " + "9" * 5000, "from 1 to 64"),
        ("--engine quick", "auto, uring, threads"),
        ("--select qest", "quest, shadowkv"),
        ("--select clo+qest", "quest, shadowkv"),
        ("--select auto+quest", "unknown selection"),
        ("--select pmr+clo", "drafts would change the output"),
        ("--select quest --budget many", "--budget is 'many'"),
        ("--select quest --budget 0", "--budget is '0'"),
        ("--select quest --budget 140%", "--budget is '140%'"),
        ("--layout spiral", "block-first, groups, kv-apart, head-major"),
        ("--layout block-first --group-blocks 4", "groups of one block"),
        ("--trace .", "no regular file"),
        ("--trace /dev/null", "no regular file"),
        ("--chat --ask why", "one of them"),
        ("--chat --document -", "standard input"),
        ("--ask ''", "--ask is empty"),
        ("--document - <&-", "is empty"),
        ("--document . ", "Is a directory"),
        ("--document /dev/null", "is empty"),
    ],
)
def test_refused_in_one_line_before_anything_is_loaded_or_made(
    args: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "kvtide.integrations.transformers", None)  # so that it cannot be imported
    done = shell(f"run {args}", tmp_path) if "<&-" in args else kvtide("run", *shlex.split(args))
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("~nobody-is-called-so/model", "~nobody-is-called-so/model"),
        ("a" * 5000, "no folder here"),
        ("list", "cannot load a model"),
        ("weights", "cannot load a model"),
    ],
)
def test_garbage_for_a_model_is_one_line(
    model: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, config in (("list", "[1, 2]"), ("weights", '{"model_type": "llama"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        for file in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name / file).write_bytes(b"\xff garbage")
    (tmp_path / "text").write_text("Some words.")
    words = ["run", "--model", model, "--document", "text"]
    # One has its own process: there, what libraries say on standard error is seen, too.
    done = shell(" ".join(words), tmp_path) if model == "weights" else kvtide(*words)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_output_that_nobody_reads_or_no_disk_takes_is_no_traceback(tmp_path: Path) -> None:
    early = shell("size llama-3-8b --json | head -c 1", tmp_path)
    assert "Traceback" not in early.stderr
    assert "Exception" not in early.stderr
    full = shell("size llama-3-8b > /dev/full", tmp_path)
    assert full.returncode == 1
    assert full.stderr.count("\n") == 1
    assert shell("size llama-3-8b >&-", tmp_path).returncode == 0


def test_an_interrupt_while_the_command_is_imported_is_quiet() -> None:
    code = (
        "import builtins, sys\n"
        "import kvtide.__main__ as start\n"
        "real = builtins.__import__\n"
        "def interrupted(name, *rest):\n"
        "    if name == 'kvtide.cli':\n"
        "        raise KeyboardInterrupt\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = interrupted\n"
        "start.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize(
    "first",
    [
        "exec('raise KeyboardInterrupt')",  # how dataclasses are made
        "import time\nclass Lock:\n    def __del__(self): raise KeyboardInterrupt\nLock()\ntime.sleep(30)",
    ],
    ids=["code-from-a-string", "finalizer"],
)
def test_ctrl_c_ends_python_m_wherever_it_comes(tmp_path: Path, first: str) -> None:
    (tmp_path / "typer.py").write_text(first)  # what is imported first
    done = subprocess.run(
        [sys.executable, "-m", "kvtide", "--version"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_an_address_that_is_none_is_told_before_a_model_is_loaded() -> None:
    done = kvtide("run", "--metrics", "9464x", "--model", "/nowhere")
    assert done.returncode == 2
    assert "--metrics is '9464x'; type a port of 0 to 65535, or HOST:PORT" in done.stderr
