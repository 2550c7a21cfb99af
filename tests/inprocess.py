"""The command line in this process: a new one for each case, which imports everything anew, takes most of the time."""

from __future__ import annotations

import functools
import io
import json
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from kvtide import cli, cli_run

MODELS = cli_run.cache_dir() / "models"  # before a test says that the cache lies elsewhere


def kvtide(*words: object, stdin: bytes | None = b"") -> subprocess.CompletedProcess[str]:
    """Run the command with these words; None for `stdin` is one that was closed, as `<&-` does."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["kvtide", *map(str, words)]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", argv)
        patch.setattr(sys, "stdin", None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin)))
        code = cli._run()
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


@functools.cache
def load_once(ref: str | None, *, dtype: str | None, **_where: Any) -> Any:
    """Return a model, loaded when it is first asked for; the embedded one is unpacked once on a machine."""
    from kvtide.integrations.transformers.models import load

    return load(ref, dtype=dtype, cache_dir=MODELS)


@functools.cache
def load_short(ref: str | None, *, dtype: str | None, **_where: Any) -> Any:
    """Return the embedded model without most of its layers: where a pass of the model is run but not looked at."""
    from kvtide.integrations.transformers.models import DEFAULT_MODEL, _embedded, load

    assert ref in {None, DEFAULT_MODEL}
    whole = _embedded(MODELS)
    with tempfile.TemporaryDirectory() as folder:
        for file in whole.iterdir():
            (Path(folder) / file.name).symlink_to(file)
        config = Path(folder) / "config.json"
        config.unlink()
        config.write_text(json.dumps(json.loads((whole / "config.json").read_text()) | {"num_hidden_layers": 4}))
        return load(folder, dtype=dtype, cache_dir=MODELS)
