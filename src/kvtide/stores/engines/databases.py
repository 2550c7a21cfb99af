"""Vector databases that run in the process: LanceDB and Milvus Lite."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np

from kvtide.stores.engines.contract import EngineOptions, Ids, Vectors

QUERY_ROWS_MAX = 16384  # Milvus returns no more at once


class LanceDb:
    """One table; `finish` optimizes it and drops old versions."""

    optimized_each = 0  # inserts

    def __init__(self, options: EngineOptions) -> None:
        import lancedb
        import pyarrow as pa

        self._base: Any = lancedb.connect(str(options.folder / "lance"))
        self._schema = pa.schema([("id", pa.int64()), ("vector", pa.list_(pa.float32(), options.dim))])
        self._table: Any = self._base.create_table("rows", schema=self._schema, exist_ok=True)
        self._dim, self._num_inserts = options.dim, 0

    def insert(self, ids: Ids, vectors: Vectors) -> None:
        import pyarrow as pa

        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), self._dim)
        self._table.add(pa.table({"id": pa.array(ids), "vector": column}, schema=self._schema))
        self._num_inserts += 1
        if self.optimized_each and self._num_inserts % self.optimized_each == 0:
            self.finish()

    def finish(self) -> None:
        self._table.optimize(cleanup_older_than=timedelta(0))

    def search(self, queries: Vectors, k: int) -> Ids:
        found = np.full((len(queries), k), -1, np.int64)
        for index, query in enumerate(queries):
            rows = self._table.search(query).select(["id"]).limit(k).to_arrow()["id"].to_numpy()
            found[index, : len(rows)] = rows
        return found

    def ids(self) -> Ids:
        return self._table.to_arrow()["id"].to_numpy()

    def close(self) -> None:
        self._table = self._base = None


class LanceDb256(LanceDb):
    """Kept in order while rows come in."""

    optimized_each = 256


class MilvusLite:
    """Milvus in one process."""

    def __init__(self, options: EngineOptions) -> None:
        from pymilvus import MilvusClient

        self._client: Any = MilvusClient(str(options.folder / "milvus.db"))
        if not self._client.has_collection("rows"):
            self._client.create_collection("rows", dimension=options.dim, metric_type="IP")
        self._client.load_collection("rows")

    def insert(self, ids: Ids, vectors: Vectors) -> None:
        self._client.insert(
            "rows", [{"id": one, "vector": vector} for one, vector in zip(ids.tolist(), vectors, strict=True)]
        )

    def finish(self) -> None:
        self._client.flush("rows")

    def search(self, queries: Vectors, k: int) -> Ids:
        found = np.full((len(queries), k), -1, np.int64)
        for index, hits in enumerate(self._client.search("rows", queries.tolist(), limit=k)):
            found[index, : len(hits)] = [hit["id"] for hit in hits]
        return found

    def ids(self) -> Ids:
        found: list[int] = []
        last = -1
        while rows := self._client.query(
            "rows", filter=f"id > {last} and id <= {last + QUERY_ROWS_MAX}", output_fields=["id"], limit=QUERY_ROWS_MAX
        ):
            found += [row["id"] for row in rows]
            last += QUERY_ROWS_MAX
        return np.array(found, np.int64)

    def close(self) -> None:
        self._client.close()
