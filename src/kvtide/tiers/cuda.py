"""Device memory on an NVIDIA GPU: the same contract as `cache.windows.CpuArena`, in torch.

Unverified: this file has not run on a GPU yet.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvtide.errors import ConfigError
from kvtide.units import format_bytes


class CudaArena:
    """A budgeted run of GPU memory.

    Shapes: tensor [num_bytes] uint8.
    Raises: ConfigError if the GPU has less.
    """

    def __init__(self, num_bytes: int, device: str) -> None:
        self.num_bytes = num_bytes // 64 * 64
        try:
            self.tensor = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        except torch.cuda.OutOfMemoryError:
            raise ConfigError(
                f"{device} has no {format_bytes(self.num_bytes)} left for KV; type a smaller --device-memory"
            ) from None

    def write(self, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """Copy host bytes to `offset`, and wait for them: the host frame may be reused at once."""
        flat = torch.from_numpy(np.ascontiguousarray(data).reshape(-1))
        self.tensor[offset : offset + flat.numel()].copy_(flat)
        torch.cuda.current_stream(self.tensor.device).synchronize()

    def populate(self, start: int, num_bytes: int) -> None:
        """Do nothing: device memory is there once it is allocated."""
