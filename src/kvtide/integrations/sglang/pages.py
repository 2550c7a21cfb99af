"""Pages of a host pool of SGLang as chunks: where their pieces lie, or how they are copied. Next: facts.

A pool that tells where its pages lie is read and written in place: K and V of a page, or its layers, are the pieces of
one chunk. Any other pool hands out and takes flat pages, one copy each. The two forms order bytes differently, so the
form is a fact of the chunks.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvtide.chunks import ChunkStore
from kvtide.errors import ConfigError
from kvtide.tiers.contract import OK

Addresses = npt.NDArray[np.uint64]
Good = npt.NDArray[np.bool_]
Keys = npt.NDArray[np.void]


class Pages(Protocol):
    """Moves pages between a pool and a store; both say which of them arrived. Shapes: keys, result [n]."""

    form: str
    piece_bytes: tuple[int, ...]

    def store(self, store: ChunkStore, keys: Keys, host_indices: torch.Tensor) -> Good:
        """Store the pages at `host_indices`, as many of them a page as the pool has tokens in one."""

    def load(self, store: ChunkStore, keys: Keys, host_indices: torch.Tensor) -> Good:
        """Load pages to `host_indices`."""


class PointedPages:
    """Pages that move straight from and to the pool's memory."""

    form = "pieces"

    def __init__(self, pool: Any) -> None:
        _, sizes = pool.get_page_buffer_meta(torch.arange(pool.page_size))
        self._pool, self.piece_bytes = pool, tuple(int(size) for size in sizes)

    def store(self, store: ChunkStore, keys: Keys, host_indices: torch.Tensor) -> Good:
        return store.store(keys, self._addresses(keys, host_indices)) == OK

    def load(self, store: ChunkStore, keys: Keys, host_indices: torch.Tensor) -> Good:
        return store.load(keys, self._addresses(keys, host_indices)) == OK

    def _addresses(self, keys: Keys, host_indices: torch.Tensor) -> Addresses:
        at, sizes = self._pool.get_page_buffer_meta(host_indices)
        if tuple(sizes) != self.piece_bytes * len(keys):
            raise ConfigError(
                f"{len(sizes)} pieces for {len(keys)} pages; each page had {len(self.piece_bytes)} pieces of "
                f"{sum(self.piece_bytes)} bytes when its pool was registered"
            )
        return np.array(at, np.uint64).reshape(len(keys), len(self.piece_bytes))


class FlatPages:
    """Pages that the pool copies out and in, each as one tensor."""

    form = "flat"

    def __init__(self, pool: Any) -> None:
        self._pool, self._empty = pool, pool.get_dummy_flat_data_page()
        self.piece_bytes: tuple[int, ...] = (num_bytes(self._empty),) if num_bytes(self._empty) else ()

    def store(self, store: ChunkStore, keys: Keys, host_indices: torch.Tensor) -> Good:
        pages = [self._pool.get_data_page(index, flat=True).contiguous() for index in self._firsts(keys, host_indices)]
        return store.store(keys, addresses_of(pages, self.piece_bytes)) == OK

    def load(self, store: ChunkStore, keys: Keys, host_indices: torch.Tensor) -> Good:
        pages = [torch.empty_like(self._empty) for _ in range(len(keys))]
        good = store.load(keys, addresses_of(pages, self.piece_bytes)) == OK
        firsts = self._firsts(keys, host_indices)
        for row in np.flatnonzero(good).tolist():
            self._pool.set_from_flat_data_page(firsts[row], pages[row])
        return good

    def _firsts(self, keys: Keys, host_indices: torch.Tensor) -> list[int]:
        return host_indices.tolist()[:: self._pool.page_size][: len(keys)]


def pages_of(pool: Any, *, in_place: bool) -> Pages:
    """Return how the pages of `pool` are moved: in place where that is wanted and the pool can."""
    if in_place:
        try:
            return PointedPages(pool)
        except (NotImplementedError, ValueError, TypeError, AttributeError, AssertionError):
            pass  # no such method, or not for this layout: the pool's own copies then
    return FlatPages(pool)


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def addresses_of(tensors: list[torch.Tensor], piece_bytes: tuple[int, ...]) -> Addresses:
    """Return where the pieces of chunks lie that lie whole in `tensors`. Shapes: returns [n, P].

    Raises: ConfigError for a tensor of another size, on a device, or with gaps.
    """
    wanted = sum(piece_bytes)
    for tensor in tensors:
        if num_bytes(tensor) != wanted or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ConfigError(
                f"a page of {num_bytes(tensor)} bytes on {tensor.device}; contiguous pages of {wanted} bytes in host "
                "memory are kept here"
            )
    bases = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
    starts = np.cumsum((0, *piece_bytes[:-1])).astype(np.uint64)
    return bases[:, None] + starts
