"""Fuzz the files of a store: any damage gives right bytes, a miss, or a named error. `make fuzz` runs it for a minute.

What is damaged and what must hold is in tests/hostile.py; tests/test_hostile.py draws some of it by Hypothesis. Input:
flags (1 encrypted, 2 no checkpoint, 4 checksums made right again), then edits: which file, where, which bytes.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

with atheris.instrument_imports(include=["kvtide.tiers", "kvtide.spec"]):
    from hostile import FILES, HostileStore

EDITS_MAX, EDIT_BYTES_MAX = 8, 64
STORES = [HostileStore(is_encrypted=bool(kind & 1), is_clean=not kind & 2) for kind in range(4)]


def one(data: bytes) -> None:
    """Damage a store as `data` says, and use it."""
    source = atheris.FuzzedDataProvider(data)
    flags = source.ConsumeIntInRange(0, 7)
    store = STORES[flags & 3]
    files = {name: bytearray(content) for name, content in store.files.items()}
    for _ in range(source.ConsumeIntInRange(1, EDITS_MAX)):
        name = FILES[source.ConsumeIntInRange(0, len(FILES) - 1)]
        content = files.setdefault(name, bytearray())
        at = source.ConsumeIntInRange(0, len(content))
        new = source.ConsumeBytes(source.ConsumeIntInRange(0, EDIT_BYTES_MAX))
        if new:
            content[at : at + len(new)] = new
        else:
            del content[at:]
    store.check({name: bytes(content) for name, content in files.items()}, is_forged=bool(flags & 4))


def main() -> None:
    """Run until told otherwise on the command line, as libFuzzer does."""
    logging.disable(logging.WARNING)
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
