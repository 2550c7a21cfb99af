"""Key-value and SQL engines: SQLite, sqlite-vec, RocksDB. Next: graphs.

Rows are keyed by their id, in order, as a history grows. Without a vector index a search reads all rows.
"""

from __future__ import annotations

import sqlite3
import struct
from typing import Any

import numpy as np

from kvtide.stores.engines.contract import EngineOptions, Ids, Vectors, brute_force


class Sqlite:
    """One table of blobs in WAL mode."""

    def __init__(self, options: EngineOptions) -> None:
        self._dim = options.dim
        self._base = self._connect(str(options.folder / "rows.db"))
        self._base.execute("pragma journal_mode=wal")
        self._base.execute(f"pragma synchronous={'full' if options.is_durable else 'normal'}")
        self._prepare()

    def _connect(self, path: str) -> sqlite3.Connection:
        return sqlite3.connect(path, isolation_level=None)

    def _prepare(self) -> None:
        self._base.execute("create table if not exists rows(id integer primary key, vector blob)")

    def insert(self, ids: Ids, vectors: Vectors) -> None:
        self._base.execute("begin")
        pairs = [(one, vector.tobytes()) for one, vector in zip(ids.tolist(), vectors, strict=True)]
        self._base.executemany("insert into rows values (?, ?)", pairs)
        self._base.execute("commit")

    def finish(self) -> None:
        self._base.execute("pragma wal_checkpoint(truncate)")

    def search(self, queries: Vectors, k: int) -> Ids:
        found = self._base.execute("select id, vector from rows").fetchall()
        vectors = np.frombuffer(b"".join(vector for _, vector in found), np.float32).reshape(-1, self._dim)
        return brute_force(queries, np.array([one for one, _ in found], np.int64), vectors, k)

    def ids(self) -> Ids:
        found = self._base.execute("select id, length(vector) from rows").fetchall()
        return np.array([one for one, size in found if size == 4 * self._dim], np.int64)

    def close(self) -> None:
        self._base.close()


class SqliteVec(Sqlite):
    """The vec0 virtual table. A Python that loads no extensions needs the package pysqlite3-binary."""

    def _connect(self, path: str) -> sqlite3.Connection:
        if hasattr(sqlite3.Connection, "enable_load_extension"):
            return super()._connect(path)
        import pysqlite3

        base: sqlite3.Connection = pysqlite3.connect(path, isolation_level=None)
        return base

    def _prepare(self) -> None:
        import sqlite_vec

        self._base.enable_load_extension(True)  # noqa: FBT003
        sqlite_vec.load(self._base)
        self._base.execute(
            f"create virtual table if not exists rows using vec0(id integer primary key, vector float[{self._dim}])"
        )

    def search(self, queries: Vectors, k: int) -> Ids:
        found = np.full((len(queries), k), -1, np.int64)
        for index, query in enumerate(queries):
            rows = self._base.execute(
                "select id from rows where vector match ? and k = ? order by distance", (query.tobytes(), k)
            ).fetchall()
            found[index, : len(rows)] = [one for (one,) in rows]
        return found


_KEY = struct.Struct(">q")


class RocksDb:
    """RocksDB with its defaults, rows without compression."""

    def __init__(self, options: EngineOptions) -> None:
        from rocksdict import DBCompressionType, Options, Rdict, WriteOptions

        made = Options(raw_mode=True)
        made.create_if_missing(True)  # noqa: FBT003
        made.set_compression_type(DBCompressionType.none())
        self._base: Any = Rdict(str(options.folder / "rocks"), made)
        self._writing = WriteOptions()
        self._writing.sync = options.is_durable
        self._dim = options.dim

    def insert(self, ids: Ids, vectors: Vectors) -> None:
        from rocksdict import WriteBatch

        batch = WriteBatch(raw_mode=True)
        for one, vector in zip(ids.tolist(), vectors, strict=True):
            batch.put(_KEY.pack(one), vector.tobytes())
        self._base.write(batch, self._writing)

    def finish(self) -> None:
        self._base.flush()

    def search(self, queries: Vectors, k: int) -> Ids:
        ids, vectors = self._rows()
        return brute_force(queries, ids, vectors, k)

    def ids(self) -> Ids:
        return self._rows()[0]

    def _rows(self) -> tuple[Ids, Vectors]:
        found = list(self._base.items())
        ids = np.frombuffer(b"".join(key for key, _ in found), ">i8").astype(np.int64)
        return ids, np.frombuffer(b"".join(value for _, value in found), np.float32).reshape(-1, self._dim)

    def close(self) -> None:
        self._base.close()
