"""The engines there are, and which of them are installed. Next: embedded."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib import import_module

from kvtide.errors import ConfigError, UnsupportedError
from kvtide.stores.engines.contract import About, Engine, EngineOptions
from kvtide.units import printable

_HERE = "kvtide.stores.engines"
MEMORY_ONLY = "in memory until it is saved at the end"
ENGINES = {
    each.name: each
    for each in (
        About("kvtide", f"{_HERE}.own:Kvtide", "", "kvtide.recall",
              "in the group that commits within 10 ms", "on disk (log, fdatasync)", "exact"),
        About("lancedb", f"{_HERE}.databases:LanceDb", "lancedb", "lancedb",
              "in files that nobody synced", "", "exact, after optimize"),
        About("lancedb-256", f"{_HERE}.databases:LanceDb256", "lancedb", "lancedb",
              "in files that nobody synced; optimized each 256 inserts", "", "exact"),
        About("rocksdb", f"{_HERE}.embedded:RocksDb", "rocksdict", "rocksdict",
              "in the log, not synced", "on disk (log, fsync)", "all rows read, exact"),
        About("sqlite", f"{_HERE}.embedded:Sqlite", "", "sqlite3",
              "in the log, synced at a checkpoint", "on disk (log, fsync)", "all rows read, exact"),
        About("sqlite-vec", f"{_HERE}.embedded:SqliteVec", "sqlite-vec pysqlite3-binary", "sqlite_vec",
              "in the log, synced at a checkpoint", "on disk (log, fsync)", "exact"),
        About("usearch", f"{_HERE}.graphs:Usearch", "usearch", "usearch", MEMORY_ONLY, "", "HNSW in a mapped file"),
        About("hnswlib", f"{_HERE}.graphs:Hnswlib", "hnswlib", "hnswlib",
              "in memory, saved each 1,000 rows", "", "HNSW in memory"),
        About("faiss", f"{_HERE}.graphs:Faiss", "faiss-cpu", "faiss", MEMORY_ONLY, "", "IVF, lists in a mapped file"),
        About("diskann", f"{_HERE}.diskann:DiskAnn", "--no-deps diskannpy", "diskannpy",
              "in a file beside, index built at the end", "in a file beside (fdatasync)", "graph on disk, beam 4"),
        About("milvus-lite", f"{_HERE}.databases:MilvusLite", "pymilvus milvus-lite", "milvus_lite",
              "as the library has it: not synced", "", "exact"),
    )
}  # fmt: skip


def is_installed(about: About) -> bool:
    """Whether the engine's library can be imported."""
    return importlib.util.find_spec(about.module) is not None


def chosen(text: str) -> list[About]:
    """Return the engines that `text` names by commas; `all`: those that are installed.

    Raises: ConfigError for a name there is not; UnsupportedError where one that was named is not installed.
    """
    if text.strip() == "all":
        return [about for about in ENGINES.values() if is_installed(about)]
    names: Sequence[str] = list(dict.fromkeys(word for word in text.replace(" ", "").split(",") if word))
    unknown = [name for name in names if name not in ENGINES]
    if unknown or not names:
        what = printable(unknown[0])[:40] if unknown else "nothing"
        raise ConfigError(f"--engines names {what}; type all, or some of {', '.join(ENGINES)}")
    absent = [ENGINES[name] for name in names if not is_installed(ENGINES[name])]
    if absent:
        raise UnsupportedError(f"{absent[0].name} is not installed; type pip install {absent[0].package}")
    return [ENGINES[name] for name in names]


def opened(name: str, options: EngineOptions) -> Engine:
    """Return the engine called `name`, open in its folder."""
    module, _, kind = ENGINES[name].place.partition(":")
    made: Engine = getattr(import_module(module), kind)(options)
    return made
