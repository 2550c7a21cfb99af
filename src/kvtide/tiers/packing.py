"""Compression of a remote's values, off by default: zstd, where a value becomes smaller by it. Next: remote.

Decides where bytes lie on their way; knows no name and no remote.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError, UnsupportedError
from kvtide.io.ops import address_of
from kvtide.tiers.breaker import LOG

LEVEL_MAX = 22  # of zstd


class Packer:
    """Packs values of `zstd_level` 1 to 22, or none of them with 0; unpacks what others packed.

    Raises: ConfigError for another level; UnsupportedError without the package `zstandard`.
    """

    def __init__(self, zstd_level: int) -> None:
        if not 0 <= zstd_level <= LEVEL_MAX:
            raise ConfigError(f"zstd level is {zstd_level}; type 0 (off) to {LEVEL_MAX}")
        self._level = zstd_level
        self._packer: Any = None
        self._unpacker: Any = None
        self._has_warned = False
        if zstd_level:
            self._packer = _zstandard().ZstdCompressor(level=zstd_level)

    def pack(
        self, addresses: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64], object]:
        """Return where the values to be sent lie, their lengths, and what must live until they were sent.

        What does not become smaller is sent as it is. Shapes: all [n].
        """
        if self._packer is None:
            return addresses, lengths, None
        packed = [self._packer.compress(_view(*one)) for one in zip(addresses.tolist(), lengths.tolist(), strict=True)]
        sizes = np.fromiter(map(len, packed), np.int64, len(packed))
        smaller = sizes < lengths
        buffers = [np.frombuffer(one, np.uint8) for one in packed]
        at = np.fromiter(map(address_of, buffers), np.uint64, len(packed))
        return np.where(smaller, at, addresses), np.where(smaller, sizes, lengths), buffers

    def can_unpack(self) -> bool:
        """Say whether values that others packed can be read here; if not, the log says once what to type."""
        try:
            _zstandard()
        except UnsupportedError as error:
            if not self._has_warned:
                LOG.warning("%s; they count as not there", error)
            self._has_warned = True
            return False
        return True

    @staticmethod
    def places(
        addresses: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64], stored: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint64], dict[int, npt.NDArray[np.uint8]]]:
        """Return where values of `stored` bytes are to be put, and a buffer for each that is packed, by its number."""
        packed = {index: np.empty(int(stored[index]), np.uint8) for index in np.flatnonzero(stored < lengths).tolist()}
        places = addresses.copy()
        for index, buffer in packed.items():
            places[index] = address_of(buffer)
        return places, packed

    def unpack(
        self,
        packed: dict[int, npt.NDArray[np.uint8]],
        wanted: npt.NDArray[np.intp],
        addresses: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.bool_]:
        """Unpack those of the `wanted` values that are packed, and say of each whether it has its length now.

        Raises: UnsupportedError if there are some, and `can_unpack` is not so.
        """
        good = np.ones(len(wanted), np.bool_)
        for index, one in enumerate(wanted.tolist() if packed else ()):
            if one in packed:
                good[index] = self._unpack(packed[one], int(addresses[one]), int(lengths[one]))
        return good

    def _unpack(self, source: npt.NDArray[np.uint8], address: int, length: int) -> bool:
        zstandard = _zstandard()
        self._unpacker = self._unpacker or zstandard.ZstdDecompressor()
        try:
            size = zstandard.frame_content_size(source.data)
            raw = self._unpacker.decompress(source.data, max_output_size=length) if size == length else b""
        except zstandard.ZstdError:
            return False
        if len(raw) != length:
            return False
        ctypes.memmove(address, raw, length)
        return True


def _view(address: int, length: int) -> Any:
    return (ctypes.c_uint8 * length).from_address(address)


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise UnsupportedError(
            "values of this remote are compressed, or shall be, and zstandard is not here; "
            "type pip install 'kvtide[valkey]'"
        ) from None
    return zstandard
