"""`kvtide size` as people and programs use it."""

from __future__ import annotations

import json
import sys

import pytest

from kvtide import cli


@pytest.fixture
def kvtide(monkeypatch, capsys):
    """Run the command line in this process; gives exit code, standard output and standard error."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["kvtide", *words])
        code = 0
        try:
            cli.main()
        except SystemExit as left:
            code = left.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


KEYS = ("model", "source", "inputs", "bytes_per_token", "total_bytes", "block_bytes", "fragments", "contiguous",
        "paged", "prefill", "decode")  # fmt: skip


@pytest.mark.parametrize(
    ("words", "bytes_per_token", "total_bytes"),
    [
        ("llama-3-70b --tokens 4096", 327_680, 1_342_177_280),
        ("llama-3-70b --tokens 32000 --batch 32", 327_680, 335_544_320_000),
        ("deepseek-v3 --dtype bf16 --tokens 1", 70_272, 70_272),
        ("smollm2-135m --dtype bf16 --tokens 1", 23_040, 23_040),
        ("llama-3-70b --tokens 4096 --tp 8 --dtype fp8_e4m3", 20_480, 83_886_080),
    ],
)
def test_json(kvtide, words, bytes_per_token, total_bytes):
    code, out, err = kvtide("size", *words.split(), "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert (found["bytes_per_token"], found["total_bytes"]) == (bytes_per_token, total_bytes)
    assert set(KEYS) <= set(found)
    assert found["fragments"]["layer_major"]["read_layer"]["fragment_bytes"] > 0
    assert {"kv_apart", "head_major"} & set(found["fragments"]) == (
        set() if "deepseek" in words else {"kv_apart", "head_major"}
    )


def test_tables_fit_a_terminal_and_name_the_numbers(kvtide):
    code, out, _ = kvtide("size", "gemma-3-27b", "--tokens", "200000", "--batch", "32", "--tp", "2")
    assert code == 0
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in out
    for words in ("a token", "sliding windows", "on all ranks", "prefill", "decode step", "contiguous",
                  "read_values", "kv_apart", "head_major", "read_head_tokens", "131,072 positions"):  # fmt: skip
        assert words in out


def test_a_file_is_sized_and_its_name_cannot_harm(kvtide, tmp_path):
    folder = tmp_path / "[bold]\x1b[31mmodel"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({
        "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 64,
    }))  # fmt: skip
    code, out, _ = kvtide("size", str(folder))
    assert code == 0
    assert "[bold]" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    "words",
    ["llama-3-7", "/no/such/place", "llama-3-8b --tokens 0", "llama-3-8b --tokens -1", "llama-3-8b --batch 0",
     "llama-3-8b --dtype fp7", "llama-3-8b --tp 3", "llama-3-8b --block-tokens 0",
     "llama-3-8b --tokens 99999999999999"],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(kvtide, words):
    code, out, err = kvtide("size", *words.split())
    assert (code, out) == (2, "")
    assert err.startswith("kvtide: ")
    assert err.count("\n") == 1
    code, out, err = kvtide("size", *words.split(), "--json")
    assert (code, out) == (2, "")
    assert json.loads(err)["kind"] == "ConfigError"


@pytest.mark.parametrize(
    "words", ["size", "size llama-3-8b --tokens many", "size llama-3-8b --colour", "sise", "size a b"]
)
def test_bad_usage_is_exit_code_2(kvtide, words):
    code, _, err = kvtide(*words.split())
    assert code == 2
    assert "Traceback" not in err


@pytest.mark.parametrize("words", [[], ["--help"], ["size", "--help"]])
def test_help_shows_an_example(kvtide, words):
    code, out, _ = kvtide(*words)
    assert code == 0
    assert "Example: kvtide size" in out


def test_version(kvtide):
    assert kvtide("--version") == (0, "kvtide 0.1.0\n", "")
