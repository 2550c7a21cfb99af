"""Engines for the tests of the plug-ins: the real ones where they are installed, else their stand-ins."""

from __future__ import annotations

import errno
import hashlib
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

from kvtide.blocks import KeyArray
from kvtide.chunks import ChunkStore, fold
from kvtide.io.ops import address_of, aligned_buffer

STAND_INS = Path(__file__).parent / "stand_ins"


def use(name: str) -> bool:
    """Let `import name` find an engine; say whether it is the real one."""
    home = STAND_INS / name
    if str(home) in sys.path:
        return False
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        sys.path.insert(0, str(home))
        return False
    if name == "sglang" and name not in sys.modules:
        spec = importlib.machinery.PathFinder.find_spec(name)
        assert spec is not None
        bare = types.ModuleType(name)  # its own start loads a language for prompts, and all that needs
        bare.__path__ = list(spec.submodule_search_locations or [])
        bare.__spec__ = spec
        sys.modules[name] = bare
    return True


class Memory:
    """Rows of bytes in host memory, `shift` bytes beyond a page."""

    def __init__(self, num: int, size: int, *, shift: int = 0, seed: int | None = None) -> None:
        step = -(-size // 4096) * 4096
        self._all = aligned_buffer(num * step + 4096)
        rows = self._all[shift : shift + num * step].reshape(num, step)
        self.rows = rows[:, :size]
        self.rows[:] = 0 if seed is None else np.random.default_rng(seed).integers(0, 256, (num, size), np.uint8)
        self.addresses = np.arange(num, dtype=np.uint64) * np.uint64(step) + np.uint64(address_of(rows[0]))


def digests(num: int, label: str = "chunk") -> list[bytes]:
    return [hashlib.sha256(f"{label} {index}".encode()).digest() for index in range(num)]


def keys(num: int, label: str = "chunk") -> KeyArray:
    return fold(digests(num, label))


class FailingEngine:
    """An engine whose disk can be told to fail."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.fails = engine, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def reap(self, wait_num: int) -> Any:
        done = self._engine.reap(wait_num).copy()
        if self.fails:
            done["error"], done["length"] = errno.EIO, 0
        return done


def break_disk(store: ChunkStore) -> FailingEngine:
    """Put an engine that fails from now on under `store`."""
    engine = FailingEngine(store._tier._io.engine)
    store._tier._io.engine = engine
    engine.fails = True
    return engine


def flip_bytes(store_path: Path, wanted: bytes) -> None:
    """Change one byte of `wanted` wherever it lies in a data file."""
    file = store_path / "data.kvt"
    body = bytearray(file.read_bytes())
    at = body.find(wanted)
    assert at >= 0
    body[at + 5] ^= 0xFF
    file.write_bytes(body)
