"""Fuzz the importers: any bytes give a trace, counted lines, or a named error. `make fuzz` runs it for a minute.

atheris finds inputs by coverage; tests/test_importers.py draws malformed lines of every format by Hypothesis.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvtide.trace.importers"]):
    from kvtide.errors import KvtideError
    from kvtide.trace.file import TraceFile
    from kvtide.trace.importers.formats import FORMATS, import_file

CHOICES = ("auto", *(form.name for form in FORMATS))
FOLDER = tempfile.TemporaryDirectory(prefix="kvtide-fuzz-")


def one(data: bytes) -> None:
    """Import what follows the first byte, which chooses the format, and read the trace back."""
    if not data:
        return
    log, output = Path(FOLDER.name) / "log", Path(FOLDER.name) / "out.kvtrace"
    log.write_bytes(data[1:])
    try:
        import_file(log, output, format=CHOICES[data[0] % len(CHOICES)])
        num_rows = sum(TraceFile(output).about.rows.values())
    except KvtideError:
        return
    assert num_rows > 0, "a log without events is an error"


def main() -> None:
    """Run until told otherwise on the command line, as libFuzzer does."""
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
