"""A memory in Milvus, for more than one machine: the `VectorMemory` of a server, or of Milvus Lite in a file.

The only file that knows pymilvus. Acknowledged means that the server took the rows; when they are durable is for it to
say, and nothing here asks it to flush: a flush per insert makes Milvus write one small segment each. Searches see every
row acknowledged before (consistency level Strong), and are as exact as the server's index.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError, IoError, UnsupportedError
from kvtide.recall.contract import (
    Filter,
    Scores,
    checked_dim,
    checked_ids,
    checked_k,
    checked_payloads,
    checked_vectors,
    keeper,
)
from kvtide.recall.records import Ids, Vectors
from kvtide.recall.scores import METRICS, Metric

NAMES = {"cosine": "COSINE", "dot": "IP", "l2": "L2"}
PAYLOAD_BYTES_MAX = 30_000  # twice as many hexadecimal digits, of 65,535 that a field may hold
CALL_ROWS = 256  # rows of a call: below the server's limit of a message, also with long payloads
SEARCH_ROWS_MAX = 16_384  # that Milvus returns


class MilvusMemory:
    """Vectors in a collection of Milvus.

    Threads: any, as the client allows.
    """

    def __init__(self, uri: str, dim: int, *, metric: Metric = "cosine", collection: str = "kvtide") -> None:
        """Open a collection, made where there is none. `uri` is a server's address, or a file's name for Milvus Lite.

        Raises: UnsupportedError without pymilvus; ConfigError for a collection of other vectors; IoError.
        """
        if metric not in METRICS:
            raise ConfigError(f"metric is {metric!r}; choose one of {', '.join(METRICS)}")
        self.dim, self.metric, self._collection = checked_dim(dim), metric, collection
        try:
            from pymilvus import MilvusClient
        except ImportError as error:
            raise UnsupportedError("a memory in Milvus needs pymilvus; type: pip install 'kvtide[milvus]'") from error
        with _told(uri):
            self._client: Any = MilvusClient(uri)
            if not self._client.has_collection(collection):
                self._make()
            self._compare(uri)
            self._client.load_collection(collection)

    def _make(self) -> None:
        from pymilvus import DataType, MilvusClient

        schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=self.dim)
        schema.add_field("payload", DataType.VARCHAR, max_length=65_535)
        index = self._client.prepare_index_params()
        index.add_index("vector", index_type="AUTOINDEX", metric_type=NAMES[self.metric])
        self._client.create_collection(self._collection, schema=schema, index_params=index, consistency_level="Strong")

    def _compare(self, uri: str) -> None:
        described = self._client.describe_collection(self._collection)
        params = [one.get("params", {}) for one in described["fields"] if one["name"] == "vector"]
        found = int(params[0].get("dim", 0)) if params else 0
        if found != self.dim:
            raise ConfigError(
                f"collection {self._collection} of {uri} keeps vectors of {found} dimensions, asked for {self.dim}; "
                f"open it with dim={found}, or name another collection"
            )
        kept = self._client.describe_index(self._collection, "vector").get("metric_type")
        if kept != NAMES[self.metric]:
            name = next((one for one, theirs in NAMES.items() if theirs == kept), str(kept))
            raise ConfigError(f"collection {self._collection} of {uri} compares by {name}; type metric='{name}'")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, ids: npt.ArrayLike, vectors: npt.ArrayLike, payloads: Sequence[bytes] | None = None) -> None:
        """Keep rows; a row with an id that is there already replaces it. Return when the server took them.

        Shapes: ids [n]; vectors [n, D]; payloads [n], of up to 30,000 bytes each.
        Raises: ConfigError for what is no such row; IoError.
        """
        known = checked_ids(ids)
        rows = checked_vectors(vectors, self.dim, len(known))
        texts = checked_payloads(payloads, len(known), PAYLOAD_BYTES_MAX)
        last = {one: at for at, one in enumerate(known.tolist())}  # the last of several with one id counts
        made = [{"id": one, "vector": rows[at], "payload": texts[at].hex()} for one, at in last.items()]
        with _told(self._collection):
            for first in range(0, len(made), CALL_ROWS):
                self._client.upsert(self._collection, made[first : first + CALL_ROWS])

    def search(self, queries: Vectors, k: int, filter: Filter = None) -> tuple[Ids, Scores]:  # noqa: A002
        """Return the ids and scores of the `k` rows most like each query, best first; as `Memory.search`.

        Shapes: queries [q, D], or [D] for one; returns [q, k] each.
        Raises: ConfigError for what is no such query, and for a function as filter of more rows than Milvus returns.
        """
        asked = np.asarray(queries)
        asked = checked_vectors(asked[None] if asked.ndim == 1 else asked, self.dim, None, "queries")
        k, keep = checked_k(k), keeper(filter)
        ids = np.full((len(asked), k), -1, np.int64)
        scores = np.full((len(asked), k), -np.inf, np.float32)
        among = "" if keep is None or callable(filter) else f"id in {checked_ids(filter).tolist()}"  # type: ignore[arg-type]
        limit = min(SEARCH_ROWS_MAX, k if keep is None or among else SEARCH_ROWS_MAX)
        if not len(asked):
            return ids, scores
        with _told(self._collection):
            found = self._client.search(self._collection, data=list(asked), limit=limit, filter=among)
        for at, hits in enumerate(found):
            here = np.array([int(hit["id"]) for hit in hits], np.int64)
            told = np.array([float(hit["distance"]) for hit in hits], np.float32)
            kept = np.flatnonzero(keep(here))[:k] if keep is not None and len(here) else np.arange(len(here))
            ids[at, : len(kept)] = here[kept]
            scores[at, : len(kept)] = -told[kept] if self.metric == "l2" else told[kept]
        return ids, scores

    def get(self, ids: npt.ArrayLike) -> list[bytes | None]:
        """Return the payload of each id, None where there is no such row. Shapes: ids [n]. Raises: IoError."""
        known = checked_ids(ids).tolist()
        found: dict[int, bytes] = {}
        with _told(self._collection):
            for first in range(0, len(known), CALL_ROWS):
                part = known[first : first + CALL_ROWS]
                for row in self._client.get(self._collection, ids=part, output_fields=["id", "payload"]):
                    found[int(row["id"])] = bytes.fromhex(row["payload"])
        return [found.get(one) for one in known]

    def delete(self, ids: npt.ArrayLike) -> None:
        """Forget rows, those that are not there too. Shapes: ids [n]. Raises: IoError."""
        known = checked_ids(ids).tolist()
        with _told(self._collection):
            for first in range(0, len(known), CALL_ROWS):
                self._client.delete(self._collection, ids=known[first : first + CALL_ROWS])

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._client is not None:
            self._client.close()
            self._client = None


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Say of which server or collection an error is."""
    try:
        yield
    except (ConfigError, UnsupportedError):
        raise
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise IoError(errno.EIO, f"Milvus, {where}: {text:.300}") from error
