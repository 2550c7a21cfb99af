"""Puts what the programs here share with tests and benchmarks on the import path. Import it before those."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / name) for name in ("tests", "benchmarks")]
