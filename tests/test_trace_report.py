"""The report of a trace: on the terminal, as JSON, and as a page in a real browser."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from inprocess import kvtide
from kvtide.trace.file import About, Device, TraceWriter

PATIENCE_MS = 300_000  # a machine that others use, too
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e'\"\n"


def make_trace(path: Path, *, name: str = "vda", num_steps: int = 12, seed: int = 1) -> Path:
    """Write a trace of decode steps of four layers, one op of two commands for each."""
    rng, layers = np.random.default_rng(seed), 4
    num = num_steps * layers
    time = np.arange(num) * 1_000_000 + 1_000_000
    took = rng.integers(80_000, 300_000, num)
    layer, step = np.tile(np.arange(layers), num_steps), np.repeat(np.arange(num_steps), layers)
    offset = rng.integers(0, 4000, num) * 262_144
    cause = ["decode-read"] * num
    common = {"cause": cause, "layer": layer}
    objects = {"time_ns": time, "wait_ns": took + 1000, "step": step, "step_tokens": np.full(num, 1), **common}
    objects |= {"wanted_bytes": np.full(num, 1 << 20), "file_bytes": np.full(num, 262_144), "num_tokens": step + 100}
    objects |= {"dram_bytes": np.full(num, 1 << 18), "sequence_id": np.zeros(num, np.int64)}
    ops = {
        "time_ns": time + 500,
        "complete_ns": time + took,
        "offset": offset,
        "length": np.full(num, 262_144),
        **common,
    }
    block = {
        "time_ns": np.repeat(time + 900, 2),
        "complete_ns": np.repeat(time + took - 100, 2),
        "queue_ns": np.repeat(time + 800, 2),
        "device": np.full(2 * num, 254 << 20),
        "offset": np.repeat(offset, 2) + np.tile([0, 131_072], num),
        "length": np.full(2 * num, 131_072),
        "flags": np.full(2 * num, 1),
        "comm": [name[:15]] * (2 * num),
        "cause": ["decode-read"] * (2 * num),
        "layer": np.repeat(layer, 2),
        "op": np.repeat(np.arange(num), 2),
    }
    about = About(source="kernel", command=name, start_ns=0, end_ns=int(time[-1] + 1_000_000), notes=[name])
    about.devices = {str(254 << 20): Device(name=name)}
    with TraceWriter(path) as writer:
        for level, columns in (("object", objects), ("op", ops), ("block", block)):
            writer.add(level, pl.DataFrame(columns))
        writer.finish(about)
    return path


def report(*words: object) -> subprocess.CompletedProcess[str]:
    return kvtide("report", *words)


def test_terminal_and_json_tell_the_same_trace(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "a.kvtrace")
    shown = report(trace)
    assert shown.returncode == 0, shown.stderr
    assert "Verdict" in shown.stdout
    told = json.loads(report(trace, "--json").stdout)["traces"][0]
    assert told["indicators"]["whole"]["read"]["num_bytes"] == 12 * 4 * 262_144
    assert told["indicators"]["causes"]["decode-read"]["read"]["sizes"]["mode_bytes"] == 131_072
    assert told["verdict"]["name"]


def test_two_traces_are_compared(tmp_path: Path) -> None:
    first, second = make_trace(tmp_path / "a.kvtrace"), make_trace(tmp_path / "b.kvtrace", num_steps=24)
    told = json.loads(report(first, second, "--json").stdout)
    assert len(told["traces"]) == 2
    values = {(row["group"], row["name"]): row["values"] for row in told["comparison"]}
    assert any(ours and theirs == 2 * ours for ours, theirs in values.values() if isinstance(ours, (int, float)))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\xff" * 200 + b"PAR1", b"hello\n" * 50])
def test_what_is_no_trace_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.kvtrace"
    file.write_bytes(content)
    done = report(file, "--html", tmp_path / "x.html")
    assert done.returncode == 1
    assert done.stderr.startswith("kvtide: ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "x.html").exists()


def test_a_truncated_trace_is_refused(tmp_path: Path) -> None:
    whole = make_trace(tmp_path / "a.kvtrace").read_bytes()
    for share in (0.1, 0.5, 0.99):
        file = tmp_path / "cut.kvtrace"
        file.write_bytes(whole[: int(len(whole) * share)])
        assert report(file).returncode == 1


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    with api.sync_playwright() as play:
        running = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"], timeout=PATIENCE_MS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def hostile_page(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of a trace whose names are markup."""
    del browser  # without one, nobody looks at the page
    folder = tmp_path_factory.mktemp("hostile")
    done = report(make_trace(folder / "a.kvtrace", name=HOSTILE), "--html", folder / "page.html")
    assert done.returncode == 0, done.stderr
    return folder / "page.html"


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_works_offline_on_a_phone_and_a_desk(browser: Any, hostile_page: Path, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, offline=True)
    context.set_default_timeout(PATIENCE_MS)
    page, troubles, asked = context.new_page(), [], []
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("dialog", lambda dialog: (troubles.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(hostile_page.as_uri())
    page.wait_for_function("document.querySelectorAll('.js-plotly-plot .main-svg').length >= 10")
    assert troubles == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in asked)
    assert page.locator(".js-plotly-plot").count() == 6
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.locator("script[src], img[onerror]").count() == 0
    step = page.locator("details.step").first
    step.locator("summary").first.click()
    step.locator("details summary").first.click()
    assert "command" in step.inner_text()
    shot = page.locator(".js-plotly-plot").first.screenshot()
    assert len(shot) > 4000  # a blank picture of this size compresses to less
    assert page.pdf()[:4] == b"%PDF"
    context.close()


@pytest.mark.browser
def test_the_page_of_two_traces_shows_both(browser: Any, tmp_path: Path) -> None:
    page_file = tmp_path / "page.html"
    traces = make_trace(tmp_path / "a.kvtrace"), make_trace(tmp_path / "b.kvtrace", num_steps=20, seed=2)
    assert report(*traces, "--html", page_file).returncode == 0
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(page_file.as_uri())
    page.wait_for_function("document.querySelectorAll('.js-plotly-plot').length == 12")
    assert "Comparison" in page.inner_text("h1")
    page.close()


@pytest.mark.browser
def test_the_example_of_the_docs_is_drawn(browser: Any, tmp_path: Path) -> None:
    docs, page_file = Path(__file__).parent.parent / "docs", tmp_path / "page.html"
    done = report(docs / "data/run.kvtrace", "--probe", docs / "data/probe.json", "--html", page_file, "--json")
    assert done.returncode == 0, done.stderr
    page = browser.new_page(viewport={"width": 1100, "height": 900})
    page.set_default_timeout(PATIENCE_MS)
    page.goto(page_file.as_uri())
    page.wait_for_function("document.querySelectorAll('.js-plotly-plot').length == 7")
    assert page.inner_text("h1") == "run.kvtrace"
    page.wait_for_function("document.querySelectorAll('.js-plotly-plot .main-svg').length > 7")
    made = page.screenshot()
    kept = (docs / "img/report.png").read_bytes()
    assert kept[:4] == made[:4] == b"\x89PNG"
    assert num_colours(page, made) > 50  # fonts differ between machines, so no two pictures are equal
    assert num_colours(page, kept) > 50
    page.close()


def num_colours(page: Any, png: bytes) -> int:
    """Return how many colours a picture has, as the browser decodes it: a blank one has one."""
    found: int = page.evaluate(
        """async text => {
            const image = await createImageBitmap(await (await fetch(text)).blob());
            const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
            canvas.drawImage(image, 0, 0);
            return new Set(new Uint32Array(canvas.getImageData(0, 0, image.width, image.height).data.buffer)).size;
        }""",
        "data:image/png;base64," + base64.b64encode(png).decode(),
    )
    return found
