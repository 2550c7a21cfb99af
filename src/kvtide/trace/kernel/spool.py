"""Pages of every CPU, kept until the capture is over: in memory, then in a file. Next: capture.

Decides where raw pages wait and in which pieces they come back; knows not what is in them.

Theory. Writing to the disk that is being traced would show in the trace. So pages stay in memory up to a budget, and
only then go to an unnamed file.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np
import numpy.typing as npt

from kvtide.errors import IoError
from kvtide.trace.kernel.pages import page_times

PIECE_PAGES = 8192  # decoded together: about 400,000 events


class Spool:
    """Pages of `num_cpus` CPUs.

    Raises: IoError(ENOSPC) where the disk has no room for more.
    """

    def __init__(self, num_cpus: int, *, page_bytes: int, memory_bytes_max: int, folder: Path) -> None:
        self.page_bytes, self.num_pages, self.is_spilled = page_bytes, 0, False
        self._memory_bytes_max, self._folder = memory_bytes_max, folder
        self._buffers = [bytearray() for _ in range(num_cpus)]
        self._files: list[IO[bytes] | None] = [None] * num_cpus

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.page_bytes

    def append(self, cpu: int, page: bytes) -> None:
        """Keep a page of `cpu`."""
        buffer = self._buffers[cpu]
        buffer += page
        buffer += bytes(self.page_bytes - len(page))
        self.num_pages += 1
        if sum(map(len, self._buffers)) > self._memory_bytes_max:
            self._spill()

    def pieces(self) -> Iterator[tuple[list[npt.NDArray[np.uint8]], int | None]]:
        """Yield pages in the order of time: a list with one array a CPU, and the time where the next piece begins.

        Events of a piece may reach over that time; None marks the last piece.
        Shapes: each array [P, page_bytes].
        """
        with contextlib.ExitStack() as stack:
            pages = [self._pages(cpu, stack) for cpu in range(len(self._buffers))]
            times = [page_times(each) for each in pages]
            borders = np.sort(np.concatenate(times))[PIECE_PAGES::PIECE_PAGES].tolist()
            done = [0] * len(pages)
            for border in [*borders, None]:
                ends = [len(each) if border is None else int(np.searchsorted(each, border)) for each in times]
                yield [each[start:end] for each, start, end in zip(pages, done, ends, strict=True)], border
                done = ends
            del pages

    def close(self) -> None:
        """Forget all pages. Idempotent."""
        for file in self._files:
            if file is not None:
                file.close()
        self._files = [None] * len(self._files)
        self._buffers = [bytearray() for _ in self._buffers]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _spill(self) -> None:
        self.is_spilled = True
        for cpu, buffer in enumerate(self._buffers):
            try:
                file = self._files[cpu] or tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - closed in `close`
                self._files[cpu] = file
                file.write(buffer)
            except OSError as error:
                where = f"{self._folder} has no room for the trace: {error.strerror}"
                raise IoError(error.errno or errno.EIO, where) from None
            self._buffers[cpu] = bytearray()

    def _pages(self, cpu: int, stack: contextlib.ExitStack) -> npt.NDArray[np.uint8]:
        file = self._files[cpu]
        if file is None:
            return np.frombuffer(self._buffers[cpu], np.uint8).reshape(-1, self.page_bytes)
        file.write(self._buffers[cpu])
        self._buffers[cpu] = bytearray()
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        stack.callback(_unmap, mapped)
        return np.frombuffer(mapped, np.uint8).reshape(-1, self.page_bytes)


def _unmap(mapped: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # an array still looks at it: the interpreter unmaps it with that
        mapped.close()
