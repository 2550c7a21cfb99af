"""Device memory on an NVIDIA GPU: the same contract as `cache.windows.CpuArena`, in torch.

Unverified: this file has not run on a GPU yet.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


class CudaArena:
    """A budgeted run of GPU memory. Shapes: tensor [num_bytes] uint8."""

    def __init__(self, num_bytes: int, device: str) -> None:
        self.num_bytes = num_bytes // 64 * 64
        self.tensor = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)

    def write(self, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """Copy host bytes to `offset`, and wait for them: the host frame may be reused at once."""
        flat = torch.from_numpy(np.ascontiguousarray(data).reshape(-1))
        self.tensor[offset : offset + flat.numel()].copy_(flat)
        torch.cuda.current_stream(self.tensor.device).synchronize()
