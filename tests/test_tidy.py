"""The house rules that a machine can check: lengths, names, module docstrings, where the environment is read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
FILE_LINES_MAX, FUNCTION_LINES_MAX = 400, 70
READS_ENVIRONMENT = {"cli.py", "cli_bench.py", "cli_probe.py", "cli_trace.py", "cli_places.py", "cli_run.py"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_is_short_documented_and_reads_no_environment(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert text.count("\n") <= FILE_LINES_MAX, "split the file"
    assert ast.get_docstring(tree), "say what the file decides"
    assert path.name not in {"utils.py", "common.py", "helpers.py"}
    if path.name not in READS_ENVIRONMENT:
        assert "os.environ" not in text
        assert "getenv" not in text
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.body:
            lines = (node.body[-1].end_lineno or 0) - node.body[0].lineno + 1
            assert lines <= FUNCTION_LINES_MAX, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name != "tables.py"], ids=lambda path: path.name)
def test_polars_is_imported_where_ctrl_c_is_mended(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body.clear()
    names = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    assert "polars" not in names, "from kvtide.tables import pl"


def test_importing_kvtide_loads_no_model_library() -> None:
    import subprocess
    import sys

    code = "import sys, kvtide.cli; print([m for m in ('torch', 'transformers', 'polars') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
