"""Logs of other tools, and arrays of other programs, as traces of ours. Begin with formats."""

from __future__ import annotations

from kvtide.trace.importers.formats import AUTO, NAMES, Imported, import_file
from kvtide.trace.importers.records import records

__all__ = ["AUTO", "NAMES", "Imported", "import_file", "records"]
