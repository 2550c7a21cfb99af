"""What every memory does, and what it is asked in: ids, vectors and payloads, checked here. Next: commits.

Knows no file. The one implementation so far is `memory.Memory`, on one machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError
from kvtide.recall.records import Ids, Vectors
from kvtide.recall.scores import METRICS, Metric
from kvtide.units import format_bytes

DIM_MAX = 1 << 16
LOG_BYTES_A_ROW = 16 << 10  # sealed logs longer than so many a row are merged before they hold `merge_rows`
GROUP_BYTES_MAX = 1 << 20  # of vectors and payloads made durable together; one row may be larger
ID_MAX = (1 << 63) - 1
OF_CHARS_MAX = 200

Keep = Callable[[Ids], npt.NDArray[np.bool_]]
"""Says which of some ids a search may return. Shapes: [n] to [n]."""
Filter = Keep | Sequence[int] | Ids | None
Scores = npt.NDArray[np.float32]


class VectorMemory(Protocol):
    """Vectors with an id and a payload each, kept for good."""

    def add(self, ids: Ids, vectors: Vectors, payloads: Sequence[bytes] | None = None) -> object: ...

    def search(self, queries: Vectors, k: int, filter: Filter = None) -> tuple[Ids, Scores]: ...  # noqa: A002

    def get(self, ids: Ids) -> list[bytes | None]: ...

    def delete(self, ids: Ids) -> object: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """How a memory is kept. The metric is fixed when it is made; the rest may change from one opening to the next.

    Raises: ConfigError for what no memory can do.
    """

    metric: Metric = "cosine"  # changes results
    of: str = ""  # what the vectors are of, as a model and its weights; noted when made, another one is refused
    payload_bytes_max: int = 1 << 20
    commit_ms: float = 10.0  # longest wait of a row for others to be committed with; 0: each call alone
    log_bytes: int = 16 << 20  # of one log: what is replayed, and held in memory until it is sealed
    page_bytes: int = 4096  # written at least; 512 for a drive that really writes sectors of 512
    pending_bytes_max: int = 64 << 20  # added, but not yet durable: then `add` waits
    engine: str = "auto"
    merge_rows: int = 65_536  # in sealed logs: then they become a segment
    merge_bytes_per_s: int = 64 << 20  # written to segments at most, on average
    index_rows: int = 50_000  # a segment of so many gets an index; smaller ones are searched exactly

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ConfigError(f"metric is {self.metric!r}; choose one of {', '.join(METRICS)}")
        if not isinstance(self.of, str) or len(self.of) > OF_CHARS_MAX or not self.of.isprintable():
            raise ConfigError(f"of has {len(self.of)} characters; give at most {OF_CHARS_MAX} that can be printed")
        if not 0 <= self.commit_ms <= 10_000:
            raise ConfigError(f"commit_ms is {self.commit_ms}; give 0 (every call alone) to 10000 milliseconds")
        if self.page_bytes not in {512, 1024, 2048, 4096}:
            raise ConfigError(f"page_bytes is {self.page_bytes}; give 4096, or 512 to 2048 for a drive of such sectors")
        if not 0 < self.payload_bytes_max <= 64 << 20:
            raise ConfigError(f"payload_bytes_max is {self.payload_bytes_max}; give 1 to {64 << 20} bytes")
        if not 64 << 10 <= self.log_bytes <= 1 << 30:
            raise ConfigError(f"log_bytes is {self.log_bytes}; give 65536 (64 KiB) to {1 << 30} (1 GiB)")
        for name in ("merge_rows", "merge_bytes_per_s", "index_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.pending_bytes_max < GROUP_BYTES_MAX:
            raise ConfigError(f"pending_bytes_max is {self.pending_bytes_max}; give at least {GROUP_BYTES_MAX}")


def checked_dim(dim: int) -> int:
    """Return `dim`.

    Raises: ConfigError unless it is from 1 to 65,536.
    """
    if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)) or not 1 <= dim <= DIM_MAX:
        raise ConfigError(f"dim is {dim!r}; give the number of dimensions of a vector, 1 to {DIM_MAX}")
    return int(dim)


def checked_ids(ids: npt.ArrayLike) -> Ids:
    """Return ids as int64. Shapes: [n].

    Raises: ConfigError unless they are whole numbers from 0 to 2**63 - 1 in one row.
    """
    array = np.asarray(ids)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"ids are {_shown(array)}; give whole numbers, int64 or uint64, in one dimension")
    if int(array.min()) < 0 or int(array.max()) > ID_MAX:
        raise ConfigError(f"ids go from {array.min()} to {array.max()}; give numbers from 0 to 2**63 - 1")
    return array.astype(np.int64)


def checked_vectors(vectors: npt.ArrayLike, dim: int, num: int | None, what: str = "vectors") -> Vectors:
    """Return vectors as contiguous float32. Shapes: [n, D].

    Raises: ConfigError for another shape, no numbers, NaN or infinity.
    """
    array = np.asarray(vectors)
    rows = "n" if num is None else num
    if array.dtype.kind not in "fiu" or array.ndim != 2 or array.shape[1] != dim or num not in {None, len(array)}:
        raise ConfigError(f"{what} are {_shown(array)}; this memory needs float32 of shape [{rows}, {dim}]")
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(array, np.float32)
    bad = ~np.isfinite(array).all(axis=1)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise ConfigError(f"{what}: row {row} holds NaN or infinity; {int(bad.sum())} such rows: leave them out")
    return array


def checked_payloads(payloads: Sequence[bytes] | None, num: int, bytes_max: int) -> list[bytes]:
    """Return one payload a row, empty where none was given.

    Raises: ConfigError for another number, what is no bytes, and what is longer than allowed.
    """
    if payloads is None:
        return [b""] * num
    if isinstance(payloads, (bytes, str)) or len(payloads) != num:
        raise ConfigError(f"{len(payloads)} payloads for {num} rows; give a list with one bytes object a row")
    for row, one in enumerate(payloads):
        if not isinstance(one, (bytes, bytearray, memoryview)):
            raise ConfigError(f"payload {row} is a {type(one).__name__}; give bytes (text.encode())")
        if len(one) > bytes_max:
            got, most = format_bytes(len(one)), format_bytes(bytes_max)
            raise ConfigError(
                f"payload {row} has {got}; at most {most}: store it elsewhere, or raise payload_bytes_max"
            )
    return [bytes(one) for one in payloads]


def checked_k(k: int) -> int:
    """Return `k`.

    Raises: ConfigError unless it is a whole number from 1 to 65,536.
    """
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not 1 <= k <= 1 << 16:
        raise ConfigError(f"k is {k!r}; give the number of neighbours wanted, 1 to {1 << 16}")
    return int(k)


def keeper(wanted: Filter) -> Keep | None:
    """Return what says which ids a search may return: `wanted` itself, or whether an id is among them; None for all.

    Raises: ConfigError if it is neither callable nor ids.
    """
    if wanted is None:
        return None
    if callable(wanted):
        return wanted
    ids = np.unique(checked_ids(wanted))
    return lambda asked: np.isin(asked, ids, assume_unique=False)


def _shown(array: npt.NDArray[np.generic]) -> str:
    return f"{array.dtype} of shape {list(array.shape)}"
