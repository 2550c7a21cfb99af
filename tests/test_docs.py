"""Documents name only what exists, and every result they cite lies in the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtide.cli import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_files_named_exist(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"
    for name in re.findall(r"`((?:src|tests|benchmarks|docs)/[\w/.]+)`", text):
        assert (ROOT / name).exists(), f"{path.name} names {name}"


def test_every_option_the_readme_shows_exists() -> None:
    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"^ {4}kvtide (\w+)((?: (?:ls|verify|drop))?)(.*)$", text, re.MULTILINE)
    assert commands
    for command, sub, rest in commands:
        shown = CliRunner().invoke(app, [command, *sub.split(), "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
        assert shown.exit_code == 0, f"kvtide {command}{sub}"
        for option in re.findall(r"--[\w-]+", rest.split(" -- ")[0]):
            assert option in shown.output, f"kvtide {command} has no {option}"
